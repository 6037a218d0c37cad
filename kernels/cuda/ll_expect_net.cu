/* Executor server: an op that is expected, for ranks of several nodes. */
#include "net_names.h"

#include "ll_expect.cu"
