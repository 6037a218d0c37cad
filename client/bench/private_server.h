/*
 * private_server: --spawn.  An ep-server for this run alone, on sockets in a temporary directory that
 * goes away with it.  Started before anything touches gRPC.
 */
#ifndef PRIVATE_SERVER_H
#define PRIVATE_SERVER_H

#include <stdint.h>
#include <sys/types.h>

#include "ep_error.h"

struct private_server {
    pid_t pid;
    char directory[80];
    char address[128]; /* "unix:PATH" of its socket */
};

/* Waits until it serves.  backend: "auto", "host" or "cuda". */
ep_status private_server_start(uint32_t host_ranks, const char *backend, struct private_server *server,
                               struct ep_error *error);

/* SIGTERM, and SIGKILL for one that does not end; removes the directory. */
void private_server_stop(struct private_server *server);

/* Its log, on stderr. */
void private_server_show_log(const struct private_server *server);

#endif
