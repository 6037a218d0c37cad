/* Executor server: a worker that does not keep to the rules of its mailbox, and what goes on around one that waits. */
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ll_tests.h"

enum { STORM_OPS = 100, EXPECT_TRIES = 4, STORM_MS = 50, CHURN = 20, SHORT_MS = 200, MEMORY_BYTES = 1 << 22,
       PLACES = 16 };

static struct ep_mailbox *mailbox_of(const struct world_rank *rank)
{
    return &((struct ep_control *)(void *)rank->window)->gpu.mailbox;
}

static struct ep_device_report *report_of(const struct world_rank *rank)
{
    return &((struct ep_control *)(void *)rank->window)->gpu.report;
}

/* At once, whatever the rank's stream waits for: the way that a worker's other streams have. */
static ep_status scribble(struct world_rank *rank, void *to, const void *from, uint64_t bytes, struct ep_error *error)
{
    return rank->world->api->write(rank->device, to, from, bytes, NULL, error);
}

static ep_status scribble_word(struct world_rank *rank, uint32_t *word, uint32_t value, struct ep_error *error)
{
    return scribble(rank, word, &value, sizeof value, error);
}

ep_status ll_ring_and_wait(struct world_rank *rank, const struct ep_op *op, struct ep_error *error)
{
    ep_status status = world_ring(rank, op, error);

    return status == EP_OK ? world_wait(rank, error) : status;
}

ep_status ll_run_case(const struct ll_setting *setting, const struct shape *shape, ll_fn fn, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), fn, error);
    ll_close(&passes);
    return status;
}

/* ---- ops that are none --------------------------------------------------------------- */

/* Fields that are wrong, one at a time. */
static const struct wrong {
    uint32_t offset, value; /* a word of the dispatch */
    ep_status status;
} wrongs[] = {
#define WRONG(field, value, status) { offsetof(struct ep_op, field), value, status }
    WRONG(kind, 0, EP_INVALID_ARGUMENT),
    WRONG(kind, 77, EP_INVALID_ARGUMENT),
    WRONG(mode, 9, EP_INVALID_ARGUMENT),
    WRONG(layout, 4, EP_INVALID_ARGUMENT),
    WRONG(flags, 0x80, EP_INVALID_ARGUMENT),
    WRONG(input_dtype, 0, EP_INVALID_ARGUMENT),
    WRONG(wire_dtype, 31, EP_INVALID_ARGUMENT),
    WRONG(tokens, UINT32_MAX, EP_INVALID_ARGUMENT),
    WRONG(top_k, 0, EP_INVALID_ARGUMENT),
    WRONG(top_k, 4000000, EP_INVALID_ARGUMENT),
    WRONG(index_bytes, 5, EP_INVALID_ARGUMENT),
    WRONG(handle, EP_MAX_HANDLES, EP_INVALID_ARGUMENT),
    WRONG(handle, UINT32_MAX, EP_INVALID_ARGUMENT),
    WRONG(x.offset, 0, EP_INVALID_ARGUMENT),
    WRONG(x.offset, 0xfffffff0u, EP_INVALID_ARGUMENT),
    WRONG(x.bytes, 16, EP_INVALID_ARGUMENT),
    WRONG(topk_idx.offset, 8, EP_INVALID_ARGUMENT),
    WRONG(out.bytes, 1, EP_INVALID_ARGUMENT),
    WRONG(out.offset, 64, EP_INVALID_ARGUMENT),
    WRONG(counts.bytes, 0, EP_INVALID_ARGUMENT),
#undef WRONG
};

ep_status ll_check_failure(struct world_rank *rank, ep_status expected, const char *what, uint32_t i,
                           struct ep_error *error)
{
    const uint64_t none = 0;
    struct ep_device_report report;
    ep_status status =
        rank->world->api->read(rank->device, &report, report_of(rank), sizeof report, rank->stream, error);

    if (status == EP_OK && report.failures != 1)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s %u: %llu failures are told, not one", what, i,
                            (unsigned long long)report.failures);
    if (status == EP_OK && report.failure.status != (int32_t)expected)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s %u ended with %s, not %s", what, i,
                            ep_status_name((ep_status)report.failure.status), ep_status_name(expected));
    return status == EP_OK ? scribble(rank, &report_of(rank)->failures, &none, sizeof none, error) : status;
}

static ep_status try_wrong(struct pass *pass, uint32_t i, struct ep_error *error)
{
    struct ep_op op = pass_dispatch_op(pass, 0);
    ep_status status;

    *(uint32_t *)(void *)((char *)&op + wrongs[i].offset) = wrongs[i].value;
    status = ll_ring_and_wait(pass->rank, &op, error);
    return status == EP_OK ? ll_check_failure(pass->rank, wrongs[i].status, "op", i, error) : status;
}

/* A complete of nothing, and one of a handle that there is not. */
static ep_status try_completes(struct pass *pass, struct ep_error *error)
{
    const uint32_t handles[] = { EP_MAX_HANDLES - 1, EP_MAX_HANDLES };
    const ep_status expected[] = { EP_FAILED_PRECONDITION, EP_INVALID_ARGUMENT };
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < 2; i++) {
        const struct ep_op op = { .kind = EP_OP_COMPLETE, .mode = EP_MODE_LL, .handle = handles[i] };

        status = ll_ring_and_wait(pass->rank, &op, error);
        if (status == EP_OK)
            status = ll_check_failure(pass->rank, expected[i], "complete", i, error);
    }
    return status;
}

/* Between good ops, which do not notice. */
static ep_status run_wrong(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = ll_three_passes(passes, rank, error);

    for (uint32_t i = 0; status == EP_OK && i < sizeof wrongs / sizeof *wrongs; i++)
        status = try_wrong(pass, i, error);
    if (status == EP_OK)
        status = try_completes(pass, error);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_wrong_ops(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return ll_run_case(setting, shape, run_wrong, error);
}

/* ---- ops that are not the expected ones ----------------------------------------------- */

/* Pairs alike, so many that entries expect them from here on. */
static ep_status repeat(struct pass *pass, uint32_t tokens, struct ep_error *error)
{
    struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, true);
    ep_status status = EP_OK;

    dispatch.tokens = combine.tokens = tokens;
    for (uint32_t i = 0; status == EP_OK && i < EP_CUDA_SERVE_OPS; i++) {
        status = world_run(pass->rank, &dispatch, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &combine, error);
    }
    return status == EP_OK ? world_wait(pass->rank, error) : status;
}

/* Another handle, other memory, another number of tokens, for which the kernel that comes may have few blocks; whole, and in
 * halves, of which the second one is for another kernel. */
static ep_status run_others(struct pass *usual, struct pass *other, struct ep_error *error)
{
    const uint32_t flags[] = { 0, EP_OP_CACHED, other->shape->ht ? 0 : EP_OP_SEND_ONLY };
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < sizeof flags / sizeof *flags; i++) {
        status = repeat(usual, 1 + i, error);
        if (status == EP_OK)
            status = pass_run(other, flags[i], false, error);
    }
    return status;
}

static ep_status try_others(struct pass *usual, struct pass *other, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < sizeof wrongs / sizeof *wrongs; i++) {
        if (i % 4 == 0)
            status = repeat(usual, 1, error);
        if (status == EP_OK)
            status = try_wrong(other, i, error);
    }
    return status;
}

static ep_status run_unexpected(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *usual = passes->pass[rank][0], *other = passes->pass[rank][1];
    ep_status status = run_others(usual, other, error);

    if (status == EP_OK && passes->shape->layout == EP_LAYOUT_EXPERT_MAJOR) /* `wrongs` are for this one */
        status = try_others(usual, other, error);
    return status == EP_OK ? pass_run(usual, 0, false, error) : status;
}

ep_status ll_case_unexpected(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 2, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_unexpected, error);
    ll_close(&passes);
    return status;
}

/* ---- ops that are expected ------------------------------------------------------------ */

/* A rank whose own kernel waits for ends of ops.  Of two that follow each other one does (world.h). */
static ep_status find_spinning(const struct ll_passes *passes, struct world_rank **out, struct ep_error *error)
{
    for (uint32_t r = 0; r < passes->world->ranks; r++) {
        struct world_rank *rank = &passes->world->rank[r];
        uint32_t spins = 0;
        ep_status status =
            passes->world->api->read(rank->device, &spins, &mailbox_of(rank)->spins, sizeof spins, NULL, error);

        *out = rank;
        if (status != EP_OK || spins)
            return status;
    }
    return ep_error_set(error, EP_INTERNAL, "no rank has a kernel that waits");
}

/* The dispatch of a rank, which waits for others then: so many blocks say that they execute it. */
static ep_status begin_alone(struct world_rank *rank, const struct ep_op *op, uint32_t *blocks, struct ep_error *error)
{
    const uint64_t end = ep_clock_ns() + rank->world->stuck_ns;
    ep_status status = world_run(rank, op, error);

    *blocks = 0;
    while (status == EP_OK && *blocks == 0) {
        if (ep_clock_ns() > end)
            return ep_error_set(error, EP_VERIFY_FAILED, "rank %u's op does not begin", rank->rank);
        status = rank->world->api->read(rank->device, blocks, &mailbox_of(rank)->blocks, sizeof *blocks, NULL, error);
    }
    return status;
}

/* A pair as of repeat(), begun by that rank. */
static ep_status run_begun(struct ll_passes *passes, struct world_rank *first, uint32_t *blocks,
                           struct ep_error *error)
{
    struct ep_op dispatch = pass_dispatch_op(passes->pass[first->rank][0], 0);
    ep_status status;

    dispatch.tokens = 1;
    status = begin_alone(first, &dispatch, blocks, error);
    for (uint32_t r = 0; status == EP_OK && r < passes->world->ranks; r++) {
        struct pass *pass = passes->pass[r][0];
        struct ep_op combine = pass_combine_op(pass, 0, true);

        dispatch = pass_dispatch_op(pass, 0);
        dispatch.tokens = combine.tokens = 1;
        if (r != first->rank)
            status = world_run(pass->rank, &dispatch, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &combine, error);
    }
    for (uint32_t r = 0; status == EP_OK && r < passes->world->ranks; r++)
        status = world_wait(&passes->world->rank[r], error);
    return status;
}

static ep_status repeat_first(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return repeat(passes->pass[rank][0], 1, error);
}

/* An entry that finds out has the blocks of a kernel for LL besides.  Now and then one finds out that could expect the op:
 * then another try will tell. */
ep_status ll_case_expected(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    struct world_rank *rank = NULL;
    uint32_t first = 0, blocks = 0;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = find_spinning(&passes, &rank, error);
    if (status == EP_OK)
        status = run_begun(&passes, rank, &first, error);
    blocks = first;
    for (uint32_t i = 0; status == EP_OK && blocks >= first && i < EXPECT_TRIES; i++) {
        status = ll_each(&passes, world_all(passes.world), repeat_first, error);
        if (status == EP_OK)
            status = run_begun(&passes, rank, &blocks, error);
    }
    if (status == EP_OK && blocks >= first)
        status = ep_error_set(error, EP_VERIFY_FAILED, "ops repeat themselves, and %u blocks execute one as %u did the first",
                              blocks, first);
    ll_close(&passes);
    return status;
}

/* ---- ops that change while they run -------------------------------------------------- */

/* What a block may find in the mailbox: other blocks find something else. */
static struct ep_op any_op(struct pass *pass, uint32_t i)
{
    struct ep_op op = i % 3 == 0 ? pass_combine_op(pass, 0, true) : pass_dispatch_op(pass, i % 5 == 0 ? EP_OP_CACHED : 0);

    if (i % 4 == 1)
        op.tokens = 1; /* so that there are other blocks */
    if (i % 7 == 2)
        op.flags |= EP_OP_SEND_ONLY;
    if (i % 11 == 3)
        op.kind = EP_OP_RELEASE;
    if (i % 13 == 4)
        op.kind = EP_OP_COMPLETE;
    if (i % 17 == 5)
        op.out.offset = 0;
    op.handle = i % 6;
    return op;
}

/* At every place of the mailbox that such a worker uses. */
static ep_status scribble_ops(struct world_rank *own, struct pass *pass, uint32_t n, struct ep_error *error)
{
    struct ep_op others[PLACES];

    for (uint32_t i = 0; i < PLACES; i++)
        others[i] = any_op(pass, n + i);
    return scribble(own, mailbox_of(own)->op, others, sizeof others, error);
}

/* What a worker tells its peers of an HT op, forged: some of them good, in the eyes of whoever compares numbers. */
static ep_status forge_notes(struct world_rank *own, uint32_t i, struct ep_error *error)
{
    const struct ep_layout_map *map = &own->world->map;
    const uint64_t bytes = 2 * map->limits.ranks * map->ht_note_stride;
    uint64_t number = 0;
    struct ep_ht_note *notes = malloc(bytes);
    ep_status status = notes ? own->world->api->read(own->device, &number, &own->state->ht_number, sizeof number, NULL, error)
                             : ep_error_set(error, EP_NO_MEMORY, "no memory for %llu bytes", (unsigned long long)bytes);

    for (uint64_t n = 0; notes && n < bytes / sizeof *notes; n++) {
        const uint32_t wild = (uint32_t)n * 2654435761u + i;

        notes[n] = (struct ep_ht_note){ .word = { i % 2 ? wild : wild % 64, i % 3 ? wild >> 7 : 0 },
                                        .tag = ep_ht_tag(number + 1, i % 2) };
    }
    if (status == EP_OK)
        status = scribble(own, own->window + map->ht_notes, notes, bytes, error);
    free(notes);
    return status;
}

/* Rings, and writes other ops meanwhile, and rings once more where one is not asked for.  repeats: for the same op, so
 * that it is expected. */
static ep_status storm(struct ll_passes *passes, uint32_t rank, bool repeats, struct ep_error *error)
{
    struct world_rank *own = &passes->world->rank[rank];
    struct pass *pass = passes->pass[rank][0];
    struct ep_mailbox *mailbox = mailbox_of(own);
    ep_status status = EP_OK;
    uint32_t n = rank;

    pass->dispatch = pass_dispatch_op(pass, 0);
    for (uint32_t i = 0; status == EP_OK && i < STORM_OPS; i++) {
        const struct ep_op op = any_op(pass, repeats ? 7 : n++);

        status = world_ring(own, &op, error);
        for (uint32_t j = 0; status == EP_OK && j < 3; j++)
            status = scribble_ops(own, pass, n++, error);
        if (status == EP_OK && passes->shape->ht)
            status = forge_notes(own, i, error);
        if (status == EP_OK && i % 9 == 0)
            status = scribble_word(own, &mailbox->bell, ep_bell_of(i * 5), error);
        if (status == EP_OK)
            status = world_wait(own, error);
    }
    return status;
}

static ep_status run_storm(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return storm(passes, rank, false, error);
}

static ep_status run_repeated_storm(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return storm(passes, rank, true, error);
}

/* Numbers of ranks have drifted apart.  A reset, as of a group that nobody is in, has all begin anew. */
ep_status ll_case_storm(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = world_set_timeout(passes.world, STORM_MS, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_storm, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_repeated_storm, error);
    if (status == EP_OK)
        status = world_reset(passes.world, setting->timeout_ms, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), ll_three_passes, error);
    if (status != EP_OK)
        (void)ep_error_prefix(error, "after the storm");
    ll_close(&passes);
    return status;
}

/* ---- a server that is gone ------------------------------------------------------------ */

ep_status ll_wait_begun(struct world_rank *rank, bool ht, uint64_t number, struct ep_error *error)
{
    const uint64_t end = ep_clock_ns() + rank->world->stuck_ns;
    uint64_t begun = 0;
    ep_status status = EP_OK;

    while (status == EP_OK && begun < number) {
        status = world_begun(rank, ht, &begun, error);
        if (status == EP_OK && ep_clock_ns() > end)
            return ep_error_set(error, EP_VERIFY_FAILED, "number %llu has not begun", (unsigned long long)number);
    }
    return status;
}

/* As libepclient does it: whoever waits goes on, and so does whoever rings later. */
static ep_status run_closed(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct world_rank *own = &passes->world->rank[rank];
    struct ep_mailbox *mailbox = mailbox_of(own);
    const struct ep_op op = pass_dispatch_op(passes->pass[rank][0], 0);
    const uint64_t start = ep_clock_ns();
    ep_status status = EP_OK;

    if (rank > 0) /* never comes: rank 0 waits for the others */
        return EP_OK;
    for (uint32_t i = 0; status == EP_OK && i < 3; i++)
        status = world_ring(own, &op, error);
    if (status == EP_OK)
        status = ll_wait_begun(own, false, 1, error);
    if (status == EP_OK)
        status = scribble_word(own, &mailbox->closed, 1, error);
    if (status == EP_OK)
        status = world_ring(own, &op, error);
    if (status == EP_OK)
        status = world_wait(own, error);
    if (status == EP_OK && (ep_clock_ns() - start) / EP_NS_PER_MS > passes->timeout_ms / 2)
        return ep_error_set(error, EP_VERIFY_FAILED, "a stream went on after %llu ms only",
                            (unsigned long long)((ep_clock_ns() - start) / EP_NS_PER_MS));
    return status;
}

/* The op waits no more than its worker does, and not until its time is over. */
static ep_status end_soon(const struct ll_passes *passes, struct ep_error *error)
{
    const struct world *world = passes->world;
    const ep_status status = world->api->serve_end(world->rank[0].serve, passes->timeout_ms / 2, error);

    return status == EP_OK ? status : ep_error_prefix(error, "the end of a serve whose worker has gone on");
}

ep_status ll_case_closed(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_closed, error);
    if (status == EP_OK)
        status = end_soon(&passes, error);
    ll_close(&passes);
    return status;
}

/* ---- the end of a serve while an op runs ---------------------------------------------------- */

static ep_status run_waiting(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct world_rank *own = &passes->world->rank[rank];
    const struct ep_op op = pass_dispatch_op(passes->pass[rank][0], 0);
    ep_status status;

    if (rank > 0) /* never comes: rank 0 waits for the others */
        return EP_OK;
    status = world_ring(own, &op, error);
    return status == EP_OK ? ll_wait_begun(own, false, 1, error) : status;
}

/*
 * Not over, then over.  The worker may have heard nothing of its op: blocks that begin after the end was told leave without a
 * word, and the doorbell that is rung for the end may be rung over the answer.  Its rank is lost, so it goes on as libepclient
 * has it.
 */
static ep_status end_twice(const struct ll_passes *passes, struct ep_error *error)
{
    struct world *world = passes->world;
    const struct ep_cuda_api *api = world->api;
    struct world_rank *rank = &world->rank[0];
    ep_status status = api->serve_end(rank->serve, SHORT_MS, error);

    if (status != EP_DEADLINE_EXCEEDED)
        return ep_error_set(error, EP_VERIFY_FAILED, "the end of a serve whose op runs says %s",
                            ep_status_name(status));
    status = world_leave(world, 0, error);
    if (status == EP_OK)
        status = api->serve_end(rank->serve, passes->timeout_ms / 2, error);
    return status == EP_OK ? scribble_word(rank, &mailbox_of(rank)->closed, 1, error) : status;
}

ep_status ll_case_end(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_waiting, error);
    if (status == EP_OK)
        status = end_twice(&passes, error);
    ll_close(&passes);
    return status;
}

/* ---- while doorbells are waited for ---------------------------------------------------- */

/* By an address in it.  What says that it is larger than it is cannot be mapped. */
static ep_status hand_on(struct world_rank *rank, const struct ep_cuda_memory *memory, struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    struct ep_cuda_memory *imported;
    uint64_t offset, bytes;
    int fd;
    ep_status status =
        api->memory_export_at(rank->device, (char *)api->memory_at(memory) + 4096, &fd, &offset, &bytes, error);

    if (status != EP_OK)
        return status;
    if (offset != 4096 || bytes < MEMORY_BYTES)
        status = ep_error_set(error, EP_VERIFY_FAILED, "an address 4096 into memory is exported as %llu of %llu",
                              (unsigned long long)offset, (unsigned long long)bytes);
    else if (api->memory_adopt(rank->device, fd, 2 * bytes, &imported, error) == EP_OK)
        status = ep_error_set(error, EP_VERIFY_FAILED, "twice the bytes that memory has were mapped");
    else
        status = api->memory_adopt(rank->device, fd, bytes, &imported, error);
    close(fd);
    if (status == EP_OK)
        api->memory_destroy(imported);
    return status;
}

/* What a server does for other groups and workers meanwhile; none of it may wait for a doorbell. */
static ep_status churn(struct world_rank *rank, struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    struct ep_cuda_memory *memory;
    struct ep_cuda_device device;
    ep_status status = api->memory_create(rank->device, MEMORY_BYTES, &memory, error);

    if (status != EP_OK)
        return status;
    for (uint32_t d = 0; status == EP_OK && d < rank->world->gpus; d++)
        if (d != rank->device)
            status = api->memory_share(memory, d, error);
    if (status == EP_OK)
        status = hand_on(rank, memory, error);
    if (status == EP_OK)
        status = api->device_info(rank->device, &device, error);
    api->memory_destroy(memory);
    return status;
}

static ep_status run_churn(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < CHURN; i++)
        status = churn(&passes->world->rank[rank], error);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

/* Another group opens, works and closes meanwhile too. */
ep_status ll_case_churn(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes, others;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_churn, error);
    for (uint32_t i = 0; status == EP_OK && i < 2; i++) {
        status = ll_open(setting, shape, 1, &others, error);
        if (status == EP_OK)
            status = ll_each(&others, world_all(others.world), ll_three_passes, error);
        ll_close(&others);
    }
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), ll_three_passes, error);
    ll_close(&passes);
    return status;
}
