#include "fibers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

enum {
    LANES = 32, MAX_WARPS = 32,
    STACK = 64 * 1024,
    LOOKS = 8,        /* a thread looks so often before another has its turn */
    IDLE_LOOKS = 256, /* of a block, in which nothing has happened: it sleeps, others may want the processor */
    NAP_NS = 50000,
    LATE_STARTS = 8, LATE_COUNTS = 64, /* one block in so many begins late, or is late after it has counted something */
    LATE_ARRIVALS = 4,                 /* and after it has counted itself among those that are nearly done */
    LATE_NS = 200000,
    STORES = 32, /* of a block that are not there yet */
};

/* Where threads wait for each other: the last one opens it for all. */
struct meeting {
    uint32_t first, threads; /* of the block: whom it is for */
    uint32_t here, alive;
    uint64_t opened; /* times */
};

struct fiber {
    void *stack;
#ifdef __x86_64__
    void *at; /* top of the stack, while it does not run */
#else
    ucontext_t at;
#endif
    const struct meeting *waits; /* NULL: for none */
    uint32_t place;              /* among those that can go on */
};

/* 16 bytes, aligned ones of which are written and read at once where there is AVX. */
#ifdef __x86_64__
typedef long long piece __attribute__((vector_size(16)));
#else
typedef struct {
    uint64_t half[2];
} piece;
#endif

struct block {
    struct fibers_grid *grid;
    uint32_t index, threads, current;
    uint32_t *ready, n_ready; /* who can go on */
    uint32_t chance, looks;
    struct meeting all, warp[MAX_WARPS];
    uint64_t given[MAX_WARPS][2][LANES]; /* of this exchange and the next one */
    bool any[2];                         /* the same, of the block */
    bool lets;                           /* the next grid come */
    struct {
        piece *to, v;
    } store[STORES]; /* that others do not see yet */
    uint32_t stores;
    uint32_t *shared;
    struct fiber home; /* of the thread of the process */
    struct fiber fiber[];
};

__thread struct fiber_index fiber_thread, fiber_block, fiber_blocks;
__thread uint32_t *fiber_shared;
static __thread struct block *block;

/* ---- from one to the next --------------------------------------------------------------------- */

#ifdef __x86_64__

/* Keeps what a function call keeps, and goes on where `to` was left. */
void fiber_switch(void **from, void *to);
__asm__(".text\n"
        ".type fiber_switch, @function\n"
        "fiber_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size fiber_switch, . - fiber_switch\n");

static void go_to(struct fiber *from, struct fiber *to)
{
    fiber_switch(&from->at, to->at);
}

static void prepare(struct fiber *fiber, void (*entry)(void))
{
    void **top = (void **)(void *)((uint8_t *)fiber->stack + STACK);

    memset(top - 8, 0, 8 * sizeof *top);
    memcpy(top - 2, &entry, sizeof entry); /* fiber_switch() returns there, with the stack as after a call */
    fiber->at = top - 8;
}

#else

static void go_to(struct fiber *from, struct fiber *to)
{
    (void)swapcontext(&from->at, &to->at);
}

static void prepare(struct fiber *fiber, void (*entry)(void))
{
    if (getcontext(&fiber->at))
        abort();
    fiber->at.uc_stack.ss_sp = fiber->stack;
    fiber->at.uc_stack.ss_size = STACK;
    fiber->at.uc_link = NULL;
    makecontext(&fiber->at, entry, 0);
}

#endif

/* ---- stores ------------------------------------------------------------------------------------- */

static uint32_t by_chance(struct block *b)
{
    b->chance ^= b->chance << 13;
    b->chance ^= b->chance >> 17;
    b->chance ^= b->chance << 5;
    return b->chance;
}

#ifdef __x86_64__
static void write_piece(piece *to, piece v)
{
    *(volatile piece *)to = v;
}

static piece read_piece(const piece *from)
{
    return *(const volatile piece *)from;
}
#else /* halves: the number, by which a reader knows most of them, is in the second one */
static void write_piece(piece *to, piece v)
{
    __atomic_store_n(&to->half[0], v.half[0], __ATOMIC_SEQ_CST);
    __atomic_store_n(&to->half[1], v.half[1], __ATOMIC_SEQ_CST);
}

static piece read_piece(const piece *from)
{
    piece v;

    v.half[1] = __atomic_load_n(&from->half[1], __ATOMIC_SEQ_CST);
    v.half[0] = __atomic_load_n(&from->half[0], __ATOMIC_SEQ_CST);
    return v;
}
#endif

/* Store i is seen. */
static void let_see(struct block *b, uint32_t i)
{
    write_piece(b->store[i].to, b->store[i].v);
    b->store[i] = b->store[--b->stores];
}

static uint32_t find_store(const struct block *b, const void *at)
{
    uint32_t i = 0;

    while (i < b->stores && b->store[i].to != at)
        i++;
    return i;
}

void fibers_store(void *to, const void *from)
{
    struct block *b = block;
    const uint32_t i = find_store(b, to);

    b->looks = 0;
    if (i < b->stores) {
        memcpy(&b->store[i].v, from, sizeof(piece));
        return;
    }
    if (b->stores == STORES)
        let_see(b, by_chance(b) % STORES);
    b->store[b->stores].to = to;
    memcpy(&b->store[b->stores++].v, from, sizeof(piece));
}

void fibers_load(void *to, const void *from)
{
    struct block *b = block;
    const uint32_t i = find_store(b, from);
    const piece v = i < b->stores ? b->store[i].v : read_piece(from);

    memcpy(to, &v, sizeof v);
}

void fibers_fence(void)
{
    struct block *b = block;

    while (b->stores)
        let_see(b, by_chance(b) % b->stores);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* ---- turns ------------------------------------------------------------------------------------------ */

static void add_ready(struct block *b, uint32_t thread)
{
    b->fiber[thread].place = b->n_ready;
    b->ready[b->n_ready++] = thread;
}

static void remove_ready(struct block *b, uint32_t thread)
{
    const uint32_t place = b->fiber[thread].place, last = b->ready[--b->n_ready];

    b->ready[place] = last;
    b->fiber[last].place = place;
}

/* Whoever can go on. */
static uint32_t choose(struct block *b)
{
    if (!b->n_ready)
        abort(); /* all wait for some who are not to come: threads of a warp that went different ways */
    return b->ready[by_chance(b) % b->n_ready];
}

static void take_turn(void)
{
    struct block *b = block;
    const uint32_t from = b->current, to = choose(b);

    if (to == from)
        return;
    b->current = to;
    go_to(&b->fiber[from], &b->fiber[to]);
    fiber_thread.x = from;
}

void fibers_look(void)
{
    struct block *b = block;

    b->looks++;
    if (b->stores && by_chance(b) % LOOKS == 0)
        let_see(b, by_chance(b) % b->stores);
    if (b->looks % IDLE_LOOKS == 0)
        nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    if (b->looks % LOOKS == 0)
        take_turn();
}

void fibers_wrote(void)
{
    block->looks = 0;
}

static void be_late(struct block *b, uint32_t one_in)
{
    if (by_chance(b) % one_in == 0)
        nanosleep(&(struct timespec){ .tv_nsec = by_chance(b) % LATE_NS }, NULL);
}

void fibers_counted(void)
{
    fibers_wrote();
    be_late(block, LATE_COUNTS);
}

void fibers_arrived(void)
{
    be_late(block, LATE_ARRIVALS);
}

/* ---- meetings ----------------------------------------------------------------------------------------- */

static void open_meeting(struct meeting *meeting)
{
    struct block *b = block;

    meeting->here = 0;
    meeting->opened++;
    if (meeting == &b->all) { /* warps that look for something meet all the time */
        b->looks = 0;
        b->any[meeting->opened % 2] = false;
    }
    for (uint32_t i = meeting->first; i < meeting->first + meeting->threads; i++)
        if (b->fiber[i].waits == meeting) {
            b->fiber[i].waits = NULL;
            add_ready(b, i);
        }
}

static void meet(struct meeting *meeting)
{
    struct block *b = block;

    if (++meeting->here == meeting->alive) {
        open_meeting(meeting);
        return;
    }
    b->fiber[b->current].waits = meeting;
    remove_ready(b, b->current);
    take_turn();
}

static void part(struct meeting *meeting)
{
    if (--meeting->alive && meeting->here == meeting->alive)
        open_meeting(meeting);
}

void fibers_meet_block(void)
{
    meet(&block->all);
}

void fibers_meet_warp(void)
{
    meet(&block->warp[fiber_thread.x / LANES]);
}

/* Nobody comes to the exchange after the next one before all have read this one's. */
const uint64_t *fibers_exchange(uint64_t value)
{
    const uint32_t warp = fiber_thread.x / LANES;
    uint64_t *given = block->given[warp][block->warp[warp].opened % 2];

    given[fiber_thread.x % LANES] = value;
    fibers_meet_warp();
    return given;
}

/* As an exchange of the block: what was given for the meeting before this one all have read. */
bool fibers_any_of_block(bool value)
{
    bool *any = &block->any[block->all.opened % 2];

    *any = *any || value;
    fibers_meet_block();
    return *any;
}

/* ---- between grids ------------------------------------------------------------------------------------ */

void fibers_await_stream(void)
{
    const struct fibers_grid *ahead = block->grid->ahead;

    while (ahead && !__atomic_load_n(&ahead->over, __ATOMIC_SEQ_CST))
        fibers_look();
}

void fibers_let_next_come(void)
{
    if (!block->lets)
        __atomic_add_fetch(&block->grid->letting, 1, __ATOMIC_SEQ_CST);
    block->lets = true;
}

/* ---- a block -------------------------------------------------------------------------------------------- */

static void enter(void)
{
    struct block *b = block;
    const uint32_t own = b->current;

    fiber_thread.x = own;
    b->grid->body(b->grid->args);
    remove_ready(b, own);
    part(&b->warp[own / LANES]);
    part(&b->all);
    if (b->all.alive) {
        b->current = choose(b);
        go_to(&b->fiber[own], &b->fiber[b->current]);
    } else {
        go_to(&b->fiber[own], &b->home);
    }
    abort(); /* nobody comes back to who is over */
}

static void *run_block(void *arg)
{
    struct block *b = arg;

    block = b;
    fiber_block.x = b->index;
    fiber_blocks.x = b->grid->blocks;
    fiber_shared = b->shared;
    be_late(b, LATE_STARTS);
    b->current = choose(b);
    go_to(&b->home, &b->fiber[b->current]);
    fibers_fence();
    fibers_let_next_come();
    return NULL;
}

static void *allocated(void *memory)
{
    if (!memory)
        abort(); /* a test's machine that has no memory for stacks runs no test */
    return memory;
}

/* Stacks of threads that are over, for the next ones: a new one's pages are made when they are first written.  This is at
 * the top of each, in a page that the next thread writes too. */
struct spare {
    struct spare *next;
};

static pthread_mutex_t spares_lock = PTHREAD_MUTEX_INITIALIZER;
static struct spare *spares;

static void *take_stack(void)
{
    struct spare *spare;

    (void)pthread_mutex_lock(&spares_lock);
    spare = spares;
    if (spare)
        spares = spare->next;
    (void)pthread_mutex_unlock(&spares_lock);
    return spare ? (uint8_t *)(spare + 1) - STACK : allocated(aligned_alloc(64, STACK));
}

static void give_stack(void *stack)
{
    struct spare *spare = (struct spare *)(void *)((uint8_t *)stack + STACK) - 1;

    (void)pthread_mutex_lock(&spares_lock);
    spare->next = spares;
    spares = spare;
    (void)pthread_mutex_unlock(&spares_lock);
}

static void free_block(struct block *b)
{
    for (uint32_t i = 0; i < b->threads; i++)
        give_stack(b->fiber[i].stack);
    free(b->shared);
    free(b->ready);
    free(b);
}

static struct block *new_block(uint32_t threads, uint32_t shared_bytes)
{
    const size_t shared = (shared_bytes + 255ull) / 128 * 128;
    struct block *b = allocated(calloc(1, sizeof *b + threads * sizeof *b->fiber));

    b->threads = b->all.threads = b->all.alive = threads;
    b->ready = allocated(calloc(threads, sizeof *b->ready));
    b->shared = memset(allocated(aligned_alloc(128, shared)), 0xcd, shared);
    for (uint32_t i = 0; i < threads; i++) {
        struct meeting *warp = &b->warp[i / LANES];

        warp->first = i / LANES * LANES;
        warp->alive = ++warp->threads;
        add_ready(b, i);
        b->fiber[i].stack = take_stack();
        prepare(&b->fiber[i], enter);
    }
    return b;
}

static struct block *block_of(struct fibers_grid *grid, uint32_t index, uint32_t run)
{
    struct block *b = new_block(grid->threads, grid->shared_bytes);

    b->grid = grid;
    b->index = index;
    b->chance = run * 0x9e3779b9u + index * 0x85ebca6bu + 1;
    b->chance += !b->chance;
    return b;
}

void fibers_run(struct fibers_grid *grid)
{
    static uint32_t runs;
    const uint32_t run = __atomic_add_fetch(&runs, 1, __ATOMIC_RELAXED);
    pthread_t *thread = allocated(calloc(grid->blocks, sizeof *thread));
    struct block **b = allocated(calloc(grid->blocks, sizeof(struct block *)));

    for (uint32_t i = 0; i < grid->blocks; i++)
        b[i] = block_of(grid, i, run);
    for (uint32_t i = 0; i < grid->blocks; i++)
        if (pthread_create(&thread[i], NULL, run_block, b[i]))
            abort();
    for (uint32_t i = 0; i < grid->blocks; i++) {
        (void)pthread_join(thread[i], NULL);
        free_block(b[i]);
    }
    free(b);
    free(thread);
    __atomic_store_n(&grid->over, 1, __ATOMIC_SEQ_CST);
}
