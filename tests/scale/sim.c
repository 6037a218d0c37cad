/* What the simulation's files share: memory, failure, what is put off to the loop. */
#include "sim.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void *sim_allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size ? size : 1);

    if (!memory)
        abort();
    return memory;
}

void sim_fail(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fputs("ep_scale: ", stderr);
    vfprintf(stderr, format, args);
    fputs("\n", stderr);
    va_end(args);
    exit(1);
}

struct sim_node *sim_find(const char *name)
{
    char *end;
    const unsigned long i = *name == 'n' ? strtoul(name + 1, &end, 10) : sim.nodes;

    return i < sim.nodes && end != name + 1 && !*end ? &sim.node[i] : NULL;
}

/* ---- later -------------------------------------------------------------------------- */

struct task {
    struct task *next;
    void (*fn)(void *user);
    void *user;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct task *first, **last = &first; /* the mutex's */
static uv_async_t ready;

static struct task *take_all(void)
{
    struct task *all;

    pthread_mutex_lock(&mutex);
    all = first;
    first = NULL;
    last = &first;
    pthread_mutex_unlock(&mutex);
    return all;
}

/* What these put off comes at the loop's next turn. */
static void on_ready(uv_async_t *async)
{
    struct task *task = take_all();

    (void)async;
    while (task) {
        const struct task now = *task;

        free(task);
        task = now.next;
        now.fn(now.user);
    }
}

void sim_later(void (*fn)(void *user), void *user)
{
    struct task *task = sim_allocate(1, sizeof *task);

    *task = (struct task){ .fn = fn, .user = user };
    pthread_mutex_lock(&mutex);
    *last = task;
    last = &task->next;
    pthread_mutex_unlock(&mutex);
    uv_async_send(&ready);
}

void sim_open(void)
{
    uv_loop_init(&sim.loop);
    uv_async_init(&sim.loop, &ready, on_ready);
}

void sim_close(void)
{
    uv_close((uv_handle_t *)&ready, NULL);
    uv_run(&sim.loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&sim.loop))
        sim_fail("the loop still has something to do");
}
