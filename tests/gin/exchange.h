/*
 * exchange: random puts between all ranks, and whether they did what they should.
 *
 * In a round every rank sends a batch to every rank: puts of mixed sizes from and to odd offsets, in random order, and
 * a signal with the last of them or after it. A batch follows from the seed, sender, receiver and round, so that the
 * receiver knows what must have come. It looks the moment it sees the signal, at the last put first, and then at all
 * the memory around: bytes that nobody put must be what they were. Then it acknowledges, and the round is over when
 * all have.
 */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "player.h"

enum { EXCHANGE_PUTS = 256 };

/* What batches are like. */
struct mix {
    uint32_t puts;         /* of a batch, at most; EXCHANGE_PUTS */
    uint64_t bytes;        /* of a put, at most; sizes are spread over their powers of two */
    const uint64_t *sizes; /* the sizes themselves, `puts` of them, in place of random ones */
    uint64_t slot_bytes;   /* room for a batch; 0: EXCHANGE_SLOT */
    bool host_source;      /* puts come from host memory, whatever the windows are */
    bool host_target;      /* and go there */
};
#define EXCHANGE_SLOT (512u << 10)

struct exchange {
    struct comm *comm;
    struct mix mix;
    uint32_t context, base; /* base: its signals begin there, two per rank */
    uint64_t key;           /* other exchanges have others */
    struct memory source, target;
    struct region source_region, target_region;
    uint8_t *image;           /* what `target` must be */
    uint8_t *expected, *seen; /* [slot] to compare with */
    uint32_t sent[CREW_MAX_RANKS], received[CREW_MAX_RANKS], acknowledged[CREW_MAX_RANKS];
};

/* Collective. `number`: exchanges of a communicator are numbered. */
ep_status exchange_open(struct comm *comm, uint32_t context, uint32_t number, const struct mix *mix,
                        struct exchange *exchange, struct ep_error *error);
ep_status exchange_close(struct exchange *exchange, struct ep_error *error);
/* Its communicator is closed already, and with it its regions. */
void exchange_abandon(struct player *player, struct exchange *exchange);

#define EXCHANGE_EVERYBODY UINT32_MAX

/* Posts this round's batch for a rank. */
ep_status exchange_send(struct exchange *exchange, uint32_t to, struct ep_error *error);
/* Receives a batch of each rank of the mask, as they come, and acknowledges them. */
ep_status exchange_receive(struct exchange *exchange, uint32_t from, struct ep_error *error);
/* What was sent to the ranks of the mask is done, and received. */
ep_status exchange_settle(struct exchange *exchange, uint32_t with, struct ep_error *error);

/* Rounds of the three with these ranks; masks. `to` has all of `from`, and may have ranks that do not answer. */
ep_status exchange_rounds(struct exchange *exchange, uint32_t rounds, uint32_t to, uint32_t from,
                          struct ep_error *error);

#endif
