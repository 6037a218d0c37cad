/*
 * Completion.  The shells' scripts are a few lines that hand the words over; what fits is found here,
 * from the command table and, for names of groups and nodes, from the server.
 */
#include "admin.h"

#include <stdlib.h>
#include <strings.h>

enum { NAMES_TIMEOUT_MS = 1000 }; /* a key was pressed: better no names than a long wait */

/* ---- scripts ----------------------------------------------------------------------- */

/* A line that begins with ":" is an instruction, as answer_value() prints them. */
static const char bash_script[] =
    "# bash completion for ep-admin: source it, or put it into .../bash-completion/completions/ep-admin\n"
    "_ep_admin() {\n"
    "    local line\n"
    "    COMPREPLY=()\n"
    "    while IFS= read -r line; do\n"
    "        case $line in\n"
    "        :file) compopt -o default 2>/dev/null ;;\n"
    "        :nospace) compopt -o nospace 2>/dev/null ;;\n"
    "        *) COMPREPLY+=(\"$line\") ;;\n"
    "        esac\n"
    "    done < <(\"${COMP_WORDS[0]}\" __complete \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2>/dev/null)\n"
    "}\n"
    "complete -F _ep_admin ep-admin\n";

static const char zsh_script[] =
    "#compdef ep-admin\n"
    "# zsh completion for ep-admin: source it, or put it as _ep-admin into a directory of $fpath\n"
    "_ep_admin() {\n"
    "    local line files=0\n"
    "    local -a found options\n"
    "    for line in \"${(@f)$(\"${words[1]}\" __complete \"${(@)words[2,CURRENT]}\" 2>/dev/null)}\"; do\n"
    "        case $line in\n"
    "        '') ;;\n"
    "        :file) files=1 ;;\n"
    "        :nospace) options=(-S '') ;;\n"
    "        *) found+=(\"$line\") ;;\n"
    "        esac\n"
    "    done\n"
    "    (( ${#found} )) && compadd \"${options[@]}\" -a found\n"
    "    if (( files )); then\n"
    "        compset -P '--*='\n"
    "        _files\n"
    "    fi\n"
    "}\n"
    "if [[ ${funcstack[1]} == _ep-admin ]]; then\n"
    "    _ep_admin \"$@\"\n"
    "else\n"
    "    compdef _ep_admin ep-admin\n"
    "fi\n";

int ep_completion_script(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    (void)admin;
    fputs(strcmp(invocation->argument, "bash") == 0 ? bash_script : zsh_script, stdout);
    return 0;
}

/* ---- the words so far -------------------------------------------------------------- */

/* What the words before the last one say. */
struct line {
    struct ep_invocation invocation; /* flags with values, for the connection */
    const struct ep_flag *pending;   /* the flag whose value comes next */
    bool argument_given;
};

static const struct ep_flag *find_flag(const struct ep_command *command, const char *name, size_t length)
{
    const struct ep_flag *flags[EP_MAX_FLAGS];
    size_t n = ep_command_flags(command, flags);

    for (size_t i = 0; i < n; i++)
        if (strlen(flags[i]->name) == length && strncmp(flags[i]->name, name, length) == 0)
            return flags[i];
    return NULL;
}

static const struct ep_flag *find_letter(const struct ep_command *command, char letter)
{
    const struct ep_flag *flags[EP_MAX_FLAGS];
    size_t n = ep_command_flags(command, flags);

    for (size_t i = 0; i < n; i++)
        if (flags[i]->letter == letter)
            return flags[i];
    return NULL;
}

static void keep_value(struct line *line, const struct ep_flag *flag, const char *text)
{
    struct ep_invocation *to = &line->invocation;
    struct ep_flag_value *grown = realloc(to->values, (to->n_values + 1) * sizeof *grown);

    if (!grown)
        return;
    to->values = grown;
    to->values[to->n_values++] = (struct ep_flag_value){ flag, text };
}

static void take_flag(struct line *line, const char *word)
{
    const struct ep_command *command = line->invocation.command;
    size_t length = strcspn(word, "=");
    bool is_long = word[1] == '-';
    const struct ep_flag *flag =
        is_long ? find_flag(command, word + 2, length - 2) : find_letter(command, word[1]);

    if (!flag || !flag->value)
        return;
    if (is_long && word[length] == '=')
        keep_value(line, flag, word + length + 1);
    else if (!is_long && word[2])
        keep_value(line, flag, word + 2);
    else
        line->pending = flag;
}

static void take_word(struct line *line, const char *word)
{
    struct ep_invocation *to = &line->invocation;

    if (line->pending && strcmp(word, "=") == 0) /* bash takes --flag=value apart */
        return;
    if (line->pending) {
        keep_value(line, line->pending, word);
        line->pending = NULL;
    } else if (word[0] == '-' && word[1]) {
        take_flag(line, word);
    } else if (!to->noun && strcmp(word, "help") != 0) {
        to->noun = word;
        to->command = ep_command_find(word, NULL);
    } else if (to->noun && !to->command) {
        to->command = ep_command_find(to->noun, word);
    } else if (to->noun) {
        line->argument_given = true;
    }
}

/*
 * bash also takes unix:PATH and HOST:PORT apart, at the colons: puts them together again.  Returns how
 * many words there are then; each is for free().
 */
static int join_colons(int n, char **words, char **out)
{
    int m = 0;

    for (int i = 0; i < n; i++) {
        char *joined = NULL;

        if (m > 0 && strcmp(words[i], ":") == 0) {
            const char *next = i + 1 < n ? words[++i] : "";

            if (asprintf(&joined, "%s:%s", out[m - 1], next) < 0)
                return m;
            free(out[m - 1]);
            out[m - 1] = joined;
        } else {
            out[m++] = strdup(words[i]);
        }
    }
    return m;
}

/* ---- answers ----------------------------------------------------------------------- */

static void answer(const char *prefix, const char *typed, const char *candidate)
{
    if (strncmp(candidate, typed, strlen(typed)) == 0)
        printf("%s%s\n", prefix, candidate);
}

/* The values of an enum, of which the last after a comma is being typed; those before are kept. */
static void answer_enum(const struct ep_flag *flag, const char *prefix, const char *typed)
{
    const char *comma = flag->kind == EP_FLAG_ENUMS ? strrchr(typed, ',') : NULL;
    const char *last = comma ? comma + 1 : typed;
    char names[256], kept[512], *state = NULL;

    snprintf(kept, sizeof kept, "%s%.*s", prefix, (int)(last - typed), typed);
    ep_text_enum_values(flag->type, ",", names, sizeof names);
    for (char *name = strtok_r(names, ",", &state); name; name = strtok_r(NULL, ",", &state))
        answer(kept, last, name);
    if (flag->kind == EP_FLAG_ENUMS)
        puts(":nospace");
}

static void answer_choices(const char *const *choices, const char *prefix, const char *typed)
{
    for (; choices && *choices; choices++)
        answer(prefix, typed, *choices);
}

static void answer_value(const struct ep_flag *flag, const char *prefix, const char *typed)
{
    switch (flag->kind) {
    case EP_FLAG_CHOICE: answer_choices(flag->choices, prefix, typed); break;
    case EP_FLAG_ENUM:
    case EP_FLAG_ENUMS: answer_enum(flag, prefix, typed); break;
    case EP_FLAG_FILE:
        if (strcmp(flag->name, "placement") == 0) {
            answer(prefix, typed, "contiguous");
            answer(prefix, typed, "pack");
            answer(prefix, typed, "spread");
        }
        puts(":file");
        break;
    default: break;
    }
}

static void answer_flags(const struct ep_command *command, const char *typed)
{
    const struct ep_flag *flags[EP_MAX_FLAGS];
    size_t n = ep_command_flags(command, flags);

    for (size_t i = 0; i < n; i++)
        answer("--", typed[1] ? typed + 2 : "", flags[i]->name);
}

static void answer_names(struct line *line, enum ep_argument_kind kind, const char *typed)
{
    Ep__V1__ListGroupsRequest groups = EP__V1__LIST_GROUPS_REQUEST__INIT;
    Ep__V1__ListNodesRequest nodes = EP__V1__LIST_NODES_REQUEST__INIT;
    bool of_groups = kind == EP_ARGUMENT_GROUP;
    struct ep_admin admin = { .quiet = true };
    struct ep_error error;
    ProtobufCMessage *reply = NULL;

    if (ep_admin_init(&admin, &line->invocation, &error) == EP_OK &&
        ep_admin_call_service(&admin, &ep__v1__admin__descriptor, of_groups ? "ListGroups" : "ListNodes",
                              of_groups ? &groups.base : &nodes.base, NAMES_TIMEOUT_MS, &reply,
                              &error) == EP_OK) {
        Ep__V1__ListGroupsReply *group_list = (Ep__V1__ListGroupsReply *)reply;
        Ep__V1__ListNodesReply *node_list = (Ep__V1__ListNodesReply *)reply;

        for (size_t i = 0; of_groups && i < group_list->n_groups; i++)
            answer("", typed, group_list->groups[i]->name);
        for (size_t i = 0; !of_groups && i < node_list->n_nodes; i++)
            answer("", typed, node_list->nodes[i]->name);
    }
    ep_admin_free(reply);
    ep_admin_close(&admin);
}

static void answer_argument(struct line *line, const char *typed)
{
    const struct ep_argument *argument = &line->invocation.command->argument;

    if (line->argument_given)
        return;
    if (argument->kind == EP_ARGUMENT_CHOICE)
        answer_choices(argument->choices, "", typed);
    else if (argument->kind != EP_ARGUMENT_NONE)
        answer_names(line, argument->kind, typed);
}

static void answer_nouns(const char *typed)
{
    for (const struct ep_noun *noun = ep_nouns; noun->name; noun++)
        answer("", typed, noun->name);
    answer("", typed, "help");
}

static void answer_verbs(const char *noun, const char *typed)
{
    for (const struct ep_command *command = ep_commands; command->noun; command++)
        if (command->verb && strcmp(command->noun, noun) == 0)
            answer("", typed, command->verb);
}

static void answer_word(struct line *line, const char *typed)
{
    const struct ep_command *command = line->invocation.command;
    size_t name = strcspn(typed, "=");
    const struct ep_flag *flag;

    if (line->pending) {
        answer_value(line->pending, "", strcmp(typed, "=") == 0 ? "" : typed);
    } else if (strncmp(typed, "--", 2) == 0 && typed[name]) { /* --flag=val as one word */
        char prefix[128];

        flag = find_flag(command, typed + 2, name - 2);
        snprintf(prefix, sizeof prefix, "%.*s", (int)(name + 1), typed);
        if (flag)
            answer_value(flag, prefix, typed + name + 1);
    } else if (typed[0] == '-') {
        answer_flags(command, typed);
    } else if (!line->invocation.noun) {
        answer_nouns(typed);
    } else if (!command) {
        answer_verbs(line->invocation.noun, typed);
    } else {
        answer_argument(line, typed);
    }
}

int ep_completion_answer(int n_words, char **words)
{
    struct line line = { .pending = NULL };
    char **joined = calloc((size_t)n_words + 1, sizeof *joined);
    int n = joined ? join_colons(n_words, words, joined) : 0;

    for (int i = 0; i + 1 < n; i++)
        take_word(&line, joined[i]);
    answer_word(&line, n > 0 ? joined[n - 1] : "");
    for (int i = 0; i < n; i++)
        free(joined[i]);
    free(joined);
    ep_invocation_clear(&line.invocation);
    return 0;
}
