/* Executor server: HT ops that were not expected, for ranks of several nodes. */
#include "net_names.h"

#include "ht_serve.cu"
