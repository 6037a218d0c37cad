/* Rows of an HT dispatch: how many a rank sends to another, and each to its place there. */
#include "ht.h"

#include <string.h>

/* Is choice j the first of its token that names this expert of this rank? */
static bool first_choice(const struct ep_host_choice *choice, uint32_t j)
{
    if (choice[j].rank < 0)
        return false;
    for (uint32_t i = 0; i < j; i++)
        if (choice[i].rank == choice[j].rank && choice[i].local == choice[j].local)
            return false;
    return true;
}

/* Rows that this rank sends to d, and to each of its experts. */
void ht_count_rows(const struct ht *h, uint32_t d, uint32_t *counts)
{
    const struct ep_host_handle *handle = h->handle;

    memset(counts, 0, (1ull + ht_local(h)) * sizeof *counts);
    counts[0] = handle->dest_first[d + 1] - handle->dest_first[d];
    for (uint32_t i = handle->dest_first[d]; i < handle->dest_first[d + 1]; i++) {
        const struct ep_host_choice *choice = handle->choices + (uint64_t)handle->dest_token[i] * handle->top_k;

        for (uint32_t j = 0; j < handle->top_k; j++)
            if (choice[j].rank == (int32_t)d && first_choice(choice, j))
                counts[1 + choice[j].local]++;
    }
}

bool ht_place_row(const struct ep_host_team *team, struct ep_host_grant *at, uint32_t d, uint8_t *window,
                  const struct ep_host_choice *choice, uint32_t top_k, uint32_t token, const uint8_t *row,
                  const uint8_t *scale)
{
    const struct ep_layout_map *map = &team->map;
    struct ep_row_header *header =
        (struct ep_row_header *)(void *)(window + map->ht_headers + (uint64_t)at->flat * map->header_bytes);
    uint32_t to = UINT32_MAX;

    if (at->rows == 0)
        return false;
    for (uint32_t j = 0; at->packed && j < top_k; j++)
        if (choice[j].rank == (int32_t)d && first_choice(choice, j)) {
            uint32_t l = (uint32_t)choice[j].local;

            if (at->next[l] == at->end[l])
                return false;
            to = to == UINT32_MAX ? at->next[l] : to;
            at->next[l]++;
        }
    if (!at->packed)
        to = at->flat;
    ep_host_header_fill(team, choice, top_k, token, d, header);
    at->flat++;
    at->rows--;
    if (at->out)
        ep_host_copy_row(window + at->out + (uint64_t)to * at->row_bytes, row, at->row_bytes);
    if (at->out && at->scales)
        memcpy(window + at->scales + (uint64_t)to * at->scale_bytes, scale, at->scale_bytes);
    return true;
}
