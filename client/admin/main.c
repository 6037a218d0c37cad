/* ep-admin: asks and changes an ep-server. */
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "admin.h"
#include "ep_descriptors.h"
#include "ep_log.h"
#include "ep_rpc.h"
#include "ep_thread.h"
#include "output.h"

EP_DESCRIPTORS_STANDARD;

static int usage_error(const struct ep_invocation *invocation, const struct ep_error *error)
{
    struct ep_admin nobody = { .server = "" };
    struct ep_text where = { "" };

    if (invocation->command)
        where = ep_command_name(invocation->command);
    else if (invocation->noun)
        snprintf(where.s, sizeof where.s, "%s", invocation->noun);
    snprintf(nobody.what, sizeof nobody.what, "%s", where.s);
    int code = ep_admin_fail(&nobody, error);
    if (invocation->incomplete)
        ep_help_print(invocation, stderr);
    else
        fprintf(stderr, "'ep-admin%s%s --help' says what can be given\n", where.s[0] ? " " : "", where.s);
    return code;
}

static int run_command(const struct ep_invocation *invocation)
{
    struct ep_admin admin = { .server = "" };
    struct ep_error error = EP_ERROR_INIT;
    int code;

    if (ep_admin_init(&admin, invocation, &error) != EP_OK)
        code = ep_admin_fail(&admin, &error);
    else
        code = invocation->command->run(&admin, invocation);
    code = ep_output_finish(&admin, code);
    ep_admin_close(&admin);
    return code;
}

/* What the build and the shells ask; not for people, so not in the table. */
static bool run_hidden(int argc, char **argv, int *code)
{
    struct ep_admin nobody = { .server = "" };

    if (argc < 2 || strncmp(argv[1], "__", 2) != 0)
        return false;
    if (strcmp(argv[1], "__complete") == 0)
        *code = ep_completion_answer(argc - 2, argv + 2);
    else if (strcmp(argv[1], "__man") == 0)
        ep_man_print(stdout);
    else
        return false;
    *code = ep_output_finish(&nobody, *code);
    return true;
}

static int run(int argc, char **argv)
{
    struct ep_admin nobody = { .server = "" };
    struct ep_invocation invocation;
    struct ep_error error = EP_ERROR_INIT;
    int code = 0;

    if (run_hidden(argc, argv, &code))
        return code;
    if (ep_invocation_parse(argc, argv, &invocation, &error) != EP_OK) {
        code = usage_error(&invocation, &error);
    } else if (ep_invocation_given(&invocation, "help")) {
        ep_help_print(&invocation, stdout);
        code = ep_output_finish(&nobody, 0);
    } else if (ep_invocation_given(&invocation, "version")) {
        printf("ep-admin %s (%s)\n", EP_VERSION, EP_COMMIT);
        code = ep_output_finish(&nobody, 0);
    } else {
        code = run_command(&invocation);
    }
    ep_invocation_clear(&invocation);
    return code;
}

int main(int argc, char **argv)
{
    ep_rpc_names_by_host();
    ep_thread_controls(); /* it may be on a node whose ranks compute */
    signal(SIGPIPE, SIG_IGN); /* a closed output is seen where it is written */
    setlocale(LC_CTYPE, "");
    setlocale(LC_TIME, "");
    /* Errors are said once, in our words.  Who traces gRPC wants to read its log too. */
    ep_log_configure(getenv("GRPC_VERBOSITY") ? EP_LOG_DEBUG : EP_LOG_OFF, EP_LOG_LOGFMT);
    return run(argc, argv);
}
