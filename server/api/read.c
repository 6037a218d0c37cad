/*
 * Reads: they wait until this server knows what was acknowledged anywhere when they were asked for.  Where it does not come to
 * know that soon, what it knows is told, with why that may be older: who looks on while the store is away wants it as well.
 */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"

#define READ_MS 1000u /* or half of what the caller waits for, where that is less */

struct read {
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it has ended */
    api_answer_fn answer;
    bool counters;         /* they are to be waited for yet */
    struct ep_error error; /* why what is known may be older */
    char name[];
};

uint32_t api_read_ms(const struct ep_rpc_call *call)
{
    const int64_t half = ep_rpc_call_remaining_ms(call) / 2;

    return half < 1 ? 1 : half < READ_MS ? (uint32_t)half : READ_MS;
}

static void on_time(const struct ep_error *error, void *user)
{
    struct read *read = user;

    if (!read->error.status)
        read->error = *error;
    if (read->call && read->counters) { /* with the call the API may have gone */
        read->counters = false;
        ep_groups_before_stats(read->api->options.groups, read->name, api_read_ms(read->call), on_time, read);
        return;
    }
    if (read->call) {
        ep_rpc_call_set_user(read->call, NULL);
        read->answer(read->api, read->call, read->name, read->error.text);
    }
    free(read);
}

static void read_later(struct ep_api *api, struct ep_rpc_call *call, const char *name, bool counters, api_answer_fn answer)
{
    const size_t n = strlen(name) + 1;
    struct read *read = malloc(sizeof *read + n);
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };

    api->requests++;
    if (!read) {
        ep_rpc_fail(call, &error);
        return;
    }
    *read = (struct read){ .api = api, .call = call, .answer = answer, .counters = counters, .error = EP_ERROR_INIT };
    memcpy(read->name, name, n);
    ep_rpc_call_set_user(call, read);
    ep_groups_before_read(api->options.groups, api_read_ms(call), on_time, read);
}

void api_read(struct ep_api *api, struct ep_rpc_call *call, const char *name, api_answer_fn answer)
{
    read_later(api, call, name, false, answer);
}

void api_read_counted(struct ep_api *api, struct ep_rpc_call *call, const char *name, api_answer_fn answer)
{
    read_later(api, call, name, true, answer);
}

void api_read_closed(struct ep_rpc_call *call, void *user)
{
    struct read *read = ep_rpc_call_user(call);

    (void)user;
    if (read)
        read->call = NULL;
}
