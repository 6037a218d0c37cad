/* Connections that gRPC holds.  It does not tell when it closes one: the descriptor then is no more, or is another file. */
#include <assert.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "rpc_private.h"

struct rpc_held_fd {
    int fd;
    dev_t dev;
    ino_t ino;
};

bool rpc_held_open(struct rpc_held *held, size_t limit)
{
    *held = (struct rpc_held){ .fds = calloc(limit, sizeof *held->fds), .limit = limit };
    return held->fds != NULL;
}

void rpc_held_close(struct rpc_held *held)
{
    free(held->fds);
    *held = (struct rpc_held){ 0 };
}

bool rpc_held_add(struct rpc_held *held, int fd)
{
    struct stat st;

    assert(held->n < held->limit);
    if (fstat(fd, &st) != 0)
        return false;
    held->fds[held->n++] = (struct rpc_held_fd){ .fd = fd, .dev = st.st_dev, .ino = st.st_ino };
    return true;
}

void rpc_held_sweep(struct rpc_held *held)
{
    size_t kept = 0;

    for (size_t i = 0; i < held->n; i++) {
        const struct rpc_held_fd h = held->fds[i];
        struct stat st;

        if (fstat(h.fd, &st) == 0 && st.st_dev == h.dev && st.st_ino == h.ino)
            held->fds[kept++] = h;
    }
    held->n = kept;
}
