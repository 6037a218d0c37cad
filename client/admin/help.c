/* --help at every level, and the manual page. */
#include <string.h>

#include "command.h"

enum { WIDTH = 96, COLUMN = 30 };

/* Prints text wrapped; the first line begins at `indent` already. */
static void print_wrapped(FILE *out, const char *text, int indent)
{
    int column = indent;
    bool first = true;

    while (*text) {
        int length = (int)strcspn(text, " ");

        if (!first) {
            bool fits = column + 1 + length <= WIDTH;

            if (fits)
                fputc(' ', out);
            else
                fprintf(out, "\n%*s", indent, "");
            column = fits ? column + 1 : indent;
        }
        fprintf(out, "%.*s", length, text);
        first = false;
        column += length;
        text += (size_t)length + strspn(text + length, " ");
    }
    fputc('\n', out);
}

static void print_row(FILE *out, const char *left, const char *right)
{
    int width = (int)strlen(left);

    if (width < COLUMN - 2) {
        fprintf(out, "%-*s", COLUMN, left);
    } else {
        fprintf(out, "%s\n%*s", left, COLUMN, "");
    }
    print_wrapped(out, right, COLUMN);
}

static void print_flags(FILE *out, const struct ep_flag *flags)
{
    char left[96];

    for (; flags && flags->name; flags++) {
        char letter[4] = "   ";

        if (flags->letter)
            snprintf(letter, sizeof letter, "-%c,", flags->letter);
        snprintf(left, sizeof left, "  %s --%s%s%s", letter, flags->name, flags->value ? " " : "",
                 flags->value ? flags->value : "");
        print_row(out, left, flags->help);
    }
}

/* "NAME", "[NAME]" or nothing. */
static struct ep_text argument_text(const struct ep_argument *argument)
{
    struct ep_text text = { "" };

    if (argument->kind != EP_ARGUMENT_NONE)
        snprintf(text.s, sizeof text.s, argument->optional ? "[%s]" : "%s", argument->name);
    if (argument->kind != EP_ARGUMENT_CHOICE)
        return text;
    text.s[0] = '\0';
    for (size_t i = 0; argument->choices[i]; i++) {
        size_t used = strlen(text.s);

        snprintf(text.s + used, sizeof text.s - used, "%s%s", i ? "|" : "", argument->choices[i]);
    }
    return text;
}

static void print_command_row(FILE *out, const struct ep_command *command)
{
    char left[160];

    snprintf(left, sizeof left, "  %s %s", ep_command_name(command).s, argument_text(&command->argument).s);
    print_row(out, left, command->summary);
}

static void help_command(const struct ep_command *command, FILE *out)
{
    struct ep_text text = argument_text(&command->argument);
    const char *argument = text.s;

    fprintf(out, "usage: ep-admin %s%s%s [flags]\n\n", ep_command_name(command).s, *argument ? " " : "",
            argument);
    print_wrapped(out, command->summary, 0);
    if (command->details) {
        fputc('\n', out);
        print_wrapped(out, command->details, 0);
    }
    if (command->flags[0])
        fputs("\nFlags:\n", out);
    for (size_t i = 0; i < sizeof command->flags / sizeof *command->flags; i++)
        print_flags(out, command->flags[i]);
    fputs("\nGlobal flags:\n", out);
    print_flags(out, ep_global_flags);
    if (command->example)
        fprintf(out, "\nExample:\n  %s\n", command->example);
}

static void print_commands(FILE *out, const char *noun)
{
    for (const struct ep_command *command = ep_commands; command->noun; command++)
        if (!noun || strcmp(command->noun, noun) == 0)
            print_command_row(out, command);
}

static void help_noun(const char *noun, FILE *out)
{
    fprintf(out, "usage: ep-admin %s VERB ...\n\n%s\n\nCommands:\n", noun, ep_noun_find(noun)->summary);
    print_commands(out, noun);
    fprintf(out, "\n'ep-admin %s VERB --help' says more.\n", noun);
}

static void help_all(FILE *out)
{
    fputs("usage: ep-admin [flags] COMMAND ...\n\nAsks and changes an ep-server.\n\nCommands:\n", out);
    print_commands(out, NULL);
    fputs("\nGlobal flags:\n", out);
    print_flags(out, ep_global_flags);
    fputs("\nExit codes:\n", out);
    for (const struct ep_exit_code *code = ep_exit_codes; code->meaning; code++)
        fprintf(out, "  %d  %s\n", code->code, code->meaning);
    fputs("\n'ep-admin COMMAND --help' says more.\n", out);
}

void ep_help_print(const struct ep_invocation *invocation, FILE *out)
{
    if (invocation->command)
        help_command(invocation->command, out);
    else if (invocation->noun)
        help_noun(invocation->noun, out);
    else
        help_all(out);
}

/* ---- manual page ------------------------------------------------------------------ */

/* Text for roff: no control line, no escape, hyphens that can be copied. */
static void man_text(FILE *out, const char *text)
{
    if (*text == '.' || *text == '\'')
        fputs("\\&", out);
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else
            fputc(*text, out);
    }
}

static void man_line(FILE *out, const char *text)
{
    man_text(out, text);
    fputc('\n', out);
}

static void man_flags(FILE *out, const struct ep_flag *flags)
{
    for (; flags && flags->name; flags++) {
        fputs(".TP\n", out);
        if (flags->letter)
            fprintf(out, "\\fB\\-%c\\fR, ", flags->letter);
        fputs("\\fB\\-\\-", out);
        man_text(out, flags->name);
        fputs("\\fR", out);
        if (flags->value)
            fprintf(out, " \\fI%s\\fR", flags->value);
        fputc('\n', out);
        man_line(out, flags->help);
    }
}

static void man_command(FILE *out, const struct ep_command *command)
{
    fprintf(out, ".SS \"ep\\-admin %s %s\"\n", ep_command_name(command).s,
            argument_text(&command->argument).s);
    man_text(out, command->summary);
    fputs(".\n", out);
    if (command->details) {
        fputs(".PP\n", out);
        man_line(out, command->details);
    }
    for (size_t i = 0; i < sizeof command->flags / sizeof *command->flags; i++)
        man_flags(out, command->flags[i]);
    if (command->example) {
        fputs(".PP\nExample:\n.PP\n.RS 4\n.EX\n", out);
        man_line(out, command->example);
        fputs(".EE\n.RE\n", out);
    }
}

static void man_environment(FILE *out)
{
    static const char *const variables[][2] = {
        { "EP_SERVER", "The server, when --server is not given." },
        { "EP_TLS_CA", "As --tls-ca." },
        { "EP_TLS_CERT", "As --tls-cert." },
        { "EP_TLS_KEY", "As --tls-key." },
        { "EP_TLS_NAME", "As --tls-name." },
        { "XDG_RUNTIME_DIR", "ep-server/ep.sock below it is tried before /run/ep-server/ep.sock." },
        { "NO_COLOR", "When set, no colours on a terminal." },
    };

    fputs(".SH ENVIRONMENT\nA flag wins over the environment, and that over the default.\n", out);
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        fprintf(out, ".TP\n.B %s\n", variables[i][0]);
        man_line(out, variables[i][1]);
    }
}

void ep_man_print(FILE *out)
{
    fputs(
        ".TH EP\\-ADMIN 1 \"\" \"ep\\-server\" \"User Commands\"\n.SH NAME\nep\\-admin \\- ask and change an "
        "ep\\-server\n.SH SYNOPSIS\n.B ep\\-admin\n[\\fIflags\\fR] \\fICOMMAND\\fR ...\n.SH DESCRIPTION\n",
        out);
    man_line(out,
             "ep-admin shows and changes the expert groups and nodes of an ep-server, over its unix socket "
             "or, from any machine, over TCP with mutual TLS. Standard output carries the answer and nothing "
             "else; errors, notes and progress go to standard error. With --output json the answer is the "
             "server's reply message as one JSON document (one per line where there are several).");
    fputs(".SH COMMANDS\n", out);
    for (const struct ep_command *command = ep_commands; command->noun; command++)
        man_command(out, command);
    fputs(".SH \"GLOBAL FLAGS\"\n", out);
    man_flags(out, ep_global_flags);
    man_environment(out);
    fputs(".SH \"EXIT STATUS\"\n", out);
    for (const struct ep_exit_code *code = ep_exit_codes; code->meaning; code++) {
        fprintf(out, ".TP\n.B %d\n", code->code);
        man_line(out, code->meaning);
    }
    fputs(".SH \"SEE ALSO\"\n.B ep\\-server \\-\\-help\n", out);
}
