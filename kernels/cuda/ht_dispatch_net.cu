/* HT dispatch, for ranks of several nodes. */
#include "net_names.h"

#include "ht_dispatch.cu"
