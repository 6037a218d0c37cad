#include "spec.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_state.h"

#define MAX_EXPERTS     65536u /* their homes fit into one message */
#define NAME_MAX_BYTES  63u
#define LABEL_KEY_MAX   63u
#define LABEL_VALUE_MAX 255u
#define DEFAULT_MODES   (1u << EP_MODE_LL | 1u << EP_MODE_HT)
#define DEFAULT_DTYPES  (1u << EP_BF16 | 1u << EP_FP8_E4M3)

/* ---- names ------------------------------------------------------------------- */

static bool is_alnum(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

ep_status ep_group_name_check(const char *name, struct ep_error *error)
{
    size_t n = strlen(name);
    bool good = n >= 1 && n <= NAME_MAX_BYTES && is_alnum(name[0]) && is_alnum(name[n - 1]);

    for (size_t i = 0; good && i < n; i++)
        good = is_alnum(name[i]) || name[i] == '-';
    if (good)
        return EP_OK;
    return ep_error_set(
        error, EP_INVALID_ARGUMENT,
        "name is \"%.80s\": must be 1 to 63 of a-z, 0-9 and '-', with a letter or digit at both ends", name);
}

/* ---- settling ----------------------------------------------------------------- */

static void settle_u32(struct ep_settled *settled, const char *field, uint32_t *value, uint32_t fallback)
{
    if (*value)
        return;
    *value = fallback;
    ep_settled_note(settled, "%s: 0 asked, %u settled: default", field, fallback);
}

/* ---- checks ------------------------------------------------------------------ */

static ep_status check_range(const char *field, uint64_t value, uint64_t low, uint64_t high,
                             struct ep_error *error)
{
    if (value >= low && value <= high)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is %" PRIu64 ": must be %" PRIu64 " to %" PRIu64,
                        field, value, low, high);
}

static bool is_cuda(const struct ep_spec_bounds *bounds)
{
    return bounds->backend == EP__V1__BACKEND__BACKEND_CUDA;
}

static ep_status check_ranks(const Ep__V1__GroupSpec *spec, const struct ep_spec_bounds *bounds,
                             struct ep_error *error)
{
    ep_status status = check_range("ranks", spec->ranks, 1, EP_MAX_RANKS, error);

    if (status || (status = check_range("experts", spec->experts, 1, MAX_EXPERTS, error)) ||
        (status = check_range("top_k", spec->top_k, 1, EP_MAX_TOP_K, error)))
        return status;
    if (spec->top_k > spec->experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "top_k is %u: must be at most experts, which is %u",
                            spec->top_k, spec->experts);
    if (is_cuda(bounds))
        return check_range("ranks", spec->ranks, 1, EP_DEVICE_MAX_RANKS, error);
    if (spec->ranks > bounds->devices && bounds->nodes > 1)
        return ep_error_set(
            error, EP_FAILED_PRECONDITION,
            "ranks is %u: the %u nodes that take workers have %u devices%s; start ep-server with more host ranks or ask "
            "for fewer",
            spec->ranks, bounds->nodes, bounds->devices, bounds->left_out);
    if (spec->ranks > bounds->devices)
        return ep_error_set(
            error, EP_FAILED_PRECONDITION,
            "ranks is %u: node %s has %u devices%s; start ep-server with more host ranks or ask for fewer",
            spec->ranks, bounds->node, bounds->devices, bounds->left_out);
    return EP_OK;
}

static ep_status check_backend(const Ep__V1__GroupSpec *spec, const struct ep_spec_bounds *bounds,
                               struct ep_error *error)
{
    const bool cuda = spec->backend == EP__V1__BACKEND__BACKEND_CUDA;

    if (spec->backend == EP__V1__BACKEND__BACKEND_UNSPECIFIED)
        return EP_OK;
    if (spec->backend != EP__V1__BACKEND__BACKEND_HOST && !cuda)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "backend is %d: must be host or cuda",
                            (int)spec->backend);
    if (cuda != is_cuda(bounds))
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "backend is %s: node %s runs with backend %s; leave it out, or start ep-server with "
                            "--backend=%s", cuda ? "cuda" : "host", bounds->node, cuda ? "host" : "cuda",
                            cuda ? "cuda" : "host");
    return EP_OK;
}

static ep_status check_direct(const Ep__V1__GroupSpec *spec, struct ep_error *error)
{
    if (protobuf_c_enum_descriptor_get_value(&ep__v1__direct__descriptor, (int)spec->direct))
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "direct is %d: must be 1 (same_uid), 2 (any) or 3 (none)",
                        (int)spec->direct);
}

/* Numbers of an enumeration, each once, between low and high; *bits gets them. */
static ep_status check_set(const char *field, const int *values, size_t n, int low, int high,
                           const char *right, uint32_t *bits, struct ep_error *error)
{
    *bits = 0;
    for (size_t i = 0; i < n; i++) {
        if (values[i] < low || values[i] > high)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s has %d: must be of %s", field, values[i],
                                right);
        if (*bits >> values[i] & 1)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s has %d twice: name each once", field,
                                values[i]);
        *bits |= 1u << values[i];
    }
    return EP_OK;
}

static ep_status check_label(const Ep__V1__GroupSpec__LabelsEntry *label, struct ep_error *error)
{
    size_t key = strlen(label->key), value = strlen(label->value);

    if (key < 1 || key > LABEL_KEY_MAX)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "labels has the key \"%.80s\": must be 1 to %u bytes",
                            label->key, LABEL_KEY_MAX);
    if (value > LABEL_VALUE_MAX)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "labels.%s has %zu bytes: must be at most %u",
                            label->key, value, LABEL_VALUE_MAX);
    return EP_OK;
}

static ep_status check_labels(const Ep__V1__GroupSpec *spec, struct ep_error *error)
{
    ep_status status;

    if (spec->n_labels > EP_MAX_LABELS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "labels has %zu entries: must be at most %u",
                            spec->n_labels, EP_MAX_LABELS);
    for (size_t i = 0; i < spec->n_labels; i++) {
        if ((status = check_label(spec->labels[i], error)))
            return status;
        for (size_t j = 0; j < i; j++)
            if (!strcmp(spec->labels[i]->key, spec->labels[j]->key))
                return ep_error_set(error, EP_INVALID_ARGUMENT, "labels has the key %s twice",
                                    spec->labels[i]->key);
    }
    return EP_OK;
}

static ep_status check_timeout(const Ep__V1__GroupSpec *spec, struct ep_error *error)
{
    return check_range("timeout_ms", spec->timeout_ms, 0, EP_MAX_TIMEOUT_MS, error);
}

/* ---- modes and dtypes ---------------------------------------------------------- */

_Static_assert(sizeof(Ep__V1__Mode) == sizeof(int) && sizeof(Ep__V1__Dtype) == sizeof(int), "enums are ints");

static bool has_mode(const struct ep_limits *limits, ep_mode mode)
{
    return limits->modes >> mode & 1;
}

/* Replaces a list of enumerators by the ascending list of `bits`. */
static void set_list(int **list, size_t *n, uint32_t bits)
{
    int *values = calloc(32, sizeof *values);

    if (!values)
        abort();
    free(*list);
    *list = values;
    *n = 0;
    for (int i = 0; i < 32; i++)
        if (bits >> i & 1)
            values[(*n)++] = i;
}

static ep_status settle_modes(struct ep_settled *settled, const struct ep_spec_bounds *bounds,
                              struct ep_limits *limits, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;
    ep_status status = check_set("modes", (const int *)spec->modes, spec->n_modes, EP_MODE_LL, EP_MODE_HT,
                                 "1 (ll), 2 (ht)", &limits->modes, error);

    if (status)
        return status;
    if (!limits->modes && bounds->modes && (bounds->modes & DEFAULT_MODES) != DEFAULT_MODES) {
        limits->modes = bounds->modes;
        ep_settled_note(settled, "modes: none asked, %s settled: node %s has no other",
                        has_mode(limits, EP_MODE_LL) ? "ll" : "ht", bounds->least);
    } else if (!limits->modes && is_cuda(bounds)) {
        limits->modes = 1u << EP_MODE_LL;
        ep_settled_note(settled, "modes: none asked, ll settled: ht takes memory of the GPUs that is worth asking for");
    } else if (!limits->modes) {
        limits->modes = DEFAULT_MODES;
        ep_settled_note(settled, "modes: none asked, ll and ht settled: default");
    }
    set_list((int **)&spec->modes, &spec->n_modes, limits->modes);
    return EP_OK;
}

static ep_status settle_dtypes(struct ep_settled *settled, const struct ep_spec_bounds *bounds,
                               struct ep_limits *limits, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;
    ep_status status = check_set("dtypes", (const int *)spec->dtypes, spec->n_dtypes, EP_BF16, EP_FP8_E4M3,
                                 "1 (bf16), 2 (fp16), 3 (fp32), 4 (fp8_e4m3)", &limits->dtypes, error);

    if (status)
        return status;
    if (!limits->dtypes) {
        limits->dtypes = DEFAULT_DTYPES & (bounds->dtypes ? bounds->dtypes : DEFAULT_DTYPES);
        if (!limits->dtypes)
            limits->dtypes = bounds->dtypes;
        if (limits->dtypes == DEFAULT_DTYPES)
            ep_settled_note(settled, "dtypes: none asked, bf16 and fp8_e4m3 settled: default");
        else
            ep_settled_note(settled, "dtypes: none asked, what node %s has settled", bounds->least);
    }
    set_list((int **)&spec->dtypes, &spec->n_dtypes, limits->dtypes);
    return EP_OK;
}

/* A size that belongs to a mode the group lacks is no error: modes may come back by an update. */
static void drop(struct ep_settled *settled, const char *field, uint32_t *value, const char *mode)
{
    if (*value)
        ep_settled_note(settled, "%s: %u asked, 0 settled: modes lacks %s", field, *value, mode);
    *value = 0;
}

static void settle_tokens(struct ep_settled *settled, const struct ep_limits *limits)
{
    Ep__V1__GroupSpec *spec = settled->spec;

    if (has_mode(limits, EP_MODE_LL)) {
        settle_u32(settled, "ll_max_tokens", &spec->ll_max_tokens, EP_DEFAULT_LL_MAX_TOKENS);
        settle_u32(settled, "ll_banks", &spec->ll_banks, EP_DEFAULT_LL_BANKS);
    } else {
        drop(settled, "ll_max_tokens", &spec->ll_max_tokens, "ll");
        drop(settled, "ll_banks", &spec->ll_banks, "ll");
    }
    if (has_mode(limits, EP_MODE_HT))
        settle_u32(settled, "ht_max_tokens", &spec->ht_max_tokens, EP_DEFAULT_HT_MAX_TOKENS);
    else
        drop(settled, "ht_max_tokens", &spec->ht_max_tokens, "ht");
}

/* ---- sizes --------------------------------------------------------------------- */

ep_status ep_spec_layout(const struct ep_limits *limits, bool default_arena, struct ep_layout_map *map,
                         struct ep_error *error)
{
    struct ep_limits l = *limits;
    ep_status status;

    if (default_arena) {
        /* The default is computed from limits that are known to be good. */
        l.arena_bytes = 0;
        status = ep_layout_compute(&l, map, error);
        if (status)
            return status;
        l.arena_bytes = ep_layout_default_arena(&l);
    }
    return ep_layout_compute(&l, map, error);
}

static uint64_t round_up(uint64_t bytes, uint64_t granule)
{
    return granule > 1 ? (bytes + granule - 1) / granule * granule : bytes;
}

uint64_t ep_spec_rank_bytes(const struct ep_layout_map *map, const struct ep_placement *placement,
                            const struct ep_spec_bounds *bounds)
{
    uint64_t state = is_cuda(bounds) ? ep_device_state_bytes(map, placement) : 0;

    return round_up(map->total_bytes, bounds->granule) + round_up(state, bounds->granule);
}

static ep_status settle_sizes(struct ep_settled *settled, const struct ep_spec_bounds *bounds,
                              struct ep_limits *limits, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;
    bool default_arena = !spec->arena_bytes;
    ep_status status;

    limits->ranks = spec->ranks;
    limits->experts = spec->experts;
    limits->local_experts = settled->placement.max_local;
    limits->top_k = spec->top_k;
    limits->hidden = spec->hidden;
    limits->ll_max_tokens = spec->ll_max_tokens;
    limits->ht_max_tokens = spec->ht_max_tokens;
    limits->ll_banks = spec->ll_banks;
    limits->arena_bytes = spec->arena_bytes;
    status = ep_spec_layout(limits, default_arena, &settled->map, error);
    if (status)
        return status;
    if (is_cuda(bounds) && (status = ep_device_check(&settled->map.limits, error)))
        return status;
    spec->arena_bytes = settled->map.limits.arena_bytes;
    settled->rank_bytes = ep_spec_rank_bytes(&settled->map, &settled->placement, bounds);
    if (default_arena)
        ep_settled_note(settled, "arena_bytes: 0 asked, %" PRIu64 " settled: one op's inputs and its largest outputs",
                        spec->arena_bytes);
    return EP_OK;
}

static void settle_backend(struct ep_settled *settled, const struct ep_spec_bounds *bounds)
{
    Ep__V1__GroupSpec *spec = settled->spec;

    spec->backend = is_cuda(bounds) ? EP__V1__BACKEND__BACKEND_CUDA : EP__V1__BACKEND__BACKEND_HOST;
    if (!is_cuda(bounds))
        return;
    if (spec->direct == EP__V1__DIRECT__DIRECT_UNSPECIFIED)
        spec->direct = EP__V1__DIRECT__DIRECT_SAME_UID;
    if (spec->ranks > bounds->devices)
        ep_settled_note(settled, "ranks: %u on %u GPUs: some share one, and without MPS kernels that their workers "
                                 "launch take turns", spec->ranks, bounds->devices);
}

static ep_status settle(struct ep_settled *settled, const struct ep_spec_bounds *bounds,
                        struct ep_error *error)
{
    struct ep_limits limits = { 0 };
    Ep__V1__GroupSpec *spec = settled->spec;
    ep_status status;

    if ((status = check_ranks(spec, bounds, error)) || (status = check_backend(spec, bounds, error)) ||
        (status = check_direct(spec, error)) || (status = check_timeout(spec, error)) ||
        (status = check_labels(spec, error)) || (status = settle_modes(settled, bounds, &limits, error)) ||
        (status = settle_dtypes(settled, bounds, &limits, error)) || (status = ep_spec_place(settled, bounds, error)))
        return status;
    settle_backend(settled, bounds);
    settle_u32(settled, "timeout_ms", &spec->timeout_ms, EP_DEFAULT_TIMEOUT_MS);
    settle_tokens(settled, &limits);
    return settle_sizes(settled, bounds, &limits, error);
}

ep_status ep_spec_settle(const Ep__V1__GroupSpec *asked, const struct ep_spec_bounds *bounds,
                         struct ep_settled *out, struct ep_error *error)
{
    struct ep_settled settled = { .spec = ep_message_copy(&asked->base) };
    ep_status status;

    ep_spec_hide_token(settled.spec); /* of what is settled nothing is kept from workers and operators */
    status = settle(&settled, bounds, error);
    if (status)
        ep_settled_clear(&settled);
    else
        *out = settled;
    return status;
}
