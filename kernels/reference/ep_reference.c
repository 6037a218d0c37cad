/* Rows, order and sums, straight from the rules in the header. */
#include "ep_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- placement ------------------------------------------------------------------ */

/* Without a list: rank r holds `count` experts from `first` on. */
static void contiguous_run(const struct ep_ref_routing *routing, uint32_t rank, uint32_t *first,
                           uint32_t *count)
{
    uint32_t each = routing->experts / routing->ranks, more = routing->experts % routing->ranks;

    *count = each + (rank < more ? 1 : 0);
    *first = rank * each + (rank < more ? rank : more);
}

static void contiguous_home(const struct ep_ref_routing *routing, uint32_t expert, uint32_t *rank,
                            uint32_t *local)
{
    for (uint32_t r = 0; r < routing->ranks; r++) {
        uint32_t first, count;

        contiguous_run(routing, r, &first, &count);
        if (expert >= first && expert < first + count) {
            *rank = r;
            *local = expert - first;
        }
    }
}

/* The n-th listed home of an expert: its rank and its place among that rank's homes. */
static void listed_home(const struct ep_ref_routing *routing, uint32_t expert, uint32_t n, uint32_t *rank,
                        uint32_t *local)
{
    uint32_t at = 0;

    for (uint32_t seen = 0; at < routing->n_homes; at++)
        if (routing->homes[at].expert == expert && seen++ == n)
            break;
    *rank = routing->homes[at].rank;
    *local = 0;
    for (uint32_t i = 0; i < at; i++)
        if (routing->homes[i].rank == *rank)
            (*local)++;
}

static uint32_t home_count(const struct ep_ref_routing *routing, uint32_t expert)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < routing->n_homes; i++)
        if (routing->homes[i].expert == expert)
            n++;
    return n;
}

bool ep_ref_home(const struct ep_ref_routing *routing, uint32_t source, uint32_t token, int64_t expert,
                 uint32_t *rank, uint32_t *local)
{
    if (expert < 0 || expert >= (int64_t)routing->experts)
        return false;
    if (routing->n_homes == 0) {
        contiguous_home(routing, (uint32_t)expert, rank, local);
        return true;
    }

    uint32_t homes = home_count(routing, (uint32_t)expert);

    if (homes == 0)
        return false;
    listed_home(routing, (uint32_t)expert, (source + token) % homes, rank, local);
    return true;
}

uint32_t ep_ref_local_experts(const struct ep_ref_routing *routing, uint32_t rank)
{
    uint32_t first, count = 0;

    if (routing->n_homes == 0) {
        contiguous_run(routing, rank, &first, &count);
        return count;
    }
    for (uint32_t i = 0; i < routing->n_homes; i++)
        if (routing->homes[i].rank == rank)
            count++;
    return count;
}

int64_t ep_ref_expert_at(const struct ep_ref_routing *routing, uint32_t rank, uint32_t local)
{
    uint32_t first, count, seen = 0;

    if (routing->n_homes == 0) {
        contiguous_run(routing, rank, &first, &count);
        return local < count ? (int64_t)first + local : -1;
    }
    for (uint32_t i = 0; i < routing->n_homes; i++)
        if (routing->homes[i].rank == rank && seen++ == local)
            return routing->homes[i].expert;
    return -1;
}

/* ---- choices -------------------------------------------------------------------- */

static int64_t choice(const struct ep_ref_routing *routing, uint32_t source, uint32_t token, uint32_t j)
{
    return routing->rank[source].topk[(uint64_t)token * routing->top_k + j];
}

static double weight(const struct ep_ref_routing *routing, uint32_t source, uint32_t token, uint32_t j)
{
    const float *weights = routing->rank[source].weights;

    return weights ? (double)weights[(uint64_t)token * routing->top_k + j] : 1.0;
}

/* local[k]: which expert of `rank` each choice of the token means, -1: none of them. */
static bool choices_at(const struct ep_ref_routing *routing, uint32_t rank, uint32_t source, uint32_t token,
                       int32_t *local)
{
    bool any = false;

    for (uint32_t j = 0; j < routing->top_k; j++) {
        uint32_t home, number;
        bool here = ep_ref_home(routing, source, token, choice(routing, source, token, j), &home, &number) &&
                    home == rank;

        local[j] = here ? (int32_t)number : -1;
        any = any || here;
    }
    return any;
}

uint64_t ep_ref_dropped(const struct ep_ref_routing *routing, uint32_t source)
{
    uint64_t dropped = 0;

    for (uint32_t t = 0; t < routing->rank[source].tokens; t++)
        for (uint32_t j = 0; j < routing->top_k; j++) {
            int64_t expert = choice(routing, source, t, j);
            uint32_t home, local;

            if (expert == -1)
                continue;
            if (!ep_ref_home(routing, source, t, expert, &home, &local) || !routing->rank[home].present)
                dropped++;
        }
    return dropped;
}

static bool elsewhere(const uint32_t *node, uint32_t source, uint32_t d)
{
    return node && node[d] != node[source];
}

/* Does a rank below d, on its node, get the token too? */
static bool node_has_it(const struct ep_ref_routing *routing, const uint32_t *node, uint32_t source, uint32_t token,
                        uint32_t d)
{
    int32_t local[EP_MAX_TOP_K];

    for (uint32_t r = 0; r < d; r++)
        if (node[r] == node[d] && routing->rank[r].present && choices_at(routing, r, source, token, local))
            return true;
    return false;
}

uint64_t ep_ref_remote_rows(const struct ep_ref_routing *routing, const uint32_t *node, uint32_t source)
{
    int32_t local[EP_MAX_TOP_K];
    uint64_t rows = 0;

    for (uint32_t t = 0; t < routing->rank[source].tokens; t++)
        for (uint32_t d = 0; d < routing->ranks; d++)
            if (d != source && routing->rank[d].present && choices_at(routing, d, source, t, local) &&
                !(elsewhere(node, source, d) && node_has_it(routing, node, source, t, d)))
                rows++;
    return rows;
}

/* ---- dispatch ------------------------------------------------------------------- */

/*
 * All tokens that reach one rank, ascending by (source, token), with local[k] of each.  Made
 * once, so that the layouts below can be written as plain loops over it.
 */
struct arrival {
    uint32_t source, token;
    bool missing;
    int32_t local[EP_MAX_TOP_K];
};

/* Has it places at the rank that receives? */
static bool has_places(const struct ep_ref_rank *rank)
{
    return rank->present || rank->announced;
}

static bool arrivals_at(const struct ep_ref_routing *routing, uint32_t rank, struct arrival **list,
                        uint64_t *n)
{
    uint64_t most = 0;

    for (uint32_t s = 0; s < routing->ranks; s++)
        most += has_places(&routing->rank[s]) ? routing->rank[s].tokens : 0;
    *n = 0;
    *list = malloc((most + 1) * sizeof **list);
    if (!*list)
        return false;
    for (uint32_t s = 0; s < routing->ranks; s++)
        for (uint32_t t = 0; has_places(&routing->rank[s]) && t < routing->rank[s].tokens; t++) {
            struct arrival *a = &(*list)[*n];

            a->source = s;
            a->token = t;
            a->missing = !routing->rank[s].present;
            if (choices_at(routing, rank, s, t, a->local))
                (*n)++;
        }
    return true;
}

static bool names(const struct arrival *a, uint32_t top_k, uint32_t expert)
{
    for (uint32_t j = 0; j < top_k; j++)
        if (a->local[j] == (int32_t)expert)
            return true;
    return false;
}

static void add_row(struct ep_ref_dispatch *out, uint64_t position, const struct arrival *a, int32_t expert)
{
    out->rows[out->n_rows++] = (struct ep_ref_row){ .position = position, .source = a->source, .token = a->token,
                                                    .expert = expert, .missing = a->missing };
}

/* By expert, each block at a fixed place of stride rows, or (stride 0) one after the other,
 * aligned. */
static void fill_by_expert(struct ep_ref_dispatch *out, const struct arrival *list, uint64_t n,
                           uint32_t top_k, uint64_t stride, uint32_t alignment)
{
    uint64_t next = 0;

    for (uint32_t l = 0; l < out->n_counts; l++) {
        uint64_t start = stride ? l * stride : next;

        next = start;
        for (uint64_t i = 0; i < n; i++)
            if (names(&list[i], top_k, l))
                add_row(out, next++, &list[i], (int32_t)l);
        out->counts[l] = (int32_t)(next - start);
        if (stride)
            continue;
        out->offsets[l] = (int32_t)start;
        for (; next % alignment != 0; next++)
            out->rows[out->n_rows++] = (struct ep_ref_row){ .position = next, .expert = -1, .padding = true };
    }
    if (!stride)
        out->offsets[out->n_counts] = (int32_t)next;
    out->positions = stride ? out->n_counts * stride : next;
}

/* One row per token, at [source][slot] (max_tokens slots each) or (0) one after the other. */
static void fill_by_source(const struct ep_ref_routing *routing, struct ep_ref_dispatch *out,
                           const struct arrival *list, uint64_t n, uint32_t max_tokens)
{
    uint32_t k = routing->top_k;

    for (uint64_t i = 0; i < n; i++) {
        uint32_t s = list[i].source;
        uint64_t slot = (uint64_t)out->counts[s]++;

        for (uint32_t j = 0; j < k; j++) {
            int32_t local = list[i].missing ? -1 : list[i].local[j];

            out->topk[out->n_rows * k + j] = local;
            out->weights[out->n_rows * k + j] = local < 0 ? 0.0f : (float)weight(routing, s, list[i].token, j);
        }
        add_row(out, max_tokens ? (uint64_t)s * max_tokens + slot : out->n_rows, &list[i], -1);
    }
    out->positions = max_tokens ? (uint64_t)routing->ranks * max_tokens : n;
}

static uint64_t most_rows(uint64_t n, uint32_t top_k, uint32_t experts, uint32_t alignment)
{
    return n * top_k + (uint64_t)experts * alignment;
}

bool ep_ref_dispatch(const struct ep_ref_routing *routing, uint32_t rank, ep_layout layout,
                     uint32_t alignment, uint32_t max_tokens, struct ep_ref_dispatch *out)
{
    bool by_expert = layout == EP_LAYOUT_EXPERT_MAJOR || layout == EP_LAYOUT_PACKED;
    uint32_t experts = ep_ref_local_experts(routing, rank);
    struct arrival *list;
    uint64_t n;

    memset(out, 0, sizeof *out);
    if (alignment == 0)
        alignment = 1;
    if (!arrivals_at(routing, rank, &list, &n))
        return false;
    out->n_counts = by_expert ? experts : routing->ranks;
    out->rows =
        malloc((most_rows(n, by_expert ? routing->top_k : 1, experts, alignment) + 1) * sizeof *out->rows);
    out->counts = calloc((size_t)out->n_counts + 1, sizeof *out->counts);
    if (layout == EP_LAYOUT_PACKED)
        out->offsets = calloc((size_t)experts + 1, sizeof *out->offsets);
    if (!by_expert) {
        out->topk = malloc((n + 1) * routing->top_k * sizeof *out->topk);
        out->weights = malloc((n + 1) * routing->top_k * sizeof *out->weights);
    }

    bool ok = out->rows && out->counts && (layout != EP_LAYOUT_PACKED || out->offsets) &&
              (by_expert || (out->topk && out->weights));

    if (ok && by_expert)
        fill_by_expert(out, list, n, routing->top_k,
                       layout == EP_LAYOUT_EXPERT_MAJOR ? (uint64_t)routing->ranks * max_tokens : 0,
                       alignment);
    else if (ok)
        fill_by_source(routing, out, list, n, layout == EP_LAYOUT_RANK_MAJOR ? max_tokens : 0);
    free(list);
    if (!ok)
        ep_ref_dispatch_free(out);
    return ok;
}

void ep_ref_dispatch_free(struct ep_ref_dispatch *dispatch)
{
    free(dispatch->rows);
    free(dispatch->counts);
    free(dispatch->offsets);
    free(dispatch->topk);
    free(dispatch->weights);
    memset(dispatch, 0, sizeof *dispatch);
}

/* ---- combine -------------------------------------------------------------------- */

/* Per element; names as in the header. */
struct sums {
    double *p, *a, *q;       /* of one rank: P, A, Q */
    double *b, *e;           /* over the parts that the source sees: B, sum of their errors */
    double *ns, *nb, *ne;    /* of one node: S_N, B_N, sum of e_d */
    double *expert, *radius; /* of one expert */
};

static bool sums_init(struct sums *sums, uint32_t hidden)
{
    double *memory = calloc((size_t)hidden * 10 + 1, sizeof *memory);
    double **all[] = { &sums->p, &sums->a, &sums->q, &sums->b, &sums->e, &sums->ns, &sums->nb, &sums->ne,
                       &sums->expert, &sums->radius };

    if (!memory)
        return false;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *all[i] = memory + i * hidden;
    return true;
}

static void sums_fini(struct sums *sums)
{
    free(sums->p); /* the block's start */
}

/* P, A and Q of rank d; how many choices it has. */
static uint32_t add_choices(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine,
                            uint32_t d, uint32_t source, uint32_t token, struct sums *sums)
{
    int32_t local[EP_MAX_TOP_K];
    uint32_t n = 0;

    if (!choices_at(routing, d, source, token, local))
        return 0;
    memset(sums->p, 0, 3 * (size_t)combine->hidden * sizeof *sums->p); /* p, a and q are neighbours */
    for (uint32_t j = 0; j < routing->top_k; j++) {
        double w = weight(routing, source, token, j);

        if (local[j] < 0)
            continue;
        n++;
        combine->expert(combine->user, source, token, (uint32_t)choice(routing, source, token, j),
                        sums->expert, sums->radius);
        for (uint32_t h = 0; h < combine->hidden; h++) {
            sums->p[h] += w * sums->expert[h];
            sums->a[h] += fabs(w) * (fabs(sums->expert[h]) + sums->radius[h]);
            sums->q[h] += fabs(w) * sums->radius[h];
        }
    }
    return n;
}

/* The rank's partial travels: rounded once.  To the sums (value, e, b) of the source, or of a node. */
static void add_partial(const struct ep_ref_combine *combine, uint32_t n, const struct sums *sums, double *value,
                        double *sum_e, double *sum_b)
{
    const double gamma = ep_ref_gamma(n);

    for (uint32_t h = 0; h < combine->hidden; h++) {
        double before = sums->q[h] + gamma * sums->a[h];
        double e = before + ep_ref_half_ulp(combine->dtype, fabs(sums->p[h]) + before);

        value[h] += sums->p[h];
        sum_e[h] += e;
        sum_b[h] += fabs(sums->p[h]) + e;
    }
}

static bool is_here(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine, uint32_t d)
{
    return combine->arrived ? combine->arrived[d] : routing->rank[d].present;
}

/* Choices of rank d that count. */
static uint32_t part_of(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine, uint32_t d,
                        uint32_t source, uint32_t token, struct sums *sums)
{
    return is_here(routing, combine, d) ? add_choices(routing, combine, d, source, token, sums) : 0;
}

/* The parts of a node's ranks; how many there are. */
static uint32_t add_node(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine, uint32_t node,
                         uint32_t source, uint32_t token, struct sums *sums)
{
    uint32_t m = 0;

    memset(sums->ns, 0, 3 * (size_t)combine->hidden * sizeof *sums->ns); /* ns, nb and ne are neighbours */
    for (uint32_t d = 0; d < routing->ranks; d++) {
        uint32_t n = combine->node[d] == node ? part_of(routing, combine, d, source, token, sums) : 0;

        if (n > 0) {
            add_partial(combine, n, sums, sums->ns, sums->ne, sums->nb);
            m++;
        }
    }
    return m;
}

/* As one part: rounded once more when it is a sum. */
static void add_node_sum(const struct ep_ref_combine *combine, uint32_t m, struct sums *sums, double *value)
{
    const double gamma = ep_ref_gamma(m);

    for (uint32_t h = 0; h < combine->hidden; h++) {
        double e = sums->ne[h];

        if (m > 1) {
            e += gamma * sums->nb[h];
            e += ep_ref_half_ulp(combine->dtype, fabs(sums->ns[h]) + e);
        }
        value[h] += sums->ns[h];
        sums->e[h] += e;
        sums->b[h] += fabs(sums->ns[h]) + e;
    }
}

static uint32_t add_other_nodes(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine,
                                uint32_t source, uint32_t token, struct sums *sums, double *value)
{
    uint32_t last = 0, parts = 0;

    for (uint32_t d = 0; combine->node && d < routing->ranks; d++)
        last = combine->node[d] > last ? combine->node[d] : last;
    for (uint32_t node = 0; combine->node && node <= last; node++) {
        uint32_t m = node == combine->node[source] ? 0 : add_node(routing, combine, node, source, token, sums);

        if (m > 0) {
            add_node_sum(combine, m, sums, value);
            parts++;
        }
    }
    return parts;
}

static void add_bias(const struct ep_ref_combine *combine, uint32_t token, struct sums *sums, double *value)
{
    uint32_t bytes = ep_ref_bytes(combine->dtype);
    const unsigned char *row =
        (const unsigned char *)combine->bias + (uint64_t)token * combine->hidden * bytes;

    for (uint32_t h = 0; h < combine->hidden; h++) {
        double b = ep_ref_decode(combine->dtype, row + (size_t)h * bytes);

        value[h] += b;
        sums->b[h] += fabs(b);
    }
}

/* Of m parts. */
static void find_bounds(const struct ep_ref_combine *combine, uint32_t m, const struct sums *sums, const double *value,
                        double *bound)
{
    const double gamma = ep_ref_gamma(m);

    for (uint32_t h = 0; h < combine->hidden; h++) {
        double e = sums->e[h] + gamma * sums->b[h];

        bound[h] = e + ep_ref_half_ulp(combine->dtype, fabs(value[h]) + e);
    }
}

bool ep_ref_combine_token(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine,
                          uint32_t source, uint32_t token, double *value, double *bound)
{
    struct sums sums;
    uint32_t m = 0;

    if (!sums_init(&sums, combine->hidden))
        return false;
    memset(value, 0, combine->hidden * sizeof *value);
    for (uint32_t d = 0; d < routing->ranks; d++) {
        uint32_t n = elsewhere(combine->node, source, d) ? 0 : part_of(routing, combine, d, source, token, &sums);

        if (n > 0) {
            add_partial(combine, n, &sums, value, sums.e, sums.b);
            m++;
        }
    }
    m += add_other_nodes(routing, combine, source, token, &sums, value);
    if (combine->bias)
        add_bias(combine, token, &sums, value);
    find_bounds(combine, m, &sums, value, bound);
    sums_fini(&sums);
    return true;
}

/* ---- gradients ------------------------------------------------------------------ */

static void gradients_of_row(const struct ep_ref_routing *routing, uint32_t d, const struct ep_ref_row *row,
                             struct ep_ref_gradient *places)
{
    int32_t local[EP_MAX_TOP_K];
    uint32_t k = routing->top_k;

    choices_at(routing, d, row->source, row->token, local);
    for (uint32_t j = 0; j < k; j++) {
        bool packed = row->expert >= 0;

        if (local[j] < 0 || (packed && local[j] != row->expert))
            continue;
        places[(uint64_t)row->token * k + j] =
            (struct ep_ref_gradient){ .rank = (int32_t)d,
                                      .index = packed ? row->position : row->position * k + j };
    }
}

bool ep_ref_gradients(const struct ep_ref_routing *routing, ep_layout layout, uint32_t alignment,
                      uint32_t source, struct ep_ref_gradient *places)
{
    for (uint64_t i = 0; i < (uint64_t)routing->rank[source].tokens * routing->top_k; i++)
        places[i] = (struct ep_ref_gradient){ .rank = -1 };
    for (uint32_t d = 0; d < routing->ranks; d++) {
        struct ep_ref_dispatch dispatch;

        if (!routing->rank[d].present)
            continue;
        if (!ep_ref_dispatch(routing, d, layout, alignment, 0, &dispatch))
            return false;
        for (uint64_t i = 0; i < dispatch.n_rows; i++)
            if (!dispatch.rows[i].padding && dispatch.rows[i].source == source)
                gradients_of_row(routing, d, &dispatch.rows[i], places);
        ep_ref_dispatch_free(&dispatch);
    }
    return true;
}
