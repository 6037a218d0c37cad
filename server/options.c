/* The sources that options are read from, each over those before it, and what else is done with all of them. */
#include "options_private.h"

#include <argp.h>
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- defaults ---------------------------------------------------------------------- */

static ep_status set_defaults(struct ep_options *options, struct ep_error *error)
{
    static const struct ep_option_source source = { { EP_ORIGIN_DEFAULT, 0 }, NULL };

    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        char *text = option->computed ? option->computed() : strdup(option->fallback);
        ep_status status = text ? ep_option_set(options, option, text, false, &source, error)
                                : ep_error_set(error, EP_NO_MEMORY, "out of memory");

        free(text);
        if (status != EP_OK)
            return status;
    }
    return EP_OK;
}

/* ---- environment ------------------------------------------------------------------ */

/*
 * Kubernetes puts variables for every service into every container; a service named ep-server or
 * ep-server-metrics makes EP_SERVER_SERVICE_HOST, EP_SERVER_METRICS_PORT_9090_TCP ...  Not ours.
 */
static bool is_service_link(const char *name, size_t length)
{
    char copy[256];
    const char *port;

    if (length >= sizeof copy)
        return false;
    memcpy(copy, name, length);
    copy[length] = '\0';
    port = strstr(copy, "_PORT");
    return strstr(copy, "_SERVICE_HOST") || strstr(copy, "_SERVICE_PORT") ||
           (port && (!port[5] || (port[5] == '_' && isdigit((unsigned char)port[6]))));
}

static const struct ep_option *find_variable(const char *name, size_t length)
{
    char wanted[64];

    for (size_t i = 0; i < ep_options_count; i++) {
        ep_option_environment_name(&ep_options_table[i], wanted, sizeof wanted);
        if (strlen(wanted) == length && strncmp(wanted, name, length) == 0)
            return &ep_options_table[i];
    }
    return NULL;
}

static ep_status unknown_variable(const char *name, size_t length, struct ep_error *error)
{
    const size_t prefix = strlen(EP_OPTION_ENVIRONMENT);
    const char *closest = ep_option_closest(name + prefix, length - prefix);
    char wanted[64] = "";

    if (closest)
        ep_option_environment_name(ep_option_find(closest, strlen(closest)), wanted, sizeof wanted);
    return ep_error_set(error, EP_INVALID_ARGUMENT, "environment variable %.*s: there is no such option%s%s%s",
                        (int)(length < 100 ? length : 100), name, closest ? "; did you mean " : "", wanted,
                        closest ? "?" : "");
}

static ep_status read_variable(struct ep_options *options, const char *entry, struct ep_error *error)
{
    static const struct ep_option_source source = { { EP_ORIGIN_ENVIRONMENT, 0 }, NULL };
    const char *equals = strchr(entry, '=');
    const struct ep_option *option;
    size_t length;

    if (strncmp(entry, EP_OPTION_ENVIRONMENT, strlen(EP_OPTION_ENVIRONMENT)) != 0 || !equals)
        return EP_OK;
    length = (size_t)(equals - entry);
    option = find_variable(entry, length);
    if (option)
        return ep_option_set(options, option, equals + 1, false, &source, error);
    return is_service_link(entry, length) ? EP_OK : unknown_variable(entry, length, error);
}

static ep_status read_environment(struct ep_options *options, char **environment, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (; environment && *environment && status == EP_OK; environment++)
        status = read_variable(options, *environment, error);
    return status;
}

/* ---- flags ------------------------------------------------------------------------ */

enum { KEY_CHECK = 0x100, KEY_PRINT, KEY_OPTION };

struct flags {
    struct ep_options *options;
    struct ep_error *error;
    bool only_config; /* the first pass: which file? */
};

/* Flags that do something instead of setting something. */
static const char *const plain_flags[] = { "check", "print-config", "help", "usage", "version" };

static bool is_plain_flag(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof plain_flags / sizeof *plain_flags; i++)
        if (strlen(plain_flags[i]) == length && strncmp(plain_flags[i], name, length) == 0)
            return true;
    return false;
}

static ep_status unknown_flag(const char *name, size_t length, struct ep_error *error)
{
    const char *closest = ep_option_closest(name, length);

    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "flag --%.*s: there is no such option%s%s%s; --help lists them",
                        (int)(length < 100 ? length : 100), name, closest ? "; did you mean --" : "",
                        closest ? closest : "", closest ? "?" : "");
}

/*
 * What argp would complain about in its own words is found here first.  Abbreviations are not
 * accepted: a script that uses one would break with the next option.
 */
static ep_status check_flags(int argc, char **argv, struct ep_error *error)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i] + 2;
        size_t length = strncmp(argv[i], "--", 2) == 0 ? strcspn(name, "=") : 0;
        const struct ep_option *option = length ? ep_option_find(name, length) : NULL;

        if (strcmp(argv[i], "-?") == 0 || strcmp(argv[i], "-V") == 0)
            continue;
        if (length == 0)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "argument \"%.100s\" is unexpected: options are --NAME=VALUE", argv[i]);
        if (!option && !is_plain_flag(name, length))
            return unknown_flag(name, length, error);
        if (!option && name[length] == '=')
            return ep_error_set(error, EP_INVALID_ARGUMENT, "flag --%.*s takes no value", (int)length, name);
        if (!option || name[length] == '=' || option->type == EP_TYPE_BOOL)
            continue;
        if (++i >= argc)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "flag --%s has no value", option->name);
    }
    return EP_OK;
}

static error_t set_flag(struct flags *flags, const struct ep_option *option, const char *text)
{
    static const struct ep_option_source source = { { EP_ORIGIN_FLAG, 0 }, NULL };
    bool append = flags->options->origins[ep_option_place(option)].kind == EP_ORIGIN_FLAG;

    if (flags->only_config && option->offset != offsetof(struct ep_options, config))
        return 0;
    if (ep_option_set(flags->options, option, text ? text : "true", append, &source, flags->error) != EP_OK)
        return EINVAL;
    return 0;
}

static error_t on_flag(int key, char *text, struct argp_state *state)
{
    struct flags *flags = state->input;

    switch (key) {
    case KEY_CHECK:
        flags->options->action = EP_ACTION_CHECK;
        return 0;
    case KEY_PRINT:
        flags->options->action = EP_ACTION_PRINT;
        return 0;
    default:
        if (key < KEY_OPTION || key >= KEY_OPTION + (int)ep_options_count)
            return ARGP_ERR_UNKNOWN;
        return set_flag(flags, &ep_options_table[key - KEY_OPTION], text);
    }
}

static const char *placeholder(enum ep_option_type type)
{
    static const char *const names[] = {
        [EP_TYPE_STRING] = "TEXT", [EP_TYPE_PATH] = "PATH", [EP_TYPE_ADDRESS] = "HOST:PORT",
        [EP_TYPE_UINT] = "N", [EP_TYPE_BYTES] = "BYTES", [EP_TYPE_DURATION] = "TIME",
        [EP_TYPE_BOOL] = "BOOL", [EP_TYPE_ENUM] = "WORD", [EP_TYPE_MODE] = "MODE",
        [EP_TYPE_UIDS] = "USER,...", [EP_TYPE_GIDS] = "GROUP,...",
    };

    return names[type];
}

/* "Doc (one of a, b; default b; reloadable)" */
static char *help_text(const struct ep_option *option)
{
    char *computed = option->computed ? option->computed() : NULL;
    const char *fallback = computed ? computed : option->fallback;
    const bool has_fallback = fallback && *fallback;
    char *text = NULL, expected[160] = "";
    size_t size;
    FILE *out = open_memstream(&text, &size);

    if (out) {
        if (option->type == EP_TYPE_ENUM || option->type == EP_TYPE_UINT)
            ep_option_expects(option, expected, sizeof expected);
        fprintf(out, "%s", option->doc);
        if (*expected || has_fallback)
            fprintf(out, " (%s%s%s%s%s)", expected, *expected && has_fallback ? "; " : "",
                    has_fallback ? "default " : "", fallback,
                    option->flags & EP_OPTION_RELOAD ? "; reloadable" : "");
        fclose(out);
    }
    free(computed);
    return text;
}

static void describe_flags(struct argp_option *list, char **texts)
{
    const char *section = "";
    int group = 0;
    size_t n = 0;

    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];

        if (strcmp(section, option->section) != 0) {
            static const char *const titles[] = { "Node", "Workers", "Administration", "Limits", "Service" };

            list[n++] = (struct argp_option){ .doc = titles[group], .group = group + 1 };
            section = option->section;
            group++;
        }
        texts[i] = help_text(option);
        list[n++] = (struct argp_option){ .name = option->name, .key = KEY_OPTION + (int)i,
                                          .arg = placeholder(option->type), .doc = texts[i],
                                          .flags = option->type == EP_TYPE_BOOL ? OPTION_ARG_OPTIONAL : 0,
                                          .group = group };
    }
    list[n++] = (struct argp_option){ .doc = "Instead of running", .group = group + 1 };
    list[n++] = (struct argp_option){ .name = "check", .key = KEY_CHECK, .group = group + 1,
                                      .doc = "Check the configuration and exit" };
    list[n] = (struct argp_option){ .name = "print-config", .key = KEY_PRINT, .group = group + 1,
                                    .doc = "Print the configuration and where each value comes from" };
}

static ep_status read_flags(struct flags *flags, int argc, char **argv)
{
    static const char doc[] =
        "Expert routing for Mixture-of-Experts models as a service of this node.\v"
        "Every option can also be given in the environment (--host-ranks as EP_SERVER_HOST_RANKS) and in "
        "the YAML file that --config names; a flag wins over the environment, the environment over the "
        "file.  SIGHUP reads the file again; SIGTERM drains and stops, a second one stops at once.";
    struct argp_option list[EP_OPTIONS_MAX * 2] = { 0 };
    char *texts[EP_OPTIONS_MAX] = { NULL };
    struct argp argp = { .options = list, .parser = on_flag, .doc = doc };
    error_t failed;

    describe_flags(list, texts);
    failed = argp_parse(&argp, argc, argv, 0, NULL, flags);
    for (size_t i = 0; i < ep_options_count; i++)
        free(texts[i]);
    if (!failed)
        return EP_OK;
    if (flags->error && flags->error->status != EP_OK)
        return flags->error->status;
    return ep_error_set(flags->error, EP_INVALID_ARGUMENT, "the flags make no sense; --help lists them");
}

/* ---- all sources --------------------------------------------------------------------- */

/* --config, else EP_SERVER_CONFIG: needed before the other sources can be put on top of the file. */
static ep_status find_file(struct ep_options *options, int argc, char **argv, char **environment,
                           struct ep_error *error)
{
    static const char variable[] = EP_OPTION_ENVIRONMENT "CONFIG=";
    struct flags flags = { .options = options, .error = error, .only_config = true };
    ep_status status = EP_OK;

    for (; environment && *environment && status == EP_OK; environment++)
        if (strncmp(*environment, variable, sizeof variable - 1) == 0)
            status = read_variable(options, *environment, error);
    return status == EP_OK ? read_flags(&flags, argc, argv) : status;
}

static ep_status read_sources(struct ep_options *options, int argc, char **argv, char **environment,
                              struct ep_error *error)
{
    struct flags flags = { .options = options, .error = error };
    ep_status status = check_flags(argc, argv, error);

    if (status == EP_OK)
        status = set_defaults(options, error);
    if (status == EP_OK)
        status = find_file(options, argc, argv, environment, error);
    if (status == EP_OK && *options->config)
        status = ep_options_read_file(options, options->config, error);
    if (status == EP_OK)
        status = read_environment(options, environment, error);
    return status == EP_OK ? read_flags(&flags, argc, argv) : status;
}

ep_status ep_options_load(int argc, char **argv, char **environment, struct ep_options **out,
                          struct ep_error *error)
{
    struct ep_options *options = calloc(1, sizeof *options);
    struct ep_error local = EP_ERROR_INIT; /* the flags' parser reads it back */
    ep_status status;

    if (!options)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = read_sources(options, argc, argv, environment, &local);
    if (status != EP_OK) {
        ep_options_free(options);
        if (error)
            *error = local;
        return status;
    }
    *out = options;
    return EP_OK;
}

void ep_options_free(struct ep_options *options)
{
    if (!options)
        return;
    for (size_t i = 0; i < ep_options_count; i++)
        ep_option_clear(&ep_options_table[i], ep_option_field(options, &ep_options_table[i]));
    free(options);
}

/* ---- printing ---------------------------------------------------------------------------- */

void ep_options_print(const struct ep_options *options, FILE *out)
{
    const char *section = "";

    fputs("# ep-server configuration: flag > environment > file > default\n", out);
    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        struct ep_option_source source = { options->origins[i], options->config };
        char *value, from[512];

        if (option->flags & EP_OPTION_NO_FILE)
            continue;
        if (strcmp(section, option->section) != 0)
            fprintf(out, "%s:\n", option->section);
        section = option->section;
        value = ep_option_format(option, ep_option_field(options, option));
        ep_option_source_text(option, &source, from, sizeof from);
        fprintf(out, "  %s: %-*s # %s\n", option->name, (int)(28 - strlen(option->name)), value ? value : "",
                from);
        free(value);
    }
}

/* ---- reloading ---------------------------------------------------------------------------- */

void ep_options_reload(struct ep_options *options, struct ep_options *from,
                       void (*changed)(const char *name, const char *text, bool applied, void *user),
                       void *user)
{
    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        bool apply = option->flags & EP_OPTION_RELOAD;
        void *field = ep_option_field(options, option);
        char *old = ep_option_format(option, field);
        char *new = ep_option_format(option, ep_option_field(from, option));

        if (old && new && strcmp(old, new) != 0) {
            if (apply)
                ep_option_move(option, field, ep_option_field(from, option));
            changed(option->name, new, apply, user);
        }
        free(old);
        free(new);
    }
}
