/*
 * ep_progress: says on stderr that something takes long.
 *
 * Nothing in the first second.  Then, on a terminal, a line with a spinner and the elapsed time that is
 * redrawn and in the end erased; elsewhere one plain line.
 */
#ifndef EP_PROGRESS_H
#define EP_PROGRESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct ep_progress {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool running, stop; /* stop: under lock */
    uint64_t began_ns;
    char text[400];
};

/* `what` is a text like "group create: waiting for unix:/run/ep-server/ep.sock".  quiet: says nothing. */
void ep_progress_begin(struct ep_progress *progress, bool quiet, const char *what);
void ep_progress_end(struct ep_progress *progress);

#endif
