/*
 * group: the group a run works in, through the Admin service of the same unix socket.
 */
#ifndef GROUP_H
#define GROUP_H

#include "bench.h"

struct group_link;

/* server: "unix:PATH"; empty: $EP_SERVER, else the library's default. */
ep_status group_link_open(const char *server, struct group_link **out, struct ep_error *error);
void group_link_close(struct group_link *link); /* NULL is allowed */

/* What the server's node runs ranks on. */
ep_status group_node_backend(struct group_link *link, enum bench_backend *backend, struct ep_error *error);

/* What a group of our own must hold. */
struct group_needs {
    bool ll, ht;
    uint32_t ll_max_tokens, ht_max_tokens;
    uint32_t dtypes; /* bits 1u << ep_dtype */
    uint64_t arena_bytes;
};
void group_needs_of(const struct bench_config *config, struct group_needs *needs);

/* Creates config->group and waits until it is ready. */
ep_status group_create(struct group_link *link, const struct bench_config *config,
                       const struct group_needs *needs, struct ep_error *error);
ep_status group_delete(struct group_link *link, const char *name, struct ep_error *error);

/*
 * Takes ranks, experts, hidden, top-k and backend of an existing group into the configuration; what was asked
 * for must agree with it.  Cases that do not fit are refused when they were asked for and left out
 * when they came from a default.
 */
ep_status group_adopt(struct group_link *link, struct bench_config *config, struct ep_error *error);

/* Which node each rank is on, and which of the servers that were given is that node's: config->node_of, server_of. */
ep_status group_find_servers(struct group_link *link, struct bench_config *config, struct ep_error *error);

/* A group's newest epoch, as it is now. */
struct group_view {
    uint64_t epoch;
    uint32_t ranks;
    char node[BENCH_MAX_RANKS][64];  /* that each rank is on */
    bool expected[BENCH_MAX_RANKS]; /* it waits for its first worker */
};
ep_status group_look(struct group_link *link, const char *name, struct group_view *view, struct ep_error *error);
/* The name of that server's node. */
ep_status group_node_name(const char *server, char *name, size_t size, struct ep_error *error);

/* Times `n` unary calls (GetVersion) into us[n]. */
ep_status group_time_rpc(struct group_link *link, uint32_t n, double *us, struct ep_error *error);

#endif
