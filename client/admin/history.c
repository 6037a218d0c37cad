/* The history command: the last changes of a group. */
#include <inttypes.h>
#include <stdlib.h>

#include "admin.h"
#include "output.h"

/* "hidden 64 -> 128; nodes a (2 ranks) -> b (2 ranks)"; for free(). */
static char *what(const Ep__V1__GroupChange *change)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    for (size_t i = 0; out && i < change->n_fields; i++)
        fprintf(out, "%s%s %s -> %s", i ? "; " : "", change->fields[i]->field,
                *change->fields[i]->from ? change->fields[i]->from : "unset",
                *change->fields[i]->to ? change->fields[i]->to : "unset");
    if (out)
        fclose(out);
    return text;
}

static struct ep_text epochs(const Ep__V1__GroupChange *change)
{
    struct ep_text text;

    if (change->epoch_before == change->epoch_after)
        return ep_text_u64(change->epoch_after);
    snprintf(text.s, sizeof text.s, "%" PRIu64 " -> %" PRIu64, change->epoch_before, change->epoch_after);
    return text;
}

/* It did not get there: nothing. */
static struct ep_text took(uint64_t us)
{
    return us ? ep_text_micros(us) : (struct ep_text){ "" };
}

static void add_change(struct ep_table *table, const Ep__V1__GroupChange *change)
{
    char *fields = what(change);

    ep_table_add(table, (const char *[]){ ep_text_u64(change->number).s, ep_text_time(change->time_us).s,
                                          change->change, change->by, change->server, epochs(change).s, change->outcome,
                                          took(change->prepare_us).s, took(change->connect_us).s,
                                          took(change->commit_us).s, took(change->settle_us).s, fields ? fields : "?",
                                          change->reason });
    free(fields);
}

static void print_changes(const Ep__V1__GetHistoryReply *reply)
{
    static const struct ep_column columns[] = {
        { "NUMBER", EP_COLUMN_RIGHT },
        { "TIME", 0 },
        { "CHANGE", 0 },
        { "BY", 0 },
        { "SERVER", 0 },
        { "EPOCH", EP_COLUMN_RIGHT },
        { "OUTCOME", 0 },
        { "PREPARE", EP_COLUMN_RIGHT },
        { "CONNECT", EP_COLUMN_RIGHT },
        { "COMMIT", EP_COLUMN_RIGHT },
        { "SETTLE", EP_COLUMN_RIGHT },
        { "WHAT", EP_COLUMN_LONG },
        { "REASON", EP_COLUMN_LONG },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < reply->n_changes; i++)
        add_change(table, reply->changes[i]);
    ep_table_print(table, stdout);
}

int ep_group_history(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__GetHistoryRequest request = EP__V1__GET_HISTORY_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    request.name = (char *)(uintptr_t)invocation->argument;
    if (ep_admin_call(admin, "GetHistory", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    if (admin->format == EP_FORMAT_TABLE)
        print_changes((Ep__V1__GetHistoryReply *)reply);
    else
        code = ep_output_message(admin, reply);
    ep_admin_note_behind(admin, ((Ep__V1__GetHistoryReply *)reply)->behind);
    ep_admin_free(reply);
    return code;
}
