#include "loads.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "spec.h"
#include "yaml_json.h"

enum { MAX_EXPERTS = 65536 };

/* ---- a file -------------------------------------------------------------------------- */

static ep_status put(json_t *loads, const char *file, uint64_t expert, uint64_t count, struct ep_error *error)
{
    if (expert >= MAX_EXPERTS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: expert %llu: must be below %d", file,
                            (unsigned long long)expert, MAX_EXPERTS);
    while (json_array_size(loads) <= expert)
        json_array_append_new(loads, json_string("0"));
    json_array_set_new(loads, expert, json_string(ep_text_u64(count).s));
    return EP_OK;
}

/* "expert,count"; the first line may name the columns. */
static ep_status put_line(json_t *loads, const char *file, const char *line, unsigned number, struct ep_error *error)
{
    char expert[32], count[32], rest;
    uint64_t e, n;

    if (!line[strspn(line, " \t\r")] || (number == 1 && isalpha((unsigned char)*line)))
        return EP_OK;
    if (sscanf(line, " %31[0-9] , %31[0-9] %c", expert, count, &rest) != 2 ||
        !ep_text_parse_u64(expert, UINT64_MAX, &e) || !ep_text_parse_u64(count, UINT64_MAX, &n))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s:%u: must be \"expert,count\"", file, number);
    return put(loads, file, e, n, error);
}

static ep_status put_lines(json_t *loads, const char *text, size_t size, const char *file, struct ep_error *error)
{
    char *copy = strndup(text, size), *at = copy, *line;
    ep_status status = copy ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "out of memory");

    for (unsigned number = 1; !status && (line = strsep(&at, "\n")); number++)
        status = put_line(loads, file, line, number, error);
    free(copy);
    return status;
}

static bool is_count(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 0;
}

static ep_status put_items(json_t *loads, const json_t *document, const char *file, struct ep_error *error)
{
    ep_status status = EP_OK;
    json_t *item;
    size_t i;

    json_array_foreach(document, i, item)
    {
        const json_t *expert = json_object_get(item, "expert"), *count = json_object_get(item, "count");

        if (!is_count(item) && (!is_count(expert) || !is_count(count)))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: [%zu] must be a count or {expert, count}", file, i);
        if (is_count(item))
            status = put(loads, file, i, (uint64_t)json_integer_value(item), error);
        else
            status = put(loads, file, (uint64_t)json_integer_value(expert), (uint64_t)json_integer_value(count), error);
        if (status)
            return status;
    }
    return EP_OK;
}

static bool is_table(const char *text, size_t size)
{
    size_t i = 0;

    while (i < size && isspace((unsigned char)text[i]))
        i++;
    return i < size && text[i] != '[' && text[i] != '{' && text[i] != '-';
}

ep_status ep_loads_parse(const char *text, size_t size, const char *file, json_t **out, struct ep_error *error)
{
    json_t *loads = json_array(), *document = NULL;
    ep_status status;

    if (is_table(text, size)) {
        status = put_lines(loads, text, size, file, error);
    } else {
        status = ep_yaml_parse(text, size, file, &document, error);
        if (!status && !json_is_array(document))
            status = ep_error_set(error, EP_INVALID_ARGUMENT,
                                  "%s: must be a list of counts or of {expert, count}, or lines of expert,count", file);
        if (!status)
            status = put_items(loads, document, file, error);
        json_decref(document);
    }
    if (!status && !json_array_size(loads))
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "%s: has no loads", file);
    if (status)
        json_decref(loads);
    else
        *out = loads;
    return status;
}

static ep_status loads_of_file(const char *file, json_t **out, struct ep_error *error)
{
    char *text;
    size_t size;
    ep_status status = ep_spec_read_file(file, &text, &size, error);

    if (status)
        return ep_error_prefix(error, "--loads");
    status = ep_loads_parse(text, size, file, out, error);
    free(text);
    return status ? ep_error_prefix(error, "--loads") : EP_OK;
}

/* ---- what was counted ------------------------------------------------------------------ */

uint64_t *ep_loads_sum(const Ep__V1__Stats *stats, size_t *n)
{
    uint64_t *sums;

    *n = 0;
    for (size_t i = 0; i < stats->n_ranks; i++)
        if (stats->ranks[i]->n_expert_rows > *n)
            *n = stats->ranks[i]->n_expert_rows;
    sums = *n ? calloc(*n, sizeof *sums) : NULL;
    for (size_t i = 0; sums && i < stats->n_ranks; i++)
        for (size_t e = 0; e < stats->ranks[i]->n_expert_rows; e++)
            sums[e] += stats->ranks[i]->expert_rows[e];
    return sums;
}

static ep_status loads_of_stats(const Ep__V1__Stats *stats, json_t **out, struct ep_error *error)
{
    size_t n;
    uint64_t *sums = ep_loads_sum(stats, &n), total = 0;

    for (size_t e = 0; sums && e < n; e++)
        total += sums[e];
    if (!total) {
        free(sums);
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "no rows were counted for any expert in this group: give the loads with --loads FILE");
    }
    *out = json_array();
    for (size_t e = 0; e < n; e++)
        json_array_append_new(*out, json_string(ep_text_u64(sums[e]).s));
    free(sums);
    return EP_OK;
}

static ep_status loads_counted(struct ep_admin *admin, const char *name, json_t **out, struct ep_error *error)
{
    Ep__V1__GetStatsRequest request = EP__V1__GET_STATS_REQUEST__INIT;
    const Ep__V1__Stats *stats;
    ProtobufCMessage *reply;
    ep_status status;

    request.group = (char *)(uintptr_t)name;
    request.experts = true;
    status = ep_admin_call(admin, "GetStats", &request.base, 0, &reply, error);
    if (status == EP_NOT_FOUND)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "a group that is not there has counted nothing: give the loads with --loads FILE");
    if (status)
        return status;
    stats = (Ep__V1__Stats *)reply;
    if (*stats->behind)
        ep_admin_note(admin, "rows may be old: %s", stats->behind);
    for (size_t i = 0; i < stats->n_missing; i++)
        ep_admin_note(admin, "without the rows of node %s", stats->missing[i]);
    status = loads_of_stats(stats, out, error);
    ep_admin_free(reply);
    return status;
}

/* ---- into the spec ------------------------------------------------------------------------ */

static bool is_by_load(const json_t *placement)
{
    const char *strategy = json_string_value(json_object_get(placement, "strategy"));
    int value;

    return strategy && ep_text_parse_enum(&ep__v1__placement_strategy__descriptor, strategy, &value) &&
           value == EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_BY_LOAD;
}

ep_status ep_loads_apply(struct ep_admin *admin, const struct ep_invocation *invocation, const char *name, json_t *spec,
                         struct ep_error *error)
{
    json_t *placement = json_object_get(spec, "placement"), *loads = NULL;
    const char *file = ep_invocation_text(invocation, "loads");
    ep_status status = EP_OK;

    if (!is_by_load(placement)) {
        if (!file && !ep_invocation_given(invocation, "redundant"))
            return EP_OK;
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s goes with --placement by-load",
                            file ? "loads" : "redundant");
    }
    if (ep_invocation_given(invocation, "redundant"))
        json_object_set_new(placement, "redundant",
                            json_integer((json_int_t)ep_invocation_u64(invocation, "redundant", 0)));
    if (file)
        status = loads_of_file(file, &loads, error);
    else if (!json_array_size(json_object_get(placement, "loads")))
        status = loads_counted(admin, name, &loads, error);
    if (loads)
        json_object_set_new(placement, "loads", loads);
    return status;
}
