#include "ep_thread.h"

#include <signal.h>

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
