#include "wire.h"

#include <pthread.h>
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
    uint64_t signals[EP_NET_ALL_SIGNALS];
};

struct wire {
    uint32_t rank, ranks;
    uint8_t *window[EP_DEVICE_MAX_RANKS];
    struct place *place[EP_DEVICE_MAX_RANKS];
    struct ep_device_net *net;
    uint64_t ll;
};

/* A put, or a signal. */
struct item {
    struct item *next; /* in the order in which they were put */
    const struct wire *from;
    uint32_t rank; /* to whom */
    uint8_t *to;
    const uint8_t *source; /* NULL: a signal */
    uint8_t *read;         /* the source as it was when it was put; NULL: it is read when it lands */
    uint64_t *signal;
    uint64_t bytes, by, due_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *places;
static struct item *first, **last = &first;
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

    return kind < AT_ONCE_PERCENT ? 0 : by_chance() % (kind < 100 - late_percent ? SOON_NS : late_ns);
}

/* A signal waits for the puts before it. */
static bool may_land(const struct item *item, uint64_t now)
{
    if (item->due_ns > now)
        return false;
    for (const struct item *before = first; item->signal && before != item; before = before->next)
        if (before->source && before->from == item->from && before->rank == item->rank)
            return false;
    return true;
}

/* Under the lock, which only the wire's thread keeps for long. */
static void land(const struct item *item)
{
    if (item->signal)
        __atomic_fetch_add(item->signal, item->by, __ATOMIC_SEQ_CST);
    else
        memcpy(item->to, item->read ? item->read : item->source, item->bytes);
}

static void land_some(void)
{
    const uint64_t now = ep_clock_ns();
    struct item **at = &first;

    while (*at) {
        struct item *item = *at;

        if (!may_land(item, now)) {
            at = &item->next;
            continue;
        }
        land(item);
        *at = item->next;
        if (!item->next)
            last = at;
        free(item->read);
        free(item);
    }
}

static void *run(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        land_some();
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

static void send(const struct item *what)
{
    struct item *item = allocated(malloc(sizeof *item));

    *item = *what;
    pthread_mutex_lock(&lock);
    if (item->source && by_chance() % 2)
        item->read = memcpy(allocated(malloc(item->bytes)), item->source, item->bytes);
    item->due_ns = ep_clock_ns() + delay_ns();
    item->next = NULL;
    *last = item;
    last = &item->next;
    pthread_mutex_unlock(&lock);
}

/* ---- kernels ------------------------------------------------------------------------------------------ */

static const struct wire *wire_of(const struct ep_device_net *net)
{
    return (const struct wire *)(uintptr_t)net->wire[0];
}

void wire_put(const struct ep_device_net *net, uint32_t rank, uint64_t there, uint64_t to, uint64_t from, uint64_t bytes)
{
    const struct wire *wire = wire_of(net);

    send(&(struct item){ .from = wire, .rank = rank,
                         .to = (there == net->window ? wire->window[rank] : wire->place[rank]->beside) + to,
                         .source = wire->place[wire->rank]->beside + from, .bytes = bytes });
}

void wire_raise(const struct ep_device_net *net, uint32_t rank, uint32_t signal, uint64_t by)
{
    const struct wire *wire = wire_of(net);

    send(&(struct item){ .from = wire, .rank = rank, .signal = &wire->place[rank]->signals[signal], .by = by });
}

const uint64_t *wire_signal(const struct ep_device_net *net, uint32_t signal)
{
    const struct wire *wire = wire_of(net);

    return &wire->place[wire->rank]->signals[signal];
}

/* ---- ends ------------------------------------------------------------------------------------------------ */

bool wire_is_there(uint32_t ranks)
{
    return wire_node_of(ranks - 1, ranks) > 0;
}

/* Under the lock. */
static struct place *take_place(const uint8_t *window, uint64_t beside)
{
    struct place *place = places;

    while (place && place->window != window)
        place = place->next;
    if (!place) {
        place = allocated(calloc(1, sizeof *place));
        place->window = window;
        place->beside = allocated(aligned_alloc(4096, (beside + 4095) / 4096 * 4096));
        memset(place->beside, 0, beside);
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

struct wire *wire_open(uint8_t *const *windows, uint32_t rank, uint32_t ranks, const struct ep_layout_map *map,
                       struct ep_device_net **net)
{
    struct wire *wire = allocated(calloc(1, sizeof *wire));
    struct ep_device_net described;
    uint32_t node[EP_DEVICE_MAX_RANKS];

    for (uint32_t r = 0; r < ranks; r++)
        node[r] = wire_node_of(r, ranks);
    ep_net_describe(map, node, rank, &described);
    wire->net = allocated(calloc(1, described.bytes));
    *wire->net = described;
    wire->net->wire[0] = (uint64_t)(uintptr_t)wire;
    wire->net->window = 1; /* two names */
    wire->net->beside = 2;
    wire->rank = rank;
    wire->ranks = ranks;
    wire->ll = map->ll;
    pthread_mutex_lock(&lock);
    start();
    for (uint32_t r = 0; r < ranks; r++) {
        wire->window[r] = windows[r];
        wire->place[r] = take_place(windows[r], described.map.bytes);
        if (!(described.far >> r & 1))
            wire->net->at[r] = (uint64_t)(uintptr_t)wire->place[r]->beside;
    }
    pthread_mutex_unlock(&lock);
    *net = wire->net;
    return wire;
}

static bool is_under_way(const struct wire *wire)
{
    bool found = false;

    pthread_mutex_lock(&lock);
    for (const struct item *item = first; item; item = item->next)
        found |= item->from == wire || item->from->window[item->rank] == wire->window[wire->rank];
    pthread_mutex_unlock(&lock);
    return found;
}

void wire_close(struct wire *wire)
{
    if (!wire)
        return;
    while (is_under_way(wire))
        nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    pthread_mutex_lock(&lock);
    for (uint32_t r = 0; r < wire->ranks; r++)
        leave_place(wire->place[r]);
    pthread_mutex_unlock(&lock);
    free(wire->net);
    free(wire);
}

uint8_t *wire_outbox(struct wire *wire)
{
    return wire->place[wire->rank]->beside - wire->ll;
}
