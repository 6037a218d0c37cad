#include "output.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <libsmartcols/libsmartcols.h>

#include "ep_json.h"
#include "ep_stdout.h"
#include "yaml_json.h"

/* ---- documents ------------------------------------------------------------------- */

static int print_json(const struct ep_admin *admin, json_t *json, bool item)
{
    if (!json) {
        struct ep_error error;

        ep_error_set(&error, EP_NO_MEMORY, "out of memory");
        return ep_admin_fail(admin, &error);
    }
    if (admin->format == EP_FORMAT_YAML) {
        ep_yaml_write(json, item, stdout);
    } else {
        json_dumpf(json, stdout, JSON_REAL_PRECISION(9) | (item ? JSON_COMPACT : JSON_INDENT(2)));
        putchar('\n');
    }
    if (item)
        fflush(stdout);
    json_decref(json);
    return 0;
}

int ep_output_document(const struct ep_admin *admin, json_t *json)
{
    return print_json(admin, json, false);
}

int ep_output_item(const struct ep_admin *admin, json_t *json)
{
    return print_json(admin, json, true);
}

int ep_output_message(const struct ep_admin *admin, const ProtobufCMessage *message)
{
    return print_json(admin, ep_json_from_message(message), false);
}

int ep_output_message_item(const struct ep_admin *admin, const ProtobufCMessage *message)
{
    return print_json(admin, ep_json_from_message(message), true);
}

static bool is_closed(void)
{
    struct pollfd out = { .fd = STDOUT_FILENO };

    return poll(&out, 1, 0) > 0 && (out.revents & (POLLERR | POLLHUP)) != 0;
}

int ep_output_finish(const struct ep_admin *admin, int code)
{
    const int why = is_closed() ? 0 : ep_stdout_error();
    struct ep_error error;

    if (why == 0 || why == EPIPE)
        return code;
    errno = why;
    ep_error_errno(&error, EP_IO, "cannot write to standard output");
    return ep_admin_fail(admin, &error);
}

bool ep_output_over(void)
{
    return ferror(stdout) || is_closed();
}

bool ep_output_coloured(void)
{
    const char *no_color = getenv("NO_COLOR");
    const char *term = getenv("TERM");

    return isatty(STDOUT_FILENO) && !(no_color && *no_color) && term && strcmp(term, "dumb") != 0;
}

void ep_output_pair(FILE *out, const char *key, const char *format, ...)
{
    char text[1024], clean[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ep_text_clean(text, clean, sizeof clean);
    fprintf(out, "%-14s %s\n", key, clean);
}

/* ---- tables ---------------------------------------------------------------------- */

struct ep_table {
    struct libscols_table *scols; /* NULL: no memory */
    const struct ep_column *columns;
    size_t n;
};

struct ep_table *ep_table_create(const struct ep_column *columns, size_t n)
{
    struct ep_table *table = malloc(sizeof *table);

    if (!table)
        return NULL;
    scols_init_debug(0);
    *table = (struct ep_table){ .scols = scols_new_table(), .columns = columns, .n = n };
    for (size_t i = 0; table->scols && i < n; i++) {
        int flags = (columns[i].flags & EP_COLUMN_RIGHT ? SCOLS_FL_RIGHT : 0) |
                    (columns[i].flags & EP_COLUMN_LONG ? SCOLS_FL_TRUNC : 0);

        scols_table_new_column(table->scols, columns[i].name, 0, flags);
    }
    scols_table_enable_colors(table->scols, ep_output_coloured());
    return table;
}

/* Green for what is as it should be, red for what is not, yellow between. */
static const char *state_colour(const char *state)
{
    static const struct {
        const char *state, *colour;
    } colours[] = {
        { "READY", "green" },     { "ATTACHED", "green" },     { "ok", "green" },
        { "EXPECTED", "cyan" },   { "FAILED", "red" },         { "fail", "red" },
        { "ABSENT", "red" },      { "DEGRADED", "yellow" },    { "QUARANTINED", "yellow" },
        { "CORDONED", "yellow" }, { "RECONFIGURING", "cyan" }, { "FORMING", "cyan" },
        { "PENDING", "cyan" },    { "DRAINING", "yellow" },    { "STOPPING", "yellow" },
        { "warn", "yellow" },     { "LOST", "red" },
    };

    for (size_t i = 0; i < sizeof colours / sizeof *colours; i++)
        if (strcmp(colours[i].state, state) == 0)
            return colours[i].colour;
    return NULL;
}

void ep_table_add(struct ep_table *table, const char *const *cells)
{
    struct libscols_line *line = table && table->scols ? scols_table_new_line(table->scols, NULL) : NULL;

    for (size_t i = 0; line && i < table->n; i++) {
        scols_line_set_data(line, i, cells[i] && *cells[i] ? cells[i] : "-");
        if (table->columns[i].flags & EP_COLUMN_STATE)
            scols_cell_set_color(scols_line_get_cell(line, i), state_colour(cells[i]));
    }
}

size_t ep_table_rows(const struct ep_table *table)
{
    return table && table->scols ? scols_table_get_nlines(table->scols) : 0;
}

static void table_free(struct ep_table *table)
{
    if (table)
        scols_unref_table(table->scols);
    free(table);
}

void ep_table_print(struct ep_table *table, FILE *out)
{
    if (ep_table_rows(table) > 0) {
        scols_table_set_stream(table->scols, out);
        scols_print_table(table->scols);
    }
    table_free(table);
}

char *ep_table_text(struct ep_table *table, size_t width)
{
    char *text = NULL;

    if (table && table->scols) {
        scols_table_set_termforce(table->scols, SCOLS_TERMFORCE_ALWAYS);
        scols_table_set_termwidth(table->scols, width);
        if (ep_table_rows(table) == 0 || scols_print_table_to_string(table->scols, &text) != 0)
            text = strdup("");
    }
    table_free(table);
    return text;
}
