#include "message.h"

#include <string.h>

static bool signal_valid(const struct ep_gin_message *m)
{
    if (m->signal_op == 0)
        return m->signal_region == 0;
    return (m->signal_op == NCCL_SIGNAL_INC || m->signal_op == NCCL_SIGNAL_ADD) && m->signal_region != 0 &&
           m->signal_offset % sizeof(uint64_t) == 0;
}

static bool data_valid(const struct ep_gin_message *m, uint32_t piece_bytes)
{
    const bool payload = m->flags & EP_GIN_PAYLOAD, whole = m->flags & EP_GIN_WHOLE;

    if (m->total == 0)
        return m->bytes == 0 && m->region == 0 && m->flags == 0;
    if (whole)
        return m->bytes == 0 && !payload && m->total <= NCCL_MAX_BYTES && m->region != 0;
    return m->bytes > 0 && m->bytes <= m->total && m->total <= NCCL_MAX_BYTES && m->region != 0 &&
           (!payload || m->bytes <= piece_bytes);
}

bool ep_gin_message_valid(const struct ep_gin_message *m, uint32_t piece_bytes)
{
    return m->magic == EP_GIN_MAGIC && (m->flags & ~(EP_GIN_PAYLOAD | EP_GIN_WHOLE)) == 0 && signal_valid(m) &&
           data_valid(m, piece_bytes);
}

/* Looks at every byte, so that the time says nothing about where they differ. */
static bool same_token(const uint8_t *a, const uint8_t *b)
{
    uint8_t difference = 0;

    for (uint32_t i = 0; i < EP_GIN_TOKEN_BYTES; i++)
        difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}

bool ep_gin_hello_valid(const struct ep_gin_hello *h, const uint8_t token[EP_GIN_TOKEN_BYTES], uint32_t ranks)
{
    return h->magic == EP_GIN_MAGIC && h->protocol == EP_GIN_PROTOCOL && same_token(h->token, token) &&
           h->ranks == ranks && h->rank < ranks && h->connections >= 1 && h->connections <= EP_GIN_MAX_CONNECTIONS &&
           h->piece_bytes >= EP_GIN_MIN_PIECE && (h->purpose == EP_GIN_CONTROL || h->purpose == EP_GIN_DATA) &&
           h->index < EP_GIN_MAX_CONNECTIONS;
}

bool ep_gin_handle_valid(const struct ep_gin_handle *h)
{
    return h->magic == EP_GIN_MAGIC && h->protocol == EP_GIN_PROTOCOL && (h->family == 4 || h->family == 6);
}

bool ep_gin_same_host(const struct ep_gin_host_id *a, const struct ep_gin_host_id *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}
