/*
 * ep_admin: what the commands of ep-admin share: options, the connection, how they report.
 */
#ifndef EP_ADMIN_H
#define EP_ADMIN_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "command.h"
#include "ep_error.h"
#include "ep_rpc.h"
#include "ep/v1/admin.pb-c.h"

enum ep_format { EP_FORMAT_TABLE, EP_FORMAT_JSON, EP_FORMAT_YAML };

/* Owned by the main thread. */
struct ep_admin {
    char server[256]; /* "unix:PATH" or "HOST:PORT" */
    bool server_is_unix;
    struct ep_rpc_tls tls; /* texts of argv or the environment */
    bool use_tls;
    enum ep_format format;
    int64_t timeout_ms;
    bool timeout_given;
    bool quiet;
    bool answered;      /* the server has let us in */
    char what[64];      /* "group create", for messages */
    struct ep_rpc *rpc; /* both made by the first call */
    struct ep_rpc_channel *channel;
};

/* Options from the flags, then the environment, then the defaults. */
ep_status ep_admin_init(struct ep_admin *admin, const struct ep_invocation *invocation,
                        struct ep_error *error);
void ep_admin_close(struct ep_admin *admin);

/*
 * One call of the Admin service; *reply is freed with ep_admin_free().  A note on stderr says that it
 * takes long.  timeout_ms 0: the option's.
 */
ep_status ep_admin_call(struct ep_admin *admin, const char *method, const ProtobufCMessage *request,
                        int64_t timeout_ms, ProtobufCMessage **reply, struct ep_error *error);
/* The same of any service, without a note. */
ep_status ep_admin_call_service(struct ep_admin *admin, const ProtobufCServiceDescriptor *service,
                                const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                                ProtobufCMessage **reply, struct ep_error *error);
/* timeout_ms < 0: none. */
ep_status ep_admin_stream(struct ep_admin *admin, const char *method, const ProtobufCMessage *request,
                          int64_t timeout_ms, struct ep_rpc_stream **stream, struct ep_error *error);
/* ep_rpc_stream_read(), with the cause of a lost connection said as well as for a call. */
ep_status ep_admin_stream_read(struct ep_admin *admin, struct ep_rpc_stream *stream, int64_t wait_ms,
                               ProtobufCMessage **reply, struct ep_error *error);
void ep_admin_free(void *message); /* NULL is allowed */

/* Says on stderr what went wrong: "ep-admin: group create: text".  Returns the exit code. */
int ep_admin_fail(const struct ep_admin *admin, const struct ep_error *error);
/* The same for a message of our own; more of a note than a failure. */
__attribute__((format(printf, 2, 3))) void ep_admin_note(const struct ep_admin *admin, const char *format,
                                                         ...);

/* The note that a reply's `behind` is worth; "": none. */
void ep_admin_note_behind(const struct ep_admin *admin, const char *behind);

/* ---- the commands, one file each ---------------------------------------------------- */

int ep_group_create(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_get(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_list(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_update(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_delete(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_plan(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_history(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_group_watch(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_node_list(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_node_get(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_node_drain(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_node_uncordon(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_stats_show(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_top_run(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_doctor_run(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_completion_script(struct ep_admin *admin, const struct ep_invocation *invocation);
int ep_version_show(struct ep_admin *admin, const struct ep_invocation *invocation);

extern const char *const ep_top_sorts[];
bool ep_stats_used(const Ep__V1__OpStats *op); /* such an op was made */

/* What the completion scripts call: candidates for the last of the words, one per line. */
int ep_completion_answer(int n_words, char **words);

/* Versions of this program in the server's terms; texts are static. */
void ep_version_of_client(Ep__V1__Version *version);

#endif
