/* Prometheus text format 0.0.4. */
#include "ep_metrics.h"

#include <inttypes.h>
#include <math.h>

/* In help a quote stands for itself, in a label value it ends the value. */
static void write_escaped(FILE *out, const char *text, bool quoted)
{
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\\\", out);
        else if (*text == '\n')
            fputs("\\n", out);
        else if (*text == '"' && quoted)
            fputs("\\\"", out);
        else
            fputc(*text, out);
    }
}

static void write_labels(FILE *out, const struct ep_metrics_label *labels, size_t n)
{
    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++) {
        fprintf(out, "%c%s=\"", i ? ',' : '{', labels[i].name);
        write_escaped(out, labels[i].value ? labels[i].value : "", true);
        fputc('"', out);
    }
    fputc('}', out);
}

/*
 * Counters are whole numbers: all digits as long as a double holds them exactly.  Else 17 digits, which
 * read back to the same double.  The server never calls setlocale(), so the point is a point.
 */
static void write_value(FILE *out, double value)
{
    const double exact = 9007199254740992.0; /* 2^53 */

    if (isnan(value))
        fputs("NaN", out);
    else if (isinf(value))
        fputs(value > 0 ? "+Inf" : "-Inf", out);
    else if (fabs(value) <= exact && value == floor(value))
        fprintf(out, "%" PRId64, (int64_t)value);
    else
        fprintf(out, "%.17g", value);
}

void ep_metrics_family(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s ", name);
    write_escaped(out, help, false);
    fprintf(out, "\n# TYPE %s %s\n", name, type);
}

void ep_metrics_sample(FILE *out, const char *name, const struct ep_metrics_label *labels, size_t n,
                       double value)
{
    fputs(name, out);
    write_labels(out, labels, n);
    fputc(' ', out);
    write_value(out, value);
    fputc('\n', out);
}
