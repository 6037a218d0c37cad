/* Threads for calls that block for as long as they like: see crew.h. */
#include "crew.h"

#include <time.h>

#include "ep_clock.h"

void crew_init(struct crew *crew, void (*end)(struct crew *crew))
{
    crew->end = end;
    ep_clock_condition(&crew->changed);
    pthread_mutex_init(&crew->lock, NULL);
}

void crew_fini(struct crew *crew)
{
    pthread_cond_destroy(&crew->changed);
    pthread_mutex_destroy(&crew->lock);
}

bool crew_is_abandoned(struct crew *crew)
{
    bool abandoned;

    pthread_mutex_lock(&crew->lock);
    abandoned = crew->abandoned;
    pthread_mutex_unlock(&crew->lock);
    return abandoned;
}

void crew_expect(struct crew *crew, uint32_t hands)
{
    crew->busy = hands; /* no thread looks yet */
}

static void through(struct crew *crew)
{
    bool last;

    pthread_mutex_lock(&crew->lock);
    last = --crew->busy == 0 && crew->abandoned;
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
    if (last)
        crew->end(crew);
}

static void *labour(void *arg)
{
    struct hand *hand = arg;
    struct crew *crew = hand->crew;

    hand->work(hand);
    through(crew);
    return NULL;
}

bool crew_set_to_work(struct crew *crew, struct hand *hand, void (*work)(struct hand *hand))
{
    pthread_t thread;

    hand->crew = crew;
    hand->work = work;
    if (pthread_create(&thread, NULL, labour, hand) == 0)
        return pthread_detach(thread) == 0;
    through(crew);
    return false;
}

bool crew_await(struct crew *crew, uint32_t timeout_ms)
{
    const struct timespec until = ep_clock_timespec(ep_clock_ns() + timeout_ms * EP_NS_PER_MS);
    bool done;

    pthread_mutex_lock(&crew->lock);
    while (crew->busy && pthread_cond_timedwait(&crew->changed, &crew->lock, &until) == 0)
        ;
    done = crew->busy == 0;
    crew->abandoned = !done;
    pthread_mutex_unlock(&crew->lock);
    return done;
}
