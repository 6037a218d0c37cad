#include "ep_thread.h"

#include <assert.h>
#include <signal.h>
#include <stdlib.h>

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

static void *wait_at(void *gate)
{
    void *volatile some = malloc(1); /* a thread's first has address space set aside, as of a library's threads */

    free(some);
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

int ep_threads_try(int wanted, int *started)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[EP_THREADS_TRY_MOST];
    int failure = 0;

    assert(wanted <= EP_THREADS_TRY_MOST);
    *started = 0;
    pthread_mutex_lock(&gate);
    while (*started < wanted && (failure = ep_thread_start(&threads[*started], "ep-try", wait_at, &gate)) == 0)
        ++*started;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < *started; i++)
        pthread_join(threads[i], NULL);
    return failure;
}
