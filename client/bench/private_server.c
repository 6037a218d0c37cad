#include "private_server.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

enum { START_MS = 20000, STOP_MS = 20000, LOG_SHOWN = 4096 };

/* ---- directory --------------------------------------------------------------------------- */

static ep_status make_directory(struct private_server *server, struct ep_error *error)
{
    const char *base = getenv("TMPDIR");

    /* A socket's path has 107 bytes at most. */
    if (!base || !*base || strlen(base) > sizeof server->directory - sizeof "/ep-bench.XXXXXX")
        base = "/tmp";
    snprintf(server->directory, sizeof server->directory, "%s/ep-bench.XXXXXX", base);
    if (!mkdtemp(server->directory)) {
        server->directory[0] = '\0';
        return ep_error_errno(error, EP_IO, "cannot make a directory in %s", base);
    }
    snprintf(server->address, sizeof server->address, "unix:%s/ep.sock", server->directory);
    return EP_OK;
}

static int remove_entry(const char *path, const struct stat *stat, int type, struct FTW *walk)
{
    (void)stat, (void)type, (void)walk;
    return remove(path);
}

static void remove_directory(struct private_server *server)
{
    if (server->directory[0])
        nftw(server->directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    server->directory[0] = '\0';
}

/* ---- process ------------------------------------------------------------------------------ */

/* Beside this program if there is one, else on the PATH. */
static void exec_server(char **argv)
{
    char self[1024], path[1100];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    if (n > 0) {
        self[n] = '\0';
        snprintf(path, sizeof path, "%s/ep-server", dirname(self));
        execv(path, argv);
    }
    execvp("ep-server", argv);
    fprintf(stderr, "cannot start ep-server: %s\n", strerror(errno));
    _exit(127);
}

static void run_child(const struct private_server *server, uint32_t host_ranks, const char *backend,
                      pid_t parent)
{
    char log[128], socket[160], state[160], ports[160], ranks[48], where[32];
    char *argv[] = {
        (char *)"ep-server", socket, state, ports, ranks, where, (char *)"--log-level=warn", NULL
    };
    int fd;

    prctl(PR_SET_PDEATHSIG, SIGTERM); /* never longer than this run */
    if (getppid() != parent)
        _exit(1);
    snprintf(log, sizeof log, "%s/log", server->directory);
    snprintf(socket, sizeof socket, "--socket=%s", server->address + strlen("unix:"));
    snprintf(state, sizeof state, "--state-dir=%s/state", server->directory);
    snprintf(ports, sizeof ports, "--port-file=%s/ports", server->directory);
    snprintf(ranks, sizeof ranks, "--host-ranks=%u", host_ranks);
    snprintf(where, sizeof where, "--backend=%s", backend);
    fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
        _exit(127);
    exec_server(argv);
}

/* The port file is written when the server is serving, and not before. */
static bool serves(const struct private_server *server)
{
    char path[128];

    snprintf(path, sizeof path, "%s/ports", server->directory);
    return access(path, F_OK) == 0;
}

static bool ended(struct private_server *server, int timeout_ms, int *status)
{
    for (int waited = 0;; waited++) {
        if (waitpid(server->pid, status, WNOHANG) == server->pid) {
            server->pid = 0;
            return true;
        }
        if (waited >= timeout_ms)
            return false;
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

static ep_status wait_until_it_serves(struct private_server *server, struct ep_error *error)
{
    uint64_t deadline = ep_clock_ns() + START_MS * EP_NS_PER_MS;
    int status = 0;

    while (!serves(server)) {
        if (ended(server, 0, &status)) {
            private_server_show_log(server);
            return ep_error_set(error, EP_UNAVAILABLE, "--spawn: ep-server ended with exit code %d",
                                WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        }
        if (ep_clock_ns() > deadline) {
            private_server_show_log(server);
            return ep_error_set(error, EP_UNAVAILABLE, "--spawn: ep-server does not serve after %d ms",
                                START_MS);
        }
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    }
    return EP_OK;
}

ep_status private_server_start(uint32_t host_ranks, const char *backend, struct private_server *server,
                               struct ep_error *error)
{
    pid_t parent = getpid();
    ep_status status;

    *server = (struct private_server){ 0 };
    status = make_directory(server, error);
    if (status != EP_OK)
        return status;
    server->pid = fork();
    if (server->pid == 0)
        run_child(server, host_ranks, backend, parent);
    if (server->pid < 0) {
        server->pid = 0;
        status = ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "--spawn: cannot fork");
    } else {
        status = wait_until_it_serves(server, error);
    }
    if (status != EP_OK)
        private_server_stop(server);
    return status;
}

void private_server_stop(struct private_server *server)
{
    int status = 0;

    if (server->pid > 0) {
        kill(server->pid, SIGTERM);
        if (!ended(server, STOP_MS, &status)) {
            fprintf(stderr, "ep-bench: ep-server did not end after SIGTERM and was killed\n");
            private_server_show_log(server);
            kill(server->pid, SIGKILL);
            waitpid(server->pid, &status, 0);
            server->pid = 0;
        } else if (status != 0) {
            fprintf(stderr, "ep-bench: ep-server ended with wait status %d\n", status);
            private_server_show_log(server);
        }
    }
    remove_directory(server);
}

void private_server_show_log(const struct private_server *server)
{
    char path[128], text[LOG_SHOWN];
    int fd;
    ssize_t n;

    snprintf(path, sizeof path, "%s/log", server->directory);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (lseek(fd, -(off_t)sizeof text, SEEK_END) < 0)
        lseek(fd, 0, SEEK_SET);
    n = read(fd, text, sizeof text);
    close(fd);
    if (n > 0)
        fprintf(stderr, "ep-bench: log of ep-server:\n%.*s", (int)n, text);
}
