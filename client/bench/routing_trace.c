/* Reading trace files: the format is in routing.h. */
#include "routing_private.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TRACE_EXPERTS = 65536 };

struct reader {
    const char *path;
    uint64_t line;
    char *next; /* rest of the line */
    struct ep_error *error;
};

__attribute__((format(printf, 2, 3))) static ep_status refuse(struct reader *reader, const char *format, ...)
{
    char text[EP_ERROR_TEXT_MAX];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return ep_error_set(reader->error, EP_INVALID_ARGUMENT, "%s:%llu: %s", reader->path,
                        (unsigned long long)reader->line, text);
}

static char *word(struct reader *reader)
{
    char *start = reader->next + strspn(reader->next, " \t\r\n");
    size_t length = strcspn(start, " \t\r\n");

    if (length == 0)
        return NULL;
    reader->next = start + length + (start[length] ? 1 : 0);
    start[length] = '\0';
    return start;
}

static ep_status read_number(struct reader *reader, const char *field, const char *text, int64_t low,
                             int64_t high, int64_t *value)
{
    char *end;

    if (!text)
        return refuse(reader, "%s is missing", field);
    errno = 0;
    *value = strtoll(text, &end, 10);
    if (end == text || *end || errno || *value < low || *value > high)
        return refuse(reader, "%s is '%s': must be %lld to %lld", field, text, (long long)low,
                      (long long)high);
    return EP_OK;
}

static ep_status read_weight(struct reader *reader, const char *field, const char *text, float *weight)
{
    char *end;

    *weight = strtof(text, &end);
    if (end == text || *end || !isfinite(*weight))
        return refuse(reader, "%s is '%s': must be a finite number", field, text);
    return EP_OK;
}

static ep_status read_keyed(struct reader *reader, const char *field, int64_t high, uint32_t *value)
{
    const char *key = word(reader);
    int64_t number = 0;

    if (!key || strcmp(key, field) != 0)
        return refuse(reader, "%s is missing: the line must be 'ep-trace 1 ranks R experts E top_k K'",
                      field);

    ep_status status = read_number(reader, field, word(reader), 1, high, &number);

    *value = (uint32_t)number;
    return status;
}

static ep_status read_head(struct reader *reader, struct routing_trace *trace)
{
    const char *name = word(reader);
    int64_t version;
    ep_status status;

    if (!name || strcmp(name, "ep-trace") != 0)
        return refuse(reader, "not a trace: the first line must be 'ep-trace 1 ranks R experts E top_k K'");
    if ((status = read_number(reader, "version", word(reader), 1, 1, &version)) != EP_OK ||
        (status = read_keyed(reader, "ranks", EP_MAX_RANKS, &trace->ranks)) != EP_OK ||
        (status = read_keyed(reader, "experts", MAX_TRACE_EXPERTS, &trace->experts)) != EP_OK ||
        (status = read_keyed(reader, "top_k", EP_MAX_TOP_K, &trace->top_k)) != EP_OK)
        return status;
    if (word(reader))
        return refuse(reader, "more words than 'ep-trace 1 ranks R experts E top_k K'");
    trace->rank = calloc(trace->ranks, sizeof *trace->rank);
    if (!trace->rank)
        return ep_error_set(reader->error, EP_NO_MEMORY, "no memory for %u ranks", trace->ranks);
    return EP_OK;
}

static bool make_room(struct routing_trace_rank *rank, uint32_t top_k)
{
    if (rank->tokens < rank->capacity)
        return true;

    uint32_t capacity = rank->capacity ? 2 * rank->capacity : 64;
    int64_t *topk = realloc(rank->topk, (size_t)capacity * top_k * sizeof *topk);

    if (topk)
        rank->topk = topk;

    float *weights = realloc(rank->weights, (size_t)capacity * top_k * sizeof *weights);

    if (weights)
        rank->weights = weights;
    if (!topk || !weights)
        return false;
    rank->capacity = capacity;
    return true;
}

static ep_status read_choice(struct reader *reader, const struct routing_trace *trace, uint32_t j,
                             int64_t *expert, float *weight)
{
    char field[32];
    char *text = word(reader), *colon = text ? strchr(text, ':') : NULL;

    snprintf(field, sizeof field, "choice %u", j);
    if (!text)
        return refuse(reader, "%s is missing: there must be %u", field, trace->top_k);
    if (!colon)
        return refuse(reader, "%s is '%s': must be ID:WEIGHT", field, text);
    *colon = '\0';
    snprintf(field, sizeof field, "expert of choice %u", j);

    ep_status status = read_number(reader, field, text, -1, (int64_t)trace->experts - 1, expert);

    if (status != EP_OK)
        return status;
    snprintf(field, sizeof field, "weight of choice %u", j);
    return read_weight(reader, field, colon + 1, weight);
}

static ep_status read_token(struct reader *reader, struct routing_trace *trace)
{
    int64_t number = 0, token = 0;
    ep_status status = read_number(reader, "rank", word(reader), 0, (int64_t)trace->ranks - 1, &number);

    if (status != EP_OK)
        return status;

    struct routing_trace_rank *rank = &trace->rank[number];

    status = read_number(reader, "token", word(reader), 0, UINT32_MAX, &token);
    if (status != EP_OK)
        return status;
    if (token != rank->tokens)
        return refuse(reader, "token is %lld: rank %lld goes on with %u", (long long)token, (long long)number,
                      rank->tokens);
    if (!make_room(rank, trace->top_k))
        return ep_error_set(reader->error, EP_NO_MEMORY, "%s: no memory for its tokens", reader->path);
    for (uint32_t j = 0; j < trace->top_k; j++) {
        size_t at = (size_t)rank->tokens * trace->top_k + j;

        status = read_choice(reader, trace, j, &rank->topk[at], &rank->weights[at]);
        if (status != EP_OK)
            return status;
    }
    if (word(reader))
        return refuse(reader, "more than %u choices", trace->top_k);
    rank->tokens++;
    return EP_OK;
}

static ep_status check_ranks(struct reader *reader, const struct routing_trace *trace)
{
    if (!trace->rank)
        return ep_error_set(reader->error, EP_INVALID_ARGUMENT,
                            "%s: no line 'ep-trace 1 ranks R experts E top_k K'", reader->path);
    for (uint32_t r = 0; r < trace->ranks; r++)
        if (trace->rank[r].tokens == 0)
            return ep_error_set(reader->error, EP_INVALID_ARGUMENT, "%s: rank %u has no token", reader->path,
                                r);
    return EP_OK;
}

ep_status routing_trace_load(const char *path, struct routing_trace *trace, struct ep_error *error)
{
    struct reader reader = { .path = path, .error = error };
    FILE *file = fopen(path, "re");
    ep_status status = EP_OK;
    char *line = NULL;
    size_t capacity = 0;

    if (!file)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot open %s", path);
    while (status == EP_OK && getline(&line, &capacity, file) >= 0) {
        reader.line++;
        reader.next = line;
        if (line[0] == '#' || line[strspn(line, " \t\r\n")] == '\0')
            continue;
        status = trace->rank ? read_token(&reader, trace) : read_head(&reader, trace);
    }
    if (status == EP_OK && ferror(file))
        status = ep_error_set(error, EP_IO, "cannot read %s", path);
    free(line);
    fclose(file);
    return status == EP_OK ? check_ranks(&reader, trace) : status;
}

void routing_trace_free(struct routing_trace *trace)
{
    for (uint32_t r = 0; trace->rank && r < trace->ranks; r++) {
        free(trace->rank[r].topk);
        free(trace->rank[r].weights);
    }
    free(trace->rank);
    memset(trace, 0, sizeof *trace);
}

void routing_trace_pick(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                        float *weights)
{
    const struct routing_trace_rank *from = &routing->trace.rank[rank % routing->trace.ranks];
    size_t at = (size_t)(token % from->tokens) * routing->trace.top_k;

    memcpy(topk, from->topk + at, routing->trace.top_k * sizeof *topk);
    memcpy(weights, from->weights + at, routing->trace.top_k * sizeof *weights);
}
