/* A line that is rewritten on a terminal; elsewhere a plain line every few seconds. */
#include <stdio.h>
#include <unistd.h>

#include "ep_clock.h"
#include "sweep.h"

enum { EVERY_S = 3 };

static bool line_open;

static bool due(bool terminal)
{
    static uint64_t last;
    uint64_t now = ep_clock_ns();

    if (last && now - last < (terminal ? EP_NS_PER_S / 5 : EVERY_S * EP_NS_PER_S))
        return false;
    last = now;
    return true;
}

void progress(uint32_t index, uint32_t n, const struct bench_case *of, const char *what)
{
    bool terminal = isatty(STDERR_FILENO);
    char name[80];

    if (!due(terminal) && !terminal)
        return;
    bench_case_text(of, name, sizeof name);
    fprintf(stderr, "%s%u/%u %s: %s%s", terminal ? "\r\033[K" : "ep-bench: ", index + 1, n, name, what,
            terminal ? "" : "\n");
    line_open = terminal;
}

void progress_soak(uint64_t steps, uint32_t kills)
{
    bool terminal = isatty(STDERR_FILENO);

    if (!due(terminal))
        return;
    fprintf(stderr, "%ssoak: %llu ops of each rank, %u kills%s", terminal ? "\r\033[K" : "ep-bench: ",
            (unsigned long long)steps, kills, terminal ? "" : "\n");
    line_open = terminal;
}

void progress_end(void)
{
    if (line_open)
        fputs("\r\033[K", stderr);
    line_open = false;
}
