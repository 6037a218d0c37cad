/*
 * crew.h: threads for calls that block for as long as they like, and a bounded wait for them.  What they work on and whatever
 * that needs belongs to the crew: when nobody waits for it any more, the last thread to be through gives it back.
 */
#ifndef EP_NODE_CREW_H
#define EP_NODE_CREW_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* The first in its struct. */
struct crew {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t busy;  /* under lock: hands that are not through */
    bool abandoned; /* under lock: nobody waits for them, and the last one calls: */
    void (*end)(struct crew *crew);
};

/* What one thread works on; the first in its struct. */
struct hand {
    struct crew *crew;
    void (*work)(struct hand *hand);
};

void crew_init(struct crew *crew, void (*end)(struct crew *crew));
void crew_fini(struct crew *crew);

/* How many hands will be set to work, before the first one is. */
void crew_expect(struct crew *crew, uint32_t hands);
/* False: there is no thread, and that hand is through. */
bool crew_set_to_work(struct crew *crew, struct hand *hand, void (*work)(struct hand *hand));
/* For all that were expected.  False: it took longer, and they are abandoned. */
bool crew_await(struct crew *crew, uint32_t timeout_ms);
/* For a hand that has something left to do. */
bool crew_is_abandoned(struct crew *crew);

#endif
