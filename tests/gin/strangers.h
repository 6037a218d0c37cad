/*
 * strangers: who connects to a port and is no peer.
 *
 * They know what anyone on the network can find out: which TCP ports listen.
 */
#ifndef STRANGERS_H
#define STRANGERS_H

#include <stdint.h>

enum { STRANGERS = 64 };

struct strangers {
    uint32_t n;
    int socket[STRANGERS]; /* of those that stay */
};

/* To every TCP port on which this process listens, with garbage of several kinds. Returns how many ports there are. */
uint32_t strangers_come(struct strangers *strangers, uint64_t seed);
void strangers_go(struct strangers *strangers);

#endif
