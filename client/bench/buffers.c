/* How large the buffers of a case are. */
#include <string.h>

#include "worker_private.h"

void buffer_sizes(const struct bench_config *config, const struct bench_case *of, uint32_t tokens,
                  uint32_t local_experts, uint32_t max_tokens, uint64_t positions, struct buffer_sizes *sizes)
{
    const struct bench_dtype_info *dtype = &bench_dtypes[of->dtype];
    size_t h = config->hidden, k = config->top_k, scales = inputs_scale_bytes(config, of);
    bool rank_major = of->layout == EP_LAYOUT_RANK_MAJOR, fp8 = dtype->wire == EP_FP8_E4M3;
    bool with_topk = rank_major || of->layout == EP_LAYOUT_FLAT, backward = of->pass == BENCH_BACKWARD;

    if (of->layout == EP_LAYOUT_EXPERT_MAJOR)
        positions = (uint64_t)local_experts * config->ranks * max_tokens;
    if (rank_major)
        positions = (uint64_t)config->ranks * max_tokens;
    if (of->layout == EP_LAYOUT_FLAT && config->replays) /* of inputs that are not known yet */
        positions = (uint64_t)config->ranks * of->tokens;
    if (of->layout == EP_LAYOUT_PACKED && config->replays)
        positions = (uint64_t)config->ranks * of->tokens * (k < local_experts ? k : local_experts) +
                    (uint64_t)local_experts * (config->alignment - 1);
    *sizes = (struct buffer_sizes){
        .x = tokens * h * ep_ref_bytes(dtype->input),
        .x_scales = dtype->input == EP_FP8_E4M3 ? tokens * scales : 0,
        .topk = tokens * k * sizeof(int64_t),
        .weights = tokens * k * sizeof(float),
        .out = rank_major ? 0 : positions * h * ep_ref_bytes(dtype->wire),
        .out_scales = fp8 && !rank_major ? positions * scales : 0,
        .counts = (local_experts > config->ranks ? local_experts : config->ranks) * sizeof(int32_t),
        .offsets = of->layout == EP_LAYOUT_PACKED ? (local_experts + 1) * sizeof(int32_t) : 0,
        .out_topk = with_topk ? positions * k * sizeof(int32_t) : 0,
        .out_weights = with_topk ? positions * k * sizeof(float) : 0,
        .sources = positions * sizeof(ep_source_row),
        .rows = fp8 || rank_major ? positions * h * ep_ref_bytes(dtype->combine) : 0,
        .result = tokens * h * ep_ref_bytes(dtype->combine),
        .bias = config->bias ? tokens * h * ep_ref_bytes(dtype->combine) : 0,
        .row_grads = backward ? positions * (with_topk ? k : 1) * sizeof(float) : 0,
        .topk_grads = backward ? tokens * k * sizeof(float) : 0,
    };
}

uint64_t buffer_total(const struct buffer_sizes *sizes)
{
    size_t each[sizeof *sizes / sizeof(size_t)];
    uint64_t total = 0;

    memcpy(each, sizes, sizeof *sizes);
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        total += (each[i] + 511) & ~(size_t)255; /* never an empty block */
    return total;
}
