/*
 * Executor server: windows in which workers write what their peers' kernels are to write there, and their own.
 *
 * A server's kernels read it, and its number is the right one: those of rank 0 alone run here, and nobody's overwrite it.  What may
 * come of it are wrong results of that rank.  An address that is made of it and followed takes the context down, and the test
 * with it; or the op ends otherwise than it should, or what is another rank's is not as it was before.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "ll_tests.h"

enum { SHORT_MS = 50 }; /* for an op that waits in vain */

static ep_status no_memory(struct ep_error *error)
{
    return ep_error_set(error, EP_NO_MEMORY, "no memory to forge");
}

/* At once, in any rank's window. */
static ep_status forge(struct world_rank *rank, uint64_t offset, const void *from, uint64_t bytes, struct ep_error *error)
{
    return rank->world->api->write(rank->device, rank->window + offset, from, bytes, NULL, error);
}

static ep_status next_number(struct world_rank *rank, const uint64_t *last, uint64_t *number, struct ep_error *error)
{
    const ep_status status = rank->world->api->read(rank->device, number, last, sizeof *number, NULL, error);

    ++*number;
    return status;
}

/* Rings for the op, which must end so. */
static ep_status run_op(struct pass *pass, const struct ep_op *op, ep_status expected, const char *what,
                        struct ep_device_record *record, struct ep_error *error)
{
    const uint32_t part = op->kind == EP_OP_COMBINE ? EP_DEVICE_COMBINE : EP_DEVICE_DISPATCH;
    ep_status status = ll_ring_and_wait(pass->rank, op, error);

    if (status == EP_OK)
        status = world_record(pass->rank, pass->handle, part, record, error);
    if (status == EP_OK && record->status != (int32_t)expected)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s: the %s ended with %s, not %s", what,
                            part == EP_DEVICE_COMBINE ? "combine" : "dispatch",
                            ep_status_name((ep_status)record->status), ep_status_name(expected));
    return status;
}

/* ---- LL: banks ---------------------------------------------------------------------- */

/* What is not as the other ranks' kernels would have it: these send as many rows as one can, to the first expert.  0: it is. */
static const struct bank {
    const char *what;
    uint32_t rows, of_expert, local, index, token;
    bool token_too_many;        /* the first that there is not */
    uint32_t late_rows, place;  /* between dispatch and combine */
} banks[] = {
    { .what = "nothing forged" },
    { .what = "rows", .rows = UINT32_MAX },
    { .what = "rows of an expert", .of_expert = UINT32_MAX, .index = 0x10000000 },
    { .what = "an expert", .local = 0x10000000 },
    { .what = "an index", .index = 0x10000000 },
    { .what = "an index at the end of 32 bits", .index = UINT32_MAX - 1 },
    { .what = "rows when they are combined", .late_rows = UINT32_MAX },
    { .what = "a token", .token = UINT32_MAX - 1 },
    { .what = "a token too many", .token_too_many = true },
    { .what = "a place", .place = UINT32_MAX - 1 },
};

struct piece { /* of a window */
    uint64_t offset, bytes;
};

/* Of a bank: item s of so many bytes. */
static struct piece region_of(const struct world *world, uint64_t number, uint64_t region, uint32_t s, uint64_t item_bytes)
{
    const struct ep_layout_map *map = &world->map;

    return (struct piece){ map->ll + number % map->limits.ll_banks * map->bank_bytes + region + s * item_bytes, item_bytes };
}

static ep_status forge_counts(struct world_rank *own, uint64_t number, uint32_t s, uint32_t rows, uint32_t of_expert,
                              struct ep_error *error)
{
    const struct piece at = region_of(own->world, number, own->world->map.bank.counts, s, own->world->map.counts_bytes);
    uint32_t *words = calloc(1, at.bytes);
    ep_status status;

    if (!words)
        return no_memory(error);
    for (uint64_t i = 3; i < at.bytes / sizeof *words; i += 4)
        words[i] = (uint32_t)number;
    words[0] = rows;
    words[1] = of_expert;
    status = forge(own, at.offset, words, at.bytes, error);
    free(words);
    return status;
}

static void forge_header(const struct ep_limits *l, const struct bank *bank, uint64_t number, uint32_t slot,
                         struct ep_row_header *header)
{
    const uint32_t token = bank->token_too_many ? l->ll_max_tokens : bank->token ? bank->token - slot : slot;

    *header = (struct ep_row_header){ .token = token, .routes = 1, .number = (uint32_t)number };
    for (uint32_t k = 0; k < l->top_k; k++)
        header->route[k] = (struct ep_route){ .expert = -1, .number = (uint32_t)number };
    header->route[0].expert = (int32_t)bank->local;
    header->route[0].weight = 1;
    header->route[0].index = bank->index ? bank->index : slot;
}

static ep_status forge_headers(struct world_rank *own, const struct bank *bank, uint64_t number, uint32_t s,
                               struct ep_error *error)
{
    const struct ep_layout_map *map = &own->world->map;
    const struct piece at = region_of(own->world, number, map->bank.headers, s,
                                      (uint64_t)map->limits.ll_max_tokens * map->header_bytes);
    char *headers = calloc(1, at.bytes);
    ep_status status;

    if (!headers)
        return no_memory(error);
    for (uint32_t slot = 0; slot < map->limits.ll_max_tokens; slot++)
        forge_header(&map->limits, bank, number, slot, (void *)(headers + (size_t)slot * map->header_bytes));
    status = forge(own, at.offset, headers, at.bytes, error);
    free(headers);
    return status;
}

static ep_status forge_places(struct world_rank *own, uint32_t place, uint64_t number, uint32_t s, struct ep_error *error)
{
    const struct ep_layout_map *map = &own->world->map;
    const struct piece at = region_of(own->world, number, map->bank.places, s,
                                      (uint64_t)map->limits.ll_max_tokens * map->places_bytes);
    uint32_t *places = malloc(at.bytes);
    ep_status status;

    if (!places)
        return no_memory(error);
    for (uint64_t i = 0; i < at.bytes / sizeof *places; i++)
        places[i] = place;
    status = forge(own, at.offset, places, at.bytes, error);
    free(places);
    return status;
}

/* So that anything can be sent.  A credit for the number itself would say that no more comes. */
static ep_status forge_credit(struct world_rank *own, uint64_t number, uint32_t s, struct ep_error *error)
{
    const struct ep_layout_map *map = &own->world->map;
    const uint64_t credit = number - 1;

    return forge(own, map->ll + map->bank.credits + (uint64_t)s * EP_LINE
                          + number % map->limits.ll_banks * sizeof credit, &credit, sizeof credit, error);
}

static ep_status forge_dispatch(struct world_rank *own, const struct bank *bank, uint64_t number, struct ep_error *error)
{
    const uint32_t most = own->world->map.limits.ll_max_tokens;
    ep_status status = EP_OK;

    for (uint32_t s = 1; status == EP_OK && s < own->world->ranks; s++) {
        status = forge_credit(own, number, s, error);
        if (status == EP_OK)
            status = forge_counts(own, number, s, bank->rows ? bank->rows : most,
                                  bank->of_expert ? bank->of_expert : most, error);
        if (status == EP_OK)
            status = forge_headers(own, bank, number, s, error);
    }
    return status;
}

static ep_status forge_combine(struct world_rank *own, const struct bank *bank, uint64_t number, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t s = 1; status == EP_OK && s < own->world->ranks; s++) {
        if (bank->late_rows)
            status = forge_counts(own, number, s, bank->late_rows, 0, error);
        if (status == EP_OK && bank->place)
            status = forge_places(own, bank->place, number, s, error);
    }
    return status;
}

/* All banks of rank s's window. */
static ep_status read_banks(struct world *world, uint32_t s, char *banks_of, struct ep_error *error)
{
    const struct ep_layout_map *map = &world->map;

    return world->api->read(world->rank[s].device, banks_of, world->rank[s].window + map->ll,
                            map->limits.ll_banks * map->bank_bytes, NULL, error);
}

/* Rank 0 has no tokens, so there it writes counts and credits, and partials of what it has: if any are to be pushed. */
static ep_status compare_banks(const struct world *world, const char *before, const char *after, bool pushed,
                               const char *what, struct ep_error *error)
{
    const struct ep_layout_map *map = &world->map;
    const uint64_t partials = (uint64_t)map->limits.ll_max_tokens * map->partial_bytes;
    bool changed = false;

    for (uint64_t b = 0; b < map->limits.ll_banks; b++) {
        const uint64_t bank = b * map->bank_bytes, own = bank + map->bank.combine_rows, behind = own + partials;

        changed |= memcmp(before + own, after + own, partials) != 0;
        if (memcmp(before + bank + map->bank.headers, after + bank + map->bank.headers, own - bank - map->bank.headers) != 0
            || memcmp(before + behind, after + behind, bank + map->bank_bytes - behind) != 0)
            return ep_error_set(error, EP_VERIFY_FAILED, "%s: something of another rank's is changed", what);
    }
    if (changed != pushed)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s: %s partial is pushed", what, pushed ? "no" : "a");
    return EP_OK;
}

/* A dispatch of no tokens, and its combine. */
static ep_status run_forged(struct pass *pass, const struct bank *bank, struct ep_error *error)
{
    struct world_rank *own = pass->rank;
    struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, false);
    struct ep_device_record record;
    uint64_t number;
    ep_status status = next_number(own, &own->state->number, &number, error);

    dispatch.tokens = combine.tokens = 0;
    if (status == EP_OK)
        status = forge_dispatch(own, bank, number, error);
    if (status == EP_OK)
        status = run_op(pass, &dispatch, EP_OK, bank->what, &record, error);
    if (status == EP_OK)
        status = forge_combine(own, bank, number, error);
    return status == EP_OK ? run_op(pass, &combine, EP_OK, bank->what, &record, error) : status;
}

static ep_status try_bank(struct pass *pass, const struct bank *bank, struct ep_error *error)
{
    struct world *world = pass->rank->world;
    const uint64_t bytes = world->map.limits.ll_banks * world->map.bank_bytes;
    char *before = malloc(bytes), *after = malloc(bytes);
    ep_status status = before && after ? read_banks(world, 1, before, error) : no_memory(error);

    if (status == EP_OK)
        status = run_forged(pass, bank, error);
    if (status == EP_OK)
        status = read_banks(world, 1, after, error);
    if (status == EP_OK)
        status = compare_banks(world, before, after, !bank->token && !bank->token_too_many, bank->what, error);
    free(before);
    free(after);
    return status;
}

static ep_status run_banks(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < sizeof banks / sizeof *banks; i++)
        status = try_bank(passes->pass[rank][0], &banks[i], error);
    return status;
}

/* ---- HT: notes ---------------------------------------------------------------------- */

enum how { AS_IT_IS, EXACTLY, MORE, FROM_END }; /* MORE: than it should be; FROM_END: so much before the window's */

/* Words of all other ranks' notes that are not as their kernels would have them: these have no rows, and grant as many as one can
 * send. */
static const struct forged {
    const char *what;
    ep_status status; /* that the dispatch ends with.  EP_OK: it does not send all of its rows, if anything is forged */
    enum { ANYWHERE, PACKED, SCALES } where; /* it is of no matter elsewhere */
    struct forged_word {
        bool grant;
        uint32_t word; /* of an offset the low half: both are meant */
        enum how how;
        uint64_t value;
    } word[2];
} forgeries[] = {
#define REFUSED                 EP_FAILED_PRECONDITION
#define ASK(word, value)        { false, EP_HT_ASK_##word, EXACTLY, value }
#define GRANT(word, how, value) { true, EP_HT_GRANT_##word, how, value }
    { "nothing forged", EP_OK, ANYWHERE, { { false, 0, AS_IT_IS, 0 } } },
    { "traits", REFUSED, ANYWHERE, { ASK(TRAITS, 77) } },
    { "rows", EP_TIMEOUT, ANYWHERE, { ASK(ROWS, UINT32_MAX) } },
    { "rows of an expert", EP_TIMEOUT, PACKED, { ASK(ROWS, 1), ASK(EXPERTS, UINT32_MAX) } },
    { "partials", REFUSED, ANYWHERE, { ASK(BACK, UINT32_MAX) } },
    { "partials, at the end of 32 bits", REFUSED, ANYWHERE, { ASK(BACK, UINT32_MAX), ASK(ROWS, 1) } },
    { "rows at half of 16 bytes", REFUSED, ANYWHERE, { GRANT(OUT_LOW, MORE, 8) } },
    { "rows before the arena", REFUSED, ANYWHERE, { GRANT(OUT_LOW, EXACTLY, 0) } },
    { "rows at the window's end", REFUSED, ANYWHERE, { GRANT(OUT_LOW, FROM_END, 16) } },
    { "rows beyond the window", REFUSED, ANYWHERE, { GRANT(OUT_LOW, FROM_END, (uint64_t)-4096) } },
    { "rows far beyond the window", REFUSED, ANYWHERE, { GRANT(OUT_LOW, EXACTLY, 1ull << 63) } },
    { "scales before the arena", REFUSED, SCALES, { GRANT(SCALES_LOW, EXACTLY, 0) } },
    { "scales at the window's end", REFUSED, SCALES, { GRANT(SCALES_LOW, FROM_END, 16) } },
    { "scales far beyond the window", REFUSED, SCALES, { GRANT(SCALES_LOW, EXACTLY, 1ull << 63) } },
    { "a header", REFUSED, ANYWHERE, { GRANT(ROW, EXACTLY, UINT32_MAX) } },
    { "headers, at the end of 32 bits", REFUSED, ANYWHERE, { GRANT(ROW, EXACTLY, UINT32_MAX - 15), GRANT(ROWS, EXACTLY, 16) } },
    { "more rows than one can send", REFUSED, ANYWHERE, { GRANT(ROWS, MORE, 1) } },
    { "an expert's rows beyond the window", REFUSED, PACKED, { GRANT(EXPERTS, EXACTLY, UINT32_MAX / 2) } },
    { "an expert's rows, at the end of 32 bits", REFUSED, PACKED,
      { GRANT(EXPERTS, EXACTLY, UINT32_MAX), GRANT(EXPERTS + 1, EXACTLY, 1) } },
    { "an expert's rows, at the end of 32 bits of bytes", REFUSED, PACKED, { GRANT(EXPERTS, EXACTLY, 1u << 22) } },
    { "fewer rows than are asked for", EP_OK, ANYWHERE, { GRANT(ROWS, EXACTLY, 1) } },
    { "fewer rows of an expert", EP_OK, PACKED, { GRANT(EXPERTS + 1, EXACTLY, 1) } },
#undef REFUSED
#undef ASK
#undef GRANT
};

/* What a rank asks, and what it grants. */
struct notes {
    uint32_t *word[2];
};

static void put_offset(uint32_t *words, uint32_t word, uint64_t offset)
{
    words[word] = (uint32_t)offset;
    words[word + 1] = (uint32_t)(offset >> 32);
}

static uint64_t offset_in(const uint32_t *words, uint32_t word)
{
    return (uint64_t)words[word + 1] << 32 | words[word];
}

/* As its kernel would have it. */
static void fill_notes(const struct pass *pass, const struct ep_op *op, struct notes *notes)
{
    const struct ep_limits *l = &pass->rank->world->map.limits;
    const bool packed = op->layout == EP_LAYOUT_PACKED;
    uint32_t *ask = notes->word[0], *grant = notes->word[1];

    ask[EP_HT_ASK_TRAITS] = EP_OP_DISPATCH | op->wire_dtype << 8 | op->scale_format << 16;
    grant[EP_HT_GRANT_BITS] = EP_HT_GRANT_ROOM | (packed ? EP_HT_GRANT_PACKED : 0);
    grant[EP_HT_GRANT_ROWS] = l->ht_max_tokens;
    put_offset(grant, EP_HT_GRANT_OUT_LOW, op->out.offset);
    put_offset(grant, EP_HT_GRANT_SCALES_LOW, op->out_scales.offset);
    for (uint32_t e = 0; packed && e < l->local_experts; e++) {
        grant[EP_HT_GRANT_EXPERTS + 2 * e] = e * l->ht_max_tokens;
        grant[EP_HT_GRANT_EXPERTS + 2 * e + 1] = l->ht_max_tokens;
    }
}

static uint64_t forge_value(const struct ep_layout_map *map, const struct forged_word *f, uint64_t value)
{
    switch (f->how) {
    case EXACTLY: return f->value;
    case MORE: return value + f->value;
    case FROM_END: return map->total_bytes - f->value;
    default: return value;
    }
}

static void forge_word(const struct ep_layout_map *map, const struct forged_word *f, struct notes *notes)
{
    uint32_t *words = notes->word[f->grant];

    if (f->grant && (f->word == EP_HT_GRANT_OUT_LOW || f->word == EP_HT_GRANT_SCALES_LOW))
        put_offset(words, f->word, forge_value(map, f, offset_in(words, f->word)));
    else
        words[f->word] = (uint32_t)forge_value(map, f, words[f->word]);
}

/* What rank s tells rank 0, with the op's tag. */
static ep_status tell(struct world_rank *s, const struct notes *notes, uint64_t tag, struct ep_error *error)
{
    const struct ep_layout_map *map = &s->world->map;
    struct ep_ht_note *told = calloc(1, map->ht_note_stride);
    ep_status status = told ? EP_OK : no_memory(error);

    for (uint64_t kind = 0; status == EP_OK && kind < 2; kind++) {
        for (uint64_t i = 0; i < map->ht_note_stride / sizeof *told; i++)
            told[i] = (struct ep_ht_note){ { notes->word[kind][2 * i], notes->word[kind][2 * i + 1] }, tag };
        status = forge(s, map->ht_notes + kind * map->limits.ranks * map->ht_note_stride, told, map->ht_note_stride, error);
    }
    free(told);
    return status;
}

/* All other ranks the same, with these two words. */
static ep_status forge_notes(struct pass *pass, const struct ep_op *op, const struct forged_word *forged, uint64_t tag,
                             struct ep_error *error)
{
    struct world *world = pass->rank->world;
    const uint32_t words = (uint32_t)(world->map.ht_note_stride / sizeof(struct ep_ht_note) * 2);
    uint32_t *all = calloc(2ull * words, sizeof *all);
    struct notes notes = { { all, all + words } };
    ep_status status = all ? EP_OK : no_memory(error);

    if (status == EP_OK)
        fill_notes(pass, op, &notes);
    for (uint32_t i = 0; status == EP_OK && i < 2; i++)
        forge_word(&world->map, &forged[i], &notes);
    for (uint32_t s = 1; status == EP_OK && s < world->ranks; s++)
        status = tell(&world->rank[s], &notes, tag, error);
    free(all);
    return status;
}

static ep_status try_notes(struct ll_passes *passes, struct pass *pass, const struct forged *f, struct ep_error *error)
{
    const struct ep_op op = pass_dispatch_op(pass, 0);
    struct ep_device_record record;
    uint64_t number;
    ep_status status;

    if ((f->where == PACKED && op.layout != EP_LAYOUT_PACKED) || (f->where == SCALES && op.out_scales.bytes == 0))
        return EP_OK;
    status = world_set_timeout(passes->world, f->status == EP_TIMEOUT ? SHORT_MS : passes->timeout_ms, error);
    if (status == EP_OK)
        status = next_number(pass->rank, &pass->rank->state->ht_number, &number, error);
    if (status == EP_OK)
        status = forge_notes(pass, &op, f->word, ep_ht_tag(number, 0), error);
    if (status == EP_OK)
        status = run_op(pass, &op, f->status, f->what, &record, error);
    if (status == EP_OK && f->status == EP_OK && (record.dropped > 0) != (f->word[0].how != AS_IT_IS))
        return ep_error_set(error, EP_VERIFY_FAILED, "%s: %llu routes are dropped", f->what,
                            (unsigned long long)record.dropped);
    return status;
}

/* ---- HT: headers -------------------------------------------------------------------- */

/* Places of a row in `out`, when each other rank says that it has one, for the first expert; that is there. */
static const uint32_t places[] = { 0, 0x10000000, 0x7fffffff, UINT32_MAX - 1 };

static ep_status forge_row(struct world_rank *own, uint32_t s, uint32_t place, uint64_t tag, struct ep_error *error)
{
    const struct ep_layout_map *map = &own->world->map;
    const uint64_t done = tag;
    struct ep_row_header *header = calloc(1, map->header_bytes);
    ep_status status;

    if (!header)
        return no_memory(error);
    *header = (struct ep_row_header){ .routes = 1, .reserved = (uint32_t)tag, .number = (uint32_t)(tag >> 32) };
    for (uint32_t k = 0; k < map->limits.top_k; k++)
        header->route[k].expert = -1;
    header->route[0] = (struct ep_route){ .expert = 0, .weight = 1, .index = place };
    status = forge(own, map->ht_headers + (uint64_t)(s - 1) * map->header_bytes, header, map->header_bytes, error);
    free(header);
    if (status != EP_OK)
        return status;
    return forge(own, map->ht_flags + (uint64_t)s * EP_HT_FLAGS_BYTES + offsetof(struct ep_ht_flags, done), &done, sizeof done,
                 error);
}

static ep_status try_place(struct pass *pass, uint32_t place, struct ep_error *error)
{
    const struct forged_word one[] = { { false, EP_HT_ASK_ROWS, EXACTLY, 1 }, { false, EP_HT_ASK_EXPERTS, EXACTLY, 1 } };
    struct ep_op op = pass_dispatch_op(pass, 0);
    struct ep_device_record record;
    uint64_t number;
    ep_status status = next_number(pass->rank, &pass->rank->state->ht_number, &number, error);

    op.tokens = 0; /* rows are others' alone */
    if (status == EP_OK)
        status = forge_notes(pass, &op, one, ep_ht_tag(number, 0), error);
    for (uint32_t s = 1; status == EP_OK && s < pass->rank->world->ranks; s++)
        status = forge_row(pass->rank, s, place, ep_ht_tag(number, 0), error);
    return status == EP_OK ? run_op(pass, &op, EP_OK, "a place", &record, error) : status;
}

static ep_status run_notes(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < sizeof forgeries / sizeof *forgeries; i++)
        status = try_notes(passes, pass, &forgeries[i], error);
    for (uint32_t i = 0; status == EP_OK && i < sizeof places / sizeof *places; i++)
        status = try_place(pass, places[i], error);
    return status;
}

/* ---- the case ----------------------------------------------------------------------- */

/* Then all ranks begin anew, and nothing is left of it. */
ep_status ll_case_forged(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_bit(0), shape->ht ? run_notes : run_banks, error);
    if (status == EP_OK)
        status = world_reset(passes.world, setting->timeout_ms, error);
    if (status == EP_OK)
        status = ll_each_three(&passes, world_all(passes.world), error);
    ll_close(&passes);
    return status;
}
