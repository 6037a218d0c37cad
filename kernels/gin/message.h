/*
 * message.h: what two communicators say to each other.  Both are of the same release and byte order: the hello says
 * so, and whoever says something else is not talked to.
 *
 *   hello     each connection's first bytes, both ways; the token proves that the other side was given our handle
 *   frame     on the control connection: links and regions, one each way per peer, in the same order everywhere
 *   message   on data connections and in rings: a piece of a put
 */
#ifndef EP_GIN_MESSAGE_H
#define EP_GIN_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_plugin.h"

#define EP_GIN_MAGIC 0x4e494745u /* "EGIN" */
#define EP_GIN_PROTOCOL 1u       /* raised with every change of what is below */
#define EP_GIN_TOKEN_BYTES 16u
#define EP_GIN_MAX_RANKS 1024u
#define EP_GIN_MAX_CONNECTIONS 16u
#define EP_GIN_MIN_PIECE 4096u

/* Processes that can map each other's memory: one kernel and one network namespace, whose abstract sockets both see. */
struct ep_gin_host_id {
    uint8_t boot[16];
    uint64_t network; /* inode of the namespace */
};

/* What NCCL carries from listen() to everyone's connect(). */
struct ep_gin_handle {
    uint32_t magic;
    uint16_t protocol;
    uint16_t port;      /* in network byte order, as the address */
    uint8_t family;     /* 4 or 6 */
    uint8_t reserved[7];
    uint8_t address[16];
    uint8_t token[EP_GIN_TOKEN_BYTES];
    struct ep_gin_host_id host;
    uint64_t name;      /* of the abstract socket; not secret, unlike the token */
    uint8_t unused[48];
};
_Static_assert(sizeof(struct ep_gin_handle) == NCCL_HANDLE_BYTES, "ep_gin_handle is NCCL's to carry");

/* What a connection is for. */
enum ep_gin_purpose { EP_GIN_CONTROL = 1, EP_GIN_DATA = 2 };

struct ep_gin_hello {
    uint32_t magic;
    uint16_t protocol;
    uint8_t purpose;
    uint8_t index;       /* of a data connection */
    uint8_t token[EP_GIN_TOKEN_BYTES]; /* of whom it is said to */
    uint32_t rank, ranks; /* of who says it */
    uint32_t wanted;     /* transport: an index, EP_GIN_AUTO: any */
    uint32_t able;       /* bit t: transport t can be used */
    uint32_t connections; /* data connections, the fewer of both */
    uint32_t piece_bytes; /* the largest payload, the smaller of both */
    struct ep_gin_host_id host;
    uint64_t reserved[5];
};
_Static_assert(sizeof(struct ep_gin_hello) == 112, "ep_gin_hello is a protocol");

enum ep_gin_frame_kind { EP_GIN_FRAME_LINK = 1, EP_GIN_FRAME_REGION, EP_GIN_FRAME_BYE };

struct ep_gin_frame {
    uint32_t magic;
    uint16_t kind;
    uint8_t has_card; /* there is something to offer */
    uint8_t reserved;
    uint64_t order;   /* how many of this kind before */
    uint32_t key;     /* REGION: what messages call it */
    uint32_t type;    /* NCCL_MEMORY_* */
    uint64_t bytes;
    uint8_t card[224];
};
_Static_assert(sizeof(struct ep_gin_frame) == 256, "ep_gin_frame is a protocol");

struct ep_gin_message {
    uint32_t magic;
    uint16_t flags;
    uint16_t signal_op;  /* NCCL_SIGNAL_*, 0: none */
    uint64_t number;     /* see order.h */
    uint32_t back;
    uint32_t bytes;      /* of this piece */
    uint64_t total;      /* of the put */
    uint32_t region;     /* key; 0 with no bytes */
    uint32_t signal_region;
    uint64_t offset;     /* of the piece in the region */
    uint64_t signal_offset, signal_value;
};
_Static_assert(sizeof(struct ep_gin_message) == 64, "ep_gin_message is a protocol");
_Static_assert(offsetof(struct ep_gin_message, offset) == 40, "ep_gin_message.offset");

/* message.flags.  PAYLOAD: the bytes follow; without it they are where they belong.  WHOLE: that is all of the put, and
 * `bytes`, which has 32 bits, is 0. */
enum { EP_GIN_PAYLOAD = 1 << 0, EP_GIN_WHOLE = 1 << 1 };

static inline uint64_t ep_gin_message_bytes(const struct ep_gin_message *message)
{
    return message->flags & EP_GIN_WHOLE ? message->total : message->bytes;
}

/* Can it be what a peer with pieces of at most piece_bytes says?  Regions are the receiver's to look up. */
bool ep_gin_message_valid(const struct ep_gin_message *message, uint32_t piece_bytes);

/* Is it one of this release, of a rank below `ranks`, and for the owner of the token? */
bool ep_gin_hello_valid(const struct ep_gin_hello *hello, const uint8_t token[EP_GIN_TOKEN_BYTES], uint32_t ranks);
bool ep_gin_handle_valid(const struct ep_gin_handle *handle);
bool ep_gin_same_host(const struct ep_gin_host_id *a, const struct ep_gin_host_id *b);

/* [offset, offset + bytes) lies in `size` bytes; no sum that could wrap. */
static inline bool ep_gin_inside(uint64_t offset, uint64_t bytes, uint64_t size)
{
    return offset <= size && bytes <= size - offset;
}

#endif
