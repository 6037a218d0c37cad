/* nccl_double: a libnccl.so.2 that connects nobody, and is there before a program looks it up. */
#ifndef NCCL_DOUBLE_H
#define NCCL_DOUBLE_H

/* Atomic: communicators (of one rank each) that were made and left, ever; windows that are registered. */
extern int nccl_double_made, nccl_double_left, nccl_double_windows;
/* To be set: making one is refused, or blocks until this is 0. */
extern int nccl_double_refuses, nccl_double_blocks;

#endif
