#include "store_fixture.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep_log.h"
#include "temporary.h"

#define PROCESSES_MAX 16

/* ---- processes --------------------------------------------------------------------- */

static pid_t running[PROCESSES_MAX]; /* 0: a free place */

static pid_t *place_of(pid_t pid)
{
    for (size_t i = 0; i < PROCESSES_MAX; i++)
        if (running[i] == pid)
            return &running[i];
    fail_msg("a case has %d processes at most", PROCESSES_MAX);
    return NULL;
}

pid_t process_fork(void)
{
    pid_t parent = getpid(), *place = place_of(0), pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(126);
        return 0;
    }
    *place = pid;
    return pid;
}

void process_end(pid_t *pid)
{
    if (*pid) {
        kill(*pid, SIGKILL);
        waitpid(*pid, NULL, 0);
        *place_of(*pid) = 0;
    }
    *pid = 0;
}

static void end_processes(void)
{
    for (size_t i = 0; i < PROCESSES_MAX; i++) {
        pid_t pid = running[i];

        process_end(&pid);
    }
}

/* ---- loop -------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *tick)
{
    (void)tick;
}

void fixture_tick_start(struct fixture *f, uv_timer_t *tick)
{
    uv_timer_init(&f->loop, tick);
    uv_timer_start(tick, on_tick, 50, 50);
}

static void on_tick_closed(uv_handle_t *tick)
{
    tick->data = NULL;
}

void fixture_tick_stop(struct fixture *f, uv_timer_t *tick)
{
    tick->data = tick;
    uv_close((uv_handle_t *)tick, on_tick_closed);
    while (tick->data)
        uv_run(&f->loop, UV_RUN_NOWAIT);
}

void fixture_run_ms(struct fixture *f, uint64_t ms)
{
    uint64_t end = ep_clock_ns() + ms * EP_NS_PER_MS;

    RUN_UNTIL(f, ep_clock_ns() >= end);
}

int fixture_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);

    f->test = *state;
    signal(SIGPIPE, SIG_IGN);
    ep_log_configure(getenv("STORE_TEST_LOG") ? EP_LOG_DEBUG : EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_true(temporary_directory(f->directory, sizeof f->directory));
    snprintf(f->path, sizeof f->path, "%s/store.db", f->directory);
    uv_loop_init(&f->loop);
    f->answer_within_ms = ANSWER_WITHIN_MS;
    *state = f;
    return 0;
}

int fixture_setup_etcd(void **state)
{
    struct fixture *f;

    fixture_setup(state);
    f = *state;
    f->on_etcd = true;
    return 0;
}

void fixture_run_case(void **state)
{
    struct fixture *f = *state;

    f->test->run(state);
    f->passed = true;
}

static void close_all(struct fixture *f)
{
    if (f->store)
        fixture_close(f);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    cluster_stop(&f->etcd);
}

/* What a case that failed, or was skipped, holds on to stays reachable: to a sanitizer it is no leak. */
static void abandon(struct fixture *f)
{
    static struct fixture *abandoned;

    f->next = abandoned;
    abandoned = f;
    end_processes();
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;

    if (f->passed)
        close_all(f);
    else
        abandon(f);
    shell("rm -rf %s", f->directory);
    if (f->passed)
        free(f);
    return 0;
}

ep_status fixture_open(struct fixture *f, struct ep_error *error)
{
    char url[256];

    if (!f->on_etcd)
        return ep_store_open_sqlite(&f->loop, f->path, &f->store, error);
    if (!f->etcd.n)
        cluster_start(&f->etcd, 1, f->directory);
    const struct ep_store_etcd options = { .url = cluster_url(&f->etcd, "/test", url, sizeof url),
                                           .answer_within_ms = f->answer_within_ms };
    return ep_store_open_etcd(&f->loop, &options, &f->store, error);
}

struct fixture *fixture_begin(void **state)
{
    struct fixture *f = *state;

    if (f->on_etcd && !cluster_installed()) {
        print_message("etcd is not installed (package etcd-server)\n");
        skip();
    }
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    return f;
}

struct ep_store *open_at(struct fixture *f, const struct ep_store_etcd *options)
{
    struct ep_store *store;
    struct ep_error error = EP_ERROR_INIT;

    if (ep_store_open_etcd(&f->loop, options, &store, &error))
        fail_msg("%s", error.text);
    return store;
}

struct ep_store *open_url(struct fixture *f, const char *url)
{
    return open_at(f, &(const struct ep_store_etcd){ .url = url, .answer_within_ms = ANSWER_WITHIN_MS });
}

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

void close_store(struct fixture *f, struct ep_store *store)
{
    bool closed = false;

    ep_store_close(store, set_flag, &closed);
    RUN_UNTIL(f, closed);
}

void fixture_close(struct fixture *f)
{
    close_store(f, f->store);
    f->store = NULL;
}

/* ---- asking ------------------------------------------------------------------------ */

void on_written(const struct ep_error *error, uint64_t revision, void *user)
{
    struct written *written = user;

    *written = (struct written){ .done = true, .error = *error, .revision = revision };
}

struct written commit_to(struct fixture *f, struct ep_store *store, const struct ep_store_write *writes,
                         size_t n)
{
    struct written written = { 0 };

    ep_store_commit(store, writes, n, on_written, &written);
    RUN_UNTIL(f, written.done);
    return written;
}

struct written commit(struct fixture *f, const struct ep_store_write *writes, size_t n)
{
    return commit_to(f, f->store, writes, n);
}

struct written put(struct fixture *f, const char *key, const char *value, uint64_t expected)
{
    const struct ep_store_write write = {
        .key = key, .value = value, .size = value ? strlen(value) : 0, .expected = expected
    };

    return commit(f, &write, 1);
}

uint64_t put_surely(struct fixture *f, const char *key, const char *value)
{
    for (int i = 0; i < 20; i++) {
        struct written w = put(f, key, value, EP_STORE_ANY);

        if (!w.error.status)
            return w.revision;
    }
    fail_msg("%s was never written", key);
    return 0;
}

__attribute__((format(printf, 4, 5))) static void append(char *text, size_t size, size_t *used,
                                                         const char *format, ...)
{
    va_list args;
    int n;

    if (*used >= size)
        return;
    va_start(args, format);
    n = vsnprintf(text + *used, size - *used, format, args);
    va_end(args);
    *used += (size_t)n;
}

void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct listed *listed = user;
    size_t used = 0;

    *listed = (struct listed){ .done = true, .error = *error, .n = n };
    for (size_t i = 0; i < n; i++) {
        append(listed->text, sizeof listed->text, &used, "%s=%.*s ", records[i].key, (int)records[i].size,
               (const char *)records[i].value);
        if (records[i].revision > listed->newest)
            listed->newest = records[i].revision;
    }
}

struct listed list_of(struct fixture *f, struct ep_store *store, const char *prefix)
{
    struct listed listed = { 0 };

    ep_store_list(store, prefix, on_listed, &listed);
    RUN_UNTIL(f, listed.done);
    return listed;
}

struct listed list(struct fixture *f, const char *prefix)
{
    return list_of(f, f->store, prefix);
}

struct listed list_surely(struct fixture *f, const char *prefix)
{
    struct listed listed = { 0 };

    for (int i = 0; i < 20; i++) {
        listed = list(f, prefix);
        if (!listed.error.status)
            return listed;
    }
    fail_msg("%s was never listed: %s", prefix, listed.error.text);
    return listed;
}

void on_changes(const struct ep_store_changes *changes, void *user)
{
    struct seen *seen = user;

    if (changes->whole)
        append(seen->text, sizeof seen->text, &seen->used, "[");
    for (size_t i = 0; i < changes->n; i++) {
        const struct ep_record *r = &changes->records[i];

        if (r->value)
            append(seen->text, sizeof seen->text, &seen->used, "%s=%.*s ", r->key, (int)r->size,
                   (const char *)r->value);
        else
            append(seen->text, sizeof seen->text, &seen->used, "-%s ", r->key);
        seen->disorder |= !changes->whole && r->revision <= seen->newest;
        if (!changes->whole && (i + 1 == changes->n || r[1].revision != r->revision))
            append(seen->text, sizeof seen->text, &seen->used, "| ");
    }
    if (changes->whole)
        append(seen->text, sizeof seen->text, &seen->used, "]");
    seen->disorder |= changes->revision < seen->newest;
    seen->newest = changes->revision;
    seen->calls++;
    seen->wholes += changes->whole;
    seen->changes += changes->whole ? 0 : changes->n;
}

void on_session(const struct ep_error *error, void *user)
{
    struct told *told = user;

    if (error->status)
        told->failed++;
    else
        told->begun++;
    told->error = *error;
}

/* ---- programs -------------------------------------------------------------------------- */

void shell(const char *format, ...)
{
    char command[2048];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(command, sizeof command, format, args);
    va_end(args);
    assert_true(n > 0 && (size_t)n < sizeof command);
    if (system(command) != 0)
        fail_msg("failed: %s", command);
}

static bool is_free(int port)
{
    const struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                         .sin_port = htons((uint16_t)port) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool free;

    assert_true(fd >= 0);
    free = bind(fd, (const struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return free;
}

/* Below those that connections are made from: else one may have it while a server that was stopped is started again. */
int free_port(void)
{
    enum { FIRST = 10000, PORTS = 20000 };
    static unsigned next;
    int port;

    if (!next)
        next = (unsigned)getpid() * 7919u;
    do
        port = FIRST + (int)(next++ % PORTS);
    while (!is_free(port));
    return port;
}

/* Its output goes to a file. */
static pid_t start_process(char *const argv[], const char *log)
{
    pid_t pid = process_fork();

    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

        if (fd < 0)
            _exit(126);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        execvp(argv[0], argv);
        _exit(127);
    }
    return pid;
}

/* ---- etcd ------------------------------------------------------------------------------ */

bool cluster_installed(void)
{
    return system("command -v etcd >/dev/null 2>&1") == 0;
}

static const char *scheme(const struct cluster *c)
{
    return c->tls ? "https" : "http";
}

static void list_members(const struct cluster *c, char *text, size_t size)
{
    size_t used = 0;

    for (size_t i = 0; i < c->n; i++)
        append(text, size, &used, "%sm%zu=http://127.0.0.1:%d", i ? "," : "", i, c->peer[i]);
}

void cluster_start_member(struct cluster *c, size_t i)
{
    char command[2048], members[256], log[128], tls[512] = "";
    const char *d = c->directory;

    list_members(c, members, sizeof members);
    if (c->tls)
        snprintf(tls, sizeof tls,
                 "--cert-file %s/server.pem --key-file %s/server.key --trusted-ca-file %s/ca.pem "
                 "--client-cert-auth",
                 d, d, d);
    snprintf(command, sizeof command,
             "exec etcd --name m%zu --data-dir %s/m%zu --listen-client-urls %s://127.0.0.1:%d "
             "--advertise-client-urls %s://127.0.0.1:%d --listen-peer-urls http://127.0.0.1:%d "
             "--initial-advertise-peer-urls http://127.0.0.1:%d --initial-cluster %s --heartbeat-interval 50 "
             "--election-timeout 500 %s %s",
             i, d, i, scheme(c), c->client[i], scheme(c), c->client[i], c->peer[i], c->peer[i], members, tls,
             c->flags ? c->flags : "");
    snprintf(log, sizeof log, "%s/m%zu.log", d, i);
    c->pid[i] = start_process((char *[]){ "sh", "-c", command, NULL }, log);
}

void cluster_start(struct cluster *c, size_t n, const char *directory)
{
    c->directory = directory;
    c->n = n;
    for (size_t i = 0; i < n; i++) {
        c->client[i] = free_port();
        c->peer[i] = free_port();
    }
    for (size_t i = 0; i < n; i++)
        cluster_start_member(c, i);
    cluster_post(c, "/health", ""); /* on a busy machine it takes longer than stores wait */
}

void cluster_kill_member(struct cluster *c, size_t i)
{
    process_end(&c->pid[i]);
}

void cluster_stop(struct cluster *c)
{
    for (size_t i = 0; i < c->n; i++)
        process_end(&c->pid[i]);
}

char *cluster_url(const struct cluster *c, const char *prefix, char *url, size_t size)
{
    size_t used = 0;

    append(url, size, &used, "etcd://");
    for (size_t i = 0; i < c->n; i++)
        append(url, size, &used, "%s127.0.0.1:%d", i ? "," : "", c->client[i]);
    append(url, size, &used, "%s", prefix);
    return url;
}

/* Prints the answer. */
static const char post_source[] =
    "import sys, time, urllib.request as u\n"
    "u.install_opener(u.build_opener(u.ProxyHandler({})))\n"
    "for i in range(300):\n"
    "    try:\n"
    "        print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode() or None), "
    "timeout=5).read().decode())\n"
    "        sys.exit(0)\n"
    "    except OSError as e:\n"
    "        last = e\n"
    "        time.sleep(0.1)\n"
    "sys.exit('%s: %s %s' % (sys.argv[1], last, getattr(last, 'read', str)()))\n";

static void post(const struct cluster *c, const char *path, const char *json, const char *output)
{
    shell("python3 -c \"%s\" http://127.0.0.1:%d%s '%s' > %s", post_source, c->client[0], path, json, output);
}

void cluster_post(const struct cluster *c, const char *path, const char *json)
{
    post(c, path, json, "/dev/null");
}

/* An alarm is one member's: its number is in the list of alarms. */
void cluster_disarm(const struct cluster *c)
{
    char path[128], text[512] = "", json[128];
    const char *id;
    FILE *file;

    snprintf(path, sizeof path, "%s/alarms", c->directory);
    post(c, "/v3/maintenance/alarm", "{\"action\": \"GET\"}", path);
    file = fopen(path, "re");
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    id = strstr(text, "\"memberID\":\"");
    assert_non_null(id);
    snprintf(json, sizeof json,
             "{\"action\": \"DEACTIVATE\", \"memberID\": \"%llu\", \"alarm\": \"NOSPACE\"}",
             strtoull(id + 12, NULL, 10));
    post(c, "/v3/maintenance/alarm", json, "/dev/null");
}

/* ---- proxy ----------------------------------------------------------------------------- */

static const char proxy_source[] =
    "import signal, socket, sys, threading, time\n"
    "swallow = False\n"
    "at = sys.argv[3].encode()\n"
    "def on_signal(*_):\n"
    "    global swallow\n"
    "    swallow = True\n"
    "signal.signal(signal.SIGUSR1, on_signal)\n"
    "def pump(a, b, answers):\n"
    "    global swallow\n"
    "    try:\n"
    "        while data := a.recv(65536):\n"
    "            if answers and swallow:\n"
    "                time.sleep(0.3)\n"
    "                break\n"
    "            if at and not answers and at in data:\n"
    "                swallow = True\n"
    "            b.sendall(data)\n"
    "    except OSError:\n"
    "        pass\n"
    "    for s in (a, b):\n"
    "        try:\n"
    "            s.shutdown(socket.SHUT_RDWR)\n"
    "        except OSError:\n"
    "            pass\n"
    "def serve(listener, to):\n"
    "    while True:\n"
    "        a = listener.accept()[0]\n"
    "        try:\n"
    "            b = socket.create_connection(('127.0.0.1', to))\n"
    "        except OSError:\n"
    "            a.close()\n"
    "            continue\n"
    "        threading.Thread(target=pump, args=(a, b, False), daemon=True).start()\n"
    "        threading.Thread(target=pump, args=(b, a, True), daemon=True).start()\n"
    "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "threading.Thread(target=serve, args=(listener, int(sys.argv[2])), daemon=True).start()\n"
    "while True:\n"
    "    time.sleep(0.01)\n";

static bool accepts(int port)
{
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                   .sin_port = htons((uint16_t)port) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool accepted = connect(fd, (struct sockaddr *)&address, sizeof address) == 0;

    close(fd);
    return accepted;
}

void proxy_start(struct proxy *p, int to)
{
    char from_text[16], to_text[16];

    if (!p->port)
        p->port = free_port();
    p->to = to;
    snprintf(from_text, sizeof from_text, "%d", p->port);
    snprintf(to_text, sizeof to_text, "%d", to);
    p->pid = start_process((char *[]){ "python3", "-c", (char *)(uintptr_t)proxy_source, from_text, to_text,
                                       (char *)(uintptr_t)(p->swallow_at ? p->swallow_at : ""), NULL },
                           "/dev/null");
    for (int i = 0; i < 500 && !accepts(p->port); i++)
        usleep(20000);
}

void proxy_stop(struct proxy *p)
{
    process_end(&p->pid);
}

void proxy_swallow(struct proxy *p)
{
    kill(p->pid, SIGUSR1);
    usleep(50000); /* Python looks for signals between its steps */
}
