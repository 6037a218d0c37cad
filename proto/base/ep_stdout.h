/* ep_stdout: whether all that a program has written to standard output got there. */
#ifndef EP_STDOUT_H
#define EP_STDOUT_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ep_status.h"

/* For atexit(), as --help and --version end in argp: says so on standard error, and the program ends with EP_IO's code. */
static inline void ep_stdout_check(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return;
    fprintf(stderr, "%s: cannot write to standard output: %s\n", program_invocation_short_name,
            strerror(errno ? errno : EIO)); /* or an earlier write failed */
    _exit(ep_status_exit_code(EP_IO));
}

#endif
