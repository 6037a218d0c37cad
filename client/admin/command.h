/*
 * ep_command: the table of commands.  Parsing, --help, completion and the manual page all read it.
 */
#ifndef EP_COMMAND_H
#define EP_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <protobuf-c/protobuf-c.h>

#include "ep_error.h"
#include "text.h"

struct ep_admin;
struct ep_invocation;

enum ep_flag_kind {
    EP_FLAG_BOOL,
    EP_FLAG_TEXT,
    EP_FLAG_FILE,
    EP_FLAG_U32,
    EP_FLAG_U64,
    EP_FLAG_SIZE,
    EP_FLAG_DURATION,
    EP_FLAG_CHOICE, /* one of choices */
    EP_FLAG_ENUM,   /* a value of type */
    EP_FLAG_ENUMS,  /* values of type, comma between them */
    EP_FLAG_LABEL   /* k=v, or k- to take it away; may be repeated */
};

struct ep_flag {
    const char *name;
    char letter; /* 0: none */
    enum ep_flag_kind kind;
    const char *value; /* what --help calls it; NULL: takes none */
    const char *help;
    const char *field;                   /* the GroupSpec field that it sets */
    const char *const *choices;          /* CHOICE: NULL at the end */
    const ProtobufCEnumDescriptor *type; /* ENUM, ENUMS; CHOICE with a field: what the choices are names of */
};

enum ep_argument_kind { EP_ARGUMENT_NONE, EP_ARGUMENT_GROUP, EP_ARGUMENT_NODE, EP_ARGUMENT_CHOICE };

/* A command takes one positional argument at most. */
struct ep_argument {
    enum ep_argument_kind kind;
    const char *name; /* "NAME" */
    bool optional;
    const char *const *choices;
};

struct ep_command {
    const char *noun;
    const char *verb; /* NULL: the noun alone is the command */
    struct ep_argument argument;
    const char *summary; /* one line, no full stop */
    const char *details; /* paragraphs; NULL: none */
    const char *example;
    const struct ep_flag *flags[3]; /* arrays, each ended by a NULL name */
    int (*run)(struct ep_admin *admin, const struct ep_invocation *invocation); /* returns the exit code */
};

struct ep_noun {
    const char *name;
    const char *summary;
};

extern const struct ep_noun ep_nouns[];       /* ended by a NULL name */
extern const struct ep_command ep_commands[]; /* ended by a NULL noun */
extern const struct ep_flag ep_global_flags[];

/* Exit codes, for --help and the manual page. */
struct ep_exit_code {
    int code;
    const char *meaning;
};
extern const struct ep_exit_code ep_exit_codes[]; /* ended by a NULL meaning */

const struct ep_noun *ep_noun_find(const char *name);
/* verb NULL: the command that is the noun alone. */
const struct ep_command *ep_command_find(const char *noun, const char *verb);
/* "group create" */
struct ep_text ep_command_name(const struct ep_command *command);

/*
 * The flags that hold for a command, its own first; command NULL: the global ones only.  Returns
 * how many there are; at most EP_MAX_FLAGS.
 */
#define EP_MAX_FLAGS 40
size_t ep_command_flags(const struct ep_command *command, const struct ep_flag *out[EP_MAX_FLAGS]);

/* ---- a parsed command line -------------------------------------------------------- */

struct ep_flag_value {
    const struct ep_flag *flag;
    const char *text; /* "" for a BOOL */
};

struct ep_invocation {
    const char *noun;                 /* as far as it was given; for --help */
    const struct ep_command *command; /* NULL: incomplete, which only --help and --version allow */
    const char *argument;             /* NULL: not given */
    bool incomplete;                  /* the error is that the words ended too early */
    struct ep_flag_value *values;     /* in the order given */
    size_t n_values;
};

/*
 * Texts stay argv's.  Every flag's value has been checked against its kind, so the functions below do
 * not fail.  On an error *out holds what was understood so far; ep_invocation_clear() either way.
 */
ep_status ep_invocation_parse(int argc, char **argv, struct ep_invocation *out, struct ep_error *error);
void ep_invocation_clear(struct ep_invocation *invocation);

/* The last value of a flag, NULL when it was not given. */
const char *ep_invocation_text(const struct ep_invocation *invocation, const char *flag);
bool ep_invocation_given(const struct ep_invocation *invocation, const char *flag);
uint64_t ep_invocation_u64(const struct ep_invocation *invocation, const char *flag, uint64_t otherwise);
int64_t ep_invocation_ms(const struct ep_invocation *invocation, const char *flag, int64_t otherwise);

/* ---- texts made from the table ---------------------------------------------------- */

/* Help for the command, the noun, or all of it, whichever is the most that the invocation knows. */
void ep_help_print(const struct ep_invocation *invocation, FILE *out);
void ep_man_print(FILE *out);

#endif
