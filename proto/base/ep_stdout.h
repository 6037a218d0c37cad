/* ep_stdout: whether all that a program has written to standard output got there. */
#ifndef EP_STDOUT_H
#define EP_STDOUT_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ep_status.h"

/* Why it did not take all, as errno has it; 0: it did. */
static inline int ep_stdout_error(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return 0;
    if (errno == 0) /* an earlier write failed, and why is lost: the next one mostly fails likewise */
        (void)!write(STDOUT_FILENO, "\n", 1);
    return errno ? errno : EIO;
}

/* For atexit(), as --help and --version end in argp: says so on standard error, and the program ends with EP_IO's code. */
static inline void ep_stdout_check(void)
{
    const int why = ep_stdout_error();

    if (why == 0)
        return;
    fprintf(stderr, "%s: cannot write to standard output: %s\n", program_invocation_short_name, strerror(why));
    _exit(ep_status_exit_code(EP_IO));
}

#endif
