#include "balance.h"

#include <stdlib.h>
#include <string.h>

#define NOWHERE UINT32_MAX

static void *allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);

    if (!memory)
        abort(); /* as in arena.c */
    return memory;
}

/* ---- how many homes each expert gets ------------------------------------------------------ */

/* A heap of experts, the one with the most load for each of its homes on top. */
struct heap {
    const uint64_t *load;
    uint32_t *homes; /* [experts] */
    uint32_t *list;
    uint32_t n;
};

static double share(const struct heap *heap, uint32_t expert)
{
    return (double)heap->load[expert] / heap->homes[expert];
}

static bool is_hotter(const struct heap *heap, uint32_t a, uint32_t b)
{
    const double x = share(heap, a), y = share(heap, b);

    return x > y || (!(x < y) && a < b);
}

static void sink(struct heap *heap, uint32_t at)
{
    for (;;) {
        uint32_t top = at, left = 2 * at + 1, right = left + 1, expert = heap->list[at];

        if (left < heap->n && is_hotter(heap, heap->list[left], heap->list[top]))
            top = left;
        if (right < heap->n && is_hotter(heap, heap->list[right], heap->list[top]))
            top = right;
        if (top == at)
            return;
        heap->list[at] = heap->list[top];
        heap->list[top] = expert;
        at = top;
    }
}

/* One each, then always one more for the hottest, until it has one on every rank. */
static void replicate(const struct ep_balance *b, uint32_t *homes)
{
    struct heap heap = { .load = b->load, .homes = homes, .n = b->experts };

    heap.list = allocate(b->experts, sizeof *heap.list);
    for (uint32_t e = 0; e < b->experts; e++) {
        heap.list[e] = e;
        homes[e] = 1;
    }
    for (uint32_t i = b->experts / 2; b->ranks > 1 && i-- > 0;)
        sink(&heap, i);
    for (uint32_t k = 0; k < b->redundant; k++) {
        if (++homes[heap.list[0]] == b->ranks)
            heap.list[0] = heap.list[--heap.n];
        sink(&heap, 0);
    }
    free(heap.list);
}

/* ---- into bins: nodes, or the ranks of a node ------------------------------------------------ */

struct copy {
    uint32_t expert;
    double share;
    uint32_t node, rank;
};

struct bin {
    uint32_t slots, used;
    uint32_t most; /* copies of one expert */
    uint32_t own;  /* of the expert that is being placed */
    double load;
};

/* The heaviest first; so the copies of an expert are neighbours. */
static int by_share(const void *x, const void *y)
{
    const struct copy *a = x, *b = y;

    if (a->share < b->share || b->share < a->share)
        return a->share < b->share ? 1 : -1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

/* Copies of one expert are placed one after the other: bins count those of the expert whose turn it is. */
struct packing {
    const struct copy *copies;
    uint32_t n;
    struct bin *bins;
    uint32_t n_bins;
    uint32_t *bin; /* [n] of each copy */
    uint64_t steps;
    /* Of make_room(): the bin with room, how many copies it has of each expert, and who may have to go there. */
    uint32_t experts, with_room;
    uint32_t *has;    /* [experts]; NULL: no room was to be made yet */
    uint32_t *before; /* [n] of those that may, the one before; NOWHERE: none */
    uint32_t last, linked;
};

/* Bins may be of different sizes: what counts is the load for each slot. */
static bool is_emptier(const struct bin *a, const struct bin *b)
{
    return a->load * b->slots < b->load * a->slots;
}

static bool has_room(const struct bin *bin)
{
    return bin->used < bin->slots;
}

static uint32_t emptiest(struct packing *p)
{
    uint32_t found = NOWHERE;

    p->steps += p->n_bins;
    for (uint32_t bin = 0; bin < p->n_bins; bin++)
        if (has_room(&p->bins[bin]) && p->bins[bin].own < p->bins[bin].most &&
            (found == NOWHERE || is_emptier(&p->bins[bin], &p->bins[found])))
            found = bin;
    return found;
}

static void put(struct packing *p, uint32_t i, uint32_t bin)
{
    p->bin[i] = bin;
    p->bins[bin].used++;
    p->bins[bin].load += p->copies[i].share;
    if (p->has && bin == p->with_room)
        p->has[p->copies[i].expert]++;
}

static void take(struct packing *p, uint32_t i)
{
    p->bins[p->bin[i]].used--;
    p->bins[p->bin[i]].load -= p->copies[i].share;
    p->bin[i] = NOWHERE;
}

/* ---- where there is room for other experts only --------------------------------------------------- */

static void link_up_to(struct packing *p, uint32_t i)
{
    for (; p->linked < i; p->linked++, p->steps++) {
        p->before[p->linked] = p->last;
        p->last = p->linked;
    }
}

/* The first bin that has room; no bin that is full comes to have room. */
static void find_room(struct packing *p, uint32_t i)
{
    const uint32_t was = p->with_room;

    for (; !has_room(&p->bins[p->with_room]); p->steps++)
        p->with_room++;
    if (p->has && p->with_room == was)
        return;
    if (!p->has) {
        p->has = allocate(p->experts, sizeof *p->has);
        p->before = allocate(p->n, sizeof *p->before);
    }
    memset(p->has, 0, p->experts * sizeof *p->has);
    for (uint32_t j = 0; j < i; j++, p->steps++)
        p->has[p->copies[j].expert] += p->bin[j] == p->with_room;
    p->last = NOWHERE;
    p->linked = 0;
}

static bool may_go(const struct packing *p, uint32_t i)
{
    return p->bin[i] != p->with_room && p->has[p->copies[i].expert] < p->bins[p->with_room].most;
}

/*
 * All bins with room have the expert as often as they may.  Another copy, the lightest so far, goes there from
 * a bin that may have this one.  There is one: were all in that bin in the other as often as they may be, the other,
 * which has this expert too, would be larger by more than the one slot for each rank that sizes differ by.
 *
 * Who may not go there now may not later either, as long as that bin has room: it is not looked at again.
 */
static uint32_t make_room(struct packing *p, uint32_t i)
{
    find_room(p, i);
    link_up_to(p, i);
    for (uint32_t j, *link = &p->last; (j = *link) != NOWHERE; p->steps++) {
        const uint32_t from = p->bin[j];

        if (!may_go(p, j)) {
            *link = p->before[j];
        } else if (p->bins[from].own < p->bins[from].most) {
            take(p, j);
            put(p, j, p->with_room);
            return from;
        } else {
            link = &p->before[j];
        }
    }
    return NOWHERE;
}

static bool begins_expert(const struct packing *p, uint32_t i)
{
    return i && p->copies[i].expert != p->copies[i - 1].expert;
}

static void pack(struct packing *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        p->bin[i] = NOWHERE;
    for (uint32_t i = 0, first = 0; i < p->n; i++) {
        uint32_t bin;

        for (; begins_expert(p, i) && first < i; first++)
            p->bins[p->bin[first]].own = 0;
        bin = emptiest(p);
        if (bin == NOWHERE)
            bin = make_room(p, i);
        put(p, i, bin);
        p->bins[bin].own++;
    }
    free(p->has);
    free(p->before);
}

/* ---- nodes, then ranks -------------------------------------------------------------------------- */

struct work {
    const struct ep_balance *b;
    struct copy *copies;
    uint32_t n;
    uint32_t nodes;
    uint64_t steps;
};

static uint32_t node_of(const struct ep_balance *b, uint32_t rank)
{
    return b->node ? b->node[rank] : 0;
}

static uint32_t slots_of(const struct work *w, uint32_t rank)
{
    return w->n / w->b->ranks + (rank < w->n % w->b->ranks);
}

static void pack_nodes(struct work *w)
{
    struct packing p = { .copies = w->copies, .n = w->n, .n_bins = w->nodes, .experts = w->b->experts };

    p.bins = allocate(w->nodes, sizeof *p.bins);
    p.bin = allocate(w->n, sizeof *p.bin);
    for (uint32_t r = 0; r < w->b->ranks; r++) {
        struct bin *bin = &p.bins[node_of(w->b, r)];

        bin->slots += slots_of(w, r);
        bin->most += slots_of(w, r) > 0;
    }
    pack(&p);
    w->steps += p.steps;
    for (uint32_t i = 0; i < w->n; i++)
        w->copies[i].node = p.bin[i];
    free(p.bins);
    free(p.bin);
}

/* The copies of each node together, in their order; first: [nodes + 1] where each node's begin. */
static void sort_by_node(struct work *w, uint32_t *first)
{
    struct copy *sorted = allocate(w->n, sizeof *sorted);
    uint32_t *next = allocate(w->nodes, sizeof *next);

    for (uint32_t i = 0; i < w->n; i++)
        first[w->copies[i].node + 1]++;
    for (uint32_t node = 0; node < w->nodes; node++)
        first[node + 1] += next[node] = first[node];
    for (uint32_t i = 0; i < w->n; i++)
        sorted[next[w->copies[i].node]++] = w->copies[i];
    free(next);
    free(w->copies);
    w->copies = sorted;
}

static uint32_t ranks_of(const struct work *w, uint32_t node, uint32_t *ranks, struct bin *bins)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < w->b->ranks; r++)
        if (node_of(w->b, r) == node) {
            bins[n] = (struct bin){ .slots = slots_of(w, r), .most = 1 };
            ranks[n++] = r;
        }
    return n;
}

static void pack_ranks(struct work *w, uint32_t node, struct copy *own, uint32_t n)
{
    struct packing p = { .copies = own, .n = n, .experts = w->b->experts };
    uint32_t *ranks = allocate(w->b->ranks, sizeof *ranks);

    p.bins = allocate(w->b->ranks, sizeof *p.bins);
    p.bin = allocate(n, sizeof *p.bin);
    p.n_bins = ranks_of(w, node, ranks, p.bins);
    pack(&p);
    w->steps += p.steps;
    for (uint32_t i = 0; i < n; i++)
        own[i].rank = ranks[p.bin[i]];
    free(p.bins);
    free(p.bin);
    free(ranks);
}

static void pack_all_ranks(struct work *w)
{
    uint32_t *first = allocate(w->nodes + 1, sizeof *first);

    sort_by_node(w, first);
    for (uint32_t node = 0; node < w->nodes; node++)
        pack_ranks(w, node, w->copies + first[node], first[node + 1] - first[node]);
    free(first);
}

static void fill_copies(struct work *w)
{
    uint32_t *homes = allocate(w->b->experts, sizeof *homes), n = 0;

    replicate(w->b, homes);
    for (uint32_t e = 0; e < w->b->experts; e++)
        for (uint32_t k = 0; k < homes[e]; k++)
            w->copies[n++] = (struct copy){ .expert = e, .share = (double)w->b->load[e] / homes[e] };
    free(homes);
    qsort(w->copies, w->n, sizeof *w->copies, by_share);
}

static int by_expert(const void *x, const void *y)
{
    const struct ep_expert_home *a = x, *b = y;

    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    return a->rank < b->rank ? -1 : a->rank > b->rank;
}

static ep_status check(const struct ep_balance *b, struct ep_error *error)
{
    if (!b->ranks || !b->experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement: neither ranks nor experts may be 0");
    if (b->redundant <= (uint64_t)b->experts * (b->ranks - 1))
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "placement.redundant is %u: must be at most %llu, when each of %u experts is on all %u ranks",
                        b->redundant, (unsigned long long)b->experts * (b->ranks - 1), b->experts, b->ranks);
}

ep_status ep_balance_homes(const struct ep_balance *b, struct ep_expert_home *homes, struct ep_error *error)
{
    struct work w = { .b = b, .n = b->experts + b->redundant, .nodes = 1 };
    ep_status status = check(b, error);

    if (status)
        return status;
    for (uint32_t r = 0; r < b->ranks; r++)
        if (node_of(b, r) >= w.nodes)
            w.nodes = node_of(b, r) + 1;
    w.copies = allocate(w.n, sizeof *w.copies);
    fill_copies(&w);
    pack_nodes(&w);
    pack_all_ranks(&w);
    for (uint32_t i = 0; i < w.n; i++)
        homes[i] = (struct ep_expert_home){ .expert = w.copies[i].expert, .rank = w.copies[i].rank };
    qsort(homes, w.n, sizeof *homes, by_expert);
    free(w.copies);
    if (b->steps)
        *b->steps = w.steps;
    return EP_OK;
}

/* ---- how good a placement is ------------------------------------------------------------------------ */

void ep_balance_ranks(const struct ep_placement *placement, const uint64_t *load, double *ranks)
{
    for (uint32_t r = 0; r < placement->ranks; r++)
        ranks[r] = 0;
    for (uint32_t e = 0; e < placement->experts; e++) {
        const uint32_t first = placement->first[e], end = placement->first[e + 1];

        for (uint32_t i = first; i < end; i++)
            ranks[placement->rank[i]] += (double)load[e] / (end - first);
    }
}

double ep_balance_peak(const struct ep_placement *placement, const uint64_t *load)
{
    double *ranks = allocate(placement->ranks, sizeof *ranks), sum = 0, most = 0;

    ep_balance_ranks(placement, load, ranks);
    for (uint32_t r = 0; r < placement->ranks; r++) {
        sum += ranks[r];
        most = ranks[r] > most ? ranks[r] : most;
    }
    free(ranks);
    return sum > 0 ? most * placement->ranks / sum : 1;
}
