#include "wire.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep_clock.h"
#include "nodes.h"

enum {
    AT_ONCE_PERCENT = 40,
    LATE_PERCENT = 3, OFTEN_LATE_PERCENT = 30, /* and the rest soon */
    SOON_NS = 100000, LATE_MS = 4, /* at most */
    NAP_NS = 20000,
};

/* A rank as others find it: by its window.  There as long as somebody names it. */
struct place {
    struct place *next;
    const uint8_t *window;
    uint32_t users;
    uint8_t *beside;
    uint64_t *signals;
};

/* A put, or a signal. */
struct item {
    struct item *next; /* to the same rank, in the order in which they were put */
    uint8_t *to;
    const uint8_t *source; /* NULL: a signal */
    uint8_t *read;         /* the source as it was when it was put; NULL: it is read when it lands */
    uint64_t *signal;
    uint64_t bytes, by, due_ns;
    uint32_t choices; /* of a record, which the put begins with; 0: it begins with something else */
    uint32_t from;
};

struct wire {
    struct wire *next;
    uint32_t rank, ranks;
    struct ep_layout_map map;
    struct ep_device_net *net;
    struct peer {
        uint8_t *window;
        struct place *place;
        struct item *first, **last; /* under way to it */
    } peer[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *places;
static struct wire *wires;
static uint32_t chance = 0x2545f491;
static uint32_t late_ns, late_percent;
static bool running;

/* ---- under way ------------------------------------------------------------------------------------ */

static uint32_t by_chance(void)
{
    chance ^= chance << 13;
    chance ^= chance >> 17;
    chance ^= chance << 5;
    return chance;
}

static uint64_t delay_ns(void)
{
    const uint32_t kind = by_chance() % 100;

    return kind < AT_ONCE_PERCENT ? 0 : by_chance() % (kind < 100 - late_percent ? SOON_NS : late_ns + 1);
}

/* A signal waits for the puts before it. */
static bool may_land(const struct peer *peer, const struct item *item, uint64_t now)
{
    if (item->due_ns > now)
        return false;
    for (const struct item *before = peer->first; item->signal && before != item; before = before->next)
        if (before->source)
            return false;
    return true;
}

/* Whoever takes a record must not believe it: choices that are none lead to nowhere now, to a rank that there is not, to one
 * of another node, to an expert or a place that there is not.  Results stay as they are. */
static void forge(const struct item *item)
{
    struct ep_net_record *record = (struct ep_net_record *)(void *)item->to;
    static const struct ep_net_choice forged[] = {
        { .route = 0x3fff0000, .slot = 1 },
        { .route = -1, .slot = 1 }, /* of another node: below */
        { .route = 0xffff, .slot = 1 },
        { .route = 0, .slot = UINT32_MAX },
        { .route = 0x40000000, .slot = 1u << 24 },
    };
    uint32_t n = by_chance();

    for (uint32_t k = 0; k < item->choices; k++) {
        if (record->choice[k].route != -1)
            continue;
        record->choice[k] = forged[n++ % (sizeof forged / sizeof *forged)];
        if (record->choice[k].route == -1)
            record->choice[k].route = (int32_t)(item->from << 16);
    }
}

/* Under the lock, which only the wire's thread keeps for long. */
static void land(const struct item *item)
{
    if (item->signal) {
        __atomic_fetch_add(item->signal, item->by, __ATOMIC_SEQ_CST);
        return;
    }
    memcpy(item->to, item->read ? item->read : item->source, item->bytes);
    if (item->choices)
        forge(item);
}

static void land_some(struct peer *peer, uint64_t now)
{
    struct item **at = &peer->first;

    while (*at) {
        struct item *item = *at;

        if (!may_land(peer, item, now)) {
            at = &item->next;
            continue;
        }
        land(item);
        *at = item->next;
        if (!item->next)
            peer->last = at;
        free(item->read);
        free(item);
    }
}

static void *run(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        for (struct wire *wire = wires; wire; wire = wire->next)
            for (uint32_t r = 0; r < wire->ranks; r++)
                land_some(&wire->peer[r], ep_clock_ns());
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    }
    return NULL;
}

static void *allocated(void *memory)
{
    if (!memory)
        abort(); /* a test's machine without memory runs no test */
    return memory;
}

static void send(struct peer *to, const struct item *what)
{
    struct item *item = allocated(malloc(sizeof *item));

    *item = *what;
    pthread_mutex_lock(&lock);
    if (item->source && by_chance() % 2)
        item->read = memcpy(allocated(malloc(item->bytes)), item->source, item->bytes);
    item->due_ns = ep_clock_ns() + delay_ns();
    item->next = NULL;
    *to->last = item;
    to->last = &item->next;
    pthread_mutex_unlock(&lock);
}

/* ---- kernels ------------------------------------------------------------------------------------------ */

static struct wire *wire_of(const struct ep_device_net *net)
{
    return (struct wire *)(uintptr_t)net->wire[0];
}

/* LL, partials: as many as rows came of the rank, and no more. */
static void check_partials(const struct wire *wire, uint32_t rank, uint64_t from, uint64_t bytes)
{
    const struct ep_net_map *m = &wire->net->map;
    const uint64_t boxes = (uint64_t)wire->map.limits.ll_banks * wire->ranks * m->ll_box_bytes;
    const uint64_t box = m->ll_box_bytes ? (from - m->ll_in) / m->ll_box_bytes * m->ll_box_bytes : 0;
    uint32_t rows;

    if (from < m->ll_in || from >= m->ll_in + boxes)
        return;
    memcpy(&rows, wire->peer[wire->rank].place->beside + m->ll_in + box + m->ll_middle, sizeof rows);
    if (bytes > m->ll_rows + (uint64_t)rows * (m->ll_head_bytes + wire->map.combine_row_bytes)) {
        fprintf(stderr, "rank %u puts %llu bytes of partials to rank %u, of which %u rows came\n", wire->rank,
                (unsigned long long)bytes, rank, rows);
        abort();
    }
}

void wire_put(const struct ep_device_net *net, uint32_t rank, uint64_t to, uint64_t from, uint64_t bytes)
{
    struct wire *wire = wire_of(net);
    struct peer *peer = &wire->peer[rank];
    const struct ep_net_map *boxes = &net->map;
    const bool records = to >= boxes->in && to < boxes->in + boxes->ins * boxes->box_bytes;

    check_partials(wire, rank, from, bytes);
    send(peer, &(struct item){ .to = peer->place->beside + to, .source = wire->peer[wire->rank].place->beside + from,
                               .bytes = bytes, .choices = records ? wire->map.limits.top_k : 0, .from = wire->rank });
}

void wire_raise(const struct ep_device_net *net, uint32_t rank, uint32_t signal, uint64_t by)
{
    struct peer *peer = &wire_of(net)->peer[rank];

    send(peer, &(struct item){ .signal = &peer->place->signals[signal], .by = by });
}

const uint64_t *wire_signal(const struct ep_device_net *net, uint32_t signal)
{
    const struct wire *wire = wire_of(net);

    return &wire->peer[wire->rank].place->signals[signal];
}

/* ---- ends ------------------------------------------------------------------------------------------------ */

/* Under the lock. */
static struct place *take_place(const uint8_t *window, uint32_t ranks, uint64_t beside)
{
    struct place *place = places;

    while (place && place->window != window)
        place = place->next;
    if (!place) {
        place = allocated(calloc(1, sizeof *place));
        place->window = window;
        place->beside = allocated(aligned_alloc(4096, (beside + 4095) / 4096 * 4096));
        memset(place->beside, 0, beside);
        place->signals = allocated(calloc(ep_net_all_signals(ranks), sizeof *place->signals));
        place->next = places;
        places = place;
    }
    place->users++;
    return place;
}

static void leave_place(struct place *place)
{
    struct place **at = &places;

    if (--place->users)
        return;
    while (*at != place)
        at = &(*at)->next;
    *at = place->next;
    free(place->beside);
    free(place->signals);
    free(place);
}

static void start(void)
{
    pthread_t thread;

    const char *late = getenv("EP_CUDA_WIRE_LATE_MS");

    if (running)
        return;
    late_ns = (late ? (uint32_t)strtoul(late, NULL, 10) : LATE_MS) * 1000000u;
    late_percent = late ? OFTEN_LATE_PERCENT : LATE_PERCENT;
    if (pthread_create(&thread, NULL, run, NULL))
        abort();
    pthread_detach(thread);
    running = true;
}

/* All that the nodes say, and the memory behind it. */
static ep_status describe(struct wire *wire, const struct ep_layout_map *map, struct ep_error *error)
{
    struct ep_device_net *net = allocated(calloc(1, sizeof *net));
    uint32_t *node = allocated(calloc(wire->ranks, sizeof *node));
    ep_status status;

    for (uint32_t r = 0; r < wire->ranks; r++)
        node[r] = wire_node_of(r, wire->ranks);
    status = ep_net_describe(map, node, wire->rank, net, error);
    free(node);
    if (status == EP_OK) {
        wire->net = allocated(calloc(1, net->tables.bytes));
        *wire->net = *net;
    }
    free(net);
    return status;
}

static bool is_far(const struct wire *wire, uint32_t rank)
{
    return wire->net->far[rank / 32] >> rank % 32 & 1;
}

/* Under the lock: its peers, and where they are. */
static void join(struct wire *wire, uint8_t *const *windows)
{
    for (uint32_t r = 0; r < wire->ranks; r++) {
        struct peer *peer = &wire->peer[r];

        peer->window = windows[r];
        peer->place = take_place(windows[r], wire->ranks, wire->net->map.bytes);
        peer->last = &peer->first;
    }
    for (uint32_t r = 0; r < wire->ranks; r++) {
        wire->net->windows[r] = is_far(wire, r) ? 0 : (uint64_t)(uintptr_t)windows[r];
        wire->net->at[r] = is_far(wire, r) ? 0 : (uint64_t)(uintptr_t)wire->peer[r].place->beside;
    }
    wire->next = wires;
    wires = wire;
}

ep_status wire_open(uint8_t *const *windows, uint32_t rank, const struct ep_layout_map *map, struct wire **out,
                    struct ep_error *error)
{
    const uint32_t ranks = map->limits.ranks;
    struct wire *wire = allocated(calloc(1, sizeof *wire + ranks * sizeof *wire->peer));

    wire->rank = rank;
    wire->ranks = ranks;
    wire->map = *map;
    if (describe(wire, map, error) != EP_OK) {
        free(wire);
        return error->status;
    }
    wire->net->wire[0] = (uint64_t)(uintptr_t)wire;
    pthread_mutex_lock(&lock);
    start();
    join(wire, windows);
    pthread_mutex_unlock(&lock);
    *out = wire;
    return EP_OK;
}

struct ep_device_net *wire_net(const struct wire *wire)
{
    return wire->net;
}

static bool is_under_way(const struct wire *wire)
{
    const uint8_t *window = wire->peer[wire->rank].window;
    bool found = false;

    pthread_mutex_lock(&lock);
    for (const struct wire *from = wires; from; from = from->next)
        for (uint32_t r = 0; r < from->ranks; r++)
            found |= from->peer[r].first && (from == wire || from->peer[r].window == window);
    pthread_mutex_unlock(&lock);
    return found;
}

/* Under the lock. */
static void leave(struct wire *wire)
{
    struct wire **at = &wires;

    while (*at != wire)
        at = &(*at)->next;
    *at = wire->next;
    for (uint32_t r = 0; r < wire->ranks; r++)
        leave_place(wire->peer[r].place);
}

void wire_close(struct wire *wire)
{
    if (!wire)
        return;
    while (is_under_way(wire))
        nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    pthread_mutex_lock(&lock);
    leave(wire);
    pthread_mutex_unlock(&lock);
    free(wire->net);
    free(wire);
}
