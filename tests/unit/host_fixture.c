/* The group: teams of one node or several in this process, windows, a thread for each rank. */
#include "host_fixture.h"

#include <string.h>
#include <sys/mman.h>

/* ---- fixture ------------------------------------------------------------------------- */

static struct ep_limits limits_for(uint32_t ranks)
{
    return (struct ep_limits){ .ranks = ranks, .experts = ranks * 2 + 3, .top_k = MAX_K, .hidden = HIDDEN,
                               .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
                               .dtypes = 1u << EP_BF16 | 1u << EP_FP16 | 1u << EP_FP32 | 1u << EP_FP8_E4M3,
                               .ll_max_tokens = LL_TOKENS, .ht_max_tokens = HT_TOKENS, .ll_banks = 2,
                               .arena_bytes = 8u << 20 };
}

static void place(struct fixture *f, bool replicas)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_expert_home homes[4 * MAX_R + 6];
    uint32_t n = 0;

    if (!replicas) {
        CHECK(ep_placement_contiguous(f->R, f->E, &f->placement, &error) == EP_OK, "%s", error.text);
        return;
    }
    for (uint32_t e = 0; e < f->E; e++)
        for (uint32_t c = 0; c <= e % 2 && c < f->R; c++)
            homes[n++] = (struct ep_expert_home){ e, (e + c) % f->R };
    CHECK(ep_placement_explicit(f->R, f->E, homes, n, &f->placement, &error) == EP_OK, "%s", error.text);
}

static struct fixture *begin(uint32_t ranks, bool replicas)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct ep_limits limits = limits_for(ranks);
    struct ep_error error = EP_ERROR_INIT;

    f->R = ranks;
    f->E = limits.experts;
    f->K = MAX_K;
    place(f, replicas);
    limits.local_experts = f->L = f->placement.max_local;
    CHECK(ep_layout_compute(&limits, &f->map, &error) == EP_OK, "%s", error.text);
    for (uint32_t r = 0; r < ranks; r++) {
        f->window[r] = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(f->window[r] != MAP_FAILED, "mmap");
    }
    return f;
}

static void give_windows(struct fixture *f)
{
    f->team = f->teams[0];
    for (uint32_t r = 0; r < f->R; r++)
        ep_host_team_set_window(team_of(f, r), r, f->window[r]);
}

struct fixture *fixture_new(uint32_t ranks, bool replicas, uint32_t timeout_ms)
{
    struct fixture *f = begin(ranks, replicas);
    struct ep_error error = EP_ERROR_INIT;

    f->nodes = 1;
    CHECK(ep_host_team_create(&f->map, &f->placement, timeout_ms, NULL, &f->teams[0], &error) == EP_OK, "%s",
          error.text);
    give_windows(f);
    return f;
}

/* ---- several nodes -------------------------------------------------------------------- */

struct connecting {
    struct fixture *f;
    struct ep_host_net *net;
    const struct ep_host_card *cards;
    uint32_t own;
    pthread_t thread;
};

static void *connect_one(void *arg)
{
    struct connecting *c = arg;
    struct ep_error error = EP_ERROR_INIT;

    CHECK(ep_host_net_connect(c->net, c->cards, c->f->nodes, c->own, 20000, &error) == EP_OK, "%s", error.text);
    return NULL;
}

struct loss {
    struct fixture *f;
    uint32_t own;
};

/* Told once: that is what the sum of the bits shows. */
static void lost_one(uint32_t node, const char *why, void *user)
{
    const struct loss *loss = user;

    CHECK(why != NULL, "no reason");
    __atomic_fetch_add(&loss->f->lost[loss->own], 1u << node, __ATOMIC_SEQ_CST);
}

static struct loss losses[MAX_NODES];

static void connect_nodes(struct fixture *f, struct connecting *c)
{
    struct ep_host_card cards[MAX_NODES];
    struct ep_error error = EP_ERROR_INIT;

    setenv("EP_GIN_INTERFACE", "=lo", 0);
    for (uint32_t n = 0; n < f->nodes; n++) {
        c[n] = (struct connecting){ .f = f, .cards = cards, .own = n };
        CHECK(ep_host_net_listen(SILENCE_MS, &c[n].net, &cards[n], &error) == EP_OK, "%s", error.text);
    }
    for (uint32_t n = 0; n < f->nodes; n++)
        CHECK(pthread_create(&c[n].thread, NULL, connect_one, &c[n]) == 0, "thread");
    for (uint32_t n = 0; n < f->nodes; n++)
        pthread_join(c[n].thread, NULL);
}

struct fixture *fixture_begin_over(uint32_t ranks, const uint32_t *node, bool replicas)
{
    struct fixture *f = begin(ranks, replicas);

    for (uint32_t r = 0; r < ranks; r++) {
        f->node[r] = node[r];
        f->nodes = node[r] >= f->nodes ? node[r] + 1 : f->nodes;
    }
    return f;
}

void fixture_make_team(struct fixture *f, uint32_t own, struct ep_host_net *net, uint32_t timeout_ms)
{
    struct ep_error error = EP_ERROR_INIT;

    losses[own] = (struct loss){ .f = f, .own = own };
    CHECK(ep_host_team_create(&f->map, &f->placement, timeout_ms,
                              &(struct ep_host_span){ .nodes = f->nodes, .own = own, .node = f->node, .net = net,
                                                      .on_lost = lost_one, .user = &losses[own] },
                              &f->teams[own], &error) == EP_OK,
          "%s", error.text);
    for (uint32_t r = 0; r < f->R; r++)
        if (f->node[r] == own)
            ep_host_team_set_window(f->teams[own], r, f->window[r]);
}

struct fixture *fixture_new_over(uint32_t ranks, const uint32_t *node, bool replicas, uint32_t timeout_ms)
{
    struct fixture *f = fixture_begin_over(ranks, node, replicas);
    struct connecting c[MAX_NODES];

    connect_nodes(f, c);
    for (uint32_t n = 0; n < f->nodes; n++)
        fixture_make_team(f, n, c[n].net, timeout_ms);
    f->team = f->teams[0];
    return f;
}

void leave_over(struct fixture *f, uint32_t rank)
{
    f->away[rank] = true;
    for (uint32_t n = 0; n < f->nodes; n++)
        ep_host_team_leave(f->teams[n], rank);
}

/* What servers do: hold all, then admit at the same numbers, the rank's own node first. */
void join_over(struct fixture *f, uint32_t rank)
{
    struct ep_host_numbers from = { 0, 0 }, begun;
    struct ep_error error = EP_ERROR_INIT;
    uint64_t hold[MAX_NODES];

    for (uint32_t n = 0; n < f->nodes; n++) {
        CHECK(ep_host_team_hold(f->teams[n], 10000, &hold[n], &begun, &error) == EP_OK, "%s", error.text);
        from.ll = begun.ll >= from.ll ? begun.ll + 1 : from.ll;
        from.ht = begun.ht >= from.ht ? begun.ht + 1 : from.ht;
    }
    for (uint32_t i = 0; i < f->nodes; i++) {
        uint32_t n = (f->node[rank] + i) % f->nodes;

        CHECK(ep_host_team_admit(f->teams[n], hold[n], rank, &from, &error) == EP_OK, "%s", error.text);
    }
    f->away[rank] = false;
}

struct ep_host_team *team_of(struct fixture *f, uint32_t rank) { return f->teams[f->node[rank]]; }

void fixture_free(struct fixture *f)
{
    for (uint32_t n = 0; n < f->nodes; n++)
        ep_host_team_destroy(f->teams[n]); /* NULL: it has gone before */
    for (uint32_t r = 0; r < f->R; r++)
        munmap(f->window[r], f->map.total_bytes);
    ep_placement_free(&f->placement);
    free(f);
}

struct ep_span take(struct fixture *f, uint32_t r, uint64_t bytes)
{
    struct ep_span span = { f->map.arena + f->used[r], bytes };

    f->used[r] += (bytes + 255) / 256 * 256;
    CHECK(f->used[r] <= f->map.limits.arena_bytes, "arena");
    return span;
}

void *at(struct fixture *f, uint32_t r, struct ep_span span) { return f->window[r] + span.offset; }

static void *thread_main(void *p)
{
    struct thread *t = p;

    t->fn(t->f, t->rank, t->arg);
    return NULL;
}

void start(struct thread *t, struct fixture *f, uint32_t rank, rank_fn fn, void *arg)
{
    *t = (struct thread){ .f = f, .rank = rank, .fn = fn, .arg = arg };
    CHECK(pthread_create(&t->id, NULL, thread_main, t) == 0, "thread");
}

void parallel(struct fixture *f, rank_fn fn, void *arg)
{
    struct thread threads[MAX_R];

    for (uint32_t r = 0; r < f->R; r++)
        start(&threads[r], f, r, fn, arg);
    for (uint32_t r = 0; r < f->R; r++)
        pthread_join(threads[r].id, NULL);
}

ep_status execute(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result)
{
    struct ep_error error = EP_ERROR_INIT;

    CHECK(ep_op_check(&f->map, op, &error) == EP_OK, "%s", error.text);
    ep_host_execute(team_of(f, r), r, op, result);
    CHECK((result->status == EP_OK) == (result->text[0] == '\0'), "status %d, text '%s'", result->status,
          result->text);
    return (ep_status)result->status;
}

void must(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result)
{
    ep_status status = execute(f, r, op, result);

    CHECK(status == EP_OK, "rank %u: %s: %s", r, ep_status_name(status), result->text);
}
