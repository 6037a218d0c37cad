/* options: the command line of ep-bench. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "bench.h"

/* --help and --version print and end the process.  The error names the flag. */
ep_status options_parse(int argc, char **argv, struct bench_config *config, struct ep_error *error);

#endif
