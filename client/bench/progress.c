/* A line that is rewritten on a terminal; elsewhere a plain line every few seconds. */
#include <stdio.h>
#include <unistd.h>

#include "ep_clock.h"
#include "sweep.h"

enum { EVERY_S = 3 };

static bool line_open;

void progress(uint32_t index, uint32_t n, const struct bench_case *of, const char *what)
{
    static uint64_t last;
    bool terminal = isatty(STDERR_FILENO);
    uint64_t now = ep_clock_ns();
    char name[80];

    if (!terminal && last && now - last < EVERY_S * EP_NS_PER_S)
        return;
    last = now;
    bench_case_text(of, name, sizeof name);
    fprintf(stderr, "%s%u/%u %s: %s%s", terminal ? "\r\033[K" : "ep-bench: ", index + 1, n, name, what,
            terminal ? "" : "\n");
    line_open = terminal;
}

void progress_end(void)
{
    if (line_open)
        fputs("\r\033[K", stderr);
    line_open = false;
}
