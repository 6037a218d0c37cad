/* What goes to the store, by whom. */
#include <string.h>

#include "sim.h"

static struct tally tally;
static uint64_t *written, *opened; /* [sim.nodes] opened: connections that are open now */

void tally_reset(void)
{
    if (!written) {
        written = sim_allocate(sim.nodes, sizeof *written);
        opened = sim_allocate(sim.nodes, sizeof *opened);
    }
    memset(written, 0, sim.nodes * sizeof *written);
    tally = (struct tally){ 0 };
}

struct tally tally_read(void)
{
    struct tally now = tally;

    for (uint32_t i = 0; i < sim.nodes; i++)
        if (written[i] > now.most_writes)
            now.most_writes = written[i];
    return now;
}

void tally_call(size_t bytes)
{
    tally.calls++;
    tally.call_bytes += bytes;
}

void tally_opened(const struct sim_node *node)
{
    if (++opened[node->index] > tally.most_opened)
        tally.most_opened = opened[node->index];
}

void tally_closed(const struct sim_node *node)
{
    opened[node->index]--;
}

/* nodes/NAME/server, groups/GROUP/members/NAME; NULL: a record of the leader's, or of the election. */
static struct sim_node *writer(const char *key)
{
    const char *last = strrchr(key, '/');
    char name[64] = "";

    if (!strncmp(key, "nodes/", 6) && last)
        memcpy(name, key + 6, (size_t)(last - key - 6) < sizeof name ? (size_t)(last - key - 6) : 0);
    else if (strstr(key, "/members/") && last && strlen(last + 1) < sizeof name)
        memcpy(name, last + 1, strlen(last + 1));
    return sim_find(name);
}

static void count(const struct ep_store_write *write)
{
    const struct sim_node *node = writer(write->key);

    if (write->check_only)
        return;
    tally.writes++;
    tally.bytes += strlen(write->key) + write->size;
    if (node && written)
        written[node->index]++;
}

void __real_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n, ep_store_write_fn done,
                            void *user);
void __wrap_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n, ep_store_write_fn done,
                            void *user);

void __wrap_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n, ep_store_write_fn done,
                            void *user)
{
    tally.commits++;
    for (size_t i = 0; i < n; i++)
        count(&writes[i]);
    __real_ep_store_commit(store, writes, n, done, user);
}
