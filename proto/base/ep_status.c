#include "ep_status.h"

#include <stddef.h>
#include <string.h>

struct row {
    const char *name;
    const char *text;
    int grpc;
    int exit_code;
};

/* Indexed by value: the list has no holes, see the assertion below. */
static const struct row rows[] = {
#define X(name_, value_, grpc_, exit_, text_) \
    [value_] = { .name = #name_, .text = text_, .grpc = grpc_, .exit_code = exit_ },
    EP_STATUS_LIST(X)
#undef X
};

enum { N_ROWS = sizeof rows / sizeof *rows };

#define X(name_, value_, grpc_, exit_, text_) +1
_Static_assert(N_ROWS == 0 EP_STATUS_LIST(X), "values of ep_status run from 0 without a hole");
#undef X

static const struct row *find(ep_status status)
{
    return (unsigned)status < N_ROWS ? &rows[status] : NULL;
}

const char *ep_status_name(ep_status status)
{
    const struct row *row = find(status);

    return row ? row->name : "?";
}

const char *ep_status_text(ep_status status)
{
    const struct row *row = find(status);

    return row ? row->text : "unknown status";
}

int ep_status_to_grpc(ep_status status)
{
    const struct row *row = find(status);

    return row ? row->grpc : rows[EP_INTERNAL].grpc;
}

/*
 * Several of ours share a gRPC code; the first of the list is the general one.  Codes that have
 * none of ours become the nearest: UNKNOWN and DATA_LOSS say no more than that it went wrong,
 * ABORTED and OUT_OF_RANGE that the state or the argument was not right.
 */
ep_status ep_status_from_grpc(int code)
{
    if (code == 10)
        return EP_FAILED_PRECONDITION; /* ABORTED */
    if (code == 11)
        return EP_INVALID_ARGUMENT; /* OUT_OF_RANGE */
    for (int i = 0; i < N_ROWS; i++)
        if (rows[i].grpc == code)
            return (ep_status)i;
    return EP_INTERNAL;
}

ep_status ep_status_from_name(const char *name)
{
    for (int i = 0; name && i < N_ROWS; i++)
        if (strcmp(rows[i].name, name) == 0)
            return (ep_status)i;
    return EP_INTERNAL;
}

int ep_status_exit_code(ep_status status)
{
    const struct row *row = find(status);

    return row ? row->exit_code : rows[EP_INTERNAL].exit_code;
}
