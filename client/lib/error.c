#include <string.h>

#include "client_private.h"

/* No versioned struct will have more: what says so was not set. */
#define STRUCT_BYTES_MAX 4096u

static _Thread_local struct ep_error last = EP_ERROR_INIT;

struct ep_error *last_error(void)
{
    return &last;
}

const char *ep_error_message(void)
{
    return last.text;
}

static size_t size_of(const void *versioned)
{
    size_t size;

    memcpy(&size, versioned, sizeof size);
    return size;
}

/* They begin with a size_t, so that theirs is a multiple of its own, and what ends in the middle of a pointer is none. */
static bool is_size(size_t size)
{
    return size >= sizeof size && size % sizeof size == 0 && size <= STRUCT_BYTES_MAX;
}

ep_status check_struct(const char *type, const void *given)
{
    if (!given)
        return ep_error_set(&last, EP_INVALID_ARGUMENT, "%s is NULL", type);
    if (!is_size(size_of(given)))
        return ep_error_set(&last, EP_INVALID_ARGUMENT, "%s.size is %zu: set it to sizeof(%s)", type, size_of(given),
                            type);
    return EP_OK;
}

ep_status take_struct(const char *type, const void *given, void *copy, size_t copy_size)
{
    if (check_struct(type, given) != EP_OK)
        return EP_INVALID_ARGUMENT;

    const size_t size = size_of(given);

    for (size_t i = copy_size; i < size; i++)
        if (((const uint8_t *)given)[i] != 0)
            return ep_error_set(&last, EP_INVALID_ARGUMENT,
                                "%s has %zu bytes, with something beyond the %zu that this libepclient "
                                "knows: a newer one is needed",
                                type, size, copy_size);
    memset(copy, 0, copy_size);
    memcpy(copy, given, size < copy_size ? size : copy_size);
    return EP_OK;
}

ep_status give_struct(const char *type, void *given, const void *full, size_t full_size)
{
    if (check_struct(type, given) != EP_OK)
        return EP_INVALID_ARGUMENT;

    const size_t size = size_of(given);

    memcpy(given, full, size < full_size ? size : full_size);
    memcpy(given, &size, sizeof size);
    return EP_OK;
}

void copy_text(char *to, size_t size, const char *from)
{
    const size_t n = strnlen(from, size - 1);

    memcpy(to, from, n);
    to[n] = '\0';
}
