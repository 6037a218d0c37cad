/*
 * ep_attach: local workers.  Owned by the loop's thread.
 *
 * A claim (from the Attach service) gives a ticket; the worker shows it on the side socket, gets the
 * window's descriptor there, and holds the rank as long as that connection lives.  Meanwhile it may hand over GPU
 * memory of its own, for the ops that the server runs.
 */
#ifndef EP_ATTACH_H
#define EP_ATTACH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "ep_error.h"
#include "ep_group.h"
#include "ep/v1/attach.pb-c.h"

struct ep_attach;

struct ep_attach_options {
    const char *socket;            /* path of the side socket */
    mode_t mode;
    bool (*is_allowed)(uid_t uid, gid_t gid, void *user); /* who may attach; NULL: whoever can connect */
    void *user;
    const char *token;             /* workers must show it; NULL: none */
    uint32_t ticket_ms;            /* 0: 5000 */
    uint32_t max_connections;      /* side socket; 0: 1024 */
    uint32_t hello_timeout_ms;     /* a connection that says nothing is dropped; 0: 2000 */
};

struct ep_attach_counters { uint64_t attaches, refused, bad_frames, silent; };

ep_status ep_attach_open(uv_loop_t *loop, struct ep_groups *groups, struct ep_node *node,
                         const struct ep_attach_options *options, struct ep_attach **out,
                         struct ep_error *error);
/* Closes the listener and every attachment (their ranks are released), then on_closed. */
void ep_attach_close(struct ep_attach *attach, void (*on_closed)(void *user), void *user);

/* Reserves a rank and a ticket; *reply's pointers are valid until the loop runs again. */
ep_status ep_attach_claim(struct ep_attach *attach, const Ep__V1__ClaimRequest *request, pid_t pid, uid_t uid,
                          Ep__V1__ClaimReply *reply, struct ep_error *error);

const struct ep_attach_counters *ep_attach_counters(const struct ep_attach *attach);

#endif
