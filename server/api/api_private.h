/* What the files of the API share.  Nobody else includes this. */
#ifndef EP_API_PRIVATE_H
#define EP_API_PRIVATE_H

#include "ep_api.h"
#include "ep_message.h"

#define API_MODULE "api"

struct ep_api {
    struct ep_api_options options;
    struct api_watch *watches;     /* WatchGroups */
    struct api_stats_stream *streams; /* WatchStats */
    struct api_claim *claims;      /* Claims that wait for a rank */
    uint32_t n_claims;
    struct ep_cluster_watch *nodes;
    bool told_to_leave;            /* this node is drained, and its workers were told */
    bool ending;                   /* no new streams */
    uint64_t requests;
};

/*
 * A call whose answer comes later, from the store.  The call may end before: then `call` is NULL and
 * only the audit line is left to write.
 */
struct api_pending {
    struct ep_api *api;
    struct ep_rpc_call *call;
    const char *action; /* "group.create" */
    char *target;
    char *identity; /* who asked, and which server */
    char *server;
    Ep__V1__Asker asker; /* the same, for the history */
    bool dry_run, deletes;
    /* a change of a group: */
    const char *method;        /* of Node, for whoever leads; NULL: it is not handed on */
    ProtobufCMessage *request; /* own copy, while it waits for its turn; else NULL */
    ProtobufCMessage *answer;  /* the leader's, own copy, until this server sees what it says */
    void (*here)(struct ep_api *api, struct api_pending *pending, const ProtobufCMessage *request);
};

/* NULL when there is no memory; the call has been failed then. */
struct api_pending *api_pending_create(struct ep_api *api, struct ep_rpc_call *call, const char *action,
                                       const char *target, bool dry_run);
/* Asked of another server, which says by whom; NULL: it does not. */
void api_pending_asked_by(struct api_pending *pending, const Ep__V1__Asker *asker);
/* Writes the audit line and frees; the call (or NULL) is the caller's to answer. */
struct ep_rpc_call *api_pending_finish(struct api_pending *pending, const struct ep_error *error);
/* on_closed of every handler that uses them. */
void api_pending_closed(struct ep_rpc_call *call, void *user);

/* Fails the call and returns true when *error is one. */
bool api_failed(struct ep_rpc_call *call, const struct ep_error *error);

/*
 * answer: later, once what is here is not older than what was acknowledged when this is called; else `behind` says why it may
 * be, and is not "".  name is copied.
 */
typedef void (*api_answer_fn)(struct ep_api *api, struct ep_rpc_call *call, const char *name, const char *behind);
void api_read(struct ep_api *api, struct ep_rpc_call *call, const char *name, api_answer_fn answer);
/* And once the ranks here of the group of that name have counted what was done by then. */
void api_read_counted(struct ep_api *api, struct ep_rpc_call *call, const char *name, api_answer_fn answer);
uint32_t api_read_ms(const struct ep_rpc_call *call); /* for which that is waited for */
void api_read_closed(struct ep_rpc_call *call, void *user); /* on_closed of every handler that uses it */

/* Handlers, one table for each service. */
void api_create_group(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_get_group(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_list_groups(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_get_history(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_update_group(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_delete_group(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
/* Is the request one for a plan only? */
bool api_creates_nothing(const ProtobufCMessage *request);
bool api_updates_nothing(const ProtobufCMessage *request);
/* Of the Node service: by another server, for its caller. */
void api_create_group_here(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_update_group_here(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_delete_group_here(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);

void api_watch_groups(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_watch_writable(struct ep_rpc_call *call, void *user);
void api_watch_closed(struct ep_rpc_call *call, void *user);
void api_watches_end(struct ep_api *api);

void api_list_nodes(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_get_node(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_drain_node(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_uncordon_node(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_get_version(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_look_closed(struct ep_rpc_call *call, void *user); /* of GetNode */
void api_on_cluster(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user);

void api_get_stats(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_get_stats_here(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user); /* of Node */
/* Of the ranks here of one group, or (empty) all.  everywhere: of those on other nodes too, which is for one group. */
struct api_gather {
    const char *group;
    bool experts, everywhere;
};
/* Answers the call, later; on_closed of its handler is the other one. */
void api_gather_stats(struct ep_api *api, struct ep_rpc_call *call, const struct api_gather *what);
void api_gather_closed(struct ep_rpc_call *call, void *user);
void api_watch_stats(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
void api_watch_stats_closed(struct ep_rpc_call *call, void *user);
void api_stats_end(struct ep_api *api);

/* The node's counters, of one group or all; clear with ep_groups_stats_clear(). */
void api_stats_fill(struct ep_api *api, const char *group, bool experts, Ep__V1__Stats *stats);

/* Claims that wait are answered now. */
void api_claims_end(struct ep_api *api);

extern const struct ep_rpc_handler api_attach_handlers[];
extern const size_t api_attach_handlers_count;

#endif
