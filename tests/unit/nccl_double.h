/* nccl_double: a libnccl.so.2 that connects nobody, and is there before a program looks it up. */
#ifndef NCCL_DOUBLE_H
#define NCCL_DOUBLE_H

extern int nccl_double_left; /* communicators that were left, ever; atomic */

#endif
