/* From argv to an invocation: getopt_long, with the options of the command table. */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"

enum { LONG_BASE = 0x100 };

/* getopt's view of the flags that hold at one level of the command line. */
struct level {
    const struct ep_flag *flags[EP_MAX_FLAGS];
    size_t n;
    struct option longs[EP_MAX_FLAGS + 1];
    char shorts[2 * EP_MAX_FLAGS + 3];
};

static void level_init(struct level *level, const struct ep_command *command, bool stop_at_word)
{
    char *s = level->shorts;

    memset(level, 0, sizeof *level);
    level->n = ep_command_flags(command, level->flags);
    if (stop_at_word)
        *s++ = '+';
    *s++ = ':';
    for (size_t i = 0; i < level->n; i++) {
        const struct ep_flag *flag = level->flags[i];

        level->longs[i] = (struct option){ .name = flag->name,
                                           .has_arg = flag->value ? required_argument : no_argument,
                                           .val = LONG_BASE + (int)i };
        if (flag->letter) {
            *s++ = flag->letter;
            if (flag->value)
                *s++ = ':';
        }
    }
}

static const struct ep_flag *level_flag(const struct level *level, int option)
{
    if (option >= LONG_BASE)
        return level->flags[option - LONG_BASE];
    for (size_t i = 0; i < level->n; i++)
        if (level->flags[i]->letter && level->flags[i]->letter == option)
            return level->flags[i];
    return NULL;
}

/* ---- values ---------------------------------------------------------------------- */

static ep_status check_enums(const struct ep_flag *flag, const char *text, struct ep_error *error)
{
    char known[256], one[64];
    int value;

    ep_text_enum_values(flag->type, ", ", known, sizeof known);
    for (const char *p = text;; p++) {
        size_t length = flag->kind == EP_FLAG_ENUMS ? strcspn(p, ",") : strlen(p);

        snprintf(one, sizeof one, "%.*s", (int)length, p);
        if (!ep_text_parse_enum(flag->type, one, &value) || value == 0)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s is '%s': must be %s %s", flag->name, text,
                                flag->kind == EP_FLAG_ENUMS ? "some of" : "one of", known);
        p += length;
        if (!*p)
            return EP_OK;
    }
}

static ep_status check_choice(const struct ep_flag *flag, const char *text, struct ep_error *error)
{
    char known[128] = "";

    for (size_t i = 0; flag->choices[i]; i++) {
        size_t used = strlen(known);

        if (strcmp(flag->choices[i], text) == 0)
            return EP_OK;
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", flag->choices[i]);
    }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s is '%s': must be one of %s", flag->name, text,
                        known);
}

static ep_status check_label(const struct ep_flag *flag, const char *text, struct ep_error *error)
{
    size_t key = strcspn(text, "=");
    bool removal = !text[key] && key > 1 && text[key - 1] == '-';

    if (key == 0 || (!text[key] && !removal))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "--%s is '%s': must be KEY=VALUE, or KEY- to take it away", flag->name, text);
    return EP_OK;
}

static ep_status check_value(const struct ep_flag *flag, const char *text, struct ep_error *error)
{
    const char *want = NULL;
    uint64_t number;
    int64_t ms;

    switch (flag->kind) {
    case EP_FLAG_BOOL: break;
    case EP_FLAG_TEXT: break;
    case EP_FLAG_FILE: want = *text ? NULL : "the name of a file"; break;
    case EP_FLAG_U32:
        want = ep_text_parse_u64(text, UINT32_MAX, &number) ? NULL : "a whole number from 0 to 4294967295";
        break;
    case EP_FLAG_U64: want = ep_text_parse_u64(text, UINT64_MAX, &number) ? NULL : "a whole number"; break;
    case EP_FLAG_SIZE: want = ep_text_parse_size(text, &number) ? NULL : "a size, as in 64MiB"; break;
    case EP_FLAG_DURATION:
        want = ep_text_parse_duration(text, &ms) ? NULL : "a time, as in 500ms, 5s or 2m";
        break;
    case EP_FLAG_CHOICE: return check_choice(flag, text, error);
    case EP_FLAG_ENUM:
    case EP_FLAG_ENUMS: return check_enums(flag, text, error);
    case EP_FLAG_LABEL: return check_label(flag, text, error);
    }
    if (!want)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s is '%s': must be %s", flag->name, text, want);
}

/* ---- levels ---------------------------------------------------------------------- */

static ep_status bad_option(const struct level *level, int answer, const char *word, struct ep_error *error)
{
    const struct ep_flag *flag = optopt ? level_flag(level, optopt) : NULL;

    if (answer == ':' && flag)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s needs a value: --%s=%s", flag->name, flag->name,
                            flag->value);
    if (flag)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s takes no value", flag->name);
    if (optopt)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "unknown flag -%c", optopt);
    return ep_error_set(error, EP_INVALID_ARGUMENT, "unknown flag %.*s", (int)strcspn(word, "="), word);
}

static ep_status add_value(struct ep_invocation *out, const struct ep_flag *flag, const char *text,
                           struct ep_error *error)
{
    struct ep_flag_value *grown = realloc(out->values, (out->n_values + 1) * sizeof *grown);

    if (!grown)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    out->values = grown;
    out->values[out->n_values++] = (struct ep_flag_value){ flag, text };
    return check_value(flag, text, error);
}

/*
 * Takes the flags of argv[1..]; *rest gets the index of the first word left over.  Without
 * stop_at_word, words are moved behind the flags.
 */
static ep_status take_flags(int argc, char **argv, const struct ep_command *command, bool stop_at_word,
                            struct ep_invocation *out, int *rest, struct ep_error *error)
{
    struct level level;
    ep_status status = EP_OK;
    int option;

    level_init(&level, command, stop_at_word);
    opterr = 0;
    optind = 0; /* glibc: start anew */
    while (status == EP_OK && (option = getopt_long(argc, argv, level.shorts, level.longs, NULL)) != -1) {
        if (option == '?' || option == ':')
            status = bad_option(&level, option, argv[optind - 1], error);
        else
            status = add_value(out, level_flag(&level, option), optarg ? optarg : "", error);
    }
    *rest = optind;
    return status;
}

static bool asks_for_text(const struct ep_invocation *out)
{
    return ep_invocation_given(out, "help") || ep_invocation_given(out, "version");
}

static ep_status take_argument(int n, char **words, struct ep_invocation *out, struct ep_error *error)
{
    const struct ep_argument *argument = &out->command->argument;
    int most = argument->kind == EP_ARGUMENT_NONE ? 0 : 1;

    if (n > most)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "'%s' is one argument too many", words[most]);
    if (n == 1)
        out->argument = words[0];
    if (out->argument && !*out->argument)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is empty", argument->name);
    if (!out->argument && most && !argument->optional && !asks_for_text(out))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is missing", argument->name);
    if (!out->argument || argument->kind != EP_ARGUMENT_CHOICE)
        return EP_OK;
    for (size_t i = 0; argument->choices[i]; i++)
        if (strcmp(argument->choices[i], out->argument) == 0)
            return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s '%s' is not known", argument->name, out->argument);
}

/* words[0] is what stood before the flags of this level. */
static ep_status take_command(int n, char **words, struct ep_invocation *out, struct ep_error *error)
{
    int rest;
    ep_status status = take_flags(n, words, out->command, false, out, &rest, error);

    return status != EP_OK ? status : take_argument(n - rest, words + rest, out, error);
}

/* The words end before a command is complete: enough for --help and --version only. */
static ep_status ends_here(struct ep_invocation *out, const char *what, struct ep_error *error)
{
    out->incomplete = !asks_for_text(out);
    return out->incomplete ? ep_error_set(error, EP_INVALID_ARGUMENT, "%s", what) : EP_OK;
}

static ep_status take_verb(int n, char **words, struct ep_invocation *out, struct ep_error *error)
{
    int rest;
    ep_status status = take_flags(n, words, NULL, true, out, &rest, error);

    if (status != EP_OK)
        return status;
    if (rest == n)
        return ends_here(out, "a verb is missing", error);
    out->command = ep_command_find(out->noun, words[rest]);
    if (!out->command)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "'%s' is not a verb", words[rest]);
    return take_command(n - rest, words + rest, out, error);
}

ep_status ep_invocation_parse(int argc, char **argv, struct ep_invocation *out, struct ep_error *error)
{
    const struct ep_flag *help;
    int rest;

    memset(out, 0, sizeof *out);
    ep_status status = take_flags(argc, argv, NULL, true, out, &rest, error);
    if (status != EP_OK)
        return status;
    if (rest < argc && strcmp(argv[rest], "help") == 0) { /* "help group create" is "group create --help" */
        for (help = ep_global_flags; strcmp(help->name, "help") != 0; help++)
            ;
        status = add_value(out, help, "", error);
        rest++;
    }
    if (status != EP_OK)
        return status;
    if (rest == argc)
        return ends_here(out, "a command is missing", error);
    if (!ep_noun_find(argv[rest]))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "'%s' is not a command", argv[rest]);
    out->noun = argv[rest];
    out->command = ep_command_find(out->noun, NULL);
    if (out->command)
        return take_command(argc - rest, argv + rest, out, error);
    return take_verb(argc - rest, argv + rest, out, error);
}

void ep_invocation_clear(struct ep_invocation *invocation)
{
    free(invocation->values);
    memset(invocation, 0, sizeof *invocation);
}

const char *ep_invocation_text(const struct ep_invocation *invocation, const char *flag)
{
    for (size_t i = invocation->n_values; i > 0; i--)
        if (strcmp(invocation->values[i - 1].flag->name, flag) == 0)
            return invocation->values[i - 1].text;
    return NULL;
}

bool ep_invocation_given(const struct ep_invocation *invocation, const char *flag)
{
    return ep_invocation_text(invocation, flag) != NULL;
}

uint64_t ep_invocation_u64(const struct ep_invocation *invocation, const char *flag, uint64_t otherwise)
{
    const char *text = ep_invocation_text(invocation, flag);
    uint64_t value = otherwise;

    if (text)
        (void)ep_text_parse_u64(text, UINT64_MAX, &value);
    return value;
}

int64_t ep_invocation_ms(const struct ep_invocation *invocation, const char *flag, int64_t otherwise)
{
    const char *text = ep_invocation_text(invocation, flag);
    int64_t value = otherwise;

    if (text)
        (void)ep_text_parse_duration(text, &value);
    return value;
}
