/* The node commands. */
#include "admin.h"

#include <inttypes.h>
#include <poll.h>
#include <string.h>

#include "ep_clock.h"
#include "move.h"
#include "output.h"
#include "progress.h"

enum { DRAIN_POLL_MS = 250, MOVE_WAIT_MS = 600000 };

static const char *state_name(const Ep__V1__NodeInfo *node)
{
    return ep_text_enum(&ep__v1__node_state__descriptor, (int)node->state);
}

static struct ep_text memory(uint64_t used, uint64_t all)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%.24s of %.24s", ep_text_size(used).s, ep_text_size(all).s);
    return text;
}

/* Held by ranks whose ops the server runs; "-" where there are none. */
static struct ep_text multiprocessors(const Ep__V1__Device *device)
{
    struct ep_text text = { "-" };

    if (device->sms)
        snprintf(text.s, sizeof text.s, "%u of %u", device->sms_held, device->sms);
    return text;
}

/* NVML's word when the server started; "-" of what is no GPU. */
static struct ep_text nvlinks(const Ep__V1__Device *device)
{
    struct ep_text text = { "-" };

    if (device->_nvlinks_case == EP__V1__DEVICE___NVLINKS_NVLINKS)
        snprintf(text.s, sizeof text.s, "%u", device->nvlinks);
    else if (device->backend == EP__V1__BACKEND__BACKEND_CUDA)
        snprintf(text.s, sizeof text.s, "not known");
    return text;
}

static const char *fabric(const Ep__V1__Device *device)
{
    if (device->backend != EP__V1__BACKEND__BACKEND_CUDA)
        return "-";
    if (device->fabric == EP__V1__FABRIC_STATE__FABRIC_STATE_UNSPECIFIED)
        return "not known";
    return ep_text_enum(&ep__v1__fabric_state__descriptor, (int)device->fabric);
}

/* "cuda" or "host": what ranks of the node run on, which its devices say. */
static const char *backend(const Ep__V1__NodeInfo *node)
{
    return node->n_devices ? ep_text_enum(&ep__v1__backend__descriptor, (int)node->devices[0]->backend) : "";
}

static bool is_lost(const Ep__V1__NodeInfo *node)
{
    return node->state == EP__V1__NODE_STATE__NODE_STATE_LOST;
}

/* "1 worker", "2 workers", and how the sentence goes on. */
static struct ep_text workers(uint32_t n, const char *one, const char *many)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%u worker%s", n, n == 1 ? one : many);
    return text;
}

/* ---- views ------------------------------------------------------------------------- */

static void print_list(Ep__V1__NodeInfo *const *nodes, size_t n)
{
    static const struct ep_column columns[] = {
        { "NAME", 0 },
        { "STATE", EP_COLUMN_STATE },
        { "ROLE", 0 },
        { "BACKEND", 0 },
        { "DEVICES", EP_COLUMN_RIGHT },
        { "MEMORY", 0 },
        { "WORKERS", EP_COLUMN_RIGHT },
        { "VERSION", 0 },
        { "UP", EP_COLUMN_RIGHT },
        { "ADDRESS", 0 },
        { "REASON", EP_COLUMN_LONG },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < n; i++) {
        const Ep__V1__NodeInfo *node = nodes[i];

        ep_table_add(table, (const char *[]){
                                node->name, state_name(node), node->leader ? "leader" : "", backend(node),
                                ep_text_u64(node->n_devices).s,
                                memory(node->memory_used_bytes, node->memory_budget_bytes).s,
                                ep_text_u64(node->attachments).s, node->version ? node->version->version : "",
                                is_lost(node) ? "" : ep_text_age(node->started_us).s, node->admin_address,
                                node->reason });
    }
    ep_table_print(table, stdout);
}

static void print_version(const Ep__V1__Version *version)
{
    char backends[128] = "";

    for (size_t i = 0; i < version->n_backends; i++) {
        size_t used = strlen(backends);

        snprintf(backends + used, sizeof backends - used, "%s%s", i ? ", " : "", version->backends[i]);
    }
    ep_output_pair(stdout, "version", "%s (%s), backends: %s, window %u, attach %u", version->version,
                   version->commit, backends, version->window_version, version->attach_version);
}

static void print_devices(const Ep__V1__NodeInfo *node)
{
    static const struct ep_column columns[] = {
        { "DEVICE", 0 },
        { "BACKEND", 0 },
        { "MEMORY", 0 },
        { "GROUPS", EP_COLUMN_RIGHT },
        { "SERVED SMS", EP_COLUMN_RIGHT },
        { "NVLINKS", EP_COLUMN_RIGHT },
        { "FABRIC", 0 },
        { "DETAIL", EP_COLUMN_LONG },
    };
    struct ep_table *table;

    if (node->n_devices == 0)
        return;
    table = ep_table_create(columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < node->n_devices; i++) {
        const Ep__V1__Device *device = node->devices[i];

        ep_table_add(table,
                     (const char *[]){ device->name,
                                       ep_text_enum(&ep__v1__backend__descriptor, (int)device->backend),
                                       memory(device->used_bytes, device->memory_bytes).s,
                                       ep_text_u64(device->groups).s, multiprocessors(device).s,
                                       nvlinks(device).s, fabric(device), device->detail });
    }
    putchar('\n');
    ep_table_print(table, stdout);
}

/* Of another node than the one that answers. */
static void print_reach(const Ep__V1__NodeInfo *node)
{
    if (*node->unreachable)
        ep_output_pair(stdout, "reach", "not from the server that answers: %s", node->unreachable);
    else if (node->round_trip_us)
        ep_output_pair(stdout, "reach", "%.1f ms there and back from the server that answers",
                       (double)node->round_trip_us / 1000);
}

static void print_one(const Ep__V1__NodeInfo *node)
{
    ep_output_pair(stdout, "name", "%s%s", node->name, node->leader ? ", the leader" : "");
    ep_output_pair(stdout, "state", "%s%s%s", state_name(node), *node->reason ? ": " : "", node->reason);
    print_reach(node);
    if (!node->version)
        return; /* it is known by its drain alone */
    print_version(node->version);
    ep_output_pair(stdout, "host", "%u cpus, %s", node->cpus, node->kernel);
    ep_output_pair(stdout, "memory", "%s for windows",
                   memory(node->memory_used_bytes, node->memory_budget_bytes).s);
    ep_output_pair(stdout, "workers", "%u attached", node->attachments);
    ep_output_pair(stdout, "server", "pid %" PRId64 ", up since %s (%s)", node->pid,
                   ep_text_time(node->started_us).s, ep_text_age(node->started_us).s);
    ep_output_pair(stdout, "socket", "%s", node->socket);
    if (*node->admin_address)
        ep_output_pair(stdout, "address", "%s", node->admin_address);
    if (*node->nccl)
        ep_output_pair(stdout, "nccl", "%s", node->nccl);
    print_devices(node);
}

/* ---- list, get --------------------------------------------------------------------- */

int ep_node_list(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__ListNodesRequest request = EP__V1__LIST_NODES_REQUEST__INIT;
    Ep__V1__ListNodesReply *list;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    (void)invocation;
    if (ep_admin_call(admin, "ListNodes", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    list = (Ep__V1__ListNodesReply *)reply;
    if (admin->format != EP_FORMAT_TABLE)
        code = ep_output_message(admin, reply);
    else if (admin->quiet)
        for (size_t i = 0; i < list->n_nodes; i++)
            puts(list->nodes[i]->name);
    else
        print_list(list->nodes, list->n_nodes);
    ep_admin_note_behind(admin, list->behind);
    ep_admin_free(reply);
    return code;
}

static ep_status get_node(struct ep_admin *admin, const char *name, bool with_note, ProtobufCMessage **reply,
                          struct ep_error *error)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;

    if (name)
        request.name = (char *)(uintptr_t)name;
    if (with_note)
        return ep_admin_call(admin, "GetNode", &request.base, 0, reply, error);
    return ep_admin_call_service(admin, &ep__v1__admin__descriptor, "GetNode", &request.base, 0, reply,
                                 error);
}

int ep_node_get(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    if (get_node(admin, invocation->argument, true, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    if (admin->format == EP_FORMAT_TABLE)
        print_one((Ep__V1__NodeInfo *)reply);
    else
        code = ep_output_message(admin, reply);
    ep_admin_note_behind(admin, ((Ep__V1__NodeInfo *)reply)->behind);
    ep_admin_free(reply);
    return code;
}

/* ---- drain, uncordon ----------------------------------------------------------------- */

/* Asks until nobody is attached; *node is replaced by the last answer. */
static ep_status poll_until_empty(struct ep_admin *admin, const char *name, uint64_t deadline_ns,
                                  ProtobufCMessage **node, struct ep_error *error)
{
    while (((Ep__V1__NodeInfo *)*node)->attachments > 0) {
        ProtobufCMessage *reply;

        if (ep_clock_ns() > deadline_ns)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "%s is drained, but %s still attached", name,
                                workers(((Ep__V1__NodeInfo *)*node)->attachments, " is", "s are").s);
        poll(NULL, 0, DRAIN_POLL_MS);
        ep_status status = get_node(admin, name, false, &reply, error);
        if (status != EP_OK)
            return status;
        ep_admin_free(*node);
        *node = reply;
    }
    return EP_OK;
}

static ep_status wait_until_empty(struct ep_admin *admin, const char *name, uint64_t deadline_ns,
                                  ProtobufCMessage **node, struct ep_error *error)
{
    struct ep_progress progress;
    char what[sizeof progress.text];

    snprintf(what, sizeof what, "%s: waiting for %s to leave", admin->what,
             workers(((Ep__V1__NodeInfo *)*node)->attachments, "", "s").s);
    ep_progress_begin(&progress, admin->quiet, what);
    ep_status status = poll_until_empty(admin, name, deadline_ns, node, error);
    ep_progress_end(&progress);
    return status;
}

static int show_change(const struct ep_admin *admin, const ProtobufCMessage *reply, const char *what)
{
    const Ep__V1__NodeInfo *node = (const Ep__V1__NodeInfo *)reply;

    if (admin->format != EP_FORMAT_TABLE)
        return ep_output_message(admin, reply);
    if (!admin->quiet)
        printf("node %s %s: %s, %s attached\n", node->name, what, state_name(node),
               workers(node->attachments, "", "s").s);
    return 0;
}

/* The node is drained whether this can be told or not. */
static void note_ranks(struct ep_admin *admin, const char *node)
{
    Ep__V1__ListGroupsRequest request = EP__V1__LIST_GROUPS_REQUEST__INIT;
    const Ep__V1__ListGroupsReply *list;
    struct ep_error error;
    ProtobufCMessage *reply;

    if (admin->quiet || ep_admin_call(admin, "ListGroups", &request.base, 0, &reply, &error) != EP_OK)
        return;
    list = (const Ep__V1__ListGroupsReply *)reply;
    for (size_t i = 0; i < list->n_groups; i++) {
        const char *group = list->groups[i]->name;
        const size_t n = ep_group_ranks_on(list->groups[i], node);

        if (n)
            ep_admin_note(admin,
                          "%zu rank%s of group %s stay%s placed on %s, and ha%s no worker when those there have left; "
                          "an update of its placement, pack or spread, finds other nodes",
                          n, n == 1 ? "" : "s", group, n == 1 ? "s" : "", node, n == 1 ? "s" : "ve");
    }
    ep_admin_free(reply);
}

int ep_node_drain(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    const char *node = invocation->argument, *reason = ep_invocation_text(invocation, "reason");
    const bool move = ep_invocation_given(invocation, "move");
    const int64_t wait_ms = ep_invocation_ms(invocation, "wait", move ? MOVE_WAIT_MS : 0);
    const uint64_t began_ns = ep_clock_ns();
    struct ep_error error;
    ProtobufCMessage *reply;
    ep_status status;
    int code;

    status = move ? ep_node_move(admin, node, reason, wait_ms, &reply, &error)
                  : ep_node_drain_call(admin, node, reason, false, &reply, &error);
    if (status != EP_OK)
        return ep_admin_fail(admin, &error);
    if (wait_ms > 0 &&
        wait_until_empty(admin, node, began_ns + (uint64_t)wait_ms * EP_NS_PER_MS, &reply, &error) != EP_OK)
        code = ep_admin_fail(admin, &error);
    else
        code = show_change(admin, reply, "drained");
    note_ranks(admin, node);
    ep_admin_free(reply);
    return code;
}

int ep_node_uncordon(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__UncordonNodeRequest request = EP__V1__UNCORDON_NODE_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    bool ready;
    int code;

    request.name = (char *)(uintptr_t)invocation->argument;
    if (ep_admin_call(admin, "UncordonNode", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    ready = ((const Ep__V1__NodeInfo *)reply)->state == EP__V1__NODE_STATE__NODE_STATE_READY;
    code = show_change(admin, reply, ready ? "takes workers again" : "is drained no more");
    ep_admin_free(reply);
    return code;
}
