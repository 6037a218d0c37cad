/* Communicators that come and go. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "gin_tests.h"

enum { TIMES = 50, WARM = 5 };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MORE_MAPPINGS = 4 * TIMES }; /* sanitizers map as they like */
#else
enum { MORE_MAPPINGS = 16 }; /* so does the C library, seldom */
#endif

static const struct mix little = { .puts = 4, .bytes = 4096, .slot_bytes = 32 << 10 };

/* What a process has, as the kernel counts it. */
struct held {
    uint32_t descriptors, threads, mappings;
};

static uint32_t entries(const char *path)
{
    DIR *folder = opendir(path);
    uint32_t n = 0;

    while (folder && readdir(folder))
        n++;
    if (folder)
        closedir(folder);
    return n;
}

static uint32_t lines(const char *path)
{
    FILE *file = fopen(path, "re");
    char line[4096];
    uint32_t n = 0;

    while (file && fgets(line, sizeof line, file))
        n += strchr(line, '\n') != NULL;
    if (file)
        fclose(file);
    return n;
}

static struct held count_held(void)
{
    return (struct held){ .descriptors = entries("/proc/self/fd"),
                          .threads = entries("/proc/self/task"),
                          .mappings = lines("/proc/self/maps") };
}

static ep_status make_use_close(struct player *player, struct ep_error *error)
{
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &little, &x, error);
    if (status == EP_OK)
        status = exchange_rounds(&x, 1, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

static ep_status compare(const struct held *before, const struct held *after, struct ep_error *error)
{
    const int times = TIMES - WARM;

    if (after->descriptors > before->descriptors)
        return ep_error_set(error, EP_VERIFY_FAILED, "%u descriptors became %u, over %d communicators",
                            before->descriptors, after->descriptors, times);
    if (after->threads > before->threads)
        return ep_error_set(error, EP_VERIFY_FAILED, "%u threads became %u, over %d communicators", before->threads,
                            after->threads, times);
    if (after->mappings > before->mappings + MORE_MAPPINGS)
        return ep_error_set(error, EP_VERIFY_FAILED, "%u mappings became %u, over %d communicators", before->mappings,
                            after->mappings, times);
    return EP_OK;
}

ep_status gin_case_churn(struct player *player, struct ep_error *error)
{
    struct held before = { 0 }, after;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < TIMES && status == EP_OK; i++) {
        status = make_use_close(player, error);
        if (i + 1 == WARM)
            before = count_held();
    }
    after = count_held();
    return status == EP_OK ? compare(&before, &after, error) : status;
}

/* NCCL finalizes a plugin with the last communicator, and may begin again. */
ep_status gin_case_restart(struct player *player, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < 4 && status == EP_OK; i++) {
        status = make_use_close(player, error);
        if (status == EP_OK)
            status = player_restart(player, error);
    }
    return status;
}
