/* Findings about the server: can it be reached, is it well, do we fit together, are the groups whole. */
#include "doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ep_clock.h"
#include "grpc/health/v1/health.pb-c.h"

enum { RECENT_US = 600 * 1000000 };      /* a late rank ten minutes ago is history */
static const uint64_t skew_us = 1000000; /* beyond which clocks are said to differ */
static const uint64_t bad_skew_us = 300ull * 1000000;

#define HEALTH(x) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##x

static const char start_server[] = "start it: systemctl start ep-server, or ep-server --socket=PATH";

/* ---- before asking ------------------------------------------------------------------- */

static struct ep_text user_name(uid_t uid)
{
    const struct passwd *entry = getpwuid(uid);
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%s", entry ? entry->pw_name : ep_text_u64(uid).s);
    return text;
}

static struct ep_text group_name(gid_t gid)
{
    const struct group *entry = getgrgid(gid);
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%s", entry ? entry->gr_name : ep_text_u64(gid).s);
    return text;
}

static void check_socket(struct ep_report *report, const struct ep_admin *admin)
{
    const char *path = admin->server + strlen("unix:");
    struct stat info;

    if (stat(path, &info) != 0) {
        ep_report_add(report, EP_FINDING_FAIL, "socket", start_server, "%s: %s", path, strerror(errno));
        return;
    }
    if (!S_ISSOCK(info.st_mode)) {
        ep_report_add(report, EP_FINDING_FAIL, "socket",
                      "give the path of the server's socket: --server unix:PATH", "%s is no socket", path);
        return;
    }
    bool allowed = faccessat(AT_FDCWD, path, R_OK | W_OK, AT_EACCESS) == 0;
    ep_report_add(report, allowed ? EP_FINDING_OK : EP_FINDING_FAIL, "socket",
                  "start the server with another --socket-mode, or use a user that may write to the socket",
                  "%s, mode %04o, owner %s:%s; we are %s:%s%s", path, (unsigned)(info.st_mode & 07777),
                  user_name(info.st_uid).s, group_name(info.st_gid).s, user_name(geteuid()).s,
                  group_name(getegid()).s, allowed ? "" : " and may not use it");
}

static void check_tls_file(struct ep_report *report, const char *path, bool secret)
{
    struct stat info;

    if (!path)
        return;
    if (access(path, R_OK) != 0)
        ep_report_add(report, EP_FINDING_FAIL, "tls", "see deploy/certs.sh", "%s: %s", path, strerror(errno));
    else if (secret && stat(path, &info) == 0 && (info.st_mode & 077) != 0)
        ep_report_add(report, EP_FINDING_WARN, "tls", "chmod 600 the key",
                      "%s can be read by others (mode %04o)", path, (unsigned)(info.st_mode & 07777));
    else
        ep_report_add(report, EP_FINDING_OK, "tls", NULL, "%s can be read", path);
}

static void check_tls(struct ep_report *report, const struct ep_admin *admin)
{
    if (!admin->use_tls)
        ep_report_add(report, EP_FINDING_WARN, "tls", "use --tls-ca, --tls-cert and --tls-key",
                      "not in use: %s is asked in plain text", admin->server);
    check_tls_file(report, admin->tls.ca, false);
    check_tls_file(report, admin->tls.cert, false);
    check_tls_file(report, admin->tls.key, true);
}

/* ---- the server ------------------------------------------------------------------------ */

static ep_status ask(struct ep_admin *admin, const char *method, const ProtobufCMessage *request,
                     ProtobufCMessage **reply, struct ep_error *error)
{
    return ep_admin_call_service(admin, &ep__v1__admin__descriptor, method, request, 0, reply, error);
}

static void check_versions(struct ep_report *report, const Ep__V1__Version *server)
{
    Ep__V1__Version ours;

    ep_version_of_client(&ours);
    if (server->window_version != ours.window_version || server->attach_version != ours.attach_version)
        ep_report_add(
            report, EP_FINDING_FAIL, "version", "install the same version of server and client on this node",
            "server %s has window %u, attach %u; here %s has window %u, attach %u: workers built with this "
            "libepclient cannot join",
            server->version, server->window_version, server->attach_version, ours.version,
            ours.window_version, ours.attach_version);
    else if (strcmp(server->version, ours.version) != 0 || strcmp(server->commit, ours.commit) != 0)
        ep_report_add(report, EP_FINDING_WARN, "version", "install the same version of server and client",
                      "server %s (%s), ep-admin %s (%s); window %u and attach %u are the same",
                      server->version, server->commit, ours.version, ours.commit, ours.window_version,
                      ours.attach_version);
    else
        ep_report_add(report, EP_FINDING_OK, "version", NULL, "%s (%s) on both sides, window %u, attach %u",
                      ours.version, ours.commit, ours.window_version, ours.attach_version);
}

/* The first call: without an answer there is nothing more to ask. */
static bool check_answer(struct ep_report *report, struct ep_admin *admin)
{
    Ep__V1__GetVersionRequest request = EP__V1__GET_VERSION_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    uint64_t began = ep_clock_ns();

    if (ask(admin, "GetVersion", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_FAIL, "server",
                      error.status == EP_PERMISSION_DENIED || error.status == EP_UNAUTHENTICATED
                          ? "use a user or a certificate that the server accepts"
                          : "start it, or say where it is: --server, EP_SERVER; its log says why it ended",
                      "does not answer: %s", error.text);
        return false;
    }
    ep_report_add(report, EP_FINDING_OK, "server", NULL, "%s answers in %s", admin->server,
                  ep_text_micros((ep_clock_ns() - began) / EP_NS_PER_US).s);
    check_versions(report, (Ep__V1__Version *)reply);
    ep_admin_free(reply);
    return true;
}

/* SERVING, NOT_SERVING ..., or -1 with the error. */
static int health_of(struct ep_admin *admin, const char *service, struct ep_error *error)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    ProtobufCMessage *reply;
    int state;

    request.service = (char *)(uintptr_t)service;
    if (ep_admin_call_service(admin, &grpc__health__v1__health__descriptor, "Check", &request.base, 0, &reply,
                              error) != EP_OK)
        return -1;
    state = (int)((Grpc__Health__V1__HealthCheckResponse *)reply)->status;
    ep_admin_free(reply);
    return state;
}

static void check_health(struct ep_report *report, struct ep_admin *admin)
{
    struct ep_error error = EP_ERROR_INIT;
    int state = health_of(admin, "", &error);

    if (state == HEALTH(SERVING))
        ep_report_add(report, EP_FINDING_OK, "health", NULL, "SERVING");
    else
        ep_report_add(report, EP_FINDING_FAIL, "health",
                      "it is starting or stopping: see its log, and node get", "%s",
                      state < 0 ? error.text : "NOT_SERVING");
}

static void check_skew(struct ep_report *report, struct ep_admin *admin)
{
    Ep__V1__GetStatsRequest request = EP__V1__GET_STATS_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    uint64_t before = ep_clock_wall_us();

    if (ask(admin, "GetStats", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_WARN, "clocks", NULL, "cannot compare: %s", error.text);
        return;
    }
    uint64_t after = ep_clock_wall_us(), theirs = ((Ep__V1__Stats *)reply)->time_us;
    uint64_t skew = theirs < before ? before - theirs : theirs > after ? theirs - after : 0;
    ep_admin_free(reply);
    ep_report_add(report,
                  skew > bad_skew_us ? EP_FINDING_FAIL
                  : skew > skew_us   ? EP_FINDING_WARN
                                     : EP_FINDING_OK,
                  "clocks", "run chrony or systemd-timesyncd on both machines",
                  "the server's and ours differ by %s", ep_text_micros(skew).s);
}

/* ---- the node -------------------------------------------------------------------------- */

static void check_budget(struct ep_report *report, const Ep__V1__NodeInfo *node, bool local)
{
    uint64_t budget = node->memory_budget_bytes, used = node->memory_used_bytes;
    uint64_t left = budget > used ? budget - used : 0;

    if (local && report->memory_available && left > report->memory_available)
        ep_report_add(report, EP_FINDING_WARN, "budget",
                      "free memory, or start the server with a smaller --memory",
                      "%s of the server's %s for windows are unused, but this machine has only %s available",
                      ep_text_size(left).s, ep_text_size(budget).s, ep_text_size(report->memory_available).s);
    else if (budget && left < budget / 10)
        ep_report_add(report, EP_FINDING_WARN, "budget",
                      "delete groups, or start the server with a larger --memory",
                      "%s of %s for windows are in use", ep_text_size(used).s, ep_text_size(budget).s);
    else
        ep_report_add(report, EP_FINDING_OK, "budget", NULL, "%s of %s for windows are in use",
                      ep_text_size(used).s, ep_text_size(budget).s);
}

/* The soft limit of another process, from /proc/PID/limits; false when it cannot be read. */
static bool limit_of(int64_t pid, const char *name, char *out, size_t size)
{
    char path[64], line[256];
    FILE *file;
    bool found = false;

    snprintf(path, sizeof path, "/proc/%" PRId64 "/limits", pid);
    file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        size_t length = strlen(name);

        if (strncmp(line, name, length) != 0)
            continue;
        const char *value = line + length + strspn(line + length, " ");
        snprintf(out, size, "%.*s", (int)strcspn(value, " \n"), value);
        found = true;
    }
    if (file)
        fclose(file);
    return found;
}

static void check_server_limits(struct ep_report *report, const Ep__V1__NodeInfo *node)
{
    char files[32], locked[32];
    uint64_t number = 0;

    if (!limit_of(node->pid, "Max open files", files, sizeof files) ||
        !limit_of(node->pid, "Max locked memory", locked, sizeof locked))
        return; /* another pid namespace, or not ours to see */
    bool few = ep_text_parse_u64(files, UINT64_MAX, &number) && number < 4096;
    bool small = strcmp(locked, "unlimited") != 0 && (report->has_gpu || report->has_rdma);
    ep_report_add(report, few || small ? EP_FINDING_WARN : EP_FINDING_OK, "limits",
                  "LimitNOFILE=65536 and LimitMEMLOCK=infinity in the unit, then restart the server",
                  "of the server (pid %" PRId64 "): %s files, %s bytes locked", node->pid, files, locked);
}

static void check_store(struct ep_report *report, const Ep__V1__NodeInfo *node)
{
    if (!*node->store_error)
        ep_report_add(report, EP_FINDING_OK, "store", NULL, "takes changes");
    else
        ep_report_add(report, EP_FINDING_FAIL, "store",
                      "look at the disk of the server's --state-dir, or at its etcd; groups go on as they are meanwhile",
                      "refuses changes: %s", node->store_error);
}

static void check_node(struct ep_report *report, struct ep_admin *admin)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    const Ep__V1__NodeInfo *node;

    if (ask(admin, "GetNode", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_FAIL, "node", NULL, "%s", error.text);
        return;
    }
    node = (Ep__V1__NodeInfo *)reply;
    bool ready = node->state == EP__V1__NODE_STATE__NODE_STATE_READY;
    bool stopping = node->state == EP__V1__NODE_STATE__NODE_STATE_STOPPING;
    ep_report_add(report, ready ? EP_FINDING_OK : EP_FINDING_WARN, "node",
                  stopping ? "start its server again: this one ends when its workers have left, or after --drain-grace"
                           : "ep-admin node uncordon NAME, when it may take workers again",
                  "%s is %s%s%s; %zu devices, %u attached", node->name,
                  ep_text_enum(&ep__v1__node_state__descriptor, (int)node->state), *node->reason ? ": " : "",
                  node->reason, node->n_devices, node->attachments);
    if (node->n_devices == 0)
        ep_report_add(report, EP_FINDING_FAIL, "devices",
                      "start the server with --host-ranks=N, or on a machine with GPUs",
                      "none: no group can be placed here");
    check_store(report, node);
    check_budget(report, node, admin->server_is_unix);
    if (admin->server_is_unix)
        check_server_limits(report, node);
    ep_admin_free(reply);
}

/* ---- the cluster ----------------------------------------------------------------------- */

/* Does the server that answers reach the other's?  Of itself it says nothing. */
static void check_reach(struct ep_report *report, struct ep_admin *admin, const char *name)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;
    const Ep__V1__NodeInfo *node;
    struct ep_error error;
    ProtobufCMessage *reply;

    request.name = (char *)(uintptr_t)name;
    if (ask(admin, "GetNode", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_FAIL, "reach", NULL, "%s", error.text);
        return;
    }
    node = (Ep__V1__NodeInfo *)reply;
    if (*node->unreachable)
        ep_report_add(report, EP_FINDING_FAIL, "reach",
                      "look at that server, the network between, --advertise there and the certificates of both",
                      "node %s is not reached: %s", name, node->unreachable);
    else if (node->round_trip_us)
        ep_report_add(report, EP_FINDING_OK, "reach", NULL, "node %s, %.1f ms there and back", name,
                      (double)node->round_trip_us / 1000);
    ep_admin_free(reply);
}

static void check_members(struct ep_report *report, struct ep_admin *admin, const Ep__V1__ListNodesReply *list)
{
    const char *leader = NULL;

    for (size_t i = 0; i < list->n_nodes; i++)
        if (list->nodes[i]->leader)
            leader = list->nodes[i]->name;
    ep_report_add(report, leader ? EP_FINDING_OK : EP_FINDING_FAIL, "cluster",
                  "look at the store: without it nobody can lead, and nothing be changed", "%zu node%s, %s leads",
                  list->n_nodes, list->n_nodes == 1 ? "" : "s", leader ? leader : "nobody");
    for (size_t i = 0; i < list->n_nodes; i++)
        if (list->nodes[i]->state != EP__V1__NODE_STATE__NODE_STATE_LOST)
            check_reach(report, admin, list->nodes[i]->name);
}

static void check_cluster(struct ep_report *report, struct ep_admin *admin)
{
    Ep__V1__ListNodesRequest request = EP__V1__LIST_NODES_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;

    if (ask(admin, "ListNodes", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_FAIL, "cluster", NULL, "%s", error.text);
        return;
    }
    check_members(report, admin, (Ep__V1__ListNodesReply *)reply);
    ep_admin_free(reply);
}

/* ---- groups ---------------------------------------------------------------------------- */

static enum ep_finding_level level_of_phase(Ep__V1__Phase phase)
{
    switch (phase) {
    case EP__V1__PHASE__PHASE_READY: return EP_FINDING_OK;
    case EP__V1__PHASE__PHASE_DEGRADED:
    case EP__V1__PHASE__PHASE_FAILED: return EP_FINDING_FAIL;
    default: return EP_FINDING_WARN;
    }
}

static void check_rank(struct ep_report *report, const char *group, const Ep__V1__RankStatus *rank)
{
    bool absent = rank->state == EP__V1__RANK_STATE__RANK_STATE_ABSENT;

    if (!absent && rank->state != EP__V1__RANK_STATE__RANK_STATE_QUARANTINED)
        return;
    ep_report_add(report, EP_FINDING_WARN, "rank",
                  absent ? "start a worker for it; until then tokens for its experts are dropped and counted"
                         : "end the old worker's process: its memory is used again when it is gone",
                  "%s rank %u is %s for %s (last worker %s, pid %" PRId64 ")%s%s", group, rank->rank,
                  absent ? "absent" : "quarantined", ep_text_age(rank->since_us).s,
                  *rank->worker ? rank->worker : "-", rank->pid, *rank->reason ? ": " : "", rank->reason);
}

static void check_late(struct ep_report *report, const char *group, const Ep__V1__GroupStatus *status)
{
    const Ep__V1__TimeoutRecord *last = NULL;
    uint64_t now = ep_clock_wall_us();
    size_t recent = 0;

    for (size_t i = 0; i < status->n_timeouts; i++) {
        if (status->timeouts[i]->time_us + RECENT_US < now)
            continue;
        recent++;
        if (!last || status->timeouts[i]->time_us > last->time_us)
            last = status->timeouts[i];
    }
    if (last)
        ep_report_add(
            report, EP_FINDING_WARN, "late",
            "look at what the late rank's worker did then; timeout-ms of the group bounds such waits",
            "%s: %zu waits timed out lately, the last %s ago: rank %u waited %s for rank %u (%s, %s)", group,
            recent, ep_text_age(last->time_us).s, last->rank, ep_text_micros(last->waited_us).s,
            last->late_rank, last->op, last->phase);
}

static void check_group(struct ep_report *report, const Ep__V1__Group *group)
{
    const Ep__V1__GroupStatus *status = group->status;

    if (!status)
        return;
    ep_report_add(report, level_of_phase(status->phase), "group",
                  status->phase == EP__V1__PHASE__PHASE_FAILED
                      ? "change the spec to what the reason allows (group update), or delete the group"
                      : "see 'ep-admin group get NAME': which ranks are missing, and why",
                  "%s is %s%s%s", group->name, ep_text_enum(&ep__v1__phase__descriptor, (int)status->phase),
                  *status->reason ? ": " : "", status->reason);
    for (size_t i = 0; i < status->n_ranks; i++)
        check_rank(report, group->name, status->ranks[i]);
    check_late(report, group->name, status);
}

static void check_groups(struct ep_report *report, struct ep_admin *admin)
{
    Ep__V1__ListGroupsRequest request = EP__V1__LIST_GROUPS_REQUEST__INIT;
    Ep__V1__ListGroupsReply *list;
    struct ep_error error;
    ProtobufCMessage *reply;

    if (ask(admin, "ListGroups", &request.base, &reply, &error) != EP_OK) {
        ep_report_add(report, EP_FINDING_FAIL, "group", NULL, "cannot be listed: %s", error.text);
        return;
    }
    list = (Ep__V1__ListGroupsReply *)reply;
    if (list->n_groups == 0)
        ep_report_add(report, EP_FINDING_OK, "group", NULL, "there are none yet: ep-admin group create");
    for (size_t i = 0; i < list->n_groups; i++)
        check_group(report, list->groups[i]);
    ep_admin_free(reply);
}

void ep_doctor_server(struct ep_report *report, struct ep_admin *admin)
{
    if (admin->server_is_unix)
        check_socket(report, admin);
    else
        check_tls(report, admin);
    if (!check_answer(report, admin))
        return;
    check_health(report, admin);
    check_skew(report, admin);
    check_node(report, admin);
    check_cluster(report, admin);
    check_groups(report, admin);
}
