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

struct packing {
    const struct copy *copies;
    uint32_t n;
    struct bin *bins;
    uint32_t n_bins;
    uint32_t *bin; /* [n] of each copy */
};

/* Copies of the same expert as copy `i` that are in the bin. */
static uint32_t count_in(const struct packing *p, uint32_t i, uint32_t bin)
{
    uint32_t first = i, n = 0;

    while (first > 0 && p->copies[first - 1].expert == p->copies[i].expert)
        first--;
    for (; first < p->n && p->copies[first].expert == p->copies[i].expert; first++)
        n += p->bin[first] == bin;
    return n;
}

static bool may_have(const struct packing *p, uint32_t i, uint32_t bin)
{
    return count_in(p, i, bin) < p->bins[bin].most;
}

/* Bins may be of different sizes: what counts is the load for each slot. */
static bool is_emptier(const struct bin *a, const struct bin *b)
{
    return a->load * b->slots < b->load * a->slots;
}

static uint32_t emptiest(const struct packing *p, uint32_t i)
{
    uint32_t found = NOWHERE;

    for (uint32_t bin = 0; bin < p->n_bins; bin++)
        if (p->bins[bin].used < p->bins[bin].slots &&
            (found == NOWHERE || is_emptier(&p->bins[bin], &p->bins[found])) && may_have(p, i, bin))
            found = bin;
    return found;
}

static void put(struct packing *p, uint32_t i, uint32_t bin)
{
    p->bin[i] = bin;
    p->bins[bin].used++;
    p->bins[bin].load += p->copies[i].share;
}

static void take(struct packing *p, uint32_t i)
{
    p->bins[p->bin[i]].used--;
    p->bins[p->bin[i]].load -= p->copies[i].share;
    p->bin[i] = NOWHERE;
}

static uint32_t bin_with_room(const struct packing *p)
{
    uint32_t bin = 0;

    while (p->bins[bin].used == p->bins[bin].slots)
        bin++;
    return bin;
}

/*
 * All bins with room have the expert as often as they may.  Another copy, the lightest so far, goes there from
 * a bin that may have this one.  There is one: were all in that bin in the other as often as they may be, the other,
 * which has this expert too, would be larger by more than the one slot for each rank that sizes differ by.
 */
static void make_room(struct packing *p, uint32_t i)
{
    const uint32_t with_room = bin_with_room(p);

    for (uint32_t j = i; j-- > 0;) {
        const uint32_t from = p->bin[j];

        if (from == with_room || !may_have(p, i, from) || !may_have(p, j, with_room))
            continue;
        take(p, j);
        put(p, j, with_room);
        put(p, i, from);
        return;
    }
}

static void pack(struct packing *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        p->bin[i] = NOWHERE;
    for (uint32_t i = 0; i < p->n; i++) {
        const uint32_t bin = emptiest(p, i);

        if (bin != NOWHERE)
            put(p, i, bin);
        else
            make_room(p, i);
    }
}

/* ---- nodes, then ranks -------------------------------------------------------------------------- */

struct work {
    const struct ep_balance *b;
    struct copy *copies;
    uint32_t n;
    uint32_t nodes;
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
    struct packing p = { .copies = w->copies, .n = w->n, .n_bins = w->nodes };

    p.bins = allocate(w->nodes, sizeof *p.bins);
    p.bin = allocate(w->n, sizeof *p.bin);
    for (uint32_t r = 0; r < w->b->ranks; r++) {
        struct bin *bin = &p.bins[node_of(w->b, r)];

        bin->slots += slots_of(w, r);
        bin->most += slots_of(w, r) > 0;
    }
    pack(&p);
    for (uint32_t i = 0; i < w->n; i++)
        w->copies[i].node = p.bin[i];
    free(p.bins);
    free(p.bin);
}

/* The copies of a node, in their order. */
static uint32_t copies_of(const struct work *w, uint32_t node, struct copy *own, uint32_t *where)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < w->n; i++)
        if (w->copies[i].node == node) {
            where[n] = i;
            own[n++] = w->copies[i];
        }
    return n;
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

static void pack_ranks(struct work *w, uint32_t node)
{
    struct copy *own = allocate(w->n, sizeof *own);
    uint32_t *where = allocate(w->n, sizeof *where), *ranks = allocate(w->b->ranks, sizeof *ranks);
    struct packing p = { .copies = own };

    p.bins = allocate(w->b->ranks, sizeof *p.bins);
    p.bin = allocate(w->n, sizeof *p.bin);
    p.n = copies_of(w, node, own, where);
    p.n_bins = ranks_of(w, node, ranks, p.bins);
    pack(&p);
    for (uint32_t i = 0; i < p.n; i++)
        w->copies[where[i]].rank = ranks[p.bin[i]];
    free(p.bins);
    free(p.bin);
    free(own);
    free(where);
    free(ranks);
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
    for (uint32_t node = 0; node < w.nodes; node++)
        pack_ranks(&w, node);
    for (uint32_t i = 0; i < w.n; i++)
        homes[i] = (struct ep_expert_home){ .expert = w.copies[i].expert, .rank = w.copies[i].rank };
    qsort(homes, w.n, sizeof *homes, by_expert);
    free(w.copies);
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
