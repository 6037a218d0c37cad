#include "group_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ep_futex.h"
#include "ep_log.h"
#include "temporary.h"

/* ---- life ------------------------------------------------------------------------- */

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

static void on_ready(const struct ep_error *error, void *user)
{
    assert_string_equal(error->text, "");
    ((struct fixture *)user)->ready = true;
}

void fixture_open(struct fixture *f)
{
    const struct ep_node_options options = { .name = f->name ? f->name : "n1",
                                             .backend = f->cuda ? EP_NODE_CUDA : EP_NODE_HOST,
                                             .cuda = f->cuda,
                                             .host_devices = f->devices,
                                             .memory_budget = f->budget,
                                             .polls = f->polls,
                                             .sms_per_rank = f->sms_per_rank,
                                             .region_bytes = 1 << 24 };
    struct ep_error error = EP_ERROR_INIT;

    f->ready = false;
    assert_int_equal(ep_node_open(&options, &f->node, &error), EP_OK);
    assert_int_equal(ep_store_open_sqlite(&f->loop, f->path, &f->store, &error), EP_OK);
    f->world = world_open(&f->loop, f->store);
    f->cluster = world_add(f->world, f->node);
    assert_int_equal(ep_groups_open(&f->loop, f->node, f->store, f->cluster, on_ready, f, &f->groups, &error), EP_OK);
    world_serve(f->cluster, f->groups);
    RUN_UNTIL(f, f->ready);
}

void fixture_close(struct fixture *f)
{
    bool groups_closed = false, store_closed = false;

    ep_groups_close(f->groups, set_flag, &groups_closed);
    RUN_UNTIL(f, groups_closed);
    world_remove(f->cluster);
    world_close(f->world);
    ep_store_close(f->store, set_flag, &store_closed);
    RUN_UNTIL(f, store_closed);
    assert_int_equal(ep_node_memory_left(f->node), f->budget * (f->cuda ? ep_node_devices(f->node) : 1));
    ep_node_close(f->node);
}

void fixture_restart(struct fixture *f)
{
    fixture_close(f);
    fixture_open(f);
}

int fixture_setup(void **state)
{
    return fixture_setup_gpus(state, NULL);
}

int fixture_setup_gpus(void **state, const struct ep_cuda_api *cuda)
{
    struct fixture *f = calloc(1, sizeof *f);

    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_true(temporary_directory(f->directory, sizeof f->directory));
    snprintf(f->path, sizeof f->path, "%s/store.db", f->directory);
    f->cuda = cuda;
    f->identity = (struct ep_worker){ .pid = getpid(), .uid = geteuid(), .name = "tester" };
    f->devices = 4;
    f->budget = 1ull << 30;
    uv_loop_init(&f->loop);
    fixture_open(f);
    *state = f;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    char command[128];

    fixture_close(f);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    snprintf(command, sizeof command, "rm -r %s", f->directory);
    assert_int_equal(system(command), 0);
    free(f);
    return 0;
}

/* ---- operators ---------------------------------------------------------------------- */

static Ep__V1__Group *copy_group(const Ep__V1__Group *group)
{
    size_t size = ep__v1__group__get_packed_size(group);
    uint8_t *bytes = malloc(size + 1);
    Ep__V1__Group *copy;

    ep__v1__group__pack(group, bytes);
    copy = ep__v1__group__unpack(NULL, size, bytes);
    free(bytes);
    return copy;
}

void on_answer(const struct ep_error *error, const Ep__V1__Group *group, void *user)
{
    struct answer *answer = user;

    assert_false(answer->done);
    answer->done = true;
    answer->error = *error;
    answer->group = group ? copy_group(group) : NULL;
}

void answer_clear(struct answer *answer)
{
    if (answer->group)
        ep__v1__group__free_unpacked(answer->group, NULL);
    *answer = (struct answer){ 0 };
}

Ep__V1__GroupSpec small_spec(void)
{
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;

    spec.ranks = 4;
    spec.experts = 8;
    spec.hidden = 64;
    spec.top_k = 2;
    spec.ll_max_tokens = 8;
    spec.ht_max_tokens = 16;
    return spec;
}

void create(struct fixture *f, const char *name, const Ep__V1__GroupSpec *spec)
{
    struct answer answer = { 0 };

    ep_groups_create(f->groups, name, spec, false, NULL, on_answer, &answer);
    RUN_UNTIL(f, answer.done);
    assert_string_equal(answer.error.text, "");
    assert_int_equal(answer.error.status, EP_OK);
    answer_clear(&answer);
}

struct answer create_refused(struct fixture *f, const char *name, const Ep__V1__GroupSpec *spec)
{
    struct answer answer = { 0 };

    ep_groups_create(f->groups, name, spec, false, NULL, on_answer, &answer);
    RUN_UNTIL(f, answer.done);
    assert_int_not_equal(answer.error.status, EP_OK);
    assert_null(answer.group);
    return answer;
}

struct answer update(struct fixture *f, const char *name, uint64_t revision, const Ep__V1__GroupSpec *spec,
                     const char *field)
{
    struct answer answer = { 0 };
    char copy[64], *fields[] = { copy };

    snprintf(copy, sizeof copy, "%s", field);
    ep_groups_update(f->groups, name, revision, spec, fields, 1, false, NULL, on_answer, &answer);
    RUN_UNTIL(f, answer.done);
    return answer;
}

struct answer delete (struct fixture *f, const char *name, bool force)
{
    struct answer answer = { 0 };

    ep_groups_delete(f->groups, name, force, NULL, on_answer, &answer);
    RUN_UNTIL(f, answer.done);
    return answer;
}

const Ep__V1__Group *get(struct fixture *f, const char *name)
{
    return ep_groups_get(f->groups, name, NULL);
}

int rank_state(struct fixture *f, const char *name, uint32_t rank)
{
    return (int)get(f, name)->status->ranks[rank]->state;
}

/* ---- workers ------------------------------------------------------------------------ */

static void on_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    struct worker *worker = user;

    snprintf(worker->text, sizeof worker->text, "%s", text ? text : "");
    switch (event) {
    case EP_GROUP_RANK_LOST:
        worker->lost++;
        worker->lost_rank = rank;
        break;
    case EP_GROUP_RANK_JOINED: worker->joined++; break;
    case EP_GROUP_EPOCH:
        worker->epochs++;
        worker->epoch_told = epoch;
        break;
    case EP_GROUP_DRAINING: worker->draining++; break;
    case EP_GROUP_DETACHED: worker->detached++; break;
    }
}

ep_status claim(struct fixture *f, struct worker *worker, const char *group, int32_t rank,
                struct ep_error *error)
{
    *worker = (struct worker){ .f = f };
    return ep_groups_claim(f->groups, group, rank, &f->identity, on_event, worker, &worker->membership, error);
}

void claim_when_free(struct fixture *f, struct worker *worker, const char *group, int32_t rank)
{
    struct ep_error error = EP_ERROR_INIT;

    while (claim(f, worker, group, rank, &error) == EP_UNAVAILABLE)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_non_null(worker->membership);
}

/* The layout follows from the spec that the worker is told. */
static void lay_out(struct worker *worker)
{
    const struct ep_control *control = (const struct ep_control *)worker->window;
    struct ep_limits limits = control->head.limits;

    assert_int_equal(ep_layout_compute(&limits, &worker->map, NULL), EP_OK);
}

void *map_window(const struct worker *worker)
{
    struct ep_membership_memory memory;
    void *window;

    assert_int_equal(ep_membership_memory(worker->membership, 0, &memory, NULL), EP_OK);
    assert_int_equal(memory.kind, EP_MEMORY_OWN_WINDOW);
    window = mmap(NULL, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
    assert_ptr_not_equal(window, MAP_FAILED);
    close(memory.fd);
    return window;
}

void on_attached(const struct ep_error *error, void *user)
{
    ((struct worker *)user)->attached = *error;
}

void attach(struct worker *worker)
{
    worker->attached.status = EP_UNAVAILABLE;
    ep_membership_attach(worker->membership, &worker->f->identity, on_attached);
    assert_int_equal(worker->attached.status, EP_OK); /* with all ranks on one node, at once */
    ep_membership_info(worker->membership, &worker->info);
    worker->window_bytes = worker->info.window_bytes;
    worker->window = map_window(worker);
    worker->slot = 0;
    lay_out(worker);
}

void join(struct fixture *f, struct worker *worker, const char *group, int32_t rank)
{
    claim_when_free(f, worker, group, rank);
    attach(worker);
}

void release(struct worker *worker, bool writer_alive)
{
    if (worker->window)
        munmap(worker->window, worker->window_bytes);
    worker->window = NULL;
    ep_membership_release(worker->membership, "its worker died", writer_alive);
    if (!writer_alive)
        worker->membership = NULL;
}

void writer_gone(struct worker *worker)
{
    ep_membership_writer_gone(worker->membership);
    worker->membership = NULL;
}

static struct ep_ring_slot *slot_of(const struct worker *worker)
{
    return &((struct ep_control *)worker->window)->slot[worker->slot];
}

void ring_dispatch(struct worker *worker)
{
    struct ep_control *control = (struct ep_control *)worker->window;
    struct ep_ring_slot *slot = slot_of(worker);

    memset(&slot->op, 0, sizeof slot->op);
    slot->op.kind = EP_OP_DISPATCH;
    slot->op.mode = EP_MODE_LL;
    slot->op.layout = EP_LAYOUT_RANK_MAJOR;
    slot->op.input_dtype = slot->op.wire_dtype = EP_BF16;
    slot->op.top_k = worker->map.limits.top_k;
    slot->op.index_bytes = 4;
    slot->op.generation = 1;
    slot->op.counts = (struct ep_span){ worker->map.arena, 4 * worker->map.limits.ranks };
    __atomic_store_n(&slot->doorbell, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&control->wake, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&control->asleep, __ATOMIC_SEQ_CST))
        ep_futex_wake_all(&control->wake);
}

bool is_done(const struct worker *worker)
{
    return __atomic_load_n(&slot_of(worker)->done, __ATOMIC_ACQUIRE) == 1;
}

struct ep_op_result result_of(struct worker *worker)
{
    struct ep_op_result result;
    struct ep_ring_slot *slot = slot_of(worker);

    while (!is_done(worker)) {
        uv_run(&worker->f->loop, UV_RUN_NOWAIT);
        ep_futex_wait(&slot->done, 0, EP_NS_PER_MS);
    }
    memcpy(&result, &slot->result, sizeof result);
    __atomic_store_n(&slot->done, 0, __ATOMIC_RELEASE);
    worker->slot = (worker->slot + 1) % EP_RING_SLOTS;
    return result;
}
