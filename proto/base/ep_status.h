/*
 * ep_status: every result a call of this project can have.
 *
 * One list gives the names, the texts, the gRPC codes and the exit codes of the
 * command-line tools.  The numeric values travel in shared memory and in
 * frames, so they never change; new ones go to the end.
 */
#ifndef EP_STATUS_H
#define EP_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/*  X(name, value, gRPC code, exit code, text)  */
#define EP_STATUS_LIST(X)                                                          \
    X(OK,                   0,  0, 0, "ok")                                        \
    X(INVALID_ARGUMENT,     1,  3, 2, "invalid argument")                          \
    X(NOT_FOUND,            2,  5, 3, "not found")                                 \
    X(ALREADY_EXISTS,       3,  6, 1, "already exists")                            \
    X(FAILED_PRECONDITION,  4,  9, 1, "not possible in the present state")         \
    X(RESOURCE_EXHAUSTED,   5,  8, 1, "a limit is reached")                        \
    X(PERMISSION_DENIED,    6,  7, 5, "permission denied")                         \
    X(UNAUTHENTICATED,      7, 16, 5, "not authenticated")                         \
    X(UNAVAILABLE,          8, 14, 4, "unavailable")                               \
    X(DEADLINE_EXCEEDED,    9,  4, 4, "deadline exceeded")                         \
    X(CANCELLED,           10,  1, 1, "cancelled")                                 \
    X(UNIMPLEMENTED,       11, 12, 1, "not implemented")                           \
    X(INTERNAL,            12, 13, 1, "internal error")                            \
    X(TIMEOUT,             13,  4, 4, "a rank was late")                           \
    X(SERVER_LOST,         14, 14, 4, "the server is gone")                        \
    X(DETACHED,            15,  9, 1, "the rank is no longer attached")            \
    X(OVERFLOW,            16,  8, 1, "the output buffer is too small")            \
    X(STALE_HANDLE,        17,  9, 1, "the handle's routing is gone")              \
    X(IO,                  18, 13, 1, "input/output error")                        \
    X(NO_MEMORY,           19,  8, 1, "out of memory")                             \
    X(PROTOCOL,            20, 13, 1, "protocol error")                            \
    X(VERIFY_FAILED,       21, 15, 6, "the result is wrong")                       \
    X(ABORTED,             22, 10, 4, "overtaken by something else, try again")    \
    X(DEVICE_LOST,         23, 14, 4, "the GPU has failed for this process, which has to be started again")

typedef enum ep_status {
#define X(name, value, grpc, exit, text) EP_##name = value,
    EP_STATUS_LIST(X)
#undef X
} ep_status;

/* The name without its prefix ("TIMEOUT"), "?" for a value that is not in the list. */
const char *ep_status_name(ep_status status);

/* What it means, in words a person reads. */
const char *ep_status_text(ep_status status);

/* The gRPC status code to answer with, and the best ep_status for a gRPC code. */
int ep_status_to_grpc(ep_status status);
ep_status ep_status_from_grpc(int code);
ep_status ep_status_from_name(const char *name); /* EP_INTERNAL when unknown */

/* The exit code of a command-line tool that ends with this result. */
int ep_status_exit_code(ep_status status);

#ifdef __cplusplus
}
#endif
#endif
