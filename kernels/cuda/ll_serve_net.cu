/* Executor server, for ranks of several nodes. */
#include "net_names.h"

#include "ll_serve.cu"
