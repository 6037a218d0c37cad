/* The group commands but watch. */
#include "group.h"

#include <inttypes.h>
#include <stdlib.h>

#include "loads.h"
#include "output.h"
#include "spec.h"

/* ---- get, list -------------------------------------------------------------------- */

int ep_group_get(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__GetGroupRequest request = EP__V1__GET_GROUP_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    request.name = (char *)(uintptr_t)invocation->argument;
    if (ep_admin_call(admin, "GetGroup", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    if (admin->format == EP_FORMAT_TABLE)
        ep_group_view_one((Ep__V1__Group *)reply, stdout);
    else
        code = ep_output_message(admin, reply);
    ep_admin_note_behind(admin, ((Ep__V1__Group *)reply)->behind);
    ep_admin_free(reply);
    return code;
}

int ep_group_list(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__ListGroupsRequest request = EP__V1__LIST_GROUPS_REQUEST__INIT;
    Ep__V1__ListGroupsReply *list;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    (void)invocation;
    if (ep_admin_call(admin, "ListGroups", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    list = (Ep__V1__ListGroupsReply *)reply;
    if (admin->format != EP_FORMAT_TABLE)
        code = ep_output_message(admin, reply);
    else if (admin->quiet)
        for (size_t i = 0; i < list->n_groups; i++)
            puts(list->groups[i]->name);
    else if (list->n_groups == 0)
        ep_admin_note(admin, "there are no groups");
    else
        ep_group_view_list(list->groups, list->n_groups, stdout);
    ep_admin_note_behind(admin, list->behind);
    ep_admin_free(reply);
    return code;
}

/* ---- create, update --------------------------------------------------------------- */

/* NAME, or the one in the file; they must agree. */
static ep_status choose_name(const char *argument, const char *of_file, const char **name,
                             struct ep_error *error)
{
    if (argument && *of_file && strcmp(argument, of_file) != 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "NAME is '%s', but the file is about '%s'", argument,
                            of_file);
    *name = argument ? argument : of_file;
    return **name ? EP_OK : ep_error_set(error, EP_INVALID_ARGUMENT, "NAME is missing");
}

/* With --wait: until the group is ready.  *group is replaced by what became of it. */
static ep_status wait_if_asked(struct ep_admin *admin, const struct ep_invocation *invocation,
                               Ep__V1__Group **group, struct ep_error *error)
{
    int64_t wait_ms = ep_invocation_ms(invocation, "wait", 0);
    char name[256];

    if (wait_ms == 0 || ep_invocation_given(invocation, "dry-run") ||
        ep_group_status(*group)->phase == EP__V1__PHASE__PHASE_READY)
        return EP_OK;
    snprintf(name, sizeof name, "%s", (*group)->name);
    return ep_group_wait(admin, name, (*group)->revision, EP__V1__PHASE__PHASE_READY, wait_ms, group, error);
}

static void print_outcome(const struct ep_admin *admin, const Ep__V1__Group *group, const char *what)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);
    struct ep_text window = { "-" };

    if (status->settled)
        window = ep_text_size(status->settled->window_bytes);
    if (!admin->quiet)
        printf("group %s %s: %s, epoch %" PRIu64 ", revision %" PRIu64 ", %u ranks, window %s each\n",
               group->name, what, ep_group_phase(group), status->epoch, group->revision,
               ep_group_spec(group)->ranks, window.s);
}

/* Shows a created or updated group; the exit code says whether it is whole. */
static int show_outcome(struct ep_admin *admin, const struct ep_invocation *invocation,
                        const Ep__V1__Group *group, const char *what)
{
    bool dry_run = ep_invocation_given(invocation, "dry-run");
    bool waited = ep_invocation_given(invocation, "wait");
    int code = 0;

    if (admin->format != EP_FORMAT_TABLE) {
        code = ep_output_message(admin, &group->base);
    } else if (dry_run) {
        ep_admin_note(admin, "dry run: nothing was changed");
        ep_group_view_plan(group, stdout);
    } else {
        print_outcome(admin, group, what);
    }
    ep_admin_note_behind(admin, group->behind);
    if (code == 0 && waited && !dry_run && ep_group_status(group)->phase == EP__V1__PHASE__PHASE_DEGRADED)
        code = 6;
    return code;
}

/* Sends the request and does what --wait and --output want.  A call may take as long as --wait. */
static int change(struct ep_admin *admin, const struct ep_invocation *invocation, const char *method,
                  const ProtobufCMessage *request, const char *what)
{
    int64_t wait_ms = ep_invocation_ms(invocation, "wait", 0);
    struct ep_error error;
    ProtobufCMessage *reply;
    Ep__V1__Group *group;
    int code;

    if (ep_admin_call(admin, method, request,
                      admin->timeout_given || wait_ms < admin->timeout_ms ? 0 : wait_ms, &reply,
                      &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    group = (Ep__V1__Group *)reply;
    if (wait_if_asked(admin, invocation, &group, &error) != EP_OK)
        code = ep_admin_fail(admin, &error);
    else
        code = show_outcome(admin, invocation, group, what);
    ep_admin_free(group);
    return code;
}

static void apply_labels(const struct ep_invocation *invocation, json_t *spec)
{
    json_t *named = json_object_get(spec, "labels");
    json_t *labels = named ? json_incref(named) : json_object();

    if (ep_spec_labels(invocation, labels))
        json_object_set(spec, "labels", labels);
    json_decref(labels);
}

static ep_status fill_create(struct ep_admin *admin, const struct ep_invocation *invocation, json_t *spec,
                             Ep__V1__CreateGroupRequest *request, struct ep_error *error)
{
    ep_status status = ep_loads_apply(admin, invocation, request->name, spec, error);

    if (status != EP_OK)
        return status;
    apply_labels(invocation, spec);
    return ep_spec_message(spec, &request->spec, error);
}

int ep_group_create(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__CreateGroupRequest request = EP__V1__CREATE_GROUP_REQUEST__INIT;
    struct ep_error error;
    const char *name = NULL;
    char of_file[128];
    json_t *spec = NULL;
    int code;

    ep_status status = ep_spec_read(invocation, of_file, sizeof of_file, &spec, &error);
    if (status == EP_OK)
        status = choose_name(invocation->argument, of_file, &name, &error);
    if (status == EP_OK) {
        request.name = (char *)(uintptr_t)name;
        request.dry_run = ep_invocation_given(invocation, "dry-run");
        status = fill_create(admin, invocation, spec, &request, &error);
    }
    if (status == EP_OK) {
        code = change(admin, invocation, "CreateGroup", &request.base, "created");
    } else {
        code = ep_admin_fail(admin, &error);
    }
    ep_admin_free(request.spec);
    json_decref(spec);
    return code;
}

/*
 * --label changes single labels, the server takes over all of them: so the others are read first, and the
 * revision makes sure that nobody changes them between the two calls.
 */
static ep_status merge_labels(struct ep_admin *admin, const struct ep_invocation *invocation,
                              const char *name, json_t *spec, uint64_t *revision, struct ep_error *error)
{
    Ep__V1__GetGroupRequest request = EP__V1__GET_GROUP_REQUEST__INIT;
    const Ep__V1__GroupSpec *present;
    ProtobufCMessage *reply;
    json_t *labels;

    if (json_object_get(spec, "labels") || !ep_invocation_given(invocation, "label")) {
        apply_labels(invocation, spec);
        return EP_OK;
    }
    request.name = (char *)(uintptr_t)name;
    ep_status status = ep_admin_call(admin, "GetGroup", &request.base, 0, &reply, error);
    if (status != EP_OK)
        return status;
    present = ep_group_spec((Ep__V1__Group *)reply);
    labels = json_object();
    for (size_t i = 0; i < present->n_labels; i++)
        json_object_set_new(labels, present->labels[i]->key, json_string(present->labels[i]->value));
    json_object_set_new(spec, "labels", labels);
    if (*revision == 0)
        *revision = ((Ep__V1__Group *)reply)->revision;
    ep_admin_free(reply);
    apply_labels(invocation, spec);
    return EP_OK;
}

/* The names of the fields that the spec has; they stay the spec's.  For free(). */
static char **field_names(json_t *spec, size_t *n)
{
    char **names = calloc(json_object_size(spec) + 1, sizeof *names);
    const char *key;
    json_t *value;

    *n = 0;
    json_object_foreach(spec, key, value) if (names) names[(*n)++] = (char *)(uintptr_t)key;
    return names;
}

static ep_status fill_update(struct ep_admin *admin, const struct ep_invocation *invocation, json_t *spec,
                             Ep__V1__UpdateGroupRequest *request, struct ep_error *error)
{
    request->revision = ep_invocation_u64(invocation, "revision", 0);
    ep_status status = merge_labels(admin, invocation, request->name, spec, &request->revision, error);
    if (status == EP_OK)
        status = ep_loads_apply(admin, invocation, request->name, spec, error);
    if (status != EP_OK)
        return status;
    if (json_object_size(spec) == 0 && !request->dry_run)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "nothing to change: name a field with a flag or in --file");
    request->fields = field_names(spec, &request->n_fields);
    return ep_spec_message(spec, &request->spec, error);
}

int ep_group_update(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__UpdateGroupRequest request = EP__V1__UPDATE_GROUP_REQUEST__INIT;
    struct ep_error error;
    const char *name = NULL;
    char of_file[128];
    json_t *spec = NULL;
    int code;

    ep_status status = ep_spec_read(invocation, of_file, sizeof of_file, &spec, &error);
    if (status == EP_OK)
        status = choose_name(invocation->argument, of_file, &name, &error);
    if (status == EP_OK) {
        request.name = (char *)(uintptr_t)name;
        request.dry_run = ep_invocation_given(invocation, "dry-run");
        status = fill_update(admin, invocation, spec, &request, &error);
    }
    if (status == EP_OK)
        code = change(admin, invocation, "UpdateGroup", &request.base, "updated");
    else
        code = ep_admin_fail(admin, &error);
    ep_admin_free(request.spec);
    free(request.fields);
    json_decref(spec);
    return code;
}

/* ---- plan ------------------------------------------------------------------------- */

/* Of a group that is not there, the plan is that of its creation. */
static ep_status ask_for_plan(struct ep_admin *admin, const struct ep_invocation *invocation, const char *name,
                              json_t *spec, ProtobufCMessage **reply, struct ep_error *error)
{
    Ep__V1__GetGroupRequest get = EP__V1__GET_GROUP_REQUEST__INIT;
    Ep__V1__CreateGroupRequest create = EP__V1__CREATE_GROUP_REQUEST__INIT;
    Ep__V1__UpdateGroupRequest update = EP__V1__UPDATE_GROUP_REQUEST__INIT;
    ep_status status;

    get.name = create.name = update.name = (char *)(uintptr_t)name;
    create.dry_run = update.dry_run = true;
    status = ep_admin_call(admin, "GetGroup", &get.base, 0, reply, error);
    if (status == EP_OK) {
        ep_admin_free(*reply);
        status = fill_update(admin, invocation, spec, &update, error);
        if (status == EP_OK)
            status = ep_admin_call(admin, "UpdateGroup", &update.base, 0, reply, error);
    } else if (status == EP_NOT_FOUND && json_object_size(spec) > 0) {
        status = fill_create(admin, invocation, spec, &create, error);
        if (status == EP_OK)
            status = ep_admin_call(admin, "CreateGroup", &create.base, 0, reply, error);
    }
    ep_admin_free(create.spec);
    ep_admin_free(update.spec);
    free(update.fields);
    return status;
}

int ep_group_plan(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    struct ep_error error;
    ProtobufCMessage *reply;
    const char *name = NULL;
    char of_file[128];
    json_t *spec = NULL;
    int code = 0;

    ep_status status = ep_spec_read(invocation, of_file, sizeof of_file, &spec, &error);
    if (status == EP_OK)
        status = choose_name(invocation->argument, of_file, &name, &error);
    if (status == EP_OK)
        status = ask_for_plan(admin, invocation, name, spec, &reply, &error);
    json_decref(spec);
    if (status != EP_OK)
        return ep_admin_fail(admin, &error);
    if (admin->format == EP_FORMAT_TABLE)
        ep_group_view_plan((Ep__V1__Group *)reply, stdout);
    else
        code = ep_output_message(admin, reply);
    ep_admin_free(reply);
    return code;
}

/* ---- delete ----------------------------------------------------------------------- */

int ep_group_delete(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__DeleteGroupRequest request = EP__V1__DELETE_GROUP_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    request.name = (char *)(uintptr_t)invocation->argument;
    request.force = ep_invocation_given(invocation, "force");
    if (ep_admin_call(admin, "DeleteGroup", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    if (admin->format != EP_FORMAT_TABLE)
        code = ep_output_message(admin, reply);
    else if (!admin->quiet)
        printf("group %s deleted\n", invocation->argument);
    ep_admin_free(reply);
    return code;
}
