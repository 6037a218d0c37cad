/* Following groups: the watch command, and waiting for a phase. */
#include "group.h"

#include <inttypes.h>

#include "ep_clock.h"
#include "output.h"
#include "progress.h"

enum { LOOK_MS = 250 }; /* how often to see whether our output still goes anywhere */

/* ---- the watch command --------------------------------------------------------------- */

struct watch {
    struct ep_admin *admin;
    const char *name; /* NULL: all groups */
    int until;        /* a phase; 0: none */
    bool reached, present;
    char last[64]; /* "FORMING", for the message when time is up */
};

static void print_header(void)
{
    printf("%-12s  %-8s  %-20s  %-13s  %5s  %7s  %8s  %s\n", "TIME", "EVENT", "NAME", "PHASE", "EPOCH",
           "RANKS", "REVISION", "REASON");
    fflush(stdout);
}

static void print_row(const Ep__V1__GroupEvent *event)
{
    const Ep__V1__GroupStatus *status = ep_group_status(event->group);
    char reason[EP_ERROR_TEXT_MAX];

    ep_text_clean(status->reason, reason, sizeof reason);
    printf("%-12s  %-8s  %-20s  %-13s  %5" PRIu64 "  %7s  %8" PRIu64 "  %s\n",
           ep_text_clock(ep_clock_wall_us()).s,
           ep_text_enum(&ep__v1__group_event__type__descriptor, (int)event->type), event->group->name,
           ep_group_phase(event->group), status->epoch, ep_group_ranks(event->group).s,
           event->group->revision, *reason ? reason : "-");
    fflush(stdout);
}

/* Notes whether the event is what the watch waits for. */
static void look(struct watch *watch, const Ep__V1__GroupEvent *event)
{
    bool deleted = event->type == EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED;

    if (!watch->until)
        return;
    if (event->type == EP__V1__GROUP_EVENT__TYPE__TYPE_SYNCED) {
        watch->reached |= !watch->present && !*event->behind && watch->until == EP__V1__PHASE__PHASE_DELETED;
        return;
    }
    if (!event->group)
        return;
    watch->present = !deleted;
    snprintf(watch->last, sizeof watch->last, "%s", deleted ? "DELETED" : ep_group_phase(event->group));
    watch->reached |=
        (int)(deleted ? EP__V1__PHASE__PHASE_DELETED : ep_group_status(event->group)->phase) == watch->until;
}

static int show_event(struct watch *watch, const Ep__V1__GroupEvent *event)
{
    look(watch, event);
    if (watch->admin->format != EP_FORMAT_TABLE)
        return ep_output_message_item(watch->admin, &event->base);
    if (event->group)
        print_row(event);
    ep_admin_note_behind(watch->admin, event->behind);
    return 0;
}

static ep_status time_is_up(const struct watch *watch, struct ep_error *error)
{
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "%s is not %s after %.1f s: it is %s", watch->name,
                        ep_text_enum(&ep__v1__phase__descriptor, watch->until),
                        (double)watch->admin->timeout_ms / 1000, watch->last[0] ? watch->last : "not there");
}

/* Reads until the phase is there, the time is up or nobody listens. */
static ep_status follow(struct watch *watch, struct ep_rpc_stream *stream, struct ep_error *error)
{
    struct ep_admin *admin = watch->admin;

    for (;;) {
        ProtobufCMessage *reply;
        ep_status status = ep_admin_stream_read(admin, stream, LOOK_MS, &reply, error);

        if (ep_output_over()) {
            ep_admin_free(reply);
            break;
        }
        if (status == EP_DEADLINE_EXCEEDED && !ep_rpc_stream_ended(stream))
            continue;
        if (status == EP_DEADLINE_EXCEEDED) /* --timeout, which without --until is a way to end */
            return watch->until ? time_is_up(watch, error) : EP_OK;
        if (status != EP_OK)
            return status;
        if (!reply)
            return ep_error_set(error, EP_UNAVAILABLE, "the server ended the watch: it is stopping");
        show_event(watch, (Ep__V1__GroupEvent *)reply);
        ep_admin_free(reply);
        if (watch->reached)
            break;
    }
    return EP_OK;
}

int ep_group_watch(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__WatchGroupsRequest request = EP__V1__WATCH_GROUPS_REQUEST__INIT;
    struct watch watch = { .admin = admin, .name = invocation->argument };
    const char *until = ep_invocation_text(invocation, "until");
    struct ep_rpc_stream *stream;
    struct ep_error error;
    ep_status status;

    if (until && !watch.name) {
        ep_error_set(&error, EP_INVALID_ARGUMENT, "--until needs the NAME of a group");
        return ep_admin_fail(admin, &error);
    }
    if (until)
        (void)ep_text_parse_enum(&ep__v1__phase__descriptor, until, &watch.until);
    if (watch.name)
        request.name = (char *)(uintptr_t)watch.name;
    if (admin->format == EP_FORMAT_TABLE && !admin->quiet)
        print_header();
    status = ep_admin_stream(admin, "WatchGroups", &request.base,
                             admin->timeout_given ? admin->timeout_ms : -1, &stream, &error);
    if (status != EP_OK)
        return ep_admin_fail(admin, &error);
    status = follow(&watch, stream, &error);
    ep_rpc_stream_cancel(stream);
    ep_rpc_stream_close(stream);
    return status == EP_OK ? 0 : ep_admin_fail(admin, &error);
}

/* ---- waiting ------------------------------------------------------------------------- */

/* EP_OK with *over: the wait has ended. */
static ep_status judge(const Ep__V1__Group *group, Ep__V1__Phase wanted, bool *over, struct ep_error *error)
{
    Ep__V1__Phase phase = ep_group_status(group)->phase;

    *over =
        phase == wanted || (wanted == EP__V1__PHASE__PHASE_READY && phase == EP__V1__PHASE__PHASE_DEGRADED);
    if (phase == EP__V1__PHASE__PHASE_FAILED && phase != wanted)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%s is FAILED: %s", group->name,
                            ep_group_status(group)->reason);
    return EP_OK;
}

/* Takes the group out of the event, so that it lives on. */
static Ep__V1__Group *take_group(Ep__V1__GroupEvent *event)
{
    Ep__V1__Group *group = event->group;

    event->group = NULL;
    return group;
}

static ep_status wait_on(struct ep_admin *admin, struct ep_rpc_stream *stream, uint64_t revision,
                         Ep__V1__Phase phase, Ep__V1__Group **group, struct ep_error *error)
{
    bool over = false;
    ep_status status = EP_OK;

    while (status == EP_OK && !over) {
        ProtobufCMessage *reply;
        Ep__V1__GroupEvent *event;

        status = ep_admin_stream_read(admin, stream, -1, &reply, error);
        if (status == EP_OK && !reply)
            status = ep_error_set(error, EP_UNAVAILABLE, "the server ended the watch: it is stopping");
        if (status != EP_OK)
            break;
        event = (Ep__V1__GroupEvent *)reply;
        if (event->type == EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED) {
            status = ep_error_set(error, EP_NOT_FOUND, "the group was deleted meanwhile");
        } else if (event->group && event->group->revision >= revision) {
            ep_admin_free(*group);
            *group = take_group(event);
            status = judge(*group, phase, &over, error);
        }
        ep_admin_free(reply);
    }
    return status;
}

ep_status ep_group_wait(struct ep_admin *admin, const char *name, uint64_t revision, Ep__V1__Phase phase,
                        int64_t timeout_ms, Ep__V1__Group **group, struct ep_error *error)
{
    Ep__V1__WatchGroupsRequest request = EP__V1__WATCH_GROUPS_REQUEST__INIT;
    const char *wanted = ep_text_enum(&ep__v1__phase__descriptor, (int)phase);
    struct ep_progress progress;
    struct ep_rpc_stream *stream;
    char what[sizeof progress.text];

    request.name = (char *)(uintptr_t)name;
    ep_status status = ep_admin_stream(admin, "WatchGroups", &request.base, timeout_ms, &stream, error);
    if (status != EP_OK)
        return status;
    snprintf(what, sizeof what, "%s: waiting for %s to be %s", admin->what, name, wanted);
    ep_progress_begin(&progress, admin->quiet, what);
    status = wait_on(admin, stream, revision, phase, group, error);
    ep_progress_end(&progress);
    ep_rpc_stream_cancel(stream);
    ep_rpc_stream_close(stream);
    if (status == EP_DEADLINE_EXCEEDED)
        ep_error_set(error, status, "%s is not %s after %.1f s: it is %s%s%s", name, wanted,
                     (double)timeout_ms / 1000, ep_group_phase(*group),
                     *ep_group_status(*group)->reason ? ": " : "", ep_group_status(*group)->reason);
    return status;
}
