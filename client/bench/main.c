/* ep-bench: see bench.h and --help. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crew.h"
#include "ep_descriptors.h"
#include "ep_stdout.h"
#include "figures.h"
#include "options.h"
#include "private_server.h"
#include "report.h"
#include "run.h"

EP_DESCRIPTORS_STANDARD;

static void on_signal(int number)
{
    (void)number;
    crew_cancelled = 1;
}

/* A second signal ends the process at once. */
static void catch_signals(void)
{
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND };

    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static ep_status measure(struct sweep *sweep, struct figures *figures, struct ep_error *error)
{
    struct bench_config config = sweep->config; /* as asked, before a group filled it in */
    ep_status status = run_sweep(sweep, error);

    if (status == EP_OK && config.reference)
        status = figures_run(&config, figures, error);
    return status;
}

static ep_status run(struct sweep *sweep, struct ep_error *error)
{
    struct private_server server = { 0 };
    struct figures figures = { 0 };
    struct ep_error ignored = EP_ERROR_INIT;
    ep_status status = EP_OK;

    if (sweep->config.spawn) {
        uint32_t ranks = sweep->config.ranks > 2 ? sweep->config.ranks : 2;

        status = private_server_start(ranks, bench_backends[sweep->config.backend], &server, error);
        memcpy(sweep->config.server[0], server.address, sizeof server.address);
    }
    if (status == EP_OK)
        status = measure(sweep, &figures, error);
    if (status != EP_OK && status != EP_CANCELLED && server.pid > 0)
        private_server_show_log(&server);
    private_server_stop(&server);
    if (sweep->n_results > 0 || sweep->soak.run) { /* also what there was before something went wrong */
        struct ep_error *unless_known = status == EP_OK ? error : &ignored;
        ep_status printed = report(sweep, figures.n > 0 ? &figures : NULL, unless_known);

        status = status == EP_OK ? printed : status;
    }
    return status;
}

static bool is_worker(int argc, char **argv)
{
    return argc == 2 && strncmp(argv[1], "--worker=", strlen("--worker=")) == 0;
}

int main(int argc, char **argv)
{
    struct ep_error error = EP_ERROR_INIT;
    struct sweep *sweep;
    ep_status status;

    if (is_worker(argc, argv))
        return bench_worker(argv[1] + strlen("--worker="));
    (void)atexit(ep_stdout_check);
    sweep = calloc(1, sizeof *sweep);
    if (!sweep) {
        fprintf(stderr, "ep-bench: %s\n", ep_status_text(EP_NO_MEMORY));
        return ep_status_exit_code(EP_NO_MEMORY);
    }
    status = options_parse(argc, argv, &sweep->config, &error);
    if (status == EP_OK) {
        catch_signals();
        status = run(sweep, &error);
    }
    if (status != EP_OK)
        fprintf(stderr, "ep-bench: %s\n", error.text[0] ? error.text : ep_status_text(status));
    else
        status = sweep_verdict(sweep);
    sweep_free(sweep);
    free(sweep);
    return ep_status_exit_code(status);
}
