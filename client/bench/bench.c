#include "bench.h"

#include <stdio.h>

#include "ep_client.h"

const struct bench_dtype_info bench_dtypes[BENCH_DTYPES] = {
    [BENCH_BF16] = { "bf16", EP_BF16, EP_BF16, EP_BF16, NULL },
    [BENCH_FP16] = { "fp16", EP_FP16, EP_FP16, EP_FP16, NULL },
    [BENCH_FP32] = { "fp32", EP_FP32, EP_FP32, EP_FP32, NULL },
    [BENCH_FP8] = { "fp8", EP_BF16, EP_FP8_E4M3, EP_BF16, "fp8/ue8m0" },
    [BENCH_FP16_TO_FP8] = { "fp16-to-fp8", EP_FP16, EP_FP8_E4M3, EP_FP16, "fp16-to-fp8/ue8m0" },
    [BENCH_FP32_TO_FP8] = { "fp32-to-fp8", EP_FP32, EP_FP8_E4M3, EP_FP32, "fp32-to-fp8/ue8m0" },
    [BENCH_FP8_GIVEN] = { "fp8-given", EP_FP8_E4M3, EP_FP8_E4M3, EP_BF16, "fp8-given/ue8m0" },
};

bool bench_quantised(enum bench_dtype dtype)
{
    return bench_dtypes[dtype].input != bench_dtypes[dtype].wire;
}

bool bench_scaled(const struct bench_case *of)
{
    return bench_dtypes[of->dtype].wire == EP_FP8_E4M3;
}

const char *bench_scales_name(ep_scale_format format)
{
    return format == EP_SCALE_UE8M0 ? "ue8m0" : "fp32";
}

const char *bench_case_dtype(const struct bench_case *of)
{
    const struct bench_dtype_info *dtype = &bench_dtypes[of->dtype];

    return of->scales == EP_SCALE_UE8M0 ? dtype->powers : dtype->name;
}

void bench_case_text(const struct bench_case *of, char *text, size_t size)
{
    int n = snprintf(text, size, "%s %s %s T=%u%s", bench_mode_name(of->mode), bench_layout_name(of->layout),
                     bench_case_dtype(of), of->tokens, of->pass == BENCH_BACKWARD ? " backward" : "");

    if (of->mode == EP_MODE_HT && of->ht_sms && n > 0 && (size_t)n < size)
        snprintf(text + n, size - (size_t)n, " on %u SMs", of->ht_sms);
}

void bench_nodes_text(const struct bench_config *config, char text[static BENCH_NODES_TEXT])
{
    uint32_t ranks[BENCH_MAX_RANKS] = { 0 }, nodes = 0; /* of each node, in the order of their first ranks */
    bool even = true;
    size_t n = 0;

    for (uint32_t r = 0; r < config->ranks; r++)
        ranks[config->node_of[r]]++;
    for (uint32_t i = 0; i < BENCH_MAX_RANKS; i++)
        if (ranks[i])
            ranks[nodes++] = ranks[i];
    for (uint32_t i = 1; i < nodes; i++)
        even = even && ranks[i] == ranks[0];
    if (even) {
        snprintf(text, BENCH_NODES_TEXT, "%ux%u", nodes, ranks[0]);
        return;
    }
    for (uint32_t i = 0; i < nodes; i++)
        n += (size_t)snprintf(text + n, BENCH_NODES_TEXT - n, "%s%u", i ? "+" : "", ranks[i]);
}

const char *bench_pass_name(enum bench_pass pass)
{
    return pass == BENCH_BACKWARD ? "backward" : "forward";
}

bool bench_pass_exists(ep_mode mode, enum bench_pass pass)
{
    return pass == BENCH_FORWARD || mode == EP_MODE_HT; /* LL has no gradients of weights */
}

const char *const bench_backends[] = {
    [BENCH_BACKEND_AUTO] = "auto", [BENCH_BACKEND_HOST] = "host", [BENCH_BACKEND_CUDA] = "cuda"
};

const char *bench_mode_name(ep_mode mode)
{
    return mode == EP_MODE_LL ? "ll" : "ht";
}

const char *bench_executor_name(uint32_t executor)
{
    if (executor == BENCH_EXECUTOR_MIXED)
        return "mixed";
    switch ((ep_executor)executor) {
    case EP_EXECUTOR_AUTO: return "auto";
    case EP_EXECUTOR_SERVER: return "server";
    case EP_EXECUTOR_DIRECT: return "direct";
    }
    return "?";
}

const char *bench_layout_name(ep_layout layout)
{
    switch (layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return "expert-major";
    case EP_LAYOUT_RANK_MAJOR: return "rank-major";
    case EP_LAYOUT_PACKED: return "packed";
    case EP_LAYOUT_FLAT: return "flat";
    }
    return "?";
}

bool bench_layout_exists(ep_mode mode, ep_layout layout)
{
    if (layout == EP_LAYOUT_PACKED)
        return true;
    return mode == EP_MODE_HT ? layout == EP_LAYOUT_FLAT : layout != EP_LAYOUT_FLAT;
}
