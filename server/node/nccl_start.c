/* NCCL's first call and first communicator on each GPU, before anything of this process waits there: see nccl.h. */
#include <stdlib.h>

#include "crew.h"
#include "nccl_private.h"

struct start {
    struct hand hand;
    uint32_t device;
    struct ep_error error;
};

struct starts {
    struct crew crew;
    const struct ep_cuda_api *api;
    uint32_t n;
    struct start at[];
};

static void end_starts(struct crew *crew)
{
    crew_fini(crew);
    free(crew);
}

/* Of one rank: its id is of no use to anybody else. */
static ep_status make_and_leave(struct ep_error *error)
{
    struct nccl_card card;
    void *comm = NULL;
    ep_status status = nccl_invite(&card, error);

    if (!status)
        status = nccl_comm_init(card.id, 1, 0, &comm, error);
    return status ? status : nccl_comm_abort(comm, error);
}

static void start(struct hand *hand)
{
    struct start *at = (struct start *)hand;
    const struct starts *starts = (struct starts *)hand->crew;

    if (!starts->api->nccl_bind(at->device, &at->error))
        (void)make_and_leave(&at->error);
}

static struct starts *make_starts(const struct ep_cuda_api *api, const uint32_t *devices, uint32_t n)
{
    struct starts *starts = calloc(1, sizeof *starts + n * sizeof *starts->at);

    if (!starts)
        return NULL;
    crew_init(&starts->crew, end_starts);
    starts->api = api;
    starts->n = n;
    for (uint32_t i = 0; i < n; i++)
        starts->at[i] = (struct start){ .device = devices[i], .error = EP_ERROR_INIT };
    return starts;
}

static ep_status first_error(const struct starts *starts, struct ep_error *error)
{
    for (uint32_t i = 0; i < starts->n; i++) {
        const struct start *at = &starts->at[i];

        if (at->error.status)
            return ep_error_set(error, at->error.status, "device %u: %.340s", at->device, at->error.text);
    }
    return EP_OK;
}

ep_status nccl_start(const struct ep_cuda_api *api, const uint32_t *devices, uint32_t n, uint32_t timeout_ms,
                     struct ep_error *error)
{
    struct starts *starts = make_starts(api, devices, n);
    ep_status status;

    if (!starts)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to start NCCL");
    crew_expect(&starts->crew, n);
    for (uint32_t i = 0; i < n; i++)
        if (!crew_set_to_work(&starts->crew, &starts->at[i].hand, start))
            (void)ep_error_set(&starts->at[i].error, EP_RESOURCE_EXHAUSTED, "no thread for NCCL");
    if (!crew_await(&starts->crew, timeout_ms))
        return ep_error_set(error, EP_DEADLINE_EXCEEDED, "it made no communicator within %u ms", timeout_ms);
    status = first_error(starts, error);
    end_starts(&starts->crew);
    return status;
}
