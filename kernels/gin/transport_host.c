/*
 * Puts within a host: to another process, and to oneself.
 *
 * A region of a peer's is mapped here (a descriptor of its VMM allocation comes with the registration), and a put is
 * one copy by the GPU's copy engine, with nobody's help at the other end.  When the copy is over, and all before it, the
 * message goes into a ring in the peer's memory.  A peer that sleeps is woken through its eventfd.
 *
 * One copy is under way for each peer, or as many small ones as do not continue each other: to begin one takes 3 us, in which
 * NVLink carries a megabyte, and so does what is between two.  So the last put waits while another copy is under way, and puts
 * that continue it, at both ends, are one copy with it.
 *
 * Large copies to all peers stand in one line, in one stream, where one waits behind the one that is under way: what is put
 * first is there first.  A GPU takes in no more from several others than from one: when all ranks send to rank 0 first, then
 * to rank 1, 4 H200 have 190 to 205 GB/s out of each; when each begins with the next rank, 290 to 370.  Two such copies at a
 * time, in two streams, go to two ranks more often, and took a dispatch over 4 nodes from 750 to 830 us.  NCCL's thread brings
 * puts in the order of ranks, so the first large one after a rest waits until it has looked at all of them, and progress puts
 * them in line in the better order.
 *
 * To oneself the region is where it is and the ring is this process's; host memory may be the target too.
 */
#include "transport.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ring.h"

/* Puts of one link, each perhaps with a copy and a mark: the driver waits in a launch when a stream holds more than about 1000. */
#define IN_FLIGHT 400u
/* Of several puts that may be one copy: with more it is hardly faster, and its first byte is told with its last. */
#define COPY_BYTES (32u << 20)
/* A put that takes longer than such a look. */
#define LARGE_BYTES (1u << 20)
/* Messages of one peer, then the others. */
#define TURN 64u

/* A region of the peer's. */
struct mapped {
    struct ep_cuda_memory *memory; /* NULL: this process's own */
    uint8_t *at;
};

/* What the descriptor of a region is of. */
struct region_card {
    uint64_t offset, bytes; /* of the region in the allocation; of both to map */
};
_Static_assert(sizeof(struct region_card) <= EP_GIN_CARD_BYTES, "a card holds it");

/* What links to other processes share. */
struct line {
    struct ep_gin_stream stream;   /* of what is large */
    struct host_link *head;        /* links whose run is to be copied, in this order */
    struct ep_cuda_marker *marker; /* of the links' own streams */
};

struct host_link {
    struct ep_gin_comm *comm;
    struct ep_gin_peer *peer;
    struct ep_gin_stream stream;
    struct line *line; /* NULL: to oneself */
    struct host_link *behind;
    struct ep_gin_ring *in;  /* the peer writes */
    struct ep_gin_ring *out; /* the peer reads; to oneself the same */
    int wake;                /* the peer's eventfd */
    bool own, broken;
    struct ep_gin_queue run;     /* puts that are to be one copy, each continues the one before */
    uint64_t run_bytes;
    struct ep_gin_queue copying; /* puts, in their order */
    uint32_t puts;               /* in both */
};

/* ---- rings -------------------------------------------------------------------------------------------- */

static ep_status map_ring(int fd, struct ep_gin_ring **ring, struct ep_error *error)
{
    void *at = mmap(NULL, sizeof **ring, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (at == MAP_FAILED)
        return ep_error_errno(error, EP_NO_MEMORY, "a ring of %zu bytes", sizeof **ring);
    *ring = at;
    return EP_OK;
}

/* Nobody can make it shorter: who has it mapped would die of that. */
static ep_status make_ring(int *out, struct ep_gin_ring **ring, struct ep_error *error)
{
    ep_status status;
    int fd = memfd_create("ep-gin-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "memory of a ring");
    if (ftruncate(fd, sizeof **ring) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        status = ep_error_errno(error, EP_NO_MEMORY, "memory of a ring");
    else
        status = map_ring(fd, ring, error);
    if (status != EP_OK) {
        close(fd);
        return status;
    }
    ep_gin_ring_format(*ring);
    *out = fd;
    return EP_OK;
}

static ep_status take_ring(int fd, uint32_t rank, struct ep_gin_ring **ring, struct ep_error *error)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    struct stat stat;
    ep_status status;

    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &stat) != 0 || stat.st_size < (off_t)sizeof **ring)
        return ep_error_set(error, EP_PROTOCOL, "rank %u offers no ring", rank);
    status = map_ring(fd, ring, error);
    if (status == EP_OK && !ep_gin_ring_valid(*ring)) {
        munmap(*ring, sizeof **ring);
        *ring = NULL;
        status = ep_error_set(error, EP_PROTOCOL, "rank %u offers a ring of another release", rank);
    }
    return status;
}

/* ---- links ---------------------------------------------------------------------------------------------- */

static ep_status host_usable(struct ep_gin_comm *comm, struct ep_error *error)
{
    return comm->cuda ? EP_OK : ep_error_set(error, EP_UNAVAILABLE, "%s", comm->no_cuda.text);
}

static void host_stop(void *shared)
{
    struct line *line = shared;

    ep_gin_stream_close(&line->stream);
    ep_gin_marker_close(line->stream.comm, line->stream.marker);
    ep_gin_marker_close(line->stream.comm, line->marker);
    free(line);
}

static ep_status host_start(struct ep_gin_comm *comm, void **shared, struct ep_error *error)
{
    struct line *line = calloc(1, sizeof *line);
    struct ep_cuda_marker *of_large;
    ep_status status;

    if (!line)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a stream");
    line->stream.comm = comm;
    status = ep_gin_marker_open(comm, &line->marker, error);
    if (status == EP_OK)
        status = ep_gin_marker_open(comm, &of_large, error);
    if (status == EP_OK)
        status = ep_gin_stream_open(comm, &line->stream, of_large, error);
    if (status == EP_OK)
        *shared = line;
    else
        host_stop(line);
    return status;
}

static void host_link_close(void *opened)
{
    struct host_link *link = opened;

    ep_gin_stream_close(&link->stream);
    if (link->out && !link->own)
        munmap(link->out, sizeof *link->out);
    if (link->in)
        munmap(link->in, sizeof *link->in);
    if (link->wake >= 0)
        close(link->wake);
    free(link);
}

/* What the peer needs: the ring that it writes, and what wakes its reader. */
static ep_status prepare(struct host_link *link, struct ep_gin_card *mine, struct ep_error *error)
{
    int wake, ring = -1;
    struct ep_cuda_marker *marker = link->line ? link->line->marker : NULL;
    ep_status status = ep_gin_stream_open(link->comm, &link->stream, marker, error);

    if (status == EP_OK)
        status = make_ring(&ring, &link->in, error);
    if (status != EP_OK)
        return status;
    wake = fcntl(link->comm->wake, F_DUPFD_CLOEXEC, 0);
    if (wake < 0) {
        close(ring);
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a descriptor of an eventfd");
    }
    mine->fd[0] = ring;
    mine->fd[1] = wake;
    mine->fds = 2;
    return EP_OK;
}

static ep_status open_link(struct ep_gin_comm *comm, struct ep_gin_peer *peer, bool own, void **out,
                           struct ep_gin_card *mine, struct ep_error *error)
{
    struct host_link *link = calloc(1, sizeof *link);
    ep_status status;

    if (!link)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a link to rank %u", peer->rank);
    link->comm = comm;
    link->peer = peer;
    link->own = own;
    link->line = own ? NULL : comm->shared[EP_GIN_HOST];
    link->wake = -1;
    status = prepare(link, mine, error);
    if (status == EP_OK)
        *out = link;
    else
        host_link_close(link);
    return status;
}

static ep_status host_link_open(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void **out,
                                struct ep_gin_card *mine, struct ep_error *error)
{
    return open_link(comm, peer, false, out, mine, error);
}

static ep_status host_link_connect(void *opened, const struct ep_gin_card *theirs, struct ep_error *error)
{
    struct host_link *link = opened;
    ep_status status;

    if (theirs->fds != 2)
        return ep_error_set(error, EP_PROTOCOL, "rank %u sends %u descriptors: must be 2", link->peer->rank,
                            theirs->fds);
    status = take_ring(theirs->fd[0], link->peer->rank, &link->out, error);
    if (status != EP_OK)
        return status;
    link->wake = fcntl(theirs->fd[1], F_DUPFD_CLOEXEC, 0);
    return link->wake >= 0 ? EP_OK : ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a descriptor of an eventfd");
}

/* The card goes nowhere: both ends are here. */
static ep_status self_link_open(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void **out,
                                struct ep_gin_card *mine, struct ep_error *error)
{
    struct host_link *link;
    ep_status status = open_link(comm, peer, true, out, mine, error);

    if (status != EP_OK)
        return status;
    link = *out;
    link->out = link->in;
    link->wake = mine->fd[1];
    close(mine->fd[0]);
    mine->fds = 0;
    return EP_OK;
}

static ep_status self_link_connect(void *opened, const struct ep_gin_card *theirs, struct ep_error *error)
{
    (void)opened, (void)theirs, (void)error;
    return EP_OK;
}

/* ---- regions ---------------------------------------------------------------------------------------------- */

/* Signals of NCCL's, memory of cudaMalloc() and host memory have no descriptor. */
static ep_status host_region_offer(void *opened, const struct ep_gin_region *region, struct ep_gin_card *card,
                                   struct ep_error *error)
{
    const struct host_link *link = opened;
    struct region_card offered;
    uint64_t bytes;
    int fd;

    if (region->type != NCCL_MEMORY_CUDA || link->comm->cuda->memory_export_at(link->comm->device, region->at, &fd,
                                                                               &offered.offset, &bytes, error) != EP_OK)
        return EP_UNIMPLEMENTED;
    if (!ep_gin_inside(offered.offset, region->bytes, bytes)) {
        close(fd);
        return ep_error_set(error, EP_UNIMPLEMENTED, "the region is of more than one allocation");
    }
    offered.bytes = offered.offset + region->bytes;
    memcpy(card->bytes, &offered, sizeof offered);
    card->fd[0] = fd;
    card->fds = 1;
    return EP_OK;
}

static ep_status import(const struct ep_gin_comm *comm, const struct ep_gin_region *region,
                        const struct ep_gin_card *card, struct mapped *mapped, struct ep_error *error)
{
    struct region_card offered;
    ep_status status;

    memcpy(&offered, card->bytes, sizeof offered);
    if (card->fds != 1 || !ep_gin_inside(offered.offset, region->bytes, offered.bytes))
        return ep_error_set(error, EP_PROTOCOL, "a region is offered that is not the one");
    status = comm->cuda->memory_import(comm->device, card->fd[0], offered.bytes, &mapped->memory, error);
    if (status == EP_OK)
        mapped->at = (uint8_t *)comm->cuda->memory_at(mapped->memory) + offered.offset;
    return status;
}

static ep_status host_region_reach(void *opened, const struct ep_gin_region *region, const struct ep_gin_card *card,
                                   void **remote, struct ep_error *error)
{
    const struct host_link *link = opened;
    struct mapped *mapped = calloc(1, sizeof *mapped);
    ep_status status = EP_OK;

    if (!mapped)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a region of rank %u", link->peer->rank);
    if (link->own)
        mapped->at = region->at;
    else
        status = import(link->comm, region, card, mapped, error);
    if (status == EP_OK)
        *remote = mapped;
    else
        free(mapped);
    return status;
}

static void start_copy(struct host_link *link);

static void host_region_leave(void *opened, const struct ep_gin_region *region, void *remote)
{
    struct host_link *link = opened;
    struct mapped *mapped = remote;

    (void)region;
    if (!mapped) /* what was offered went with its descriptor */
        return;
    while (link->run.head)
        start_copy(link); /* nothing is begun that goes there when it is not mapped any more */
    if (!ep_gin_stream_wait(&link->stream, link->comm->settings.timeout_ns) ||
        (link->line && !ep_gin_stream_wait(&link->line->stream, link->comm->settings.timeout_ns)))
        return; /* it stays mapped: the GPU still writes there */
    if (mapped->memory)
        link->comm->cuda->memory_destroy(mapped->memory);
    free(mapped);
}

/* ---- sending ------------------------------------------------------------------------------------------------- */

static uint8_t *target_of(const struct ep_gin_put *put)
{
    return ((const struct mapped *)put->reached)->at + put->offset;
}

static bool on_host(const struct host_link *link, const struct ep_gin_put *put)
{
    return link->own && put->source->type == NCCL_MEMORY_HOST && put->target->type == NCCL_MEMORY_HOST;
}

static bool continues_run(const struct host_link *link, const struct ep_gin_put *put)
{
    const struct ep_gin_put *first = link->run.head;

    return first && put->bytes <= COPY_BYTES - link->run_bytes && put->source == first->source &&
           put->reached == first->reached && put->from == first->from + link->run_bytes &&
           put->offset == first->offset + link->run_bytes;
}

static bool is_large(const struct host_link *link, uint64_t bytes) { return link->line && bytes >= LARGE_BYTES; }

/* Its place in the line, or the end of it. */
static struct host_link **place_of(const struct host_link *link)
{
    struct host_link **at = &link->line->head;

    while (*at && *at != link)
        at = &(*at)->behind;
    return at;
}

static void get_in_line(struct host_link *link)
{
    struct host_link **at = place_of(link);

    if (*at)
        return;
    *at = link;
    link->behind = NULL;
}

static void leave_line(const struct host_link *link)
{
    struct host_link **at = place_of(link);

    if (*at)
        *at = link->behind;
}

/* Half of what is large, in whole puts: what the last copy brings is told, and moved on, only when all of it is there. */
static uint64_t next_copy(const struct host_link *link)
{
    uint64_t bytes = 0;

    if (!is_large(link, link->run_bytes))
        return link->run_bytes;
    for (const struct ep_gin_put *put = link->run.head; bytes < link->run_bytes - bytes; put = put->next)
        bytes += put->bytes;
    return bytes;
}

static void copy_run(struct host_link *link, struct ep_gin_stream *stream, uint64_t bytes)
{
    const struct ep_gin_put *first = link->run.head;

    if (bytes == 0)
        return;
    if (on_host(link, first))
        memmove(target_of(first), first->from, bytes);
    else
        ep_gin_stream_copy(stream, target_of(first), first->from, bytes);
}

static void start_copy(struct host_link *link)
{
    const bool large = is_large(link, link->run_bytes);
    struct ep_gin_stream *stream = large ? &link->line->stream : &link->stream;
    const uint64_t bytes = next_copy(link);

    copy_run(link, stream, bytes);
    link->run_bytes -= bytes;
    for (uint64_t done = 0; link->run.head && (done < bytes || link->run.head->bytes == 0);) {
        struct ep_gin_put *put = ep_gin_queue_pop(&link->run);

        done += put->bytes;
        put->stream = stream;
        put->mark = ep_gin_stream_mark(stream);
        ep_gin_queue_push(&link->copying, put);
    }
    if (!large)
        return;
    if (!is_large(link, link->run_bytes))
        leave_line(link);
    ep_gin_stream_flush(stream); /* what comes behind it, of another link, has a mark of its own */
}

/* There is a copy in it, and one behind that. */
static bool is_full(const struct ep_gin_stream *stream)
{
    return stream->written > 1 && !ep_gin_stream_reached(stream, stream->written - 1);
}

/* Only what may still grow is worth a wait. */
static bool run_waits(const struct host_link *link)
{
    return link->run_bytes < COPY_BYTES && !ep_gin_stream_idle(&link->stream);
}

/* It may grow meanwhile. */
static bool waits_in_line(const struct host_link *link)
{
    return link->line->head != link || is_full(&link->line->stream);
}

static bool host_put_start(void *opened, struct ep_gin_put *put)
{
    struct host_link *link = opened;

    if (link->puts == IN_FLIGHT)
        return false;
    if (!continues_run(link, put)) {
        if (is_large(link, link->run_bytes))
            return false; /* it has its turn in progress */
        start_copy(link);
    }
    if (is_large(link, put->bytes) && link->comm->large++ == 0)
        link->comm->gathers = link->comm->ranks; /* NCCL's thread calls progress after each rank that it looks at */
    put->taken = put->bytes;
    ep_gin_queue_push(&link->run, put);
    link->run_bytes += put->bytes;
    link->puts++;
    if (!is_large(link, link->run_bytes) && !run_waits(link))
        start_copy(link);
    return true;
}

/* False: no room in the ring. */
static bool tell(struct host_link *link, const struct ep_gin_put *put)
{
    struct ep_gin_message message;

    if (!ep_gin_peer_is_served(link->peer))
        return true;
    ep_gin_put_message(put, 0, 0, &message);
    message.flags = put->bytes > 0 ? EP_GIN_WHOLE : 0;
    return ep_gin_ring_write(link->out, &message);
}

static void wake_peer(const struct host_link *link)
{
    const uint64_t one = 1;

    if (ep_gin_ring_sleeps(link->out))
        (void)!write(link->wake, &one, sizeof one); /* full: it is awake */
}

/* True: somebody is to be told of what is over. */
static bool reap(struct host_link *link)
{
    bool told = false;

    while (link->copying.head && ep_gin_stream_reached(link->copying.head->stream, link->copying.head->mark) &&
           tell(link, link->copying.head)) {
        struct ep_gin_put *put = ep_gin_queue_pop(&link->copying);

        link->puts--;
        link->comm->large -= is_large(link, put->bytes);
        told = true;
        ep_gin_put_sent(put, put->bytes);
    }
    return told;
}

static void host_progress(void *opened)
{
    struct host_link *link = opened;
    const bool told = reap(link);

    if (!is_large(link, link->run_bytes)) {
        if (!run_waits(link))
            start_copy(link);
    } else if (link->comm->gathers == 0) {
        get_in_line(link);
        if (!waits_in_line(link))
            start_copy(link);
    }
    ep_gin_stream_flush(&link->stream);
    if (told)
        wake_peer(link);
}

/* ---- receiving --------------------------------------------------------------------------------------------------- */

static void refuse(struct host_link *link)
{
    link->broken = true;
    ep_gin_count(link->comm, &link->comm->counts.bad_messages, "a message that no rank sends");
    ep_gin_peer_lost(link->peer, "its ring has a message that no rank sends");
}

/* False: nothing was there to be taken. */
static bool take_one(struct host_link *link)
{
    const struct ep_gin_region *region;
    struct ep_gin_message message;
    bool broken;
    void *to;

    if (!ep_gin_ring_peek(link->in, &message, &broken)) {
        if (broken)
            refuse(link);
        return broken;
    }
    switch (ep_gin_judge(link->peer, &message, &region, &to)) {
    case EP_GIN_LATER: return false;
    case EP_GIN_REFUSE: refuse(link); return true;
    case EP_GIN_TAKE:
    case EP_GIN_DROP: break;
    }
    ep_gin_ring_next(link->in);
    if ((message.flags & EP_GIN_PAYLOAD) || !ep_gin_landed(link->peer, &message))
        refuse(link);
    return true;
}

static bool host_poll(void *opened)
{
    struct host_link *link = opened;
    uint32_t n = 0;

    while (n < TURN && !link->broken && take_one(link))
        n++;
    return n > 0;
}

/* It wrote its messages before it went. */
static bool host_drained(void *opened)
{
    const struct host_link *link = opened;
    struct ep_gin_message message;
    bool broken;

    return link->broken || (!ep_gin_ring_peek(link->in, &message, &broken) && !broken);
}

static void host_sleep(void *opened, bool asleep)
{
    ep_gin_ring_sleep(((struct host_link *)opened)->in, asleep);
}

const struct ep_gin_transport ep_gin_host = {
    .name = "host",
    .same_host = true,
    .usable = host_usable,
    .start = host_start,
    .stop = host_stop,
    .link_open = host_link_open,
    .link_connect = host_link_connect,
    .link_close = host_link_close,
    .region_offer = host_region_offer,
    .region_reach = host_region_reach,
    .region_leave = host_region_leave,
    .put_start = host_put_start,
    .progress = host_progress,
    .poll = host_poll,
    .sleep = host_sleep,
    .drained = host_drained,
};

/* Always there, with GPUs and without. */
const struct ep_gin_transport ep_gin_self = {
    .name = "self",
    .link_open = self_link_open,
    .link_connect = self_link_connect,
    .link_close = host_link_close,
    .region_reach = host_region_reach,
    .region_leave = host_region_leave,
    .put_start = host_put_start,
    .progress = host_progress,
    .poll = host_poll,
    .sleep = host_sleep,
};
