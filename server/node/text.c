/* Figures in messages. */
#include <inttypes.h>
#include <stdio.h>

#include "node_private.h"

struct ep_bytes_text ep_bytes_text(uint64_t bytes)
{
    static const char *const units[] = { "KiB", "MiB", "GiB", "TiB" };
    struct ep_bytes_text out;
    double value = (double)bytes / 1024;
    size_t unit = 0;

    if (bytes < 1024) {
        snprintf(out.text, sizeof out.text, "%" PRIu64 " bytes", bytes);
        return out;
    }
    while (value >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(out.text, sizeof out.text, "%.1f %s (%" PRIu64 " bytes)", value, units[unit], bytes);
    return out;
}
