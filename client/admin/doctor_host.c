/* Findings about this machine: kernel, processors, memory, limits, clocks. */
#include "doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "ep_clock.h"

enum {
    MIN_KERNEL_MAJOR = 5,
    MIN_KERNEL_MINOR = 3, /* pidfd_open(2) */
    MIN_FILES = 1024,     /* a server has some descriptors for every rank and connection */
    PROBE_BYTES = 2 << 20
};
static const uint64_t small_shm = 256ull << 20;
static const uint64_t small_memory = 512ull << 20;
static const uint64_t year_2024_us = 1704067200ull * 1000000;

static bool read_line(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    bool good = file && fgets(out, (int)size, file);

    if (file)
        fclose(file);
    if (good)
        out[strcspn(out, "\n")] = '\0';
    return good;
}

static bool read_number(const char *path, uint64_t *out)
{
    char line[64];

    return read_line(path, line, sizeof line) && ep_text_parse_u64(line, UINT64_MAX, out);
}

/* ---- kernel, processors -------------------------------------------------------------- */

static void check_kernel(struct ep_report *report)
{
    struct utsname name;
    int major = 0, minor = 0;

    uname(&name);
    if (sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
        (major < MIN_KERNEL_MAJOR || (major == MIN_KERNEL_MAJOR && minor < MIN_KERNEL_MINOR)))
        ep_report_add(
            report, EP_FINDING_WARN, "kernel", "run Linux 5.3 or newer",
            "%s %s, %s: without pidfd_open(2) the death of a worker that holds on to its window is seen late",
            name.sysname, name.release, name.machine);
    else
        ep_report_add(report, EP_FINDING_OK, "kernel", NULL, "%s %s, %s", name.sysname, name.release,
                      name.machine);
}

static void check_cpus(struct ep_report *report)
{
    long configured = sysconf(_SC_NPROCESSORS_ONLN);
    char line[64];
    long long quota, period;
    cpu_set_t set;
    int usable = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)configured;

    if (read_line("/sys/fs/cgroup/cpu.max", line, sizeof line) &&
        sscanf(line, "%lld %lld", &quota, &period) == 2 && period > 0 && quota < period * usable)
        ep_report_add(
            report, EP_FINDING_WARN, "cpus", "give the container whole processors, or no limit",
            "%d, but the cgroup allows the time of %.1f: threads that wait for peers are stopped in between",
            usable, (double)quota / (double)period);
    else if (usable < 2)
        ep_report_add(report, EP_FINDING_WARN, "cpus", "give the server at least two processors",
                      "%d: the server and the workers take turns, so every op waits for the scheduler",
                      usable);
    else
        ep_report_add(report, EP_FINDING_OK, "cpus", NULL, "%d usable of %ld", usable, configured);
}

/* ---- memory -------------------------------------------------------------------------- */

static uint64_t meminfo(const char *key)
{
    FILE *file = fopen("/proc/meminfo", "re");
    size_t length = strlen(key);
    char line[128];
    uint64_t kib = 0;

    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, key, length) == 0 && line[length] == ':')
            kib = strtoull(line + length + 1, NULL, 10);
    if (file)
        fclose(file);
    return kib * 1024;
}

static void check_memory(struct ep_report *report)
{
    uint64_t all = meminfo("MemTotal"), available = meminfo("MemAvailable"), limit, used;
    const char *bound = "";

    if (read_number("/sys/fs/cgroup/memory.max", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", &used) &&
        (limit > used ? limit - used : 0) < available) {
        available = limit > used ? limit - used : 0;
        bound = " (bound by the cgroup)";
    }
    report->memory_available = available;
    ep_report_add(report, available < small_memory ? EP_FINDING_WARN : EP_FINDING_OK, "memory",
                  "free memory or raise the limit: a window takes tens of MiB per rank",
                  "%s available of %s%s", ep_text_size(available).s, ep_text_size(all).s, bound);
}

static void check_shm(struct ep_report *report)
{
    struct statvfs info;

    if (statvfs("/dev/shm", &info) != 0) {
        ep_report_add(report, EP_FINDING_WARN, "/dev/shm", "mount a tmpfs there",
                      "is not there (%s): NCCL and the workers' frameworks use it; windows do not",
                      strerror(errno));
        return;
    }
    uint64_t size = (uint64_t)info.f_blocks * info.f_frsize, left = (uint64_t)info.f_bavail * info.f_frsize;
    ep_report_add(
        report, left < small_shm ? EP_FINDING_WARN : EP_FINDING_OK, "/dev/shm",
        "mount it larger (container runtimes: --shm-size; Kubernetes: an emptyDir with medium Memory)",
        "%s free of %s; for NCCL and the workers' frameworks, windows do not need it", ep_text_size(left).s,
        ep_text_size(size).s);
}

/* Does with a small memfd what the server does with a window's. */
static const char *try_memfd(void)
{
    const char *failed = NULL;
    int fd = memfd_create("ep-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return "memfd_create(2)";
    if (ftruncate(fd, PROBE_BYTES) != 0)
        failed = "ftruncate(2) of a memfd";
    else if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        failed = "sealing a memfd";
    else if (fallocate(fd, 0, 0, PROBE_BYTES) != 0)
        failed = "fallocate(2) of a memfd";
    int cause = errno;
    close(fd);
    errno = cause;
    return failed;
}

static void check_memfd(struct ep_report *report)
{
    const char *failed = try_memfd();
    struct rlimit size;

    if (failed)
        ep_report_add(report, EP_FINDING_FAIL, "memfd",
                      "allow memfd_create (seccomp profile, vm.memfd_noexec), RLIMIT_FSIZE and memory",
                      "%s: %s: windows of the host backend are memfds", failed, strerror(errno));
    else if (getrlimit(RLIMIT_FSIZE, &size) == 0 && size.rlim_cur != RLIM_INFINITY)
        ep_report_add(report, EP_FINDING_WARN, "memfd",
                      "ulimit -f unlimited, or LimitFSIZE=infinity in the unit",
                      "work, but RLIMIT_FSIZE is %s and bounds a window", ep_text_size(size.rlim_cur).s);
    else
        ep_report_add(report, EP_FINDING_OK, "memfd", NULL, "can be made, sized and sealed");
}

/* ---- limits -------------------------------------------------------------------------- */

static void check_files(struct ep_report *report)
{
    struct rlimit limit = { 0, 0 };

    getrlimit(RLIMIT_NOFILE, &limit);
    ep_report_add(report, limit.rlim_cur < MIN_FILES ? EP_FINDING_WARN : EP_FINDING_OK, "nofile",
                  "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
                  "RLIMIT_NOFILE is %" PRIu64 " (hard %s) here", (uint64_t)limit.rlim_cur,
                  limit.rlim_max == RLIM_INFINITY ? "unlimited" : ep_text_u64(limit.rlim_max).s);
}

static void check_memlock(struct ep_report *report)
{
    struct rlimit limit = { 0, 0 };
    bool needed = report->has_gpu || report->has_rdma;

    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur == RLIM_INFINITY)
        ep_report_add(report, EP_FINDING_OK, "memlock", NULL, "RLIMIT_MEMLOCK is unlimited here");
    else
        ep_report_add(report, needed ? EP_FINDING_WARN : EP_FINDING_OK, "memlock",
                      "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
                      "RLIMIT_MEMLOCK is %s here%s", ep_text_size(limit.rlim_cur).s,
                      needed ? ": registering memory with a NIC or GPU may fail"
                             : ", which the host backend does not need");
}

/* ---- clocks -------------------------------------------------------------------------- */

static void check_clock(struct ep_report *report)
{
    struct timex state = { .modes = 0 };
    char source[64] = "unknown";
    uint64_t now = ep_clock_wall_us(), first = ep_clock_ns(), second = ep_clock_ns();
    int result = adjtimex(&state);

    (void)read_line("/sys/devices/system/clocksource/clocksource0/current_clocksource", source,
                    sizeof source);
    if (now < year_2024_us)
        ep_report_add(report, EP_FINDING_FAIL, "clock", "set the clock; run chrony or systemd-timesyncd",
                      "it is %s here: certificates and times in records are wrong", ep_text_time(now).s);
    else if (second < first)
        ep_report_add(report, EP_FINDING_FAIL, "clock",
                      "report this to whoever makes the kernel or the hypervisor",
                      "the monotonic clock runs backwards");
    else if (result == TIME_ERROR || (state.status & STA_UNSYNC) != 0)
        ep_report_add(report, EP_FINDING_WARN, "clock", "run chrony or systemd-timesyncd",
                      "%s, but not synchronised: times of several nodes cannot be compared (source %s)",
                      ep_text_time(now).s, source);
    else
        ep_report_add(report, EP_FINDING_OK, "clock", NULL, "%s, synchronised, source %s",
                      ep_text_time(now).s, source);
}

void ep_doctor_host(struct ep_report *report)
{
    check_kernel(report);
    check_cpus(report);
    check_memory(report);
    check_shm(report);
    check_memfd(report);
    check_files(report);
    check_memlock(report);
    check_clock(report);
}
