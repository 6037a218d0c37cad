#include "nccl_double.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl.h"

int nccl_double_made, nccl_double_left, nccl_double_windows, nccl_double_refuses, nccl_double_blocks;

typedef struct { char internal[NCCL_ID_BYTES]; } unique_id;

int ncclGetVersion(int *version);
int ncclGetUniqueId(unique_id *id);
int ncclCommInitRank(void **comm, int ranks, unique_id id, int rank);
int ncclCommAbort(void *comm);
const char *ncclGetLastError(void *comm);
const char *ncclGetErrorString(int result);
int ncclCommWindowRegister(void *comm, void *memory, size_t bytes, void **window, int flags);
int ncclCommWindowDeregister(void *comm, void *window);
int ncclDevCommCreate(void *comm, const void *needs, void *out);
int ncclDevCommDestroy(void *comm, const void *device);

int ncclGetVersion(int *version)
{
    *version = 22809;
    return 0;
}

int ncclGetUniqueId(unique_id *id)
{
    memset(id, 'n', sizeof *id);
    return 0;
}

/* ncclInvalidArgument for an id that nobody made. */
int ncclCommInitRank(void **comm, int ranks, unique_id id, int rank)
{
    while (__atomic_load_n(&nccl_double_blocks, __ATOMIC_RELAXED))
        usleep(1000);
    if (id.internal[0] != 'n' || rank >= ranks || nccl_double_refuses)
        return 4;
    *comm = malloc(1);
    __atomic_fetch_add(&nccl_double_made, 1, __ATOMIC_RELAXED);
    return *comm ? 0 : 2;
}

int ncclCommAbort(void *comm)
{
    free(comm);
    __atomic_fetch_add(&nccl_double_left, 1, __ATOMIC_RELEASE); /* whoever sees it may set up anew what this one has read */
    return 0;
}

const char *ncclGetLastError(void *comm)
{
    (void)comm;
    return "the double says no more";
}

const char *ncclGetErrorString(int result)
{
    return result ? "refused" : "no error";
}

int ncclCommWindowRegister(void *comm, void *memory, size_t bytes, void **window, int flags)
{
    (void)comm, (void)flags;
    *window = bytes ? memory : NULL;
    __atomic_fetch_add(&nccl_double_windows, 1, __ATOMIC_RELAXED);
    return 0;
}

int ncclCommWindowDeregister(void *comm, void *window)
{
    (void)comm, (void)window;
    __atomic_fetch_sub(&nccl_double_windows, 1, __ATOMIC_RELAXED);
    return 0;
}

/* What a double of the cuda backend would call. */
int ncclDevCommCreate(void *comm, const void *needs, void *out)
{
    (void)comm, (void)needs, (void)out;
    return 0;
}

int ncclDevCommDestroy(void *comm, const void *device)
{
    (void)comm, (void)device;
    return 0;
}
