#include "span_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "temporary.h"

/* ---- what the data path would do -------------------------------------------------------- */

struct ep_team_net {
    const struct ep_node *node;
};

ep_status __wrap_ep_team_net_listen(struct ep_node *node, const struct ep_team_net_options *options,
                                    struct ep_team_net **out, struct ep_team_card *card, struct ep_error *error);
ep_status __wrap_ep_team_net_connect(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes,
                                     uint32_t own, uint32_t timeout_ms, struct ep_error *error);
void __wrap_ep_team_net_close(struct ep_team_net *net);
ep_status __real_ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error);
ep_status __wrap_ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error);

ep_status __wrap_ep_team_net_listen(struct ep_node *node, const struct ep_team_net_options *options,
                                    struct ep_team_net **out, struct ep_team_card *card, struct ep_error *error)
{
    (void)options, (void)error;
    *out = calloc(1, sizeof **out);
    (*out)->node = node;
    memset(card, 0, sizeof *card);
    snprintf((char *)card->bytes, sizeof card->bytes, "%s", ep_node_name(node));
    return EP_OK;
}

const char *const span_names[SERVERS] = { "a", "b", "c" };

static bool is_server(const char *name)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        if (!strcmp(name, span_names[i]))
            return true;
    return false;
}

/* The cards are those of the members, each once, and this one's is where it should be. */
ep_status __wrap_ep_team_net_connect(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes,
                                     uint32_t own, uint32_t timeout_ms, struct ep_error *error)
{
    (void)timeout_ms;
    for (uint32_t i = 0; i < nodes; i++) {
        const char *name = (const char *)cards[i].bytes;

        if (!is_server(name) || (i == own) != !strcmp(name, ep_node_name(net->node)))
            return ep_error_set(error, EP_INTERNAL, "card %u is of \"%s\"", i, name);
    }
    return EP_OK;
}

void __wrap_ep_team_net_close(struct ep_team_net *net)
{
    free(net);
}

static const struct ep_team_span *newest[SERVERS]; /* of each server; its epoch's */

static void note_span(const char *name, const struct ep_team_span *span)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        if (!strcmp(name, span_names[i]))
            newest[i] = span;
}

static void lose(uint32_t one, uint32_t other)
{
    newest[one]->on_lost(newest[other]->own, "its connection is closed", newest[one]->user);
}

void span_tear(struct fixture *f, uint32_t one, uint32_t other)
{
    assert_non_null(f->servers[one].groups);
    assert_non_null(f->servers[other].groups);
    lose(one, other);
    lose(other, one);
}

ep_status __wrap_ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error)
{
    struct ep_team_options alone = *options;

    if (options->span)
        free(options->span->net); /* the team's now */
    note_span(ep_node_name(options->node), options->span);
    alone.span = NULL;
    return __real_ep_team_create(&alone, out, error);
}

/* ---- what they are told of records ------------------------------------------------------- */

#define GROUPS "groups/"

/* Of one server, for as long as it is there. */
struct view {
    ep_store_watch_fn fn;
    void *user; /* its groups */
    bool held;
    uint64_t revision; /* of what was told last */
};

static struct view views[SERVERS];

struct ep_watch *__real_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user);
struct ep_watch *__wrap_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user);

static void on_changes(const struct ep_store_changes *changes, void *user)
{
    struct view *view = user;

    view->revision = changes->revision;
    if (!view->held)
        view->fn(changes, view->user);
}

struct ep_watch *__wrap_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user)
{
    struct view *view = views;

    if (strcmp(prefix, GROUPS) != 0)
        return __real_ep_watch_open(store, prefix, since, fn, user);
    while (view->fn)
        view++;
    *view = (struct view){ .fn = fn, .user = user };
    return __real_ep_watch_open(store, prefix, since, on_changes, view);
}

static struct view *view_of(const struct fixture *f, uint32_t server)
{
    struct view *view = views;

    while (view->user != f->servers[server].groups)
        view++;
    return view;
}

/* All commits that this has are told before it, and those that it has not, after it. */
static void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct view *view = user;
    const struct ep_store_changes whole = { .whole = true, .records = records, .n = n, .revision = view->revision };

    assert_string_equal(error->text, "");
    view->held = false;
    view->fn(&whole, view->user);
}

void span_hold_view(struct fixture *f, uint32_t server, bool held)
{
    struct view *view = view_of(f, server);

    if (held) {
        view->held = true;
        return;
    }
    ep_store_list(f->store, GROUPS, on_listed, view);
    WAIT(f, !view->held);
}

/* ---- servers ------------------------------------------------------------------------------ */

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

/* For whoever has to find out why a wait was in vain. */
static void describe(const struct fixture *f)
{
    for (uint32_t i = 0; i < SERVERS; i++) {
        const struct server *s = &f->servers[i];
        const Ep__V1__Group *group = s->groups ? ep_groups_get(s->groups, "moe", NULL) : NULL;

        print_message("%s: %s, leads %d, %llu bytes used, phase %d, epoch %llu, %zu draining: %s\n", span_names[i],
                      s->groups ? "there" : "away", s->groups && ep_cluster_leads(s->cluster),
                      s->groups ? (unsigned long long)(BUDGET - ep_node_memory_left(s->node)) : 0,
                      group ? (int)group->status->phase : 0, group ? (unsigned long long)group->status->epoch : 0,
                      group ? group->status->n_draining_epochs : 0, group ? group->status->reason : "");
    }
}

static void on_awake(uv_timer_t *timer)
{
    (void)timer;
}

void span_in_vain(const struct fixture *f, const char *what)
{
    describe(f);
    fail_msg("not in time: %s (victim %u, step %u of %u)", what, f->victim, f->steps, f->crash_at);
}

static void on_ready(const struct ep_error *error, void *user)
{
    assert_int_equal(error->status, EP_OK);
    ((struct server *)user)->ready = true;
}

void span_start(struct fixture *f, uint32_t i)
{
    const struct ep_node_options options = {
        .name = span_names[i], .backend = EP_NODE_HOST, .host_devices = 2, .memory_budget = BUDGET
    };
    struct server *s = &f->servers[i];

    s->ready = false;
    assert_int_equal(ep_node_open(&options, &s->node, NULL), EP_OK);
    s->cluster = world_add(f->world, s->node);
    assert_int_equal(ep_groups_open(&f->loop, s->node, f->store, s->cluster, on_ready, s, &s->groups, NULL), EP_OK);
    world_serve(s->cluster, s->groups);
}

void span_stop(struct fixture *f, uint32_t i)
{
    struct server *s = &f->servers[i];
    bool closed = false;

    world_serve(s->cluster, NULL);
    *view_of(f, i) = (struct view){ 0 }; /* nothing is told once it is closed */
    ep_groups_close(s->groups, set_flag, &closed);
    WAIT(f, closed);
    world_remove(s->cluster);
    assert_int_equal(ep_node_memory_left(s->node), BUDGET);
    ep_node_close(s->node);
    *s = (struct server){ 0 };
}

bool span_all_ready(const struct fixture *f)
{
    bool ready = true;

    for (uint32_t i = 0; i < SERVERS; i++)
        ready &= f->servers[i].ready;
    return ready;
}

int span_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);

    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_true(temporary_directory(f->directory, sizeof f->directory));
    snprintf(f->path, sizeof f->path, "%s/store.db", f->directory);
    uv_loop_init(&f->loop);
    uv_timer_init(&f->loop, &f->awake);
    uv_timer_start(&f->awake, on_awake, 50, 50);
    assert_int_equal(ep_store_open_sqlite(&f->loop, f->path, &f->store, NULL), EP_OK);
    f->world = world_open(&f->loop, f->store);
    f->crash_at = NO_STEP;
    for (uint32_t i = 0; i < SERVERS; i++)
        span_start(f, i);
    WAIT(f, span_all_ready(f) && span_leader(f) < SERVERS);
    *state = f;
    return 0;
}

int span_teardown(void **state)
{
    struct fixture *f = *state;
    bool closed = false;
    char command[128];

    world_on_step(f->world, NULL, NULL);
    for (uint32_t i = 0; i < SERVERS; i++)
        if (f->servers[i].groups)
            span_stop(f, i);
    world_close(f->world);
    ep_store_close(f->store, set_flag, &closed);
    WAIT(f, closed);
    uv_close((uv_handle_t *)&f->awake, NULL);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    snprintf(command, sizeof command, "rm -r %s", f->directory);
    assert_int_equal(system(command), 0);
    free(f);
    return 0;
}

uint32_t span_leader(const struct fixture *f)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        if (f->servers[i].groups && !(f->crashed && i == f->victim) && ep_cluster_leads(f->servers[i].cluster))
            return i;
    return SERVERS;
}

/* ---- changes --------------------------------------------------------------------------------- */

void span_on_answer(const struct ep_error *error, const Ep__V1__Group *group, void *user)
{
    struct answer *answer = user;

    (void)group;
    answer->done = true;
    answer->error = *error;
}

Ep__V1__GroupSpec span_spec(uint32_t hidden, uint32_t ranks)
{
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;

    spec.ranks = ranks;
    spec.experts = 12;
    spec.hidden = hidden;
    spec.top_k = 2;
    spec.ll_max_tokens = 8;
    spec.ht_max_tokens = 16;
    return spec;
}
