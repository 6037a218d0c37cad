#include "progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_thread.h"
#include "text.h"

enum { PATIENCE_MS = 1000, FRAME_MS = 120 };

/* Waits for the end, at most so long; true when it has come.  Called with the lock held. */
static bool wait_for_end(struct ep_progress *progress, uint32_t ms)
{
    const struct timespec until = ep_clock_timespec(ep_clock_ns() + ms * EP_NS_PER_MS);

    while (!progress->stop && pthread_cond_timedwait(&progress->wake, &progress->lock, &until) == 0)
        ;
    return progress->stop;
}

static void *run(void *argument)
{
    static const char frames[] = "|/-\\";
    struct ep_progress *progress = argument;
    bool terminal = isatty(STDERR_FILENO);
    bool ended;

    pthread_mutex_lock(&progress->lock);
    ended = wait_for_end(progress, PATIENCE_MS);
    if (!ended && !terminal)
        fprintf(stderr, "ep-admin: %s\n", progress->text);
    for (unsigned i = 0; terminal && !ended; i++) {
        double seconds = (double)(ep_clock_ns() - progress->began_ns) / (double)EP_NS_PER_S;

        fprintf(stderr, "\r%c ep-admin: %s, %.1f s\033[K", frames[i % 4], progress->text, seconds);
        ended = wait_for_end(progress, FRAME_MS);
        if (ended)
            fputs("\r\033[K", stderr);
    }
    pthread_mutex_unlock(&progress->lock);
    return NULL;
}

void ep_progress_begin(struct ep_progress *progress, bool quiet, const char *what)
{
    progress->running = progress->stop = false;
    if (quiet)
        return;
    ep_text_clean(what, progress->text, sizeof progress->text);
    progress->began_ns = ep_clock_ns();
    pthread_mutex_init(&progress->lock, NULL);
    ep_clock_condition(&progress->wake);
    progress->running = ep_thread_start(&progress->thread, "ep-progress", run, progress) == 0;
}

void ep_progress_end(struct ep_progress *progress)
{
    if (!progress->running)
        return;
    pthread_mutex_lock(&progress->lock);
    progress->stop = true;
    pthread_cond_signal(&progress->wake);
    pthread_mutex_unlock(&progress->lock);
    pthread_join(progress->thread, NULL);
    pthread_cond_destroy(&progress->wake);
    pthread_mutex_destroy(&progress->lock);
    progress->running = false;
}
