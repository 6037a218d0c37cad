/* ep-server: reads its configuration and runs. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon.h"
#include "ep_descriptors.h"
#include "ep_log.h"
#include "ep_rpc.h"
#include "ep_stdout.h"
#include "ep_thread.h"
#include "options.h"

EP_DESCRIPTORS_STANDARD;

const char *argp_program_version = "ep-server " EP_VERSION " (" EP_COMMIT ")";

static ep_status act(struct ep_options *options, int argc, char **argv, struct ep_error *error)
{
    ep_status status;

    if (options->action == EP_ACTION_PRINT) {
        ep_options_print(options, stdout);
        return EP_OK;
    }
    status = ep_options_check(options, error);
    if (status != EP_OK || options->action == EP_ACTION_CHECK)
        return status;
    ep_log_configure((enum ep_log_level)options->log_level, (enum ep_log_format)options->log_format);
    EP_INFO("main", "starting", EP_S("version", EP_VERSION), EP_S("commit", EP_COMMIT), EP_I("pid", getpid()));
    return ep_daemon_run(options, argc, argv, error);
}

/* libuv makes its pool when it is first used, of 4 threads unless the environment says otherwise. */
static void size_pool(void)
{
    char threads[16];

    snprintf(threads, sizeof threads, "%d", EP_POOL_THREADS);
    (void)setenv("UV_THREADPOOL_SIZE", threads, 0); /* without it things are slower, no more */
}

int main(int argc, char **argv)
{
    struct ep_options *options = NULL;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status;

    size_pool();
    ep_rpc_names_by_host();
    (void)atexit(ep_stdout_check);
    /* Threads that run ops say so themselves.  Where they may not, they would stand behind with this one, which makes them. */
    if (ep_thread_runs_ops())
        ep_thread_controls();
    status = ep_options_load(argc, argv, environ, &options, &error);
    if (status == EP_OK)
        status = act(options, argc, argv, &error);
    ep_options_free(options);
    if (status == EP_OK)
        return 0;
    fprintf(stderr, "ep-server: %s\n", error.text);
    return ep_status_exit_code(status);
}
