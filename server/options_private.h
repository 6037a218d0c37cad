/*
 * What the files of the options share:
 *
 *   options.c        all sources together; environment and flags
 *   options_file.c   the YAML file
 *   options_check.c  what no single option can tell
 *   options_table.c  the table
 *   options_value.c  from text to values and back
 */
#ifndef EP_OPTIONS_PRIVATE_H
#define EP_OPTIONS_PRIVATE_H

#include "options.h"

#define EP_OPTION_ENVIRONMENT "EP_SERVER_" /* what names of variables begin with */
#define EP_OPTION_SIDE_SOCKET ".attach"    /* as in main.c; counts for the length of the path */

enum ep_option_type {
    EP_TYPE_STRING,
    EP_TYPE_PATH,
    EP_TYPE_ADDRESS,  /* HOST:PORT */
    EP_TYPE_UINT,
    EP_TYPE_BYTES,    /* 512MiB */
    EP_TYPE_DURATION, /* 250ms; kept in ms */
    EP_TYPE_BOOL,
    EP_TYPE_ENUM,
    EP_TYPE_MODE,     /* octal file mode */
    EP_TYPE_UIDS,     /* list of names or numbers */
    EP_TYPE_GIDS
};

enum {
    EP_OPTION_RELOAD = 1u << 0,   /* takes effect on SIGHUP */
    EP_OPTION_NO_FILE = 1u << 1   /* makes no sense in a file */
};

struct ep_option {
    const char *name;
    const char *section;
    enum ep_option_type type;
    unsigned flags;
    size_t offset; /* in struct ep_options */
    const char *fallback; /* the default, as text */
    char *(*computed)(void); /* the default where it depends on who we are; malloc'ed */
    const char *doc;
    uint64_t min, max;        /* UINT, BYTES, DURATION (ms) */
    const char *const *words; /* ENUM: by value, NULL at the end */
};

/* ---- options_table.c ---- */

extern const struct ep_option ep_options_table[];
extern const size_t ep_options_count;

/* Where a value comes from, for messages and --print-config. */
struct ep_option_source {
    struct ep_option_origin origin;
    const char *file;
};

size_t ep_option_place(const struct ep_option *option); /* in the table */
/* NULL when there is none.  length: the name need not be terminated. */
const struct ep_option *ep_option_find(const char *name, size_t length);
/* The name that is most like `name`; NULL when none is. */
const char *ep_option_closest(const char *name, size_t length);

/* Parses text into the option's field.  append: lists grow instead of being replaced. */
ep_status ep_option_set(struct ep_options *options, const struct ep_option *option, const char *text,
                        bool append, const struct ep_option_source *source, struct ep_error *error);

/* "host-ranks is WHAT (SOURCE): must be an integer from 1 to 1024" */
ep_status ep_option_mismatch(const struct ep_option *option, const char *what,
                             const struct ep_option_source *source, struct ep_error *error);

/* "FILE:3", "environment EP_SERVER_NAME", "flag --name", "default" */
void ep_option_source_text(const struct ep_option *option, const struct ep_option_source *source,
                           char *text, size_t size);
/* "EP_SERVER_HOST_RANKS" */
void ep_option_environment_name(const struct ep_option *option, char *text, size_t size);

/* ---- options_value.c ---- */

/* False: not a value of this option; *why is then NULL or a malloc'ed sentence that says more. */
bool ep_option_parse(const struct ep_option *option, const char *text, bool append, void *field, char **why);
/* "an integer from 1 to 1024" */
void ep_option_expects(const struct ep_option *option, char *text, size_t size);
/* The value as YAML that parses back to it; malloc'ed. */
char *ep_option_format(const struct ep_option *option, const void *field);
void ep_option_clear(const struct ep_option *option, void *field);
/* Moves the value of `from` into `to`. */
void ep_option_move(const struct ep_option *option, void *to, void *from);

/* ---- options_file.c ---- */

ep_status ep_options_read_file(struct ep_options *options, const char *path, struct ep_error *error);

static inline void *ep_option_field(const struct ep_options *options, const struct ep_option *option)
{
    return (char *)(uintptr_t)options + option->offset;
}

#endif
