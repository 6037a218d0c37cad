/* Windows of the host backend: sealed-size memfds, and who has how much of them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ep_node.h"
#include "node_private.h"

#define OWNERS_NAMED 3

static ep_status make_memfd(const char *name, uint64_t bytes, int *out, struct ep_error *error)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "window %s: cannot make its memory", name);
    /* The size is final, so that no worker can make us fault by cutting it; and so are the seals,
     * else a worker could forbid the next one to map it for writing. */
    if (ftruncate(fd, (off_t)bytes) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "window %s: cannot give it %s", name,
                       ep_bytes_text(bytes).text);
        close(fd);
        return EP_RESOURCE_EXHAUSTED;
    }
    *out = fd;
    return EP_OK;
}

static struct window *make_record(const char *name, void *base, uint64_t bytes)
{
    struct window *window = calloc(1, sizeof *window);

    if (!window)
        return NULL;
    window->base = base;
    window->bytes = bytes;
    window->owner = strndup(name, strcspn(name, "/"));
    if (!window->owner) {
        free(window);
        return NULL;
    }
    return window;
}

ep_status ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                int *fd, void **base, struct ep_error *error)
{
    struct window *window;
    void *memory;
    int memfd = -1;
    ep_status status = make_memfd(name, bytes, &memfd, error);

    (void)device; /* all host devices have the same memory */
    if (status)
        return status;
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (memory == MAP_FAILED) {
        ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "window %s: cannot map %s", name,
                       ep_bytes_text(bytes).text);
        close(memfd);
        return EP_RESOURCE_EXHAUSTED;
    }
    window = make_record(name, memory, bytes);
    if (!window) {
        munmap(memory, bytes);
        close(memfd);
        return ep_error_set(error, EP_NO_MEMORY, "window %s: out of memory", name);
    }
    pthread_mutex_lock(&node->windows_mutex);
    window->next = node->windows;
    node->windows = window;
    pthread_mutex_unlock(&node->windows_mutex);
    *fd = memfd;
    *base = memory;
    return EP_OK;
}

static void forget(struct ep_node *node, const void *base)
{
    pthread_mutex_lock(&node->windows_mutex);
    for (struct window **link = &node->windows; *link; link = &(*link)->next) {
        struct window *window = *link;

        if (window->base != base)
            continue;
        *link = window->next;
        free(window->owner);
        free(window);
        break;
    }
    pthread_mutex_unlock(&node->windows_mutex);
}

void ep_node_window_destroy(struct ep_node *node, uint32_t device, int fd, void *base, uint64_t bytes)
{
    (void)device;
    forget(node, base);
    munmap(base, bytes);
    close(fd);
}

/* ---- who has the memory --------------------------------------------------------- */

struct share {
    const char *owner;
    uint64_t bytes;
};

static int larger_first(const void *a, const void *b)
{
    const struct share *x = a, *y = b;

    return x->bytes < y->bytes ? 1 : x->bytes > y->bytes ? -1 : strcmp(x->owner, y->owner);
}

static size_t sum_by_owner(const struct ep_node *node, struct share *shares)
{
    size_t n = 0, i;

    for (const struct window *w = node->windows; w; w = w->next) {
        for (i = 0; i < n && strcmp(shares[i].owner, w->owner); i++)
            ;
        if (i == n)
            shares[n++] = (struct share){ .owner = w->owner };
        shares[i].bytes += w->bytes;
    }
    return n;
}

/* *shares is for the caller to free; the names in it are those of the windows. */
static size_t collect(const struct ep_node *node, struct share **shares)
{
    size_t n = 0;

    for (const struct window *w = node->windows; w; w = w->next)
        n++;
    *shares = n ? calloc(n, sizeof **shares) : NULL;
    if (!*shares)
        return 0;
    n = sum_by_owner(node, *shares);
    qsort(*shares, n, sizeof **shares, larger_first);
    return n;
}

void ep_node_describe_owners(struct ep_node *node, char *text, size_t size)
{
    size_t n, used = 0;
    struct share *shares;

    *text = '\0';
    pthread_mutex_lock(&node->windows_mutex);
    n = collect(node, &shares);
    for (size_t i = 0; i < n && i < OWNERS_NAMED && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%sgroup %s %.1f MiB", i ? ", " : "",
                                 shares[i].owner, (double)shares[i].bytes / (1 << 20));
    if (n > OWNERS_NAMED && used < size)
        snprintf(text + used, size - used, " and %zu more", n - OWNERS_NAMED);
    free(shares);
    pthread_mutex_unlock(&node->windows_mutex);
}
