/*
 * Which ranks go over to the next epoch together: by what their nodes say of how far they are, and of whom they have lost.
 *
 * Nodes are *apart* when one of them has lost the other in the epoch that is left, and one's ranks are far ahead of the
 * other's.  All others belong together, by way of third ones too.  Of ranks that belong together those go over that can
 * come to one boundary, and of all such parts the one with the most ranks.
 */
#include <stdlib.h>

#include "group_private.h"

/* ---- who is apart -------------------------------------------------------------------------------- */

struct nodes {
    const struct turn *turn;
    bool *lost;         /* [n * n] the one has lost the other */
    uint64_t *furthest; /* [n] of its ranks */
    uint32_t *part;     /* [n] nodes with the same belong together */
    uint32_t n;
};

static void note_furthest(const struct nodes *nodes)
{
    const struct turn *turn = nodes->turn;

    for (uint32_t i = 0; i < turn->n_fars; i++) {
        uint64_t *furthest = &nodes->furthest[turn->fars[i].node];

        *furthest = turn->fars[i].position > *furthest ? turn->fars[i].position : *furthest;
    }
}

/* Where a rank that was lost has a worker, which is on another node. */
static void note_lost(const struct nodes *nodes)
{
    const struct turn *turn = nodes->turn;

    for (uint32_t i = 0; i < turn->n_lost; i++)
        for (uint32_t j = 0; j < turn->n_fars; j++)
            if (turn->fars[j].rank == turn->lost[i].rank)
                nodes->lost[turn->lost[i].node * nodes->n + turn->fars[j].node] = true;
}

static bool are_apart(const struct nodes *nodes, uint32_t a, uint32_t b)
{
    const uint64_t one = nodes->furthest[a], other = nodes->furthest[b];

    return (nodes->lost[a * nodes->n + b] || nodes->lost[b * nodes->n + a]) &&
           (one > other ? one - other : other - one) > TURN_NEAR;
}

static void join_parts(const struct nodes *nodes, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < nodes->n; i++)
        if (nodes->part[i] == from)
            nodes->part[i] = to;
}

static void find_parts(const struct nodes *nodes)
{
    for (uint32_t a = 0; a < nodes->n; a++)
        nodes->part[a] = a;
    for (uint32_t a = 0; a < nodes->n; a++)
        for (uint32_t b = 0; b < a; b++)
            if (nodes->part[a] != nodes->part[b] && !are_apart(nodes, a, b))
                join_parts(nodes, nodes->part[a], nodes->part[b]);
}

static void part(struct turn *turn)
{
    const uint32_t n = turn->n_nodes;
    struct nodes nodes = { .turn = turn, .n = n };

    nodes.lost = group_allocate((size_t)n * n, sizeof *nodes.lost);
    nodes.furthest = group_allocate(n, sizeof *nodes.furthest);
    nodes.part = group_allocate(n, sizeof *nodes.part);
    note_furthest(&nodes);
    note_lost(&nodes);
    find_parts(&nodes);
    for (uint32_t i = 0; i < turn->n_fars; i++)
        turn->fars[i].part = nodes.part[turn->fars[i].node];
    free(nodes.lost);
    free(nodes.furthest);
    free(nodes.part);
}

/* ---- who goes over ----------------------------------------------------------------------------------- */

static int by_part_and_position(const void *a, const void *b)
{
    const struct how_far *one = a, *other = b;

    if (one->part != other->part)
        return one->part < other->part ? -1 : 1;
    return one->position < other->position ? -1 : one->position > other->position;
}

static bool come_together(const struct how_far *first, const struct how_far *other)
{
    return other->part == first->part && other->position <= TURN_FURTHEST &&
           other->position - first->position <= TURN_APART;
}

static bool is_better(const struct turn *turn, uint32_t first, uint32_t n)
{
    return n > turn->n_together ||
           (n && n == turn->n_together && turn->fars[first].position < turn->fars[turn->together].position);
}

/* The most; of as many, those that are less far.  One that says what is not so leaves out itself, unless most say the
 * same. */
void together_find(struct turn *turn)
{
    const struct how_far *fars = turn->fars;

    turn->together = turn->n_together = 0;
    if (!turn->n_fars)
        return;
    part(turn);
    qsort(turn->fars, turn->n_fars, sizeof *turn->fars, by_part_and_position);
    for (uint32_t i = 0, end = 0; i < turn->n_fars; i++) {
        end = end > i ? end : i;
        while (end < turn->n_fars && come_together(&fars[i], &fars[end]))
            end++;
        if (is_better(turn, i, end - i)) {
            turn->together = i;
            turn->n_together = end - i;
        }
    }
}
