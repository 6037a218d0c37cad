/* What doctor found, and how it is printed. */
#include "doctor.h"

#include <stdarg.h>
#include <stdlib.h>

#include "output.h"

static const char *const level_names[] = { "ok", "warn", "fail" };

void ep_report_add(struct ep_report *report, enum ep_finding_level level, const char *check,
                   const char *remedy, const char *format, ...)
{
    struct ep_finding *grown = realloc(report->findings, (report->n + 1) * sizeof *grown);
    struct ep_finding *finding;
    char text[sizeof finding->text];
    va_list args;

    if (!grown)
        return;
    report->findings = grown;
    finding = &grown[report->n++];
    *finding = (struct ep_finding){ .level = level,
                                    .check = check,
                                    .remedy = level == EP_FINDING_OK ? NULL : remedy };
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ep_text_clean(text, finding->text, sizeof finding->text);
}

size_t ep_report_count(const struct ep_report *report, enum ep_finding_level level)
{
    size_t n = 0;

    for (size_t i = 0; i < report->n; i++)
        n += report->findings[i].level == level;
    return n;
}

static int print_document(const struct ep_admin *admin, const struct ep_report *report)
{
    json_t *list = json_array();

    for (size_t i = 0; i < report->n; i++) {
        const struct ep_finding *finding = &report->findings[i];

        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "status", level_names[finding->level],
                                              "check", finding->check, "finding", finding->text, "remedy",
                                              finding->remedy ? finding->remedy : ""));
    }
    return ep_output_document(admin, json_pack("{s:s, s:I, s:I, s:I, s:o}", "server", admin->server, "ok",
                                               (json_int_t)ep_report_count(report, EP_FINDING_OK), "warn",
                                               (json_int_t)ep_report_count(report, EP_FINDING_WARN), "fail",
                                               (json_int_t)ep_report_count(report, EP_FINDING_FAIL), "findings", list));
}

static void print_text(const struct ep_admin *admin, const struct ep_report *report)
{
    static const char *const colours[] = { "\033[32m", "\033[33m", "\033[31m" };
    bool coloured = ep_output_coloured();

    for (size_t i = 0; i < report->n; i++) {
        const struct ep_finding *finding = &report->findings[i];

        if (admin->quiet && finding->level == EP_FINDING_OK)
            continue;
        printf("%s%-4s%s  %-10s %s\n", coloured ? colours[finding->level] : "", level_names[finding->level],
               coloured ? "\033[0m" : "", finding->check, finding->text);
        if (finding->remedy)
            printf("      %-10s remedy: %s\n", "", finding->remedy);
    }
    if (!admin->quiet)
        printf("\n%zu ok, %zu to look at, %zu failing\n", ep_report_count(report, EP_FINDING_OK),
               ep_report_count(report, EP_FINDING_WARN), ep_report_count(report, EP_FINDING_FAIL));
}

int ep_report_print(const struct ep_admin *admin, const struct ep_report *report)
{
    if (admin->format != EP_FORMAT_TABLE)
        return print_document(admin, report);
    print_text(admin, report);
    return 0;
}
