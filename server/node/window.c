/* Windows: memory that workers map; and who has how much of it. */
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

/* ---- host: a memfd -------------------------------------------------------------- */

static ep_status create_host(struct ep_node_window *window, const char *name, struct ep_error *error)
{
    ep_status status = make_memfd(name, window->bytes, &window->fd, error);

    if (status)
        return status;
    window->base = mmap(NULL, window->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, window->fd, 0);
    if (window->base != MAP_FAILED)
        return EP_OK;
    ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "window %s: cannot map %s", name,
                   ep_bytes_text(window->bytes).text);
    close(window->fd);
    return EP_RESOURCE_EXHAUSTED;
}

static ep_status export_host(const struct ep_node_window *window, int *fd, struct ep_error *error)
{
    int copy = fcntl(window->fd, F_DUPFD_CLOEXEC, 0);

    if (copy < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a descriptor of a window");
    *fd = copy;
    return EP_OK;
}

/* ---- cuda: memory of a GPU -------------------------------------------------------- */

static ep_status create_cuda(struct ep_node_window *window, const char *name, struct ep_error *error)
{
    const struct device *device = &window->node->devices[window->device];
    ep_status status =
        window->node->cuda->memory_create(device->ordinal, window->bytes, &window->memory, error);

    if (status)
        return ep_error_prefix(error, "window %s: %s on %s", name, ep_bytes_text(window->bytes).text,
                               device->name);
    window->base = window->node->cuda->memory_at(window->memory);
    return EP_OK;
}

/* ---- both ------------------------------------------------------------------------ */

static void list(struct ep_node_window *window)
{
    struct ep_node *node = window->node;

    pthread_mutex_lock(&node->windows_mutex);
    window->next = node->windows;
    node->windows = window;
    pthread_mutex_unlock(&node->windows_mutex);
}

static void unlist(struct ep_node_window *window)
{
    struct ep_node *node = window->node;
    struct ep_node_window **link = &node->windows;

    pthread_mutex_lock(&node->windows_mutex);
    while (*link != window)
        link = &(*link)->next;
    *link = window->next;
    pthread_mutex_unlock(&node->windows_mutex);
}

static void free_record(struct ep_node_window *window)
{
    free(window->owner);
    free(window);
}

ep_status ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                struct ep_node_window **out, struct ep_error *error)
{
    struct ep_node_window *window = calloc(1, sizeof *window);
    ep_status status;

    if (!window || !(window->owner = strndup(name, strcspn(name, "/")))) {
        free(window);
        return ep_error_set(error, EP_NO_MEMORY, "window %s: out of memory", name);
    }
    window->node = node;
    window->device = device;
    window->bytes = bytes;
    window->fd = -1;
    status = node->cuda ? create_cuda(window, name, error) : create_host(window, name, error);
    if (status) {
        free_record(window);
        return status;
    }
    list(window);
    *out = window;
    return EP_OK;
}

ep_status ep_node_window_extend(struct ep_node_window *window, uint64_t bytes, struct ep_error *error)
{
    const struct device *device = &window->node->devices[window->device];
    ep_status status = window->node->cuda->memory_create(device->ordinal, bytes, &window->beside, error);

    if (status)
        return ep_error_prefix(error, "what goes to other nodes, of group %s: %s on %s", window->owner,
                               ep_bytes_text(bytes).text, device->name);
    window->beside_bytes = bytes;
    return EP_OK;
}

void *ep_node_window_beside(const struct ep_node_window *window)
{
    return window->beside ? window->node->cuda->memory_at(window->beside) : NULL;
}

void ep_node_window_destroy(struct ep_node_window *window)
{
    unlist(window);
    if (window->beside)
        window->node->cuda->memory_destroy(window->beside);
    if (window->memory) {
        window->node->cuda->memory_destroy(window->memory);
    } else {
        munmap(window->base, window->bytes);
        close(window->fd);
    }
    free_record(window);
}

void *ep_node_window_base(const struct ep_node_window *window)
{
    return window->base;
}

ep_status ep_node_window_export(const struct ep_node_window *window, int *fd, struct ep_error *error)
{
    return window->memory ? window->node->cuda->memory_export(window->memory, fd, error)
                          : export_host(window, fd, error);
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

static size_t sum_by_owner(const struct ep_node *node, int64_t device, struct share *shares)
{
    size_t n = 0, i;

    for (const struct ep_node_window *w = node->windows; w; w = w->next) {
        if (device >= 0 && w->device != device)
            continue;
        for (i = 0; i < n && strcmp(shares[i].owner, w->owner); i++)
            ;
        if (i == n)
            shares[n++] = (struct share){ .owner = w->owner };
        shares[i].bytes += w->bytes + w->beside_bytes;
    }
    return n;
}

/* *shares is for the caller to free; the names in it are those of the windows. */
static size_t collect(const struct ep_node *node, int64_t device, struct share **shares)
{
    size_t n = 0;

    for (const struct ep_node_window *w = node->windows; w; w = w->next)
        n++;
    *shares = n ? calloc(n, sizeof **shares) : NULL;
    if (!*shares)
        return 0;
    n = sum_by_owner(node, device, *shares);
    qsort(*shares, n, sizeof **shares, larger_first);
    return n;
}

void ep_node_describe_owners(struct ep_node *node, int64_t device, char *text, size_t size)
{
    size_t n, used = 0;
    struct share *shares;

    *text = '\0';
    pthread_mutex_lock(&node->windows_mutex);
    n = collect(node, device, &shares);
    for (size_t i = 0; i < n && i < OWNERS_NAMED && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%sgroup %s %.1f MiB", i ? ", " : "",
                                 shares[i].owner, (double)shares[i].bytes / (1 << 20));
    if (n > OWNERS_NAMED && used < size)
        snprintf(text + used, size - used, " and %zu more", n - OWNERS_NAMED);
    free(shares);
    pthread_mutex_unlock(&node->windows_mutex);
}
