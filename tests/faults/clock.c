/*
 * The wall clock of one program, which a test moves while it runs: preloaded, it adds what a file says.
 *
 *   LD_PRELOAD=libep_wall_clock.so EP_WALL_CLOCK=FILE program      FILE: 8 bytes, nanoseconds, of this machine's order
 *
 * What it moves: CLOCK_REALTIME, its coarse twin and CLOCK_TAI of clock_gettime(), gettimeofday() and time().  What it
 * does not: monotonic clocks, timers, the times of files, and what a program asks the kernel for past the C library.
 *
 * Programs in Go, as etcd is, do not call the C library for the time, but what the kernel shows them as a library (the
 * vDSO), by the address in their auxiliary vector.  They are shown one of ours there: just enough of an ELF image for
 * two functions to be found in it.
 */
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ll

extern char **environ;

static const int64_t *moved_ns; /* in the file; others write it */
static int (*true_clock)(clockid_t clock, struct timespec *out);

/* ---- the time ------------------------------------------------------------------------------ */

static bool is_wall(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

static void move(struct timespec *t)
{
    const int64_t by = __atomic_load_n(moved_ns, __ATOMIC_RELAXED);
    int64_t ns = t->tv_nsec + by % NS_PER_S;

    t->tv_sec += by / NS_PER_S;
    if (ns >= NS_PER_S) {
        t->tv_sec++;
        ns -= NS_PER_S;
    } else if (ns < 0) {
        t->tv_sec--;
        ns += NS_PER_S;
    }
    t->tv_nsec = ns;
}

static int told_clock(clockid_t clock, struct timespec *out)
{
    const int rc = true_clock(clock, out);

    if (rc == 0 && is_wall(clock))
        move(out);
    return rc;
}

static int told_day(struct timeval *out, void *zone)
{
    struct timespec t;

    (void)zone;
    if (told_clock(CLOCK_REALTIME, &t))
        return -1;
    if (out)
        *out = (struct timeval){ .tv_sec = t.tv_sec, .tv_usec = t.tv_nsec / 1000 };
    return 0;
}

/* ---- for programs in Go ---------------------------------------------------------------------- */

enum { SYMBOLS = 3 }; /* the first is none */

static struct {
    Elf64_Ehdr header;
    Elf64_Phdr load, dynamic;
    Elf64_Dyn table[5]; /* the last is none */
    Elf64_Sym symbols[SYMBOLS];
    Elf64_Verdef version; /* of the image itself; its symbols have none */
    uint32_t hash[2 + 1 + SYMBOLS]; /* one bucket: all in one chain */
    char names[64];
} image;

/* All addresses in the image are distances from its beginning. */
static uint64_t distance(const void *at)
{
    return (uintptr_t)at - (uintptr_t)&image;
}

static void add_symbol(unsigned index, const char *name, uint64_t function, size_t *used)
{
    image.symbols[index] = (Elf64_Sym){ .st_name = (Elf64_Word)*used, .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC),
                                        .st_shndx = 1, .st_value = function - (uintptr_t)&image };
    *used += (size_t)snprintf(image.names + *used, sizeof image.names - *used, "%s", name) + 1;
}

static void make_image(void)
{
    size_t used = 1;

    image.header.e_phoff = distance(&image.load);
    image.header.e_phentsize = sizeof image.load;
    image.header.e_phnum = 2;
    image.load.p_type = PT_LOAD;
    image.dynamic.p_type = PT_DYNAMIC;
    image.dynamic.p_offset = distance(image.table);
    image.table[0] = (Elf64_Dyn){ .d_tag = DT_STRTAB, .d_un.d_ptr = distance(image.names) };
    image.table[1] = (Elf64_Dyn){ .d_tag = DT_SYMTAB, .d_un.d_ptr = distance(image.symbols) };
    image.table[2] = (Elf64_Dyn){ .d_tag = DT_HASH, .d_un.d_ptr = distance(image.hash) };
    image.table[3] = (Elf64_Dyn){ .d_tag = DT_VERDEF, .d_un.d_ptr = distance(&image.version) };
    image.version.vd_flags = VER_FLG_BASE;
    add_symbol(1, "__vdso_clock_gettime", (uintptr_t)told_clock, &used);
    add_symbol(2, "__vdso_gettimeofday", (uintptr_t)told_day, &used);
    image.hash[0] = 1;
    image.hash[1] = SYMBOLS;
    image.hash[2] = 1; /* the bucket begins at the first symbol, which leads to the second */
    image.hash[3 + 1] = 2;
}

/* The auxiliary vector lies behind the environment that the kernel gave the program. */
static void show_image(void)
{
    char **end = environ;

    while (*end)
        end++;
    for (Elf64_auxv_t *entry = (Elf64_auxv_t *)(void *)(end + 1); entry->a_type != AT_NULL; entry++)
        if (entry->a_type == AT_SYSINFO_EHDR)
            entry->a_un.a_val = (uintptr_t)&image;
}

/* ---- set-up, and what takes the place of the C library's ------------------------------------------ */

static void fail(const char *what)
{
    perror(what);
    abort(); /* a test that moved no clock would say that all is well */
}

static void set_up(void)
{
    const char *path = getenv("EP_WALL_CLOCK");
    const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *moved_ns, PROT_READ, MAP_SHARED, fd, 0);

    if (map == MAP_FAILED)
        fail("EP_WALL_CLOCK");
    close(fd);
    *(void **)&true_clock = dlsym(RTLD_NEXT, "clock_gettime");
    if (!true_clock)
        fail("clock_gettime");
    moved_ns = map;
}

__attribute__((constructor)) static void begin(void)
{
    if (!moved_ns)
        set_up();
    make_image();
    show_image();
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    if (!moved_ns)
        set_up(); /* another library's constructor ran before ours */
    return told_clock(clock, out);
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    if (!moved_ns)
        set_up();
    return told_day(out, zone);
}

time_t time(time_t *out)
{
    struct timespec t = { 0 };

    (void)clock_gettime(CLOCK_REALTIME, &t);
    if (out)
        *out = t.tv_sec;
    return t.tv_sec;
}
