/* Ranks that stop, die or leave, strangers, peers that never come. */
#include "gin_tests.h"
#include "strangers.h"

static const struct mix mixed = { .puts = 48, .bytes = 64 << 10 };

static uint32_t last_of(const struct player *player)
{
    return player->crew->ranks - 1;
}

/* ---- a rank that is stopped ---------------------------------------------------------------------- */

enum { STOPS, LET_GO };                       /* words of a member */
enum { HEAPED = 400, HEAP_BYTES = 64 << 10 }; /* more than sockets and rings take */

/* `x` is an exchange that is not used otherwise: nobody looks at what arrives. */
static ep_status heap_up(struct exchange *x, uint32_t stopped, struct ep_error *error)
{
    const struct plugin_put put = { .source = x->source_region.gin_handle,
                                    .target = x->target_region.gin_handle,
                                    .to = x->comm->player->crew->rank * x->mix.slot_bytes,
                                    .bytes = HEAP_BYTES,
                                    .rank = stopped };
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < HEAPED && status == EP_OK; i++)
        status = comm_post(x->comm, x->context, &put, NULL, error);
    return status;
}

/* Puts to the one that is stopped wait; what the others do among themselves does not. */
static ep_status go_on_without(struct exchange x[2], uint32_t stopped, struct ep_error *error)
{
    const struct crew *crew = x->comm->player->crew;
    const uint32_t others = EXCHANGE_EVERYBODY & ~(1u << stopped);
    uint32_t turn = 0;
    ep_status status;

    while (!__atomic_load_n(&crew->shared->member[stopped].words[STOPS], __ATOMIC_RELAXED))
        if (!crew_go_on(crew, &turn))
            return crew_late(crew, error, "rank %u has not stopped itself", stopped);
    status = heap_up(&x[1], stopped, error);
    if (status == EP_OK)
        status = exchange_send(x, stopped, error);
    return status == EP_OK ? exchange_rounds(x, 6, others, others, error) : status;
}

static ep_status stop(struct exchange *x, struct ep_error *error)
{
    struct crew *crew = x->comm->player->crew;
    ep_status status = EP_OK;

    __atomic_store_n(&crew_me(crew)->words[STOPS], 1, __ATOMIC_RELAXED);
    crew_stop(crew);
    for (uint32_t r = 0; r + 1 < crew->ranks && status == EP_OK; r++)
        status = exchange_send(x, r, error);
    return status;
}

/* The last rank stops. When all others have come through their rounds they let it go on, and what waits is done. */
static ep_status stop_for_a_while(struct exchange x[2], struct ep_error *error)
{
    struct crew *crew = x->comm->player->crew;
    const uint32_t last = crew->ranks - 1, me = crew->rank;
    const uint32_t peers = me == last ? EXCHANGE_EVERYBODY & ~(1u << last) : 1u << last;
    ep_status status = me == last ? stop(x, error) : go_on_without(x, last, error);

    if (status == EP_OK && me != last &&
        __atomic_add_fetch(&crew->shared->member[last].words[LET_GO], 1, __ATOMIC_RELAXED) == last)
        crew_resume(crew);
    if (status == EP_OK)
        status = exchange_receive(x, peers, error);
    return status == EP_OK ? exchange_settle(x, peers, error) : status;
}

ep_status gin_case_stopped(struct player *player, struct ep_error *error)
{
    struct exchange x[2];
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    for (uint32_t i = 0; i < 2 && status == EP_OK; i++)
        status = exchange_open(comm, 0, i, &mixed, &x[i], error);
    if (status == EP_OK)
        status = exchange_rounds(x, 2, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = stop_for_a_while(x, error);
    if (status == EP_OK)
        status = exchange_rounds(x, 2, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    for (uint32_t i = 0; i < 2 && status == EP_OK; i++)
        status = exchange_close(&x[i], error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- a rank that dies or leaves ------------------------------------------------------------------ */

/* On a communicator of all, and on one without the rank that goes. */
struct departure {
    struct comm *all, *rest;
    struct exchange x_all, x_rest;
};

static ep_status open_departure(struct player *player, struct departure *d, struct ep_error *error)
{
    const struct comm_options rest = { .ranks = last_of(player) };
    ep_status status = gin_open(player, &d->all, error);

    if (status == EP_OK)
        status = comm_open(player, &rest, &d->rest, error);
    if (status == EP_OK)
        status = exchange_open(d->all, 0, 0, &mixed, &d->x_all, error);
    if (status == EP_OK && d->rest)
        status = exchange_open(d->rest, 0, 0, &mixed, &d->x_rest, error);
    return status == EP_OK ? exchange_rounds(&d->x_all, 2, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error) : status;
}

/* In the middle: its puts are with the plugin, and others' are on their way to it. */
static ep_status depart_dead(struct player *player, struct departure *d, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < d->all->ranks && status == EP_OK; r++)
        status = exchange_send(&d->x_all, r, error);
    if (status == EP_OK)
        crew_die(player->crew);
    return status;
}

static ep_status check_rest_unharmed(struct departure *d, struct ep_error *error)
{
    bool failed;
    ep_status status = comm_query(d->rest, &failed, error);

    if (status == EP_OK && failed)
        return ep_error_set(error, EP_VERIFY_FAILED,
                            "queryLastError tells of an error in a communicator that the rank "
                            "that is gone had no part in");
    return status;
}

/* Puts to the one that is gone are done, also those that begin now; the others' data is right as before. */
static ep_status survive(struct departure *d, uint32_t gone, struct ep_error *error)
{
    const uint32_t others = EXCHANGE_EVERYBODY & ~(1u << gone);
    ep_status status = exchange_rounds(&d->x_all, 6, (1u << d->all->ranks) - 1, others, error);

    if (status == EP_OK)
        status = exchange_rounds(&d->x_rest, 4, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = comm_drain(d->all, gone, error);
    if (status == EP_OK)
        status = exchange_rounds(&d->x_all, 3, (1u << d->all->ranks) - 1, others, error);
    if (status == EP_OK)
        status = comm_drain(d->all, PLAYER_ALL, error);
    return status == EP_OK ? check_rest_unharmed(d, error) : status;
}

static ep_status close_departure(struct departure *d, struct ep_error *error)
{
    ep_status status = exchange_close(&d->x_all, error);

    if (status == EP_OK && d->rest)
        status = exchange_close(&d->x_rest, error);
    if (status == EP_OK)
        status = comm_close(d->rest, error);
    return status == EP_OK ? comm_close(d->all, error) : status;
}

ep_status gin_case_killed(struct player *player, struct ep_error *error)
{
    const uint32_t last = last_of(player);
    struct departure d = { 0 };
    ep_status status = open_departure(player, &d, error);

    if (status == EP_OK)
        status = player->crew->rank == last ? depart_dead(player, &d, error) : survive(&d, last, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    return status == EP_OK ? close_departure(&d, error) : status;
}

/* The last rank closes its communicator, at peace, while the others go on putting to it. */
ep_status gin_case_closed(struct player *player, struct ep_error *error)
{
    const uint32_t last = last_of(player);
    struct departure d = { 0 };
    ep_status status = open_departure(player, &d, error);

    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK && player->crew->rank == last)
        status = close_departure(&d, error);
    else if (status == EP_OK)
        status = survive(&d, last, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    return status == EP_OK && player->crew->rank != last ? close_departure(&d, error) : status;
}

/* ---- closing with puts under way ----------------------------------------------------------------- */

/* As ncclCommAbort does: nobody has waited for anything. */
ep_status gin_case_closed_busy(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 200, .bytes = 128 << 10, .slot_bytes = 2 << 20 };
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &mix, &x, error);
    for (uint32_t r = 0; status == EP_OK && r < comm->ranks; r++)
        status = exchange_send(&x, r, error);
    if (status == EP_OK)
        status = comm_close(comm, error);
    if (status == EP_OK)
        exchange_abandon(player, &x);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    return status == EP_OK ? gin_case_signal_alone(player, error) : status;
}

/* ---- strangers ----------------------------------------------------------------------------------- */

struct visit {
    struct strangers strangers;
    uint32_t ports;
};

static ep_status let_strangers_in(struct player *player, void *user, struct ep_error *error)
{
    struct visit *visit = user;

    (void)error;
    visit->ports = strangers_come(&visit->strangers, player->setting->seed);
    return EP_OK;
}

/* While all connect, and afterwards for as long as the communicator is there. */
ep_status gin_case_strangers(struct player *player, struct ep_error *error)
{
    struct visit visit = { 0 };
    const struct comm_options options = { .before_connect = let_strangers_in, .user = &visit };
    struct exchange x;
    struct comm *comm;
    ep_status status = comm_open(player, &options, &comm, error);

    if (status == EP_OK && visit.ports == 0)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the plugin listens on no TCP port");
    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &mixed, &x, error);
    for (uint32_t i = 0; i < 3 && status == EP_OK; i++) {
        strangers_come(&visit.strangers, player->setting->seed + i);
        status = exchange_rounds(&x, 3, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    }
    strangers_go(&visit.strangers);
    if (status == EP_OK)
        status = exchange_rounds(&x, 3, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- peers that never come ----------------------------------------------------------------------- */

static ep_status connect_in_vain(struct player *player, void *listener, struct ep_error *error)
{
    struct ep_error refused = EP_ERROR_INIT;
    void *plugin_comm;

    if (comm_connect(player, player->crew->ranks, listener, &plugin_comm, &refused) == EP_OK)
        return ep_error_set(error, EP_VERIFY_FAILED, "connect says that all ranks are there: the last never came");
    crew_me(player->crew)->said[0] = '\0'; /* it had something to warn of */
    return player->plugin.close_listen(listener) == NCCL_SUCCESS
               ? EP_OK
               : ep_error_set(error, EP_VERIFY_FAILED, "closeListen failed after a connect that did");
}

ep_status gin_case_never_connects(struct player *player, struct ep_error *error)
{
    void *listener;
    ep_status status = comm_listen(player, &listener, error);

    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK && player->crew->rank != last_of(player))
        status = connect_in_vain(player, listener, error);
    else if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK && player->crew->rank != last_of(player))
        return crew_barrier(player->crew, error);
    return status == EP_OK ? player_said(player, "closeListen", player->plugin.close_listen(listener), error) : status;
}

ep_status gin_case_died_before(struct player *player, struct ep_error *error)
{
    void *listener;
    ep_status status = comm_listen(player, &listener, error);

    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK && player->crew->rank == last_of(player))
        crew_die(player->crew);
    return status == EP_OK ? connect_in_vain(player, listener, error) : status;
}
