/* Configuration: precedence, origins, types, and every message that a wrong one gets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "ep_log.h"
#include "options_private.h"
#include "temporary.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static char directory[48];
static char file_path[64];

static int make_directory(void **state)
{
    (void)state;
    setenv("XDG_RUNTIME_DIR", "/run/user/1000", 1); /* a login has it, a bare shell may not */
    unsetenv("XDG_STATE_HOME");
    if (!temporary_directory(directory, sizeof directory))
        return -1;
    snprintf(file_path, sizeof file_path, "%s/c.yaml", directory);
    return 0;
}

static int remove_directory(void **state)
{
    (void)state;
    unlink(file_path);
    return rmdir(directory);
}

static void write_bytes(const char *bytes, size_t n)
{
    FILE *f = fopen(file_path, "w");

    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* ---- loading with up to three flags, three variables and a file -------------------------- */

struct sources {
    const char *file; /* its text; NULL: none */
    char *flags[8];
    char *environment[8];
};

static ep_status load_from(const struct sources *s, struct ep_options **out, struct ep_error *error)
{
    char config[80];
    char *argv[16] = { (char *)(uintptr_t)"ep-server" };
    char *environment[10] = { NULL };
    int argc = 1;

    if (s->file) {
        write_bytes(s->file, strlen(s->file));
        snprintf(config, sizeof config, "--config=%s", file_path);
        argv[argc++] = config;
    }
    for (size_t i = 0; i < COUNT(s->flags) && s->flags[i]; i++)
        argv[argc++] = s->flags[i];
    for (size_t i = 0; i < COUNT(s->environment) && s->environment[i]; i++)
        environment[i] = s->environment[i];
    return ep_options_load(argc, argv, environment, out, error);
}

static struct ep_options *load(struct sources s)
{
    struct ep_options *options = NULL;
    struct ep_error error = EP_ERROR_INIT;

    if (load_from(&s, &options, &error) != EP_OK)
        fail_msg("%s", error.text);
    return options;
}

static const struct ep_option_origin *origin(const struct ep_options *options, const char *name)
{
    const struct ep_option *option = ep_option_find(name, strlen(name));

    assert_non_null(option);
    return &options->origins[option - ep_options_table];
}

/* The text that an error must hold; one asterisk stands for the file's path. */
static void expect_text(const struct ep_error *error, const char *expected)
{
    char wanted[512];
    const char *star = strchr(expected, '*');

    if (star)
        snprintf(wanted, sizeof wanted, "%.*s%s%s", (int)(star - expected), expected, file_path, star + 1);
    else
        snprintf(wanted, sizeof wanted, "%s", expected);
    if (!strstr(error->text, wanted))
        fail_msg("\nexpected: %s\n     got: %s", wanted, error->text);
}

static void refuse(struct sources s, const char *expected)
{
    struct ep_options *options = NULL;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = load_from(&s, &options, &error);

    if (status == EP_OK) {
        ep_options_free(options);
        fail_msg("accepted, expected: %s", expected);
    }
    assert_int_equal(status, EP_INVALID_ARGUMENT);
    assert_int_equal(error.status, EP_INVALID_ARGUMENT);
    assert_int_equal(ep_status_exit_code(status), 2);
    assert_null(options);
    expect_text(&error, expected);
}

static void refuse_check(struct sources s, const char *expected)
{
    struct ep_options *options = load(s);
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_options_check(options, &error), EP_INVALID_ARGUMENT);
    expect_text(&error, expected);
    ep_options_free(options);
}

static void accept_check(struct sources s)
{
    struct ep_options *options = load(s);
    struct ep_error error = EP_ERROR_INIT;

    if (ep_options_check(options, &error) != EP_OK)
        fail_msg("%s", error.text);
    ep_options_free(options);
}

/* ---- precedence and origins ----------------------------------------------------------------- */

static void defaults_need_no_source(void **state)
{
    struct ep_options *o = load((struct sources){ 0 });

    (void)state;
    assert_int_equal(o->action, EP_ACTION_RUN);
    assert_int_equal(o->host_ranks, 8);
    assert_int_equal(o->memory, 0);
    assert_int_equal(o->lost_after, 2000);
    assert_int_equal(o->drain_grace, 30000);
    assert_int_equal(o->max_message_bytes, 4 << 20);
    assert_int_equal(o->socket_mode, 0666);
    assert_int_equal(o->log_level, EP_LOG_INFO);
    assert_int_equal(o->log_format, EP_LOG_LOGFMT);
    assert_false(o->insecure);
    assert_string_equal(o->listen, "");
    assert_int_equal(o->allow_uid.n, 0);
    assert_true(strlen(o->name) > 0);
    assert_int_equal(origin(o, "host-ranks")->kind, EP_ORIGIN_DEFAULT);
    ep_options_free(o);
}

static void flag_beats_environment_beats_file_beats_default(void **state)
{
    const struct sources all = { .file = "host-ranks: 3\n", .flags = { "--host-ranks=5" },
                                 .environment = { "EP_SERVER_HOST_RANKS=4" } };
    struct sources s = all;
    struct ep_options *o = load(s);

    (void)state;
    assert_int_equal(o->host_ranks, 5);
    assert_int_equal(origin(o, "host-ranks")->kind, EP_ORIGIN_FLAG);
    ep_options_free(o);

    s.flags[0] = NULL;
    o = load(s);
    assert_int_equal(o->host_ranks, 4);
    assert_int_equal(origin(o, "host-ranks")->kind, EP_ORIGIN_ENVIRONMENT);
    ep_options_free(o);

    s.environment[0] = NULL;
    o = load(s);
    assert_int_equal(o->host_ranks, 3);
    assert_int_equal(origin(o, "host-ranks")->kind, EP_ORIGIN_FILE);
    assert_int_equal(origin(o, "host-ranks")->line, 1);
    ep_options_free(o);
}

static void the_file_can_be_named_in_the_environment(void **state)
{
    char variable[96];
    struct sources s = { .environment = { variable } };
    struct ep_options *o;

    (void)state;
    write_bytes("name: here\n", 11);
    snprintf(variable, sizeof variable, "EP_SERVER_CONFIG=%s", file_path);
    o = load(s);
    assert_string_equal(o->name, "here");
    ep_options_free(o);
    /* and a flag wins over that */
    s.flags[0] = (char *)(uintptr_t)"--config=";
    o = load(s);
    assert_string_not_equal(o->name, "here");
    ep_options_free(o);
}

static void flags_take_their_value_either_way(void **state)
{
    struct ep_options *o = load((struct sources){ .flags = { "--host-ranks", "6", "--insecure", "--name", "a b" } });

    (void)state;
    assert_int_equal(o->host_ranks, 6);
    assert_true(o->insecure);
    assert_string_equal(o->name, "a b");
    ep_options_free(o);
    o = load((struct sources){ .flags = { "--insecure=false", "--check" } });
    assert_false(o->insecure);
    assert_int_equal(o->action, EP_ACTION_CHECK);
    ep_options_free(o);
}

static void sections_and_flat_names_are_the_same(void **state)
{
    static const char text[] = "# comment\n"
                               "node: # more\n"
                               "  host-ranks: 3\n"
                               "  memory: 1GiB\n"
                               "workers:\n"
                               "  allow-uid: [0, 7]\n"
                               "limits:\n"
                               "log-level: warn\n";
    struct ep_options *o = load((struct sources){ .file = text });

    (void)state;
    assert_int_equal(o->host_ranks, 3);
    assert_int_equal(o->memory, 1 << 30);
    assert_int_equal(o->log_level, EP_LOG_WARN);
    assert_int_equal(o->allow_uid.n, 2);
    assert_int_equal(o->allow_uid.ids[1], 7);
    assert_int_equal(origin(o, "memory")->line, 4);
    ep_options_free(o);
}

static void an_empty_file_sets_nothing(void **state)
{
    static const char *const texts[] = { "", "# only this\n", "---\n", "{}\n", "~\n" };

    (void)state;
    for (size_t i = 0; i < COUNT(texts); i++)
        ep_options_free(load((struct sources){ .file = texts[i] }));
}

static void lists_add_up_within_a_source_only(void **state)
{
    struct ep_options *o = load((struct sources){ .file = "allow-uid: [1, 2]\n",
                                                  .flags = { "--allow-uid=3,4", "--allow-uid", "root" } });

    (void)state;
    assert_int_equal(o->allow_uid.n, 3);
    assert_int_equal(o->allow_uid.ids[0], 3);
    assert_int_equal(o->allow_uid.ids[1], 4);
    assert_int_equal(o->allow_uid.ids[2], 0);
    ep_options_free(o);
    o = load((struct sources){ .file = "allow-gid: [1, 2]\n", .environment = { "EP_SERVER_ALLOW_GID=" } });
    assert_int_equal(o->allow_gid.n, 0);
    ep_options_free(o);
}

/* ---- types ------------------------------------------------------------------------------------ */

static void sizes_have_units(void **state)
{
    static const struct { const char *flag; uint64_t bytes; } cases[] = {
        { "--memory=0", 0 }, { "--memory=4096", 4096 }, { "--memory=1KiB", 1024 }, { "--memory=512MiB", 512u << 20 },
        { "--memory=2GB", 2000000000 }, { "--memory=3 TiB", 3ull << 40 }, { "--memory=7B", 7 },
    };

    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ep_options *o = load((struct sources){ .flags = { (char *)(uintptr_t)cases[i].flag } });

        assert_int_equal(o->memory, cases[i].bytes);
        ep_options_free(o);
    }
}

static void durations_have_units(void **state)
{
    static const struct { const char *flag; uint64_t ms; } cases[] = {
        { "--drain-grace=0", 0 }, { "--drain-grace=250ms", 250 }, { "--drain-grace=10s", 10000 },
        { "--drain-grace=2m", 120000 }, { "--drain-grace=1h", 3600000 },
    };

    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ep_options *o = load((struct sources){ .flags = { (char *)(uintptr_t)cases[i].flag } });

        assert_int_equal(o->drain_grace, cases[i].ms);
        ep_options_free(o);
    }
}

static void wrong_values_say_what_is_right(void **state)
{
    static const struct { const char *flag, *expected; } cases[] = {
        { "--host-ranks=abc", "host-ranks is \"abc\" (flag --host-ranks): must be an integer from 1 to 1024" },
        { "--host-ranks=", "host-ranks is \"\" (flag --host-ranks)" },
        { "--host-ranks=0", "host-ranks is \"0\"" },
        { "--host-ranks=1025", "must be an integer from 1 to 1024" },
        { "--host-ranks=-1", "host-ranks is \"-1\"" },
        { "--host-ranks=+1", "host-ranks is \"+1\"" },
        { "--host-ranks= 1", "host-ranks is \" 1\"" },
        { "--host-ranks=1e2", "host-ranks is \"1e2\"" },
        { "--host-ranks=0x8", "host-ranks is \"0x8\"" },
        { "--host-ranks=99999999999999999999999", "host-ranks is \"9999" },
        { "--memory=1.5GiB", "memory is \"1.5GiB\" (flag --memory): must be a size from 0 to 1024TiB, such as" },
        { "--memory=1gib", "memory is \"1gib\"" },
        { "--memory=99999999999TiB", "memory is \"99999999999TiB\"" },
        { "--memory=GiB", "memory is \"GiB\"" },
        { "--drain-grace=10", "drain-grace is \"10\" (flag --drain-grace): must be a time from 0ms to 24h, such as "
                              "250ms or 10s" },
        { "--lost-after=1999ms", "lost-after is \"1999ms\" (flag --lost-after): must be a time from 2s to 1h" },
        { "--drain-grace=10 minutes", "drain-grace is \"10 minutes\"" },
        { "--drain-grace=25h", "must be a time from 0ms to 24h" },
        { "--insecure=maybe", "insecure is \"maybe\" (flag --insecure): must be true or false" },
        { "--log-level=loud", "log-level is \"loud\" (flag --log-level): must be one of debug, info, warn, error, off" },
        { "--backend=tpu", "must be one of auto, host, cuda" },
        { "--socket-mode=abc", "must be an octal file mode, such as 0660" },
        { "--socket-mode=1777", "socket-mode is \"1777\"" },
        { "--socket-mode=888", "socket-mode is \"888\"" },
        { "--socket-mode=0", "socket-mode is \"0\"" },
        { "--listen=7300", "listen is \"7300\" (flag --listen): must be HOST:PORT" },
        { "--listen=:7300", "listen is \":7300\"" },
        { "--listen=a:b", "listen is \"a:b\"" },
        { "--listen=a:65536", "listen is \"a:65536\"" },
        { "--listen=::1:7300", "listen is \"::1:7300\"" },
        { "--listen=[]:7300", "listen is \"[]:7300\"" },
        { "--allow-uid=nobody-of-that-name", "there is no user \"nobody-of-that-name\" here" },
        { "--allow-gid=1,nothing", "there is no group \"nothing\" here" },
        { "--allow-uid=1,,2", "must be a list of user names or numbers" },
        { "--allow-uid=4294967295", "allow-uid is \"4294967295\"" },
        { "--name=a\nb", "name is \"a?b\", and it must be UTF-8 without control characters" },
        { "--name=\xff", "it must be UTF-8" },
    };

    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        refuse((struct sources){ .flags = { (char *)(uintptr_t)cases[i].flag } }, cases[i].expected);
}

static void an_overridden_value_is_still_checked(void **state)
{
    (void)state;
    refuse((struct sources){ .file = "host-ranks: many\n", .flags = { "--host-ranks=4" } },
           "host-ranks is \"many\" (*:1): must be an integer");
    refuse((struct sources){ .environment = { "EP_SERVER_MEMORY=lots" }, .flags = { "--memory=1MiB" } },
           "memory is \"lots\" (environment EP_SERVER_MEMORY): must be a size");
}

static void long_values_do_not_crowd_out_the_message(void **state)
{
    char flag[4096] = "--host-ranks=";

    (void)state;
    memset(flag + strlen(flag), '1', sizeof flag - strlen(flag) - 1);
    refuse((struct sources){ .flags = { flag } }, "must be an integer from 1 to 1024");
}

/* ---- names -------------------------------------------------------------------------------------- */

static void unknown_names_get_a_suggestion(void **state)
{
    (void)state;
    refuse((struct sources){ .flags = { "--host-rank=4" } },
           "flag --host-rank: there is no such option; did you mean --host-ranks?");
    refuse((struct sources){ .flags = { "--sockt", "x" } }, "did you mean --socket?");
    refuse((struct sources){ .flags = { "--zzzzzzzzzz=1" } }, "flag --zzzzzzzzzz: there is no such option; --help");
    refuse((struct sources){ .flags = { "-x" } }, "argument \"-x\" is unexpected");
    refuse((struct sources){ .flags = { "stray" } }, "argument \"stray\" is unexpected");
    refuse((struct sources){ .flags = { "--" } }, "argument \"--\" is unexpected");
    refuse((struct sources){ .flags = { "--name" } }, "flag --name has no value");
    refuse((struct sources){ .flags = { "--check=1" } }, "flag --check takes no value");
    refuse((struct sources){ .environment = { "EP_SERVER_HOSTRANKS=1" } },
           "environment variable EP_SERVER_HOSTRANKS: there is no such option; did you mean EP_SERVER_HOST_RANKS?");
    refuse((struct sources){ .file = "a: 1\n" }, "*:1: there is no option a");
    refuse((struct sources){ .file = "\nhost_ranks: 1\n" }, "*:2: there is no option host_ranks; did you mean host-ranks?");
    refuse((struct sources){ .file = "node:\n  Memory: 1\n" }, "*:2: there is no option Memory; did you mean memory?");
}

static void abbreviations_are_no_names(void **state)
{
    (void)state;
    refuse((struct sources){ .flags = { "--host=4" } }, "flag --host: there is no such option");
}

static void service_links_of_kubernetes_are_not_ours(void **state)
{
    (void)state;
    ep_options_free(load((struct sources){ .environment = {
        "EP_SERVER_SERVICE_HOST=10.0.0.1", "EP_SERVER_SERVICE_PORT_METRICS=9090", "EP_SERVER_PORT=tcp://10.0.0.1:1",
        "EP_SERVER_PORT_9090_TCP_ADDR=10.0.0.1", "EP_SERVER_METRICS_SERVICE_PORT=1", "EP_SERVER=unix:/x",
        "OTHER=1" } }));
}

/* ---- the file ------------------------------------------------------------------------------------- */

static void wrong_files_are_refused(void **state)
{
    static const struct { const char *text, *expected; } cases[] = {
        { "host-ranks: [1, 2]\n", "host-ranks is a list (*:1): must be an integer" },
        { "host-ranks: {a: 1}\n", "host-ranks is a mapping (*:1): must be an integer" },
        { "host-ranks:\n", "host-ranks is without a value (*:1)" },
        { "host-ranks: ~\n", "host-ranks is without a value (*:1)" },
        { "\n\nhost-ranks: true\n", "host-ranks is \"true\" (*:3): must be an integer" },
        { "insecure: 7\n", "insecure is \"7\" (*:1): must be true or false" },
        { "allow-uid: {a: b}\n", "allow-uid is a mapping (*:1): must be a list" },
        { "allow-uid: [1, [2]]\n", "allow-uid is a list (*:1)" },
        { "allow-uid: [1, ~]\n", "allow-uid is without a value" },
        { "allow-uid:\n - 1\n - x y\n", "there is no user \"x y\" here (*:3)" },
        { "name: \"a\\0b\"\n", "name is text with a NUL (*:1)" },
        { "memory: 1MiB\nname: a\nmemory: 2MiB\n", "*:3: memory is given twice, first in line 1" },
        { "node:\n  name: a\nname: b\n", "*:3: name is given twice, first in line 2" },
        { "node:\n  name: a\nnode:\n  memory: 1\n", "*:3: node is given twice, first in line 1" },
        { "node: 7\n", "*:1: section node must be a mapping of options" },
        { "workers:\n  listen: a:1\n", "*:2: listen is not in section workers: it belongs in section admin or at" },
        { "node:\n  node:\n    name: a\n", "*:2: there is no option node" },
        { "config: x\n", "*:1: config cannot be set in a file" },
        { "- a\n- b\n", "*:1: must be a mapping of options" },
        { "hello\n", "*:1: must be a mapping of options" },
        { "[a]: b\n", "*:1: a key must be the name" },
        { "a: b: c\n", "*:1: not valid YAML: mapping values are not allowed" },
        { "name: \"open\n", "not valid YAML: found unexpected end of stream" },
        { "node:\n\tname: x\n", "*:2: not valid YAML" },
        { "name: *nothing\n", "*:1: not valid YAML: found undefined alias" },
        { "name: a\n---\nname: b\n", "*:3: a second document begins here" },
    };

    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        if (strncmp(cases[i].text, "name: *", 7) == 0) /* the asterisk is part of the file */
            refuse((struct sources){ .file = cases[i].text }, "not valid YAML: found undefined alias");
        else
            refuse((struct sources){ .file = cases[i].text }, cases[i].expected);
}

static void bytes_that_are_no_text_are_refused(void **state)
{
    static const char bad_utf8[] = "name: \xff\xfe\n", nul[] = "name: a\0b\n";
    char flag[80];

    (void)state;
    snprintf(flag, sizeof flag, "--config=%s", file_path);
    write_bytes(bad_utf8, sizeof bad_utf8 - 1);
    refuse((struct sources){ .flags = { flag } }, "*: not valid YAML: ");
    write_bytes(nul, sizeof nul - 1);
    refuse((struct sources){ .flags = { flag } }, "*: not valid YAML: ");
}

static void what_is_no_file_is_refused(void **state)
{
    char directory_flag[80], missing_flag[80], big_flag[80];

    (void)state;
    snprintf(directory_flag, sizeof directory_flag, "--config=%s", directory);
    refuse((struct sources){ .flags = { directory_flag } }, "it is a directory, not a file");
    refuse((struct sources){ .flags = { "--config=/dev/null" } },
           "cannot read /dev/null: it is a device or pipe, not a file");
    unlink(file_path);
    snprintf(missing_flag, sizeof missing_flag, "--config=%s", file_path);
    refuse((struct sources){ .flags = { missing_flag } }, "cannot read *: No such file or directory");
    write_bytes("", 0);
    assert_int_equal(truncate(file_path, 2 << 20), 0);
    snprintf(big_flag, sizeof big_flag, "--config=%s", file_path);
    refuse((struct sources){ .flags = { big_flag } }, "it has more than 1048576 bytes");
}

/* ---- combinations ------------------------------------------------------------------------------------ */

static void other_machines_need_tls_or_insecure(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--listen=0.0.0.0:7300" } },
                 "listen is 0.0.0.0:7300, which other machines reach, and there is no TLS");
    refuse_check((struct sources){ .flags = { "--listen=[::]:7300" } }, "there is no TLS");
    refuse_check((struct sources){ .flags = { "--listen=host.example:7300" } }, "there is no TLS");
    refuse_check((struct sources){ .flags = { "--listen=h:1", "--tls-cert=/dev/null", "--tls-key=/dev/null" } },
                 "tls-ca is not set");
    accept_check((struct sources){ .flags = { "--listen=0.0.0.0:7300", "--insecure" } });
    accept_check((struct sources){ .flags = { "--listen=127.0.0.1:0" } });
    accept_check((struct sources){ .flags = { "--listen=[::1]:7300" } });
    accept_check((struct sources){ .flags = { "--listen=localhost:7300" } });
    accept_check((struct sources){ .flags = { "--listen=h:1", "--tls-cert=/dev/null", "--tls-key=/dev/null",
                                              "--tls-ca=/dev/null" } });
}

/* Each would be written over by the next. */
static void what_is_made_has_paths_of_its_own(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--pid-file=/run/ep", "--port-file=/run/ep" } },
                 "pid-file and port-file are both /run/ep: give each a path of its own");
    refuse_check((struct sources){ .flags = { "--socket=/run/ep.sock", "--pid-file=/run/ep.sock" } },
                 "socket and pid-file are both /run/ep.sock");
    refuse_check((struct sources){ .flags = { "--socket=/run/ep.sock", "--port-file=/run/ep.sock" } },
                 "socket and port-file are both /run/ep.sock");
    refuse_check((struct sources){ .flags = { "--socket=/run/ep.sock", "--port-file=/run/ep.sock.attach" } },
                 "the socket beside it and port-file are both /run/ep.sock.attach");
    accept_check((struct sources){ .flags = { "--pid-file=/run/ep.pid", "--port-file=/run/ep.port" } });
}

static void tls_options_go_together(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--tls-cert=/dev/null" } }, "tls-cert is set without tls-key");
    refuse_check((struct sources){ .flags = { "--tls-key=/dev/null" } }, "tls-key is set without tls-cert");
    refuse_check((struct sources){ .flags = { "--tls-ca=/dev/null" } }, "tls-ca is set without tls-cert and tls-key");
    refuse_check((struct sources){ .flags = { "--peer-ou=server" } }, "peer-ou is set without tls-ca");
    accept_check((struct sources){ .flags = { "--peer-ou=server", "--tls-cert=/dev/null", "--tls-key=/dev/null",
                                              "--tls-ca=/dev/null" } });
    refuse_check((struct sources){ .flags = { "--tls-cert=/no/cert", "--tls-key=/dev/null" } },
                 "tls-cert: cannot read /no/cert: No such file or directory");
    refuse_check((struct sources){ .flags = { "--tls-cert=/", "--tls-key=/dev/null" } },
                 "tls-cert: cannot read /: it is a directory, not a file");
    refuse_check((struct sources){ .flags = { "--attach-token-file=/" } }, "attach-token-file: cannot read /: it is a directory");
}

static void memory_holds_a_window_at_least(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--memory=5" } },
                 "memory is 5 bytes: no window has less than 217088; 0 stands for half of what is free at start");
    refuse_check((struct sources){ .environment = { "EP_SERVER_MEMORY=211KiB" } }, "memory is 216064 bytes");
    accept_check((struct sources){ .flags = { "--memory=212KiB" } });
    accept_check((struct sources){ .flags = { "--memory=0" } });
}

static void gpus_are_numbers(void **state)
{
    static const char *const wrong[] = { "--gpus=a", "--gpus=-1", "--gpus=,", "--gpus=0,", "--gpus=,1", "--gpus=0,,1",
                                         "--gpus=0 1", "--gpus=0-3" };

    (void)state;
    for (size_t i = 0; i < COUNT(wrong); i++)
        refuse_check((struct sources){ .flags = { (char *)(uintptr_t)wrong[i] } },
                     "must be numbers of GPUs with commas between them");
    accept_check((struct sources){ .flags = { "--gpus=0,12" } });
}

static void a_store_needs_what_belongs_together(void **state)
{
    (void)state;
    accept_check((struct sources){ .flags = { "--store=etcd://127.0.0.1:2379,[::1]:2379/clusters/a",
                                              "--listen=127.0.0.1:0", "--insecure" } });
    accept_check((struct sources){ .flags = { "--store=etcd://h:1", "--store-user=u",
                                              "--store-password-file=/dev/null", "--listen=127.0.0.1:0",
                                              "--insecure" } });
    refuse_check((struct sources){ .flags = { "--store=sqlite" } }, "store is \"sqlite\": must be etcd://HOST:PORT");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1,h" } }, "\"h\" must be HOST:PORT");
    refuse_check((struct sources){ .flags = { "--store-user=u" } }, "store-user is set without store");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--store-user=u" } },
                 "store-user is set without store-password-file");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--store-key=/dev/null" } },
                 "store-key is set without store-cert");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--store-ca=/no/such" } },
                 "store-ca: cannot read /no/such");
}

static void servers_of_a_cluster_tell_each_other_where_they_are(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1" } },
                 "store is etcd, and listen is not set: the servers of a cluster call each other");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--listen=0.0.0.0:7300", "--insecure" } },
                 "listen is 0.0.0.0:7300, which tells the other servers of the cluster nothing: give --advertise");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--listen=[::]:7300", "--insecure" } },
                 "give --advertise");
    refuse_check((struct sources){ .flags = { "--store=etcd://h:1", "--listen=127.0.0.1:0" } },
                 "store is etcd, and tls-ca is not set");
    accept_check(
        (struct sources){ .flags = { "--store=etcd://h:1", "--listen=127.0.0.1:0", "--tls-cert=/dev/null",
                                     "--tls-key=/dev/null", "--tls-ca=/dev/null" } });
    refuse_check((struct sources){ .flags = { "--advertise=h:1" } }, "advertise is h:1, and listen is not set");
    refuse_check((struct sources){ .flags = { "--advertise=0.0.0.0:1", "--listen=127.0.0.1:0" } },
                 "advertise is 0.0.0.0:1, which is no address of a machine");
    accept_check((struct sources){ .flags = { "--store=etcd://h:1", "--listen=0.0.0.0:7300", "--insecure",
                                              "--advertise=node1:0" } });
    accept_check((struct sources){ .flags = { "--listen=0.0.0.0:7300", "--insecure" } }); /* a cluster of one */
}

static void paths_are_checked(void **state)
{
    char flag[256] = "--socket=/", name[300] = "--name=";

    (void)state;
    memset(flag + strlen(flag), 'x', 120);
    refuse_check((struct sources){ .flags = { flag } }, "socket is 121 bytes long: a path of a unix socket may have 100");
    refuse_check((struct sources){ .flags = { "--socket=" } }, "socket is empty: give --socket=PATH");
    refuse_check((struct sources){ .flags = { "--state-dir=" } }, "state-dir is empty: give --state-dir=PATH");
    accept_check((struct sources){ .flags = { "--state-dir=", "--store=etcd://h:1", "--listen=127.0.0.1:0", "--insecure" } });
    refuse_check((struct sources){ .flags = { "--name=" } }, "name is empty");
    memset(name + strlen(name), 'x', 254);
    refuse_check((struct sources){ .flags = { name } }, "name is 254 bytes long: it may have 253");
    refuse_check((struct sources){ .flags = { "--attach-token-file=/no/token" } }, "attach-token-file: cannot read");
}

static void what_is_for_gpus_is_of_no_use_to_the_host(void **state)
{
    (void)state;
    refuse_check((struct sources){ .flags = { "--backend=host", "--mps=require" } },
                 "mps is require with backend host");
    refuse_check((struct sources){ .flags = { "--backend=host", "--gpus=0" } }, "gpus is set with backend host");
    refuse_check((struct sources){ .flags = { "--backend=host", "--doorbell=poll" } },
                 "doorbell is poll with backend host");
    refuse_check((struct sources){ .flags = { "--backend=host", "--sms-per-rank=4" } },
                 "sms-per-rank is set with backend host");
    accept_check((struct sources){ .flags = { "--backend=host", "--mps=off", "--gpus=", "--doorbell=wait",
                                              "--sms-per-rank=0" } });
    accept_check((struct sources){ .flags = { "--gpus=0", "--doorbell=poll", "--sms-per-rank=4" } });
}

/* ---- printing ------------------------------------------------------------------------------------------ */

static char *print(const struct ep_options *options)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    ep_options_print(options, out);
    fclose(out);
    return text;
}

/* Values without the origins. */
static char *values_of(const struct ep_options *options)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    for (size_t i = 0; i < ep_options_count; i++) {
        char *value = ep_option_format(&ep_options_table[i], ep_option_field(options, &ep_options_table[i]));

        if (!(ep_options_table[i].flags & EP_OPTION_NO_FILE))
            fprintf(out, "%s=%s\n", ep_options_table[i].name, value);
        free(value);
    }
    fclose(out);
    return text;
}

static void printing_round_trips(void **state)
{
    const struct sources s = {
        .flags = { "--name=a \"quoted\" \\ # name: \xc3\xa9", "--memory=1536MiB", "--allow-uid=0,5", "--socket-mode=600",
                   "--listen=[::1]:0", "--drain-grace=1500ms", "--log-level=off" },
        .environment = { "EP_SERVER_ALLOW_GID=0", "EP_SERVER_TLS_CA=/a b", "EP_SERVER_INSECURE=on" },
    };
    struct ep_options *first = load(s), *second;
    char *text = print(first), *a, *b;

    (void)state;
    second = load((struct sources){ .file = text });
    a = values_of(first);
    b = values_of(second);
    assert_string_equal(a, b);
    for (size_t i = 0; i < ep_options_count; i++)
        if (!(ep_options_table[i].flags & EP_OPTION_NO_FILE))
            assert_int_equal(second->origins[i].kind, EP_ORIGIN_FILE);
    free(a);
    free(b);
    free(text);
    ep_options_free(first);
    ep_options_free(second);
}

static void printing_names_the_origin(void **state)
{
    struct ep_options *o = load((struct sources){ .file = "\nmemory: 1GiB\n", .flags = { "--host-ranks=4" },
                                                  .environment = { "EP_SERVER_INSECURE=true" } });
    char *text = print(o), from[128];

    (void)state;
    snprintf(from, sizeof from, "# %s:2\n", file_path);
    assert_non_null(strstr(text, from));
    assert_non_null(strstr(text, "# flag --host-ranks\n"));
    assert_non_null(strstr(text, "# environment EP_SERVER_INSECURE\n"));
    assert_non_null(strstr(text, "drain-grace:"));
    assert_non_null(strstr(text, "30s"));
    free(text);
    ep_options_free(o);
}

/* ---- reloading -------------------------------------------------------------------------------------------- */

static void note_change(const char *name, const char *text, bool applied, void *user)
{
    char *log = user;
    size_t used = strlen(log);

    snprintf(log + used, 512 - used, "%s=%s%s;", name, text, applied ? "!" : "");
}

static void reload_takes_what_may_change_and_names_the_rest(void **state)
{
    struct ep_options *o = load((struct sources){ .file = "log-level: info\nhost-ranks: 4\n" });
    struct ep_options *fresh = load((struct sources){ .file = "log-level: debug\nhost-ranks: 5\ndrain-grace: 5s\n" });
    char log[512] = "";

    (void)state;
    ep_options_reload(o, fresh, note_change, log);
    ep_options_free(fresh);
    assert_string_equal(log, "host-ranks=5;log-level=\"debug\"!;drain-grace=5s!;");
    assert_int_equal(o->host_ranks, 4);
    assert_int_equal(o->log_level, EP_LOG_DEBUG);
    assert_int_equal(o->drain_grace, 5000);
    ep_options_free(o);
}

/* ---- the table ---------------------------------------------------------------------------------------------- */

static void the_table_is_in_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        bool again = false;

        assert_ptr_equal(ep_option_find(option->name, strlen(option->name)), option);
        assert_true(strlen(option->doc) > 10);
        for (size_t j = i + 1; j < ep_options_count; j++) { /* a section is one block */
            again |= strcmp(option->section, ep_options_table[j].section) != 0;
            assert_false(again && strcmp(option->section, ep_options_table[j].section) == 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_need_no_source),
        cmocka_unit_test(flag_beats_environment_beats_file_beats_default),
        cmocka_unit_test(the_file_can_be_named_in_the_environment),
        cmocka_unit_test(flags_take_their_value_either_way),
        cmocka_unit_test(sections_and_flat_names_are_the_same),
        cmocka_unit_test(an_empty_file_sets_nothing),
        cmocka_unit_test(lists_add_up_within_a_source_only),
        cmocka_unit_test(sizes_have_units),
        cmocka_unit_test(durations_have_units),
        cmocka_unit_test(wrong_values_say_what_is_right),
        cmocka_unit_test(an_overridden_value_is_still_checked),
        cmocka_unit_test(long_values_do_not_crowd_out_the_message),
        cmocka_unit_test(unknown_names_get_a_suggestion),
        cmocka_unit_test(abbreviations_are_no_names),
        cmocka_unit_test(service_links_of_kubernetes_are_not_ours),
        cmocka_unit_test(wrong_files_are_refused),
        cmocka_unit_test(bytes_that_are_no_text_are_refused),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(other_machines_need_tls_or_insecure),
        cmocka_unit_test(what_is_made_has_paths_of_its_own),
        cmocka_unit_test(tls_options_go_together),
        cmocka_unit_test(memory_holds_a_window_at_least),
        cmocka_unit_test(gpus_are_numbers),
        cmocka_unit_test(paths_are_checked),
        cmocka_unit_test(what_is_for_gpus_is_of_no_use_to_the_host),
        cmocka_unit_test(a_store_needs_what_belongs_together),
        cmocka_unit_test(servers_of_a_cluster_tell_each_other_where_they_are),
        cmocka_unit_test(printing_round_trips),
        cmocka_unit_test(printing_names_the_origin),
        cmocka_unit_test(reload_takes_what_may_change_and_names_the_rest),
        cmocka_unit_test(the_table_is_in_order),
    };

    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
