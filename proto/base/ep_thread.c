#include "ep_thread.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>

int ep_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    int failure;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failure = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure == 0)
        (void)pthread_setname_np(*thread, name); /* for who looks */
    return failure;
}

/* Of address space, which malloc sets aside when a thread first asks it: a heap of glibc's (HEAP_MAX_SIZE). */
#define HEAP_BYTES ((size_t)64 << 20)

static void *wait_at(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* A thread's first malloc() takes what is left, be it the next one's stack: they are tried with room for both. */
static int start_with_heap(pthread_t *thread, pthread_mutex_t *gate, void **heap)
{
    int failure;

    *heap = mmap(NULL, HEAP_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*heap == MAP_FAILED)
        return errno;
    failure = ep_thread_start(thread, "ep-try", wait_at, gate);
    if (failure)
        munmap(*heap, HEAP_BYTES);
    return failure;
}

int ep_threads_try(int wanted, int *started)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[EP_THREADS_TRY_MOST];
    void *heaps[EP_THREADS_TRY_MOST];
    int n = 0, failure = 0;

    assert(wanted <= EP_THREADS_TRY_MOST);
    pthread_mutex_lock(&gate);
    while (n < wanted && (failure = start_with_heap(&threads[n], &gate, &heaps[n])) == 0)
        n++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        munmap(heaps[i], HEAP_BYTES);
    }
    *started = n;
    return failure;
}
