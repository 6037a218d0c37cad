#include "attach_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "ep_log.h"

#define DEFAULT_TICKET_MS 5000u
#define DEFAULT_HELLO_MS 2000u
#define DEFAULT_CONNECTIONS 1024u
#define DEFAULT_MODE 0660

const struct ep_attach_counters *ep_attach_counters(const struct ep_attach *attach)
{
    return &attach->counters;
}

/* ---- end ------------------------------------------------------------------------ */

static void destroy(struct ep_attach *attach)
{
    free(attach->token);
    free(attach);
}

void attach_handle_opened(struct ep_attach *attach)
{
    attach->open_handles++;
}

void attach_handle_closed(struct ep_attach *attach)
{
    void (*on_closed)(void *user) = attach->on_closed;
    void *user = attach->closed_user;

    if (--attach->open_handles > 0 || !attach->closing)
        return;
    destroy(attach);
    if (on_closed)
        on_closed(user);
}

void ep_attach_close(struct ep_attach *attach, void (*on_closed)(void *user), void *user)
{
    attach->closing = true;
    attach->on_closed = on_closed;
    attach->closed_user = user;
    listener_close(attach);
    while (attach->claims)
        claim_abandon(attach->claims, "the server is stopping");
    while (attach->oldest)
        connection_close(attach->oldest);
}

/* ---- open ------------------------------------------------------------------------ */

/*
 * Silent connections must not eat the descriptors that the RPC side, the windows and the store
 * need: no more than half of what the process may open.
 */
static uint32_t bounded_connections(uint32_t asked)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur / 2 >= asked)
        return asked;
    EP_WARN("attach", "fewer connections than asked for: raise the limit of open files",
            EP_U("asked", asked), EP_U("connections", limit.rlim_cur / 2));
    return (uint32_t)(limit.rlim_cur / 2);
}

static bool copy_options(struct ep_attach *attach, const struct ep_attach_options *options)
{
    attach->mode = options->mode ? options->mode : DEFAULT_MODE;
    attach->ticket_ms = options->ticket_ms ? options->ticket_ms : DEFAULT_TICKET_MS;
    attach->hello_timeout_ms = options->hello_timeout_ms ? options->hello_timeout_ms : DEFAULT_HELLO_MS;
    attach->max_connections =
        bounded_connections(options->max_connections ? options->max_connections : DEFAULT_CONNECTIONS);
    attach->is_allowed = options->is_allowed;
    attach->user = options->user;
    attach->token = options->token ? strdup(options->token) : NULL;
    return attach->token || !options->token;
}

ep_status ep_attach_open(uv_loop_t *loop, struct ep_groups *groups, struct ep_node *node,
                         const struct ep_attach_options *options, struct ep_attach **out,
                         struct ep_error *error)
{
    struct ep_error local = EP_ERROR_INIT;
    struct ep_attach *attach = calloc(1, sizeof *attach);

    error = error ? error : &local;
    if (!attach || !copy_options(attach, options)) {
        if (attach)
            destroy(attach);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the attach service");
    }
    attach->loop = loop;
    attach->groups = groups;
    attach->node = node;
    if (listener_open(attach, options->socket, error) != EP_OK) {
        destroy(attach);
        return error->status;
    }
    *out = attach;
    return EP_OK;
}
