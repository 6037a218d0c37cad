/* What the kinds of routing share. */
#ifndef ROUTING_PRIVATE_H
#define ROUTING_PRIVATE_H

#include "routing.h"

#include <stdbool.h>

typedef void (*routing_pick_fn)(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                                float *weights);

/* Words of a text: [first[i], first[i] + length[i]) of bytes. */
struct routing_text {
    char *bytes;
    uint32_t *first, *length;
    uint32_t words;
};

/* One rank of a trace. */
struct routing_trace_rank {
    uint32_t tokens, capacity;
    int64_t *topk;
    float *weights;
};
struct routing_trace {
    uint32_t ranks, experts, top_k;
    struct routing_trace_rank *rank;
};

struct routing {
    struct routing_spec spec;
    struct routing_shape shape;
    routing_pick_fn pick;
    double *log_odds;      /* zipf [E] */
    uint32_t groups, kept; /* deepseek-v3 */
    struct routing_text text;
    struct routing_trace trace;
};

ep_status routing_text_load(const char *path, struct routing_text *text, struct ep_error *error);
void routing_text_free(struct routing_text *text);
void routing_text_pick(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                       float *weights);

ep_status routing_trace_load(const char *path, struct routing_trace *trace, struct ep_error *error);
void routing_trace_free(struct routing_trace *trace);
void routing_trace_pick(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                        float *weights);

#endif
