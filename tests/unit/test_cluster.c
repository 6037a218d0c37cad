/* Servers that share a store: registration, the table of nodes, the lead, drains, calls.  On etcd too where it matters. */
#include "store_fixture.h"

#include "ep_cluster.h"
#include "ep/v1/node.pb-c.h"

#define SHORT_MS 200   /* on etcd two seconds, which is the least there */
#define LONG_MS  20000 /* where nobody is to be lost, also when the machine stands still */
#define METHODS_MAX 32

static uint64_t ttl_ms; /* of the case's sessions */

/* A server: a node with its part of the cluster, and a port where it answers to Ping. */
struct peer {
    struct fixture *f;
    struct ep_node *node;
    struct ep_store *store; /* its own on etcd; on sqlite they share the fixture's */
    struct ep_rpc *rpc;
    struct ep_rpc_server *server;
    struct ep_rpc_call *held; /* a Ping that is not answered */
    struct ep_cluster *cluster;
    struct ep_cluster_watch *watch;
    bool ready, left, closed;
    struct ep_error error; /* of on_ready */
    unsigned replaced;
    struct ep_error by;    /* of on_replaced */
    char events[1024];     /* "+a -b ~c lead session " */
};

/* ---- servers ---------------------------------------------------------------------------- */

static void on_ready(const struct ep_error *error, void *user)
{
    struct peer *p = user;

    assert_false(p->ready);
    p->ready = true;
    p->error = *error;
}

static void on_replaced(const struct ep_error *error, void *user)
{
    struct peer *p = user;

    p->replaced++;
    p->by = *error;
}

static void on_event(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user)
{
    static const char *const signs[] = {
        [EP_CLUSTER_NODE_UP] = "+", [EP_CLUSTER_NODE_DOWN] = "-", [EP_CLUSTER_NODE_CHANGED] = "~",
        [EP_CLUSTER_LEADER] = "lead", [EP_CLUSTER_SESSION] = "session",
        [EP_CLUSTER_MARK] = "mark",
    };
    struct peer *p = user;
    size_t used = strlen(p->events);

    if (node)
        assert_int_equal(node->alive, event == EP_CLUSTER_NODE_UP || (event == EP_CLUSTER_NODE_CHANGED && node->alive));
    snprintf(p->events + used, sizeof p->events - used, "%s%s ", signs[event], node ? node->name : "");
}

static void on_ping(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__PingRequest *request = (const Ep__V1__PingRequest *)message;
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;
    struct peer *p = user;

    if (!strcmp(request->node, "hold")) {
        p->held = call;
        return;
    }
    reply.node = (char *)(uintptr_t)ep_node_name(p->node);
    reply.boot_us = ep_node_boot(p->node);
    ep_rpc_reply(call, &reply.base);
}

static void on_other(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const struct ep_error error = { EP_UNIMPLEMENTED, "there are no groups here" };

    (void)message, (void)user;
    ep_rpc_fail(call, &error);
}

/* Of the service nothing but Ping. */
static void add_service(struct peer *p)
{
    const ProtobufCServiceDescriptor *service = &ep__v1__node__descriptor;
    struct ep_rpc_handler handlers[METHODS_MAX] = { 0 };

    assert_in_range(service->n_methods, 1, METHODS_MAX);
    for (unsigned i = 0; i < service->n_methods; i++) {
        handlers[i].method = service->methods[i].name;
        handlers[i].on_request = strcmp(handlers[i].method, "Ping") ? on_other : on_ping;
    }
    assert_int_equal(ep_rpc_server_add_service(p->server, service, handlers, service->n_methods, p, NULL), EP_OK);
}

static void open_port(struct peer *p)
{
    const struct ep_rpc_server_options options = { 0 };
    char address[64];
    int port;

    assert_int_equal(ep_rpc_server_create(p->rpc, &options, &p->server, NULL), EP_OK);
    add_service(p);
    assert_int_equal(ep_rpc_server_listen_tcp(p->server, "127.0.0.1:0", NULL, &port, NULL), EP_OK);
    assert_int_equal(ep_rpc_server_start(p->server, NULL), EP_OK);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    ep_node_set_admin_address(p->node, address);
}

static void open_own_store(struct peer *p)
{
    char url[256];
    const struct ep_store_etcd options = { .url = cluster_url(&p->f->etcd, "/test", url, sizeof url),
                                           .answer_within_ms = ANSWER_WITHIN_MS };

    p->store = p->f->store;
    if (p->f->on_etcd)
        assert_int_equal(ep_store_open_etcd(&p->f->loop, &options, &p->store, NULL), EP_OK);
}

static void begin_peer(struct fixture *f, struct peer *p, const char *name, bool listens)
{
    const struct ep_node_options node = { .name = name, .host_devices = 2, .memory_budget = 1 << 20 };

    *p = (struct peer){ .f = f };
    open_own_store(p);
    assert_int_equal(ep_node_open(&node, &p->node, NULL), EP_OK);
    assert_int_equal(ep_rpc_open(&f->loop, &p->rpc, NULL), EP_OK);
    if (listens)
        open_port(p);
    const struct ep_cluster_options options = { .loop = &f->loop, .rpc = p->rpc, .store = p->store, .node = p->node,
                                                .ttl_ms = ttl_ms, .on_ready = on_ready, .on_replaced = on_replaced,
                                                .user = p };
    assert_int_equal(ep_cluster_open(&options, &p->cluster, NULL), EP_OK);
    p->watch = ep_cluster_watch(p->cluster, on_event, p);
    ep_cluster_join(p->cluster);
}

/* Ready: the nodes that were there are in its table. */
static void open_peer(struct fixture *f, struct peer *p, const char *name)
{
    begin_peer(f, p, name, true);
    RUN_UNTIL(f, p->ready);
    assert_string_equal(p->error.text, "");
}

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

static void leave(struct peer *p)
{
    ep_cluster_leave(p->cluster, set_flag, &p->left);
    RUN_UNTIL(p->f, p->left);
}

static void close_peer(struct peer *p)
{
    if (!p->left)
        leave(p);
    ep_cluster_unwatch(p->watch);
    ep_cluster_close(p->cluster, set_flag, &p->closed);
    RUN_UNTIL(p->f, p->closed);
    if (p->store != p->f->store)
        close_store(p->f, p->store);
    ep_rpc_server_destroy(p->server);
    ep_rpc_close(p->rpc);
    ep_node_close(p->node);
}

static bool sees(const struct peer *p, const char *name)
{
    const struct ep_cluster_node *node = ep_cluster_find(p->cluster, name);

    return node && node->alive;
}

static const Ep__V1__NodeInfo *info_of(const struct peer *p, const char *name)
{
    return ep_cluster_info(p->cluster, ep_cluster_find(p->cluster, name));
}

/* The events since the last look; own renewals, which come when they come, are left out. */
static const char *events(struct peer *p)
{
    static char text[sizeof p->events];
    char own[64], *at;

    snprintf(own, sizeof own, "~%s ", ep_cluster_self(p->cluster));
    while ((at = strstr(p->events, own)))
        memmove(at, at + strlen(own), strlen(at + strlen(own)) + 1);
    strcpy(text, p->events);
    *p->events = '\0';
    return text;
}

/* ---- one -------------------------------------------------------------------------------- */

static void one_server_is_a_cluster_and_leads_it(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct ep_store_write writes[2];
    struct peer a;

    open_peer(f, &a, "a");
    assert_int_equal(ep_cluster_count(a.cluster), 1);
    assert_string_equal(ep_cluster_at(a.cluster, 0)->name, "a");
    assert_null(ep_cluster_at(a.cluster, 1));
    assert_string_equal(ep_cluster_self(a.cluster), "a");
    RUN_UNTIL(f, ep_cluster_leads(a.cluster));
    assert_string_equal(ep_cluster_leader(a.cluster), "a");
    assert_non_null(ep_cluster_session(a.cluster));
    assert_int_equal(info_of(&a, "a")->n_devices, 2);
    assert_int_equal(ep_cluster_find(a.cluster, "a")->boot, ep_node_boot(a.node));
    writes[0] = ep_cluster_guard(a.cluster);
    writes[1] = (struct ep_store_write){ .key = "x", .value = "1", .size = 1, .expected = EP_STORE_ABSENT };
    assert_string_equal(commit_to(f, a.store, writes, 2).error.text, "");
    leave(&a);
    assert_null(ep_cluster_session(a.cluster));
    assert_null(ep_cluster_leader(a.cluster));
    writes[0] = ep_cluster_guard(a.cluster);
    writes[1].expected = EP_STORE_ANY;
    assert_int_equal(commit_to(f, a.store, writes, 2).error.status, EP_FAILED_PRECONDITION);
    close_peer(&a);
    assert_string_equal(list(f, "").text, "x=1 ");
}

/* ---- several ---------------------------------------------------------------------------- */

static void nodes_come_and_go(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a, b;

    open_peer(f, &a, "a");
    RUN_UNTIL(f, ep_cluster_leads(a.cluster));
    (void)events(&a);
    open_peer(f, &b, "b");
    assert_true(sees(&b, "a"));
    RUN_UNTIL(f, sees(&a, "b"));
    assert_string_equal(events(&a), "+b ");
    assert_string_equal(ep_cluster_leader(b.cluster), "a");
    assert_false(ep_cluster_leads(b.cluster));
    close_peer(&b);
    RUN_UNTIL(f, !sees(&a, "b"));
    assert_string_equal(events(&a), "-b ");
    assert_int_equal(ep_cluster_count(a.cluster), 1);
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    close_peer(&b);
    close_peer(&a);
}

static void the_lead_passes_on(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct ep_store_write guard;
    struct peer a, b;

    open_peer(f, &a, "a");
    RUN_UNTIL(f, ep_cluster_leads(a.cluster));
    guard = ep_cluster_guard(a.cluster);
    guard.session = NULL;
    open_peer(f, &b, "b");
    leave(&a);
    RUN_UNTIL(f, ep_cluster_leads(b.cluster));
    assert_string_equal(ep_cluster_leader(b.cluster), "b");
    assert_int_equal(commit_to(f, b.store, &guard, 1).error.status, EP_FAILED_PRECONDITION);
    close_peer(&a);
    close_peer(&b);
}

/* A server's record, of no session. */
static void put_server(struct fixture *f, const char *name, const char *address, uint64_t boot)
{
    Ep__V1__NodeRecord record = EP__V1__NODE_RECORD__INIT;
    struct ep_store_write write = { .expected = EP_STORE_ANY };
    uint8_t bytes[128];
    char key[64];

    record.boot_us = boot;
    record.address = (char *)(uintptr_t)address;
    snprintf(key, sizeof key, "nodes/%s/server", name);
    assert_in_range(protobuf_c_message_get_packed_size(&record.base), 1, sizeof bytes);
    write.key = key;
    write.value = bytes;
    write.size = protobuf_c_message_pack(&record.base, bytes);
    assert_string_equal(commit(f, &write, 1).error.text, "");
}

static void a_restart_is_down_and_up(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    open_peer(f, &a, "a");
    for (uint64_t boot = 1; boot <= 2; boot++) {
        put_server(f, "b", "", boot);
        RUN_UNTIL(f, sees(&a, "b") && ep_cluster_find(a.cluster, "b")->boot == boot);
        assert_non_null(strstr(events(&a), boot == 1 ? "+b " : "-b +b "));
    }
    put_server(f, "b", "", 2); /* the same again */
    RUN_UNTIL(f, *a.events);
    assert_string_equal(events(&a), "~b ");
    put(f, "nodes/b/server", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, !sees(&a, "b"));
    close_peer(&a);
}

static void what_a_node_has_is_renewed(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    assert_int_equal(ep_node_reserve(b.node, 0, 4096, NULL), EP_OK);
    RUN_UNTIL(f, info_of(&a, "b")->memory_used_bytes == 4096);
    ep_node_release(b.node, 0, 4096);
    ep_cluster_refresh(b.cluster);
    RUN_UNTIL(f, info_of(&a, "b")->memory_used_bytes == 0);
    close_peer(&b);
    close_peer(&a);
}

/* ---- a table that is behind ------------------------------------------------------------------ */

/* What the store tells a peer's table, kept back while the test wants it so. */
struct kept {
    struct kept *next;
    struct ep_store_changes changes;
};

static struct {
    struct ep_cluster *of; /* NULL: nobody's */
    ep_store_watch_fn fn;
    struct kept *first, **last;
} held_back;

static struct ep_record copy_record(const struct ep_record *from)
{
    struct ep_record record = *from;
    uint8_t *value = from->value ? calloc(1, from->size + 1) : NULL;

    if (value && from->size)
        memcpy(value, from->value, from->size);
    record.key = strdup(from->key);
    record.value = value;
    return record;
}

static void keep_back(const struct ep_store_changes *changes)
{
    struct kept *kept = calloc(1, sizeof *kept);
    struct ep_record *records = calloc(changes->n + 1, sizeof *records);

    for (size_t i = 0; i < changes->n; i++)
        records[i] = copy_record(&changes->records[i]);
    kept->changes = *changes;
    kept->changes.records = records;
    *held_back.last = kept;
    held_back.last = &kept->next;
}

static void tell_kept(void)
{
    struct ep_cluster *of = held_back.of;

    held_back.of = NULL;
    while (held_back.first) {
        struct kept *kept = held_back.first;

        held_back.first = kept->next;
        held_back.fn(&kept->changes, of);
        for (size_t i = 0; i < kept->changes.n; i++) {
            free((void *)(uintptr_t)kept->changes.records[i].key);
            free((void *)(uintptr_t)kept->changes.records[i].value);
        }
        free((void *)(uintptr_t)kept->changes.records);
        free(kept);
    }
}

static void on_table(const struct ep_store_changes *changes, void *user)
{
    if (held_back.of && held_back.of == user)
        keep_back(changes);
    else
        held_back.fn(changes, user);
}

struct ep_watch *__real_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user);
struct ep_watch *__wrap_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user);

struct ep_watch *__wrap_ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since, ep_store_watch_fn fn,
                                      void *user)
{
    if (strcmp(prefix, "nodes/") != 0)
        return __real_ep_watch_open(store, prefix, since, fn, user);
    held_back.fn = fn;
    return __real_ep_watch_open(store, prefix, since, on_table, user);
}

/* A server that is ready is not yet in everybody's table; whoever has come to a mark has it. */
static void a_mark_tells_whether_the_table_is_behind(void **state)
{
    struct fixture *f = fixture_begin(state);
    const struct ep_store_write mark = ep_cluster_mark();
    struct written written;
    struct peer a, b;

    open_peer(f, &a, "a");
    held_back.of = a.cluster;
    held_back.last = &held_back.first;
    open_peer(f, &b, "b");
    written = commit(f, &mark, 1);
    assert_string_equal(written.error.text, "");
    RUN_UNTIL(f, ep_cluster_knows(b.cluster, written.revision));
    RUN_UNTIL(f, sees(&b, "a") && sees(&b, "b"));
    assert_false(sees(&a, "b"));
    assert_false(ep_cluster_knows(a.cluster, written.revision));
    events(&a);
    tell_kept();
    RUN_UNTIL(f, ep_cluster_knows(a.cluster, written.revision));
    RUN_UNTIL(f, sees(&a, "b"));
    assert_non_null(strstr(events(&a), "mark"));
    close_peer(&b);
    close_peer(&a);
}

/* ---- names ------------------------------------------------------------------------------ */

static void a_name_that_another_server_has_is_refused(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a, other;
    char text[64];

    open_peer(f, &a, "a");
    begin_peer(f, &other, "a", true);
    RUN_UNTIL(f, other.ready);
    assert_int_equal(other.error.status, EP_ALREADY_EXISTS);
    assert_text(other.error.text, "name is \"a\": another server of this store has that name: it is at 127.0.0.1:");
    snprintf(text, sizeof text, "pid %d there", (int)getpid());
    assert_text(other.error.text, text);
    assert_null(ep_cluster_session(other.cluster));
    close_peer(&other);
    assert_true(sees(&a, "a"));
    close_peer(&a);
}

static void a_name_that_is_left_is_taken(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    put(f, "nodes/a/server", "", EP_STORE_ANY); /* of a server that was killed, until its lease ends */
    begin_peer(f, &a, "a", true);
    fixture_run_ms(f, 300);
    assert_false(a.ready);
    put(f, "nodes/a/server", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, a.ready);
    assert_string_equal(a.error.text, "");
    close_peer(&a);
}

/* As by one that was started while this one was stopped. */
static void a_name_that_another_server_took_meanwhile_is_refused(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    open_peer(f, &a, "a");
    put_server(f, "a", "127.0.0.1:1", 1);
    RUN_UNTIL(f, a.replaced);
    assert_int_equal(a.by.status, EP_ALREADY_EXISTS);
    assert_text(a.by.text, "name is \"a\": another server of this store has that name");
    assert_null(ep_cluster_session(a.cluster));
    fixture_run_ms(f, 1200); /* it is tried again several times */
    assert_int_equal(a.replaced, 1);
    put(f, "nodes/a/server", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, ep_cluster_session(a.cluster)); /* who does not end for that has it again */
    close_peer(&a);
}

static void a_record_that_is_deleted_is_written_again(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    open_peer(f, &a, "a");
    RUN_UNTIL(f, ep_cluster_leads(a.cluster));
    (void)events(&a);
    put(f, "nodes/a/server", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, !ep_cluster_session(a.cluster));
    RUN_UNTIL(f, ep_cluster_leads(a.cluster));
    assert_non_null(ep_cluster_session(a.cluster));
    assert_null(strstr(a.events, "-a")); /* it knows better */
    assert_text(events(&a), "session lead session lead ");
    close_peer(&a);
}

/* As after a renewal whose answer was lost: the record is newer than this side knew. */
static void a_record_that_is_newer_than_known_is_its_own_all_the_same(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    open_peer(f, &a, "a");
    put_server(f, "a", "", ep_node_boot(a.node));
    RUN_UNTIL(f, info_of(&a, "a")->n_devices == 0);
    assert_non_null(ep_cluster_session(a.cluster));
    assert_int_equal(ep_node_reserve(a.node, 0, 4096, NULL), EP_OK);
    RUN_UNTIL(f, info_of(&a, "a")->memory_used_bytes == 4096);
    assert_null(strstr(a.events, "session lead session"));
    ep_node_release(a.node, 0, 4096);
    close_peer(&a);
}

/* ---- who was away ----------------------------------------------------------------------- */

static void lose_session(struct peer *p)
{
    char key[64];

    snprintf(key, sizeof key, "nodes/%s/server", ep_cluster_self(p->cluster));
    put(p->f, key, NULL, EP_STORE_ANY);
    RUN_UNTIL(p->f, !ep_cluster_session(p->cluster));
    RUN_UNTIL(p->f, ep_cluster_session(p->cluster));
}

/* All have b's address: a node that answers there, one that was restarted since, and, once b has gone, none. */
static void who_was_away_asks_those_whose_records_go(void **state)
{
    struct fixture *f = fixture_begin(state);
    char address[64];
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    snprintf(address, sizeof address, "%s", ep_cluster_find(a.cluster, "b")->address);
    put_server(f, "same", address, ep_node_boot(b.node));
    put_server(f, "restarted", address, ep_node_boot(b.node) - 1);
    put_server(f, "unasked", "", 1);
    RUN_UNTIL(f, sees(&a, "same") && sees(&a, "restarted") && sees(&a, "unasked"));
    lose_session(&a);
    put(f, "nodes/same/server", NULL, EP_STORE_ANY);
    put(f, "nodes/unasked/server", NULL, EP_STORE_ANY);
    put(f, "nodes/restarted/server", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, !sees(&a, "restarted"));
    fixture_run_ms(f, 1200); /* it is asked several times */
    assert_true(sees(&a, "same") && sees(&a, "unasked"));
    close_peer(&b);
    RUN_UNTIL(f, !sees(&a, "same") && !sees(&a, "b"));
    assert_true(sees(&a, "unasked"));
    put_server(f, "same", address, 1);
    RUN_UNTIL(f, sees(&a, "same"));
    close_peer(&a);
}

/* ---- drains ----------------------------------------------------------------------------- */

static void on_cordoned(const struct ep_error *error, void *user)
{
    on_written(error, 0, user);
}

static struct written cordon(struct peer *p, const char *name, const char *reason)
{
    struct written done = { 0 };

    ep_cluster_cordon(p->cluster, name, reason, false, on_cordoned, &done);
    RUN_UNTIL(p->f, done.done);
    return done;
}

static void a_node_does_what_its_cordon_says(void **state)
{
    struct fixture *f = fixture_begin(state);
    const char *reason;
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    assert_string_equal(cordon(&a, "b", "new driver").error.text, "");
    assert_string_equal(list(f, ep_cluster_mark().key).text, "nodes/.mark= "); /* what a read waits for */
    assert_true(ep_node_cordoned(b.node, &reason));
    assert_string_equal(reason, "new driver");
    assert_true(ep_cluster_find(a.cluster, "b")->cordoned);
    assert_int_equal(info_of(&a, "b")->state, EP__V1__NODE_STATE__NODE_STATE_CORDONED);
    assert_false(ep_node_cordoned(a.node, NULL));
    close_peer(&b);
    RUN_UNTIL(f, !sees(&a, "b"));
    assert_string_equal(ep_cluster_find(a.cluster, "b")->reason, "new driver"); /* an operator knows it */
    open_peer(f, &b, "b");
    assert_true(ep_node_cordoned(b.node, NULL));
    assert_string_equal(cordon(&b, "b", NULL).error.text, "");
    assert_false(ep_node_cordoned(b.node, NULL));
    close_peer(&b);
    RUN_UNTIL(f, !ep_cluster_find(a.cluster, "b"));
    close_peer(&a);
}

static void workers_may_stay_for_a_while(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct written done = { 0 };
    struct peer a;

    open_peer(f, &a, "a");
    ep_cluster_cordon(a.cluster, "a", "new driver", true, on_cordoned, &done);
    RUN_UNTIL(f, done.done);
    assert_string_equal(done.error.text, "");
    assert_true(ep_node_cordoned(a.node, NULL));
    assert_true(ep_cluster_find(a.cluster, "a")->workers_stay);
    assert_string_equal(ep_cluster_find(a.cluster, "a")->reason, "new driver");
    assert_string_equal(cordon(&a, "a", "new driver").error.text, "");
    RUN_UNTIL(f, !ep_cluster_find(a.cluster, "a")->workers_stay);
    assert_true(ep_node_cordoned(a.node, NULL));
    assert_string_equal(cordon(&a, "a", NULL).error.text, "");
    assert_false(ep_cluster_find(a.cluster, "a")->workers_stay);
    close_peer(&a);
}

static void a_node_that_is_away_is_drained_in_the_store(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    open_peer(f, &a, "a");
    assert_string_equal(cordon(&a, "b", "gone").error.text, "");
    assert_false(sees(&a, "b"));
    assert_null(info_of(&a, "b"));
    assert_string_equal(list(f, "nodes/b/").text, "nodes/b/cordon=gone ");
    assert_string_equal(cordon(&a, "b", NULL).error.text, "");
    assert_null(ep_cluster_find(a.cluster, "b"));
    close_peer(&a);
}

/* One whose server is there and does not say so: it was told, and is late. */
static void a_node_that_does_not_follow_is_named(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct written done;
    struct peer a;

    open_peer(f, &a, "a");
    put(f, "nodes/b/server", "", EP_STORE_ANY);
    RUN_UNTIL(f, sees(&a, "b"));
    done = cordon(&a, "b", "why");
    assert_int_equal(done.error.status, EP_DEADLINE_EXCEEDED);
    assert_text(done.error.text, "the store has it, but node b has not said");
    close_peer(&a);
}

/* ---- calls ------------------------------------------------------------------------------ */

struct answer {
    unsigned told;
    struct ep_error error;
    char node[64];
};

static void on_answer(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct answer *answer = user;

    answer->told++;
    answer->error = *error;
    if (reply)
        snprintf(answer->node, sizeof answer->node, "%s", ((const Ep__V1__PingReply *)reply)->node);
}

static void call(struct peer *p, const char *node, const char *text, uint32_t timeout_ms, struct answer *answer)
{
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;

    *answer = (struct answer){ 0 };
    request.node = (char *)(uintptr_t)text;
    ep_cluster_call(p->cluster, node, &ep__v1__node__descriptor, "Ping", &request.base, timeout_ms, on_answer, answer);
    assert_int_equal(answer->told, 0);
}

static void servers_call_each_other(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct answer answer;
    struct peer a, b, mute;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    begin_peer(f, &mute, "mute", false);
    RUN_UNTIL(f, sees(&a, "b") && sees(&a, "mute"));
    call(&a, "b", "x", 5000, &answer);
    RUN_UNTIL(f, answer.told);
    assert_string_equal(answer.node, "b");
    call(&a, "c", "x", 5000, &answer);
    RUN_UNTIL(f, answer.told);
    assert_int_equal(answer.error.status, EP_UNAVAILABLE);
    assert_string_equal(answer.error.text, "node c is not known");
    call(&a, "mute", "x", 5000, &answer);
    RUN_UNTIL(f, answer.told);
    assert_text(answer.error.text, "node mute has no address");
    call(&a, "b", "hold", 100, &answer);
    RUN_UNTIL(f, answer.told);
    assert_int_equal(answer.error.status, EP_DEADLINE_EXCEEDED);
    assert_text(answer.error.text, "node b: no answer from 127.0.0.1:");
    close_peer(&mute);
    close_peer(&b);
    close_peer(&a);
}

static void a_call_ends_with_its_node(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct answer answer;
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    call(&a, "b", "hold", 50000, &answer);
    RUN_UNTIL(f, b.held);
    leave(&b); /* its record goes; its port still answers */
    RUN_UNTIL(f, answer.told);
    assert_int_equal(answer.error.status, EP_UNAVAILABLE);
    assert_string_equal(answer.error.text, "node b is lost");
    close_peer(&b);
    open_peer(f, &b, "b"); /* at another port */
    RUN_UNTIL(f, sees(&a, "b"));
    call(&a, "b", "x", 5000, &answer);
    RUN_UNTIL(f, answer.told);
    assert_string_equal(answer.node, "b");
    close_peer(&b);
    close_peer(&a);
}

static void who_leaves_ends_its_calls(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct answer held, late;
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    call(&a, "b", "hold", 50000, &held);
    RUN_UNTIL(f, b.held);
    leave(&a);
    assert_int_equal(held.told, 1);
    assert_int_equal(held.error.status, EP_UNAVAILABLE);
    call(&a, "b", "x", 5000, &late);
    RUN_UNTIL(f, late.told);
    assert_string_equal(late.error.text, "this server is stopping");
    close_peer(&b);
    close_peer(&a);
}

/* ---- etcd away -------------------------------------------------------------------------- */

static void nobody_is_gone_because_etcd_is(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct answer answer;
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    cluster_kill_member(&f->etcd, 0);
    RUN_UNTIL(f, !ep_cluster_session(a.cluster) && !ep_cluster_session(b.cluster));
    assert_false(ep_cluster_leads(a.cluster));
    assert_true(sees(&a, "b"));
    call(&a, "b", "x", 5000, &answer);
    RUN_UNTIL(f, answer.told);
    assert_string_equal(answer.node, "b");
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, ep_cluster_session(a.cluster) && ep_cluster_session(b.cluster));
    RUN_UNTIL(f, ep_cluster_leads(a.cluster) || ep_cluster_leads(b.cluster));
    fixture_run_ms(f, 3000); /* what was to go has gone */
    assert_null(strstr(a.events, "-b"));
    assert_null(strstr(b.events, "-a"));
    close_peer(&b);
    RUN_UNTIL(f, !sees(&a, "b"));
    close_peer(&a);
}

/* The copy has the sessions, and of the nodes what they were then. */
static void after_etcd_was_set_back_nodes_say_again_what_they_are(void **state)
{
    struct fixture *f = fixture_begin(state);
    const struct ep_store_write mark = ep_cluster_mark();
    uint64_t marked = 0;
    struct peer a, b;

    open_peer(f, &a, "a");
    open_peer(f, &b, "b");
    RUN_UNTIL(f, sees(&a, "b"));
    cluster_kill_member(&f->etcd, 0);
    shell("cp -r %s/m0 %s/old", f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    assert_int_equal(ep_node_reserve(b.node, 0, 4096, NULL), EP_OK);
    RUN_UNTIL(f, info_of(&a, "b")->memory_used_bytes == 4096);
    for (int i = 0; i < 100; i++)
        marked = commit(f, &mark, 1).revision; /* so that what is there then is behind them */
    RUN_UNTIL(f, ep_cluster_knows(a.cluster, marked) && ep_cluster_knows(b.cluster, marked));
    cluster_kill_member(&f->etcd, 0);
    shell("rm -rf %s/m0 && mv %s/old %s/m0", f->directory, f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, !ep_cluster_knows(a.cluster, marked) && !ep_cluster_knows(b.cluster, marked));
    RUN_UNTIL(f, info_of(&a, "b")->memory_used_bytes == 4096);
    ep_node_release(b.node, 0, 4096);
    close_peer(&b);
    close_peer(&a);
}

/* It is told by an error, within the time in which the store answers. */
static void a_start_without_etcd_fails(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct peer a;

    cluster_kill_member(&f->etcd, 0);
    begin_peer(f, &a, "a", true);
    RUN_UNTIL(f, a.ready);
    assert_int_equal(a.error.status, EP_UNAVAILABLE);
    assert_text(a.error.text, "store etcd://127.0.0.1:");
    close_peer(&a);
}

static int setup_sqlite(void **state)
{
    ttl_ms = SHORT_MS;
    return fixture_setup(state);
}

static int setup_patient(void **state)
{
    ttl_ms = 10 * LONG_MS;
    return fixture_setup(state);
}

static int setup_etcd(void **state)
{
    ttl_ms = LONG_MS;
    return fixture_setup_etcd(state);
}

static int setup_losing_etcd(void **state)
{
    ttl_ms = SHORT_MS;
    return fixture_setup_etcd(state);
}

#define ON_SQLITE(name)      FIXTURE_TEST(#name, name, setup_sqlite)
#define ON_PATIENT(name)     FIXTURE_TEST(#name, name, setup_patient)
#define ON_ETCD(name)        FIXTURE_TEST(#name "_on_etcd", name, setup_etcd)
#define ON_LOSING_ETCD(name) FIXTURE_TEST(#name "_on_etcd", name, setup_losing_etcd)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_SQLITE(one_server_is_a_cluster_and_leads_it),
        ON_SQLITE(nodes_come_and_go),
        ON_SQLITE(the_lead_passes_on),
        ON_SQLITE(a_restart_is_down_and_up),
        ON_SQLITE(what_a_node_has_is_renewed),
        ON_SQLITE(a_mark_tells_whether_the_table_is_behind),
        ON_SQLITE(a_name_that_another_server_has_is_refused),
        ON_SQLITE(a_name_that_is_left_is_taken),
        ON_SQLITE(a_name_that_another_server_took_meanwhile_is_refused),
        ON_SQLITE(a_record_that_is_deleted_is_written_again),
        ON_SQLITE(a_record_that_is_newer_than_known_is_its_own_all_the_same),
        ON_PATIENT(who_was_away_asks_those_whose_records_go),
        ON_SQLITE(a_node_does_what_its_cordon_says),
        ON_SQLITE(workers_may_stay_for_a_while),
        ON_SQLITE(a_node_that_is_away_is_drained_in_the_store),
        ON_SQLITE(a_node_that_does_not_follow_is_named),
        ON_SQLITE(servers_call_each_other),
        ON_SQLITE(a_call_ends_with_its_node),
        ON_SQLITE(who_leaves_ends_its_calls),
        ON_ETCD(one_server_is_a_cluster_and_leads_it),
        ON_ETCD(nodes_come_and_go),
        ON_ETCD(the_lead_passes_on),
        ON_ETCD(a_mark_tells_whether_the_table_is_behind),
        ON_ETCD(a_node_does_what_its_cordon_says),
        ON_ETCD(workers_may_stay_for_a_while),
        ON_ETCD(after_etcd_was_set_back_nodes_say_again_what_they_are),
        ON_LOSING_ETCD(nobody_is_gone_because_etcd_is),
        ON_LOSING_ETCD(a_start_without_etcd_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
