/* HT combine, for ranks of several nodes. */
#include "net_names.h"

#include "ht_combine.cu"
