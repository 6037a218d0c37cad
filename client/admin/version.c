/* The version command. */
#include "admin.h"

#include <inttypes.h>

#include "attach_frame.h"
#include "ep_json.h"
#include "output.h"
#include "window.h"

void ep_version_of_client(Ep__V1__Version *version)
{
    static char number[] = EP_VERSION, commit[] = EP_COMMIT;

    ep__v1__version__init(version);
    version->version = number;
    version->commit = commit;
    version->window_version = EP_WINDOW_VERSION;
    version->attach_version = EP_ATTACH_VERSION;
}

static void print_row(const char *who, const Ep__V1__Version *version)
{
    printf("%-10s %s (%s), window %u, attach %u\n", who, version->version, version->commit,
           version->window_version, version->attach_version);
}

static int print_versions(const struct ep_admin *admin, const Ep__V1__Version *client,
                          const Ep__V1__Version *server)
{
    if (admin->format != EP_FORMAT_TABLE) {
        json_t *both = json_object();

        json_object_set_new(both, "client", ep_json_from_message(&client->base));
        json_object_set_new(both, "server", server ? ep_json_from_message(&server->base) : json_null());
        return ep_output_document(admin, both);
    }
    print_row("ep-admin", client);
    if (server)
        print_row("ep-server", server);
    return 0;
}

/* Our own version is told also when no server answers. */
int ep_version_show(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__GetVersionRequest request = EP__V1__GET_VERSION_REQUEST__INIT;
    Ep__V1__Version client;
    struct ep_error error = EP_ERROR_INIT;
    ProtobufCMessage *reply = NULL;
    int code;

    ep_version_of_client(&client);
    if (!ep_invocation_given(invocation, "client"))
        (void)ep_admin_call(admin, "GetVersion", &request.base, 0, &reply, &error);
    code = print_versions(admin, &client, (Ep__V1__Version *)reply);
    ep_admin_free(reply);
    return error.status == EP_OK || code != 0 ? code : ep_admin_fail(admin, &error);
}
