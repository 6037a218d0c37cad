/*
 * Any frame from another node: it is refused, or what it says is done inside the windows of the ranks that it names.
 *
 * The input is a kind and a few numbers that make a frame as a node sends it, a list of patches to it, and how long it
 * is.  The team is one of two nodes, in an LL and an HT op as far as frames can tell: rank 0 and 1 are here, rank 2
 * sends.  Windows lie between pages that fault, and so does the frame; control blocks and arenas, where nothing was
 * asked for, are compared afterwards.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "host_private.h"

enum { RANKS = 3, EXPERTS = 6, LOCAL = 2, K = 2, HIDDEN = 64, T = 4, ARENA = 1 << 14, GUARD = 1 << 20 };
enum { FRAME_MAX = 1 << 14, OUT = 1 << 13 };

static const uint32_t node_of[RANKS] = { 0, 0, 1 };
static const uint64_t tag = 1ull << EP_HT_TAG_SHIFT;
static struct ep_layout_map map;
static struct ep_placement placement;
static struct ep_host_team *team;
static uint8_t *window[RANKS], *frame_end;

static void check(bool ok)
{
    if (!ok)
        abort();
}

/* Between two guards. */
static uint8_t *guarded(uint64_t bytes)
{
    uint64_t size = (bytes + 4095) / 4096 * 4096;
    uint8_t *base = mmap(NULL, size + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    check(base != MAP_FAILED);
    check(mprotect(base + GUARD, size, PROT_READ | PROT_WRITE) == 0);
    return base + GUARD;
}

/* ---- two nodes ------------------------------------------------------------------------ */

struct end {
    struct ep_host_net *net;
    uint32_t own;
};
static struct ep_host_card cards[2];

static void *connect_end(void *arg)
{
    const struct end *end = arg;

    check(ep_host_net_connect(end->net, cards, 2, end->own, 20000, NULL) == EP_OK);
    return NULL;
}

static struct ep_host_net *make_net(void)
{
    static struct end ends[2];
    pthread_t thread;

    setenv("EP_GIN_INTERFACE", "=lo", 0);
    for (uint32_t n = 0; n < 2; n++) {
        ends[n].own = n;
        check(ep_host_net_listen(20000, &ends[n].net, &cards[n], NULL) == EP_OK);
    }
    check(pthread_create(&thread, NULL, connect_end, &ends[1]) == 0);
    connect_end(&ends[0]);
    pthread_join(thread, NULL);
    return ends[0].net; /* the other end stays, and says nothing */
}

static void set_up(void)
{
    const struct ep_limits limits = {
        .ranks = RANKS, .experts = EXPERTS, .local_experts = LOCAL, .top_k = K, .hidden = HIDDEN,
        .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
        .dtypes = 1u << EP_BF16 | 1u << EP_FP32 | 1u << EP_FP8_E4M3,
        .ll_max_tokens = T, .ht_max_tokens = T, .ll_banks = 2, .arena_bytes = ARENA,
    };
    struct ep_host_span span = { .nodes = 2, .own = 0, .node = node_of };

    check(ep_layout_compute(&limits, &map, NULL) == EP_OK);
    check(ep_placement_contiguous(RANKS, EXPERTS, &placement, NULL) == EP_OK);
    span.net = make_net();
    check(ep_host_team_create(&map, &placement, 100, &span, &team, NULL) == EP_OK);
    for (uint32_t r = 0; r < 2; r++) {
        window[r] = guarded(map.total_bytes);
        ep_host_team_set_window(team, r, window[r]);
    }
    frame_end = guarded(FRAME_MAX) + FRAME_MAX;
}

/* ---- what ranks here have asked for, and granted ----------------------------------------- */

static void grant(uint32_t d)
{
    struct ep_host_grant *g = &team->ranks[d].grants[2];

    g->answer = EP_HOST_GRANTED;
    g->packed = d == 1;
    g->flat = 3;
    g->rows = g->all = 2;
    g->row_bytes = HIDDEN * 2;
    g->scale_bytes = 0;
    g->out = map.arena + OUT;
    g->scales = 0;
    for (uint32_t l = 0; l < LOCAL; l++) {
        g->next[l] = l * 2;
        g->end[l] = l * 2 + 2;
    }
    g->tag = tag;
}

/* Rank 0 has sent tokens 1 and 3 to the other node, and waits for their sums. */
static void open_rank(void)
{
    static uint32_t first[2] = { 0, 0 }, count[2] = { 0, 2 }, token[2] = { 1, 3 };
    static uint32_t dest_first[RANKS + 1];
    static struct ep_host_handle handle = {
        .node_first = first, .node_count = count, .node_token = token, .dest_first = dest_first
    };

    team->ranks[0].open = (struct ep_host_open){ .tag = tag + 1, .handle = &handle, .row_bytes = HIDDEN * 2 };
}

static void begin_ops(void)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        memset(team->ranks[r].released, 0, sizeof team->ranks[r].released);
        team->ranks[r].ht_closed = 0;
        team->ranks[r].ll_sent = 0;
    }
    grant(0);
    grant(1);
    open_rank();
    team->ranks[0].node_done[1] = 0;
    for (uint32_t r = 0; r < 2; r++) {
        memset(window[r], 0, sizeof(struct ep_control));
        memset(window[r] + map.arena, 0, ARENA);
    }
}

static void check_zero(const uint8_t *at, uint64_t bytes)
{
    static const uint8_t zeros[sizeof(struct ep_control) + ARENA];

    check(memcmp(at, zeros, bytes) == 0);
}

/* But for the rows that were granted. */
static void check_untouched(void)
{
    const uint64_t end = OUT + 8ull * HIDDEN * 2;

    for (uint32_t r = 0; r < 2; r++) {
        check_zero(window[r], sizeof(struct ep_control));
        check_zero(window[r] + map.arena, OUT);
        check_zero(window[r] + map.arena + end, ARENA - end);
    }
}

/* ---- frames --------------------------------------------------------------------------------- */

/* A good one; returns its bytes. */
static uint32_t make(uint8_t kind, uint8_t peer, uint8_t count, uint8_t *at)
{
    const uint32_t n = count % (T + 1);
    struct ep_host_frame head = { .size = { .kind = 1 + kind % EP_FRAME_HT_PARTIALS }, .rank = 2, .peer = peer % 2,
                                  .number = 1, .count = n, .total = n, .last = 1, .row_bytes = HIDDEN * 2 };
    struct ep_host_choice *choice;
    uint64_t bytes = 0;

    switch (head.size.kind) {
    case EP_FRAME_STATE: bytes = sizeof(struct ep_host_state); break;
    case EP_FRAME_LL_ROWS: bytes = ep_host_ll_rows_sections(&map, n, head.row_bytes, 0).bytes; break;
    case EP_FRAME_LL_PARTIALS: bytes = ep_host_ll_partials_sections(n, head.row_bytes).bytes; break;
    case EP_FRAME_HT_ASK: head.number = tag; bytes = ep_host_ht_ask_bytes(&team->shape, 0, tag); break;
    case EP_FRAME_HT_GRANT: head.number = tag; bytes = 2 * sizeof(uint32_t); break;
    case EP_FRAME_HT_ROWS:
        head.number = tag;
        bytes = ep_host_ht_rows_sections(&map, n, head.row_bytes, 0).bytes;
        choice = (struct ep_host_choice *)(void *)(at + sizeof head + ep_host_ht_rows_sections(&map, n, 0, 0).choices);
        for (uint32_t i = 0; i < n * K; i++)
            choice[i] = (struct ep_host_choice){ .rank = (int32_t)(i % 2), .local = (int32_t)(i % LOCAL), .weight = 1 };
        break;
    default:
        head.number = tag + 1;
        bytes = ep_host_ht_partials_sections(1, n, head.row_bytes, 0).bytes;
        break;
    }
    head.size.bytes = (uint32_t)(sizeof head + bytes);
    memcpy(at, &head, sizeof head);
    return head.size.bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t scratch[FRAME_MAX] __attribute__((aligned(64)));
    uint32_t bytes;
    uint8_t *frame;

    if (!team)
        set_up();
    if (size < 4)
        return 0;
    begin_ops();
    memset(scratch, 0, sizeof scratch);
    bytes = make(data[0], data[1], data[2], scratch);
    if (data[3] & 1 && data[3] / 2 < bytes)
        bytes -= data[3] / 2;
    for (data += 4, size -= 4; size >= 6; data += 6, size -= 6) {
        uint32_t at = (uint32_t)(data[0] | data[1] << 8);

        if (at + 4 <= bytes)
            memcpy(scratch + at, data + 2, 4);
    }
    frame = frame_end - (bytes + EP_HOST_FRAME_ALIGN - 1) / EP_HOST_FRAME_ALIGN * EP_HOST_FRAME_ALIGN;
    memcpy(frame, scratch, bytes);
    (void)ep_host_remote_frame(team, 1, frame, bytes);
    check_untouched();
    return 0;
}
