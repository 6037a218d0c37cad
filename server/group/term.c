/*
 * Terms: a leader's is the revision of its record in the store, and its requests show it as their fence.  Once a later
 * one is known here, requests of earlier ones are refused: who sent them leads no more, and could commit nothing.
 *
 * A fence is believed where it is that of a record: as this server's watch has told, or, when the watch has told of none
 * that is as late, as the store says when it is asked.  So a leader that has just won is heeded before the watch tells of
 * it, and one that was never elected, whoever it is that can call here, is not, however late the term that it claims.
 *
 * A store that was restored from an older copy goes on from there: the terms of leaders to come are lower than those that
 * are known here.  So the store is asked about an earlier term too, and believed when it is that of the leader now.
 */
#include <stdlib.h>

#include "ep_message.h"
#include "group_private.h"

/* A request whose fence the store is asked about. */
struct claim {
    struct ep_groups *groups;
    uint64_t fence;
    uint64_t known;            /* the term that was known here when the store was asked */
    ProtobufCMessage *request; /* own copy */
    term_serve_fn serve;
    ep_cluster_done_fn done;
    void *user;
};

static void learn(struct ep_groups *groups, uint64_t term)
{
    if (term > groups->fence)
        groups->fence = term;
}

/* An earlier one that the store knows to be the leader's: what was known before the store was asked is not true any more.
 * Where a later one has become known meanwhile, the answer may be from before that. */
static void learn_asked(const struct claim *claim, uint64_t term)
{
    struct ep_groups *groups = claim->groups;

    if (term == claim->fence && claim->known == groups->fence)
        groups->fence = term;
    learn(groups, term);
}

static ep_status judge(const struct claim *claim, struct ep_error *error)
{
    const unsigned long long fence = claim->fence, known = claim->groups->fence;

    if (claim->fence <= claim->groups->fence)
        return EP_OK; /* term_check() has the last word */
    if (error->status)
        return ep_error_set(error, EP_UNAVAILABLE,
                            "fence is %llu, and the store does not tell node %s whether a leader has "
                            "that term: try again",
                            fence, nodes_self(claim->groups));
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "fence is %llu: no leader has that term, the last that node %s "
                        "knows is %llu",
                        fence, nodes_self(claim->groups), known);
}

static void on_term(const struct ep_error *error, uint64_t term, void *user)
{
    struct claim *claim = user;
    struct ep_groups *groups = claim->groups;
    struct ep_error why = *error;

    groups->calls--;
    if (!error->status)
        learn_asked(claim, term);
    if (judge(claim, &why))
        claim->done(&why, NULL, claim->user);
    else
        claim->serve(groups, claim->request, claim->done, claim->user);
    protobuf_c_message_free_unpacked(claim->request, NULL);
    free(claim);
    group_later(groups);
}

void term_serve(struct ep_groups *groups, uint64_t fence, const ProtobufCMessage *request,
                term_serve_fn serve, ep_cluster_done_fn done, void *user)
{
    struct claim *claim;

    learn(groups, ep_cluster_term(groups->cluster));
    if (fence == groups->fence || groups->closing) {
        serve(groups, request, done, user);
        return;
    }
    claim = group_allocate(1, sizeof *claim);
    *claim = (struct claim){ .groups = groups,
                             .fence = fence,
                             .known = groups->fence,
                             .request = ep_message_copy(request),
                             .serve = serve,
                             .done = done,
                             .user = user };
    groups->calls++;
    ep_cluster_ask_term(groups->cluster, on_term, claim);
}

ep_status term_check(const struct ep_groups *groups, uint64_t fence, struct ep_error *error)
{
    if (groups->closing)
        return ep_error_set(error, EP_UNAVAILABLE, "the server is stopping");
    if (fence != groups->fence)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "fence is %llu: there is a leader of the later term %llu",
                            (unsigned long long)fence, (unsigned long long)groups->fence);
    return EP_OK;
}
