/* Between player.c and comm.c. */
#ifndef PLAYER_PRIVATE_H
#define PLAYER_PRIVATE_H

#include "player.h"

uint64_t player_mix(uint64_t x);

/* The progress thread serves it from now on. */
ep_status player_add(struct player *player, struct comm *comm, struct ep_error *error);
/* When it returns, the progress thread has let go of it. */
ep_status player_remove(struct player *player, const struct comm *comm, struct ep_error *error);

#endif
