#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "client_private.h"
#include "ep_secret.h"


/* A rank whose last worker has just gone is free in a moment: so long we ask again, that often. */
#define CLAIM_PATIENCE_MS 500u
#define CLAIM_AGAIN_MS 5u

/* So often a rank is claimed whose ticket runs out before it is attached. */
#define CLAIMS 3

/* So many descriptors below HIGH_FD are for connections, above those that the process opens otherwise. */
#define HIGH_FDS 64

_Static_assert((int)EP_EXECUTOR_AUTO == EP__V1__EXECUTOR__EXECUTOR_AUTO
                   && (int)EP_EXECUTOR_SERVER == EP__V1__EXECUTOR__EXECUTOR_SERVER
                   && (int)EP_EXECUTOR_DIRECT == EP__V1__EXECUTOR__EXECUTOR_DIRECT
                   && (int)EP_BACKEND_HOST == EP__V1__BACKEND__BACKEND_HOST
                   && (int)EP_BACKEND_CUDA == EP__V1__BACKEND__BACKEND_CUDA,
               "ep_executor and ep_backend are those of the schema");

/* ---- claim ----------------------------------------------------------------------- */

static ep_status fill_claim(const struct ep_client *client, const struct joining *how,
                            Ep__V1__ClaimRequest *request, struct ep_error *error)
{
    const ep_join_options *options = &how->options;

    if (!options->group)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ep_join_options.group is NULL");
    if (options->rank < EP_ANY_RANK)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "ep_join_options.rank is %d: must be a rank or EP_ANY_RANK (%d)",
                            options->rank, EP_ANY_RANK);
    if ((unsigned)options->executor > EP_EXECUTOR_DIRECT)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "ep_join_options.executor is %d: must be EP_EXECUTOR_AUTO, _SERVER or _DIRECT",
                            (int)options->executor);
    request->group = (char *)options->group; /* only packed */
    if (options->rank != EP_ANY_RANK) {
        request->_rank_case = EP__V1__CLAIM_REQUEST___RANK_RANK;
        request->rank = (uint32_t)options->rank;
    }
    request->worker = client->name;
    request->token = client->token;
    request->window_version = EP_WINDOW_VERSION;
    request->attach_version = EP_ATTACH_VERSION;
    request->executor = (Ep__V1__Executor)options->executor;
    request->follow = options->follow;
    request->after = how->after;
    if (how->after)
        request->after_ticket = (ProtobufCBinaryData){ EP_ATTACH_TICKET_BYTES, (uint8_t *)(uintptr_t)how->after_ticket };
    request->group_token = (char *)how->options.token;
    request->ht_sms = options->ht_sms;
    return EP_OK;
}

static ep_status claim(struct ep_client *client, const struct joining *how, Ep__V1__ClaimReply **reply, struct ep_error *error)
{
    Ep__V1__ClaimRequest request = EP__V1__CLAIM_REQUEST__INIT;
    ProtobufCMessage *message = NULL;

    if (fill_claim(client, how, &request, error) != EP_OK)
        return error->status;

    const uint64_t end = ep_clock_ns() + CLAIM_PATIENCE_MS * EP_NS_PER_MS;

    while (call_server(client, "Claim", &request.base, &message, error) != EP_OK) {
        if (error->status != EP_UNAVAILABLE || ep_clock_ns() >= end)
            return error->status;
        usleep(CLAIM_AGAIN_MS * 1000);
    }
    *reply = (Ep__V1__ClaimReply *)message;
    return EP_OK;
}

/* The one that runs the rank's ops, by what was settled and what this library can. */
static ep_status choose_executor(const Ep__V1__ClaimReply *reply, const struct executor **out,
                                 struct ep_error *error)
{
    const bool server = reply->executor == EP__V1__EXECUTOR__EXECUTOR_SERVER;
    const bool direct = reply->executor == EP__V1__EXECUTOR__EXECUTOR_DIRECT;

    if (reply->backend == EP__V1__BACKEND__BACKEND_HOST && server)
        *out = &ring_executor;
    else if (reply->backend == EP__V1__BACKEND__BACKEND_CUDA && (server || direct))
        *out = direct ? &direct_executor : &mailbox_executor;
    else
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "the group's backend is %d (host 1, cuda 2) with executor %d (server 1, direct 2): "
                            "this libepclient has server on both and direct on cuda",
                            (int)reply->backend, (int)reply->executor);
    return EP_OK;
}

static ep_status check_reply(const Ep__V1__ClaimReply *reply, const ep_join_options *options,
                             const struct executor **executor, struct ep_error *error)
{
    if (!reply->spec || reply->ticket.len != EP_ATTACH_TICKET_BYTES)
        return ep_error_set(error, EP_PROTOCOL, "the server's answer to a claim has no %s",
                            reply->spec ? "ticket" : "spec");
    if (choose_executor(reply, executor, error) != EP_OK)
        return error->status;
    if (options->executor != EP_EXECUTOR_AUTO && options->executor != (*executor)->kind)
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "ep_join_options.executor is %d: the group's backend has executor %d only",
                            (int)options->executor, (int)(*executor)->kind);
    return EP_OK;
}

/* ---- side socket ----------------------------------------------------------------- */

static int try_connect(int fd, const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    return connect(fd, (const struct sockaddr *)&address, sizeof address);
}

/* In a container the server's directory may be mounted under another name: beside its RPC socket. */
static int try_neighbour(struct ep_client *client, int fd, const char *path)
{
    const char *slash = strrchr(client->path, '/');
    const char *name = strrchr(path, '/');
    char beside[512];

    if (!slash || !name
        || snprintf(beside, sizeof beside, "%.*s%s", (int)(slash - client->path), client->path, name)
               >= (int)sizeof beside)
        return -1;
    return try_connect(fd, beside);
}

/*
 * Linux gives up the descriptors of a killed process from the highest down, and those of a GPU take it a long
 * time (150 to 240 ms on an H200, 0.4 ms when the socket went first), in which peers' kernels would wait.
 */
static int move_up(int fd)
{
    struct rlimit limit;
    int high;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return fd;
    high = (int)(limit.rlim_cur < HIGH_FD ? limit.rlim_cur : HIGH_FD);
    high = fcntl(fd, F_DUPFD_CLOEXEC, high - HIGH_FDS);
    if (high < 0)
        return fd; /* too many are there already: it is only slower */
    close(fd);
    return high;
}

static ep_status connect_side(struct ep_client *client, const char *path, int *out,
                              struct ep_error *error)
{
    struct timeval bound = { .tv_sec = client->timeout_ms / 1000,
                             .tv_usec = client->timeout_ms % 1000 * 1000 };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "socket");
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound);
    if (try_connect(fd, path) < 0 && try_neighbour(client, fd, path) < 0) {
        ep_error_errno(error, EP_UNAVAILABLE, "connect to the server's side socket %s", path);
        close(fd);
        return EP_UNAVAILABLE;
    }
    *out = move_up(fd);
    return EP_OK;
}

/* HELLO, then WELCOME with the window's descriptor. */
static ep_status greet(int socket, const ProtobufCBinaryData *ticket, struct ep_attach_frame *welcome,
                       int *window_fd, struct ep_error *error)
{
    struct ep_attach_frame hello;
    int fd;

    ep_attach_frame_init(&hello, EP_ATTACH_HELLO);
    memcpy(hello.ticket, ticket->data, sizeof hello.ticket);
    if (ep_attach_send(socket, &hello, -1, error) != EP_OK
        || ep_attach_receive(socket, welcome, &fd, error) != EP_OK) {
        if (error->status == EP_UNAVAILABLE)
            ep_error_set(error, EP_DEADLINE_EXCEEDED, "the server does not answer on its side socket");
        return error->status;
    }
    if (welcome->type == EP_ATTACH_WELCOME && fd >= 0) {
        *window_fd = fd;
        return EP_OK;
    }
    if (fd >= 0)
        close(fd);
    if (fd == EP_ATTACH_FD_LOST)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "the window's descriptor has come, and this process may open no more: "
                            "raise its limit of open files (ulimit -n)");
    if (welcome->type == EP_ATTACH_REFUSED)
        return ep_error_set(error, (ep_status)welcome->status, "%s", welcome->text);
    return ep_error_set(error, EP_PROTOCOL, "the server answered HELLO with frame type %u%s", welcome->type,
                        welcome->type == EP_ATTACH_WELCOME ? " and no descriptor" : "");
}

/* ---- window: host ---------------------------------------------------------------- */

static ep_status map_window(struct ep_rank *rank, int fd, uint64_t bytes, struct ep_error *error)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return ep_error_errno(error, EP_IO, "the window's descriptor");
    if (bytes != rank->shape.map.total_bytes || (uint64_t)st.st_size < bytes)
        return ep_error_set(error, EP_PROTOCOL, "the window has %llu bytes (WELCOME says %llu): must have %llu",
                            (unsigned long long)st.st_size, (unsigned long long)bytes,
                            (unsigned long long)rank->shape.map.total_bytes);

    /* A successor's pages are there before its first op: others wait for that. */
    void *window = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (rank->ahead ? MAP_POPULATE : 0), fd, 0);

    if (window == MAP_FAILED)
        return ep_error_errno(error, EP_NO_MEMORY, "map a window of %llu bytes", (unsigned long long)bytes);
    rank->window = window;
    rank->control = window;
    return EP_OK;
}

/* local number -> expert, from the placement's homes. */
static ep_status list_experts(struct ep_rank *rank, struct ep_error *error)
{
    const struct ep_placement *p = &rank->shape.placement;
    const uint32_t n = p->local_experts[rank->rank];

    rank->local_to_expert = calloc(n ? n : 1, sizeof *rank->local_to_expert);
    if (!rank->local_to_expert)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the rank's experts");
    for (uint32_t e = 0; e < p->experts; e++)
        for (uint32_t i = p->first[e]; i < p->first[e + 1]; i++)
            if (p->rank[i] == rank->rank)
                rank->local_to_expert[p->local[i]] = e;
    return EP_OK;
}

static ep_status list_homes(struct ep_rank *rank, struct ep_error *error)
{
    const struct ep_placement *p = &rank->shape.placement;

    rank->homes = calloc(p->first[p->experts] + 1, sizeof *rank->homes);
    if (!rank->homes)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the group's placement");
    for (uint32_t e = 0; e < p->experts; e++)
        for (uint32_t i = p->first[e]; i < p->first[e + 1]; i++)
            rank->homes[rank->n_homes++] = (ep_home){ e, p->rank[i], p->local[i] };
    return EP_OK;
}

/* ---- join ------------------------------------------------------------------------ */

static ep_status attach_host(struct ep_rank *rank, const struct ep_attach_frame *welcome, int fd,
                             struct ep_error *error)
{
    if (map_window(rank, fd, welcome->value, error) != EP_OK)
        return error->status;
    return rank_check_window(rank, rank->rank, &rank->control->head, error);
}

/* A worker without a GPU, a driver or the module will never have them: nothing to try again. */
static ep_status prepare_device(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    const struct ep_cuda_api *api;

    if (ep_cuda_open(&api, error) != EP_OK) {
        if (error->status == EP_NOT_FOUND)
            error->status = EP_UNIMPLEMENTED;
        return ep_error_prefix(error, "the group's backend is cuda");
    }
    if (rank->ahead) /* the program may be capturing */
        api->thread_relax();
    return device_prepare(rank, api, reply, error);
}

static ep_status attach_device(struct ep_rank *rank, const Ep__V1__ClaimReply *reply,
                               const struct ep_attach_frame *welcome, int fd, struct ep_error *error)
{
    return rank->executor == &direct_executor ? direct_attach(rank, reply, welcome, fd, error)
                                              : mailbox_attach(rank, reply, welcome, fd, error);
}

/* From HELLO on the peers wait for the rank; a new process takes some 100 ms to make a GPU's context. */
static ep_status attach(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    const bool on_gpu = rank->executor->backend == EP_BACKEND_CUDA;
    struct ep_attach_frame welcome;
    int fd = -1;

    if (on_gpu && prepare_device(rank, reply, error) != EP_OK)
        return error->status;
    if (connect_side(rank->client, reply->socket, &rank->socket, error) != EP_OK
        || greet(rank->socket, &reply->ticket, &welcome, &fd, error) != EP_OK)
        return error->status;

    ep_status status = on_gpu ? attach_device(rank, reply, &welcome, fd, error)
                              : attach_host(rank, &welcome, fd, error);

    close(fd);
    if (status != EP_OK)
        return status;
    memcpy(rank->ticket, reply->ticket.data, sizeof rank->ticket);
    rank->ll_begun = welcome.offset - welcome.ht;
    rank->ht_begun = welcome.ht;
    turn_begin(rank, welcome.offset);
    if (fcntl(rank->socket, F_SETFL, O_NONBLOCK) < 0)
        return ep_error_errno(error, EP_IO, "the rank's connection");
    return EP_OK;
}

static ep_status set_up(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, const struct joining *how,
                        struct ep_error *error)
{
    if (check_reply(reply, &how->options, &rank->executor, error) != EP_OK
        || shape_from_spec(reply->spec, reply->window_bytes, &rank->shape, error) != EP_OK)
        return error->status;
    rank->rank = reply->rank;
    rank->epoch = reply->epoch;
    rank->ht_sms_at_most = reply->ht_sms;
    rank->spin_ns = 1;
    if (rank->rank >= rank->shape.map.limits.ranks)
        return ep_error_set(error, EP_PROTOCOL, "the server gave rank %u of %u", rank->rank,
                            rank->shape.map.limits.ranks);
    if (list_experts(rank, error) != EP_OK || list_homes(rank, error) != EP_OK
        || arena_init(&rank->arena, rank->shape.map.limits.arena_bytes, error) != EP_OK
        || events_init(rank, error) != EP_OK || attach(rank, reply, error) != EP_OK
        || (how->options.follow && follow_begin(rank, how, error) != EP_OK))
        return error->status;
    return monitor_add(rank, error);
}

/* Once HELLO has gone out the rank may be taken in, and without BYE its memory would wait for the end of this process. */
static void undo(struct ep_rank *rank)
{
    if (!rank)
        return;
    follow_end(rank);
    if (rank->socket >= 0)
        rank_finish(rank);
    else
        rank_free(rank);
}

/* On failure too the rank is there, unless there is no memory; `expired`: it was its ticket that ran out. */
static ep_status join_once(struct ep_client *client, const struct joining *how, struct ep_rank **out, bool *expired,
                           struct ep_error *error)
{
    const uint64_t begun = ep_clock_ns();
    struct ep_rank *rank = *out = rank_new(client);
    Ep__V1__ClaimReply *reply = NULL;
    ep_status status;

    *expired = false;
    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    rank->ht_sms = how->options.ht_sms;
    rank->ahead = how->after != 0;
    status = claim(client, how, &reply, error);
    if (status == EP_OK) {
        status = set_up(rank, reply, how, error);
        *expired = status == EP_UNAUTHENTICATED && ep_clock_ns() - begun >= reply->ticket_ms * EP_NS_PER_MS;
        protobuf_c_message_free_unpacked(&reply->base, NULL);
    }
    return status;
}

/*
 * On a machine whose driver is asleep a process's first context takes seconds, longer than a ticket is good for: by the
 * next claim it is there, kept by the rank that was too late.
 */
ep_status join_group(struct ep_client *client, const struct joining *how, struct ep_rank **out, struct ep_error *error)
{
    struct ep_rank *rank = NULL, *late = NULL;
    bool expired = true;
    ep_status status = EP_OK;

    for (int claims = 0; expired && claims < CLAIMS; claims++) {
        status = join_once(client, how, &rank, &expired, error);
        undo(late);
        late = rank;
    }
    if (status == EP_OK)
        *out = rank;
    else
        undo(rank);
    return status;
}

/* The group's token: as given, or from the file that the environment names.  `room` is for the latter. */
static ep_status choose_token(ep_join_options *options, char room[static EP_ATTACH_TOKEN_MAX + 1], struct ep_error *error)
{
    if (options->token && strlen(options->token) > EP_ATTACH_TOKEN_MAX)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ep_join_options.token has %zu bytes: must have at most %u",
                            strlen(options->token), EP_ATTACH_TOKEN_MAX);
    if (options->token)
        return EP_OK;
    options->token = room;
    return read_token("EP_ATTACH_TOKEN_FILE", room, EP_ATTACH_TOKEN_MAX + 1, error);
}

ep_status ep_join(ep_client *client, const ep_join_options *given, ep_rank **out)
{
    struct ep_error *error = last_error();
    struct joining how = { .after = 0 };
    char token[EP_ATTACH_TOKEN_MAX + 1] = "";
    ep_status status;

    if (!client || !out)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is NULL", client ? "rank" : "client");
    if (take_struct("ep_join_options", given, &how.options, sizeof how.options) != EP_OK)
        return EP_INVALID_ARGUMENT;
    status = choose_token(&how.options, token, error);
    if (status == EP_OK)
        status = join_group(client, &how, out, error);
    explicit_bzero(token, sizeof token);
    return status;
}
