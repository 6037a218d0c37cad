/* What a spec was settled to: its notes, and its end.  See spec.h. */
#include "spec.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void ep_settled_note(struct ep_settled *settled, const char *format, ...)
{
    char **notes = realloc(settled->notes, (settled->n_notes + 1) * sizeof *notes);
    va_list args;

    if (!notes)
        abort(); /* as in arena.c */
    settled->notes = notes;
    va_start(args, format);
    if (vasprintf(&notes[settled->n_notes], format, args) < 0)
        abort();
    va_end(args);
    settled->n_notes++;
}

static void clear_notes(struct ep_settled *settled)
{
    for (size_t i = 0; i < settled->n_notes; i++)
        free(settled->notes[i]);
    free(settled->notes);
    settled->notes = NULL;
    settled->n_notes = 0;
}

void ep_settled_set_notes(struct ep_settled *settled, char *const *notes, size_t n)
{
    clear_notes(settled);
    for (size_t i = 0; i < n; i++)
        ep_settled_note(settled, "%s", notes[i]);
}

void ep_settled_clear(struct ep_settled *settled)
{
    if (settled->spec)
        ep__v1__group_spec__free_unpacked(settled->spec, NULL);
    if (settled->placement.first)
        ep_placement_free(&settled->placement);
    clear_notes(settled);
    *settled = (struct ep_settled){ 0 };
}
