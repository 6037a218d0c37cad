/* What happened to an op, in words: the same ones whoever executed it. */
#include <stdio.h>

#include "ep_kernels.h"

void ep_op_late_text(char *text, size_t size, uint32_t late_rank, uint32_t mode, uint64_t number,
                     uint64_t waited_ms, uint32_t phase)
{
    static const char *const what[] = { [EP_WAIT_NONE] = "nothing",
                                        [EP_WAIT_ARRIVAL] = "its rows",
                                        [EP_WAIT_CREDIT] = "its bank",
                                        [EP_WAIT_READY] = "it to begin" };

    snprintf(text, size, "rank %u was late: %s %llu waited %llu ms for %s", late_rank,
             mode == EP_MODE_HT ? "HT" : "LL", (unsigned long long)number, (unsigned long long)waited_ms,
             phase < sizeof what / sizeof *what ? what[phase] : "something");
}
