/* reference.h: what the files of the reference plugin share; reference.c says what it is. */
#ifndef GIN_REFERENCE_H
#define GIN_REFERENCE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "ep_clock.h"
#include "ep_cuda.h"
#include "nccl_plugin.h"

enum { RANKS = 16, REGIONS = 4096, BOUNCE = 1 << 20, TOKEN = 16, PENDING = 256, CONNECT_MS = 4000, RECEIVES = 32 };

/* What a handle holds, and a connection begins with. */
struct address {
    uint8_t token[TOKEN];
    uint16_t port; /* network order */
    uint16_t rank; /* of who connects */
};

struct region {
    uint8_t *at;
    uint64_t bytes;
    bool cuda;
    uint32_t device;
    uint32_t id;
};

enum kind { PUT, REGISTERED };

struct message {
    uint32_t kind, target, signal; /* regions by number; UINT32_MAX: none */
    uint32_t signal_op;
    uint64_t to, bytes, signal_at, value;
};

struct request {
    struct message message;
    const struct region *source;
    uint64_t from;
    uint32_t done;        /* atomic, release, partner: test */
    uint64_t number;      /* of the communicator's */
    struct request *next; /* in a peer's queue, or among those that are free */
    struct request *all;  /* every one of a communicator, for its end */
};

struct comm;

struct peer {
    struct comm *comm;
    int out, in;
    pthread_t sender, receiver;
    uint8_t *out_bounce, *in_bounce;
    /* under the lock */
    struct request *first, *last;
    bool dead;
    uint32_t registered; /* regions that it has told of */
};

struct listener {
    int fd;
    struct address address;
};

struct comm {
    uint32_t ranks, rank;
    struct peer peer[RANKS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool closing, lost; /* lost: some peer is gone */
    uint32_t n_regions;
    struct region *region[REGIONS];
    struct request *free, *all;
    uint64_t requests, tested;
    bool progressed; /* the progress thread's: since the last test */
};

/* ---- reference_data.c: from a request to its bytes at the peer --------------------------------------- */

extern const struct ep_cuda_api *cuda; /* NULL: none */
extern uint32_t lost_anywhere;         /* peers, of all communicators; atomic */

/* Is it the rule that is to be broken? */
bool wrong(const char *rule);
void nap_ms(uint32_t ms);
bool inside(const struct region *region, uint64_t at, uint64_t bytes);
void finish(struct comm *comm, struct request *request);
struct request *new_request(struct comm *comm);
void enqueue(struct peer *peer, struct request *request);
bool send_bytes(int fd, const void *from, uint64_t bytes);
void *run_sender(void *arg);
void *run_receiver(void *arg);

/* ---- reference_connect.c --------------------------------------------------------------------------- */

nccl_result reference_init(void **context, uint64_t comm_id, nccl_logger log);
nccl_result reference_devices(int *count);
nccl_result reference_listen(void *context, int device, void *handle, void **out);
nccl_result reference_close_listen(void *arg);
nccl_result reference_connect(void *context, void *handles[], int ranks, int rank, void *listener, void **out);
nccl_result reference_close(void *arg);

#endif
