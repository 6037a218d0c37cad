#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "client_private.h"
#include "ep_address.h"
#include "ep_descriptors.h"
#include "ep_secret.h"
#include "ep_utf8.h"
#include "ep/v1/admin.pb-c.h"

#define DEFAULT_TIMEOUT_MS 5000
#define TOKEN_ROOM 4096 /* of one from there */
#define UNIX_PREFIX "unix:"
#define SOCKET_PATH_BYTES (sizeof((struct sockaddr_un *)NULL)->sun_path) /* the end of the string included */

const char *ep_version(void)
{
    return EP_VERSION;
}

ep_status call_server(struct ep_client *client, const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct ep_error *error)
{
    return ep_rpc_unary(client->channel, &ep__v1__attach__descriptor, method, NULL, 0, request,
                        client->timeout_ms, reply, error);
}

/* ---- open ------------------------------------------------------------------------ */

static ep_status set_path(struct ep_client *client, const char *address, struct ep_error *error)
{
    char by_default[EP_ADDRESS_MAX];

    if (!address)
        address = ep_address_default(by_default, sizeof by_default);
    if (strncmp(address, UNIX_PREFIX, strlen(UNIX_PREFIX)) != 0 || !address[strlen(UNIX_PREFIX)])
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "address is \"%s\": must be unix:PATH, workers attach on their own host",
                            address);
    if (strlen(address) - strlen(UNIX_PREFIX) >= SOCKET_PATH_BYTES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "address has a path of %zu bytes: a socket's has at most %zu",
                            strlen(address) - strlen(UNIX_PREFIX), SOCKET_PATH_BYTES - 1);
    client->path = strdup(address + strlen(UNIX_PREFIX));
    return client->path ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for a client");
}

ep_status read_token(const char *variable, char *room, size_t size, struct ep_error *error)
{
    const char *file = getenv(variable);

    if (!file || !*file || ep_secret_read(file, room, size, error) == EP_OK)
        return EP_OK;
    return ep_error_prefix(error, variable);
}

/* The server's token: as given, or from the file that the environment names. */
static ep_status set_token(struct ep_client *client, const char *given, struct ep_error *error)
{
    char room[TOKEN_ROOM] = "";

    if (!given && read_token("EP_CLIENT_TOKEN_FILE", room, sizeof room, error) != EP_OK)
        return error->status;
    client->token = strdup(given ? given : room);
    explicit_bzero(room, sizeof room);
    return client->token ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for a client");
}

static ep_status set_options(struct ep_client *client, const ep_client_options *given,
                             struct ep_error *error)
{
    ep_client_options options = { .size = sizeof options };

    if (given && take_struct("ep_client_options", given, &options, sizeof options) != EP_OK)
        return EP_INVALID_ARGUMENT;
    if (options.timeout_ms < 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "ep_client_options.timeout_ms is %d: must be at least 1, or 0 for %d; calls of the server "
                            "always have a bound", options.timeout_ms, DEFAULT_TIMEOUT_MS);
    client->timeout_ms = options.timeout_ms ? options.timeout_ms : DEFAULT_TIMEOUT_MS;
    client->name = strdup(options.name ? options.name : program_invocation_short_name);
    if (!client->name)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a client");
    ep_utf8_mend(client->name); /* a program may have any */
    return set_token(client, options.token, error);
}

static ep_status check_version(const Ep__V1__Version *version, struct ep_error *error)
{
    if (version->attach_version == EP_ATTACH_VERSION && version->window_version == EP_WINDOW_VERSION)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "ep-server %s speaks attach %u and window %u, this libepclient %s attach %u and "
                        "window %u: they must be of matching releases",
                        version->version, version->attach_version, version->window_version, EP_VERSION,
                        EP_ATTACH_VERSION, EP_WINDOW_VERSION);
}

/* Is somebody there, and of our kind? */
static ep_status greet(struct ep_client *client, struct ep_error *error)
{
    Ep__V1__GetVersionRequest request = EP__V1__GET_VERSION_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    ep_status status = ep_rpc_unary(client->channel, &ep__v1__admin__descriptor, "GetVersion", NULL, 0,
                                    &request.base, client->timeout_ms, &reply, error);

    if (status != EP_OK)
        return status;
    status = check_version((const Ep__V1__Version *)reply, error);
    protobuf_c_message_free_unpacked(reply, NULL);
    return status;
}

static ep_status connect_server(struct ep_client *client, struct ep_error *error)
{
    char target[sizeof UNIX_PREFIX + SOCKET_PATH_BYTES];

    snprintf(target, sizeof target, UNIX_PREFIX "%s", client->path);
    if (ep_rpc_open(NULL, &client->rpc, error) != EP_OK)
        return error->status;
    ep_rpc_connect_within(client->rpc, client->timeout_ms);
    if (ep_rpc_channel_open(client->rpc, target, NULL, 0, &client->channel, error) != EP_OK)
        return error->status;
    return greet(client, error);
}

static void destroy(struct ep_client *client)
{
    if (client->channel)
        ep_rpc_channel_close(client->channel);
    if (client->rpc)
        ep_rpc_close(client->rpc);
    free(client->path);
    free(client->name);
    free(client->token);
    free(client);
}

ep_status ep_client_open(const char *address, const ep_client_options *options, ep_client **out)
{
    struct ep_error *error = last_error();
    struct ep_client *client;

    if (!out)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "client is NULL");
    client = calloc(1, sizeof *client);
    if (!client)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a client");
    ep_descriptors_reserve(HIGH_FD); /* a rank that is joined must not wait for it: its peers do */
    if (set_path(client, address, error) != EP_OK || set_options(client, options, error) != EP_OK
        || connect_server(client, error) != EP_OK) {
        destroy(client);
        return error->status;
    }
    following_init(client);
    if (monitor_start(client, error) != EP_OK) {
        following_fini(client);
        destroy(client);
        return error->status;
    }
    *out = client;
    return EP_OK;
}

/* Successors that were not handed over go with those that they succeed. */
static struct ep_rank *rank_to_leave(struct ep_client *client)
{
    struct ep_rank *rank = client->ranks;

    while (rank && rank->ahead)
        rank = rank->next;
    return rank;
}

void ep_client_close(ep_client *client)
{
    if (!client)
        return;

    struct ep_rank *rank;

    following_stop(client); /* from here on no rank is added */
    while ((rank = rank_to_leave(client)))
        ep_leave(rank);
    monitor_stop(client);
    following_fini(client);
    destroy(client);
}

/* ---- groups ---------------------------------------------------------------------- */

static ep_status describe(const Ep__V1__DescribeReply *reply, ep_group_info *info, struct ep_error *error)
{
    struct group_shape shape;

    if (!reply->spec)
        return ep_error_set(error, EP_PROTOCOL, "the server described a group without a spec");
    if (reply->window_bytes == 0)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "the group is not formed yet");
    if (shape_from_spec(reply->spec, reply->window_bytes, &shape, error) != EP_OK)
        return error->status;

    ep_group_info full = { .size = sizeof full };

    shape_info(&shape, reply->epoch, &full);
    ep_placement_free(&shape.placement);
    return give_struct("ep_group_info", info, &full, sizeof full);
}

ep_status ep_group_describe(ep_client *client, const char *group, ep_group_info *info)
{
    Ep__V1__DescribeRequest request = EP__V1__DESCRIBE_REQUEST__INIT;
    struct ep_error *error = last_error();
    ProtobufCMessage *reply = NULL;

    if (!client || !group)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is NULL", client ? "group" : "client");
    request.group = (char *)group; /* only packed */
    if (call_server(client, "Describe", &request.base, &reply, error) != EP_OK)
        return error->status;

    ep_status status = describe((const Ep__V1__DescribeReply *)reply, info, error);

    protobuf_c_message_free_unpacked(reply, NULL);
    return status;
}
