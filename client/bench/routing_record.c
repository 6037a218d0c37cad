/* Writing trace files: the format is in routing.h. */
#include "routing_private.h"

static void write_token(const struct routing *routing, uint32_t rank, uint32_t token, FILE *file)
{
    int64_t topk[EP_MAX_TOP_K];
    float weights[EP_MAX_TOP_K];

    routing_token(routing, rank, token, topk, weights);
    fprintf(file, "%u %u", rank, token);
    for (uint32_t j = 0; j < routing->shape.top_k; j++)
        fprintf(file, " %lld:%.9g", (long long)topk[j], (double)weights[j]);
    fputc('\n', file);
}

ep_status routing_record(const struct routing *routing, uint32_t tokens, const char *path,
                         struct ep_error *error)
{
    FILE *file = fopen(path, "we");

    if (!file)
        return ep_error_errno(error, EP_IO, "cannot write %s", path);
    fprintf(file, "ep-trace 1 ranks %u experts %u top_k %u\n", routing->shape.ranks, routing->shape.experts,
            routing->shape.top_k);
    for (uint32_t r = 0; r < routing->shape.ranks; r++)
        for (uint32_t t = 0; t < tokens; t++)
            write_token(routing, r, t, file);

    bool bad = ferror(file) != 0;

    if (fclose(file) != 0 || bad)
        return ep_error_set(error, EP_IO, "cannot write %s", path);
    return EP_OK;
}
