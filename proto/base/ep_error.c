#include "ep_error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/*
 * Cut text of length (as vsnprintf counts it) to what fits, and not in the middle of a UTF-8
 * sequence: the text goes into JSON and into gRPC messages.
 */
static void cut(char *text, size_t size, int length)
{
    if (length < 0 || (size_t)length < size)
        return;

    size_t end = size - 1;
    size_t start = end;

    while (start > 0 && end - start < 3 && ((unsigned char)text[start - 1] & 0xc0u) == 0x80u)
        start--;
    if (start == 0)
        return;

    unsigned char lead = (unsigned char)text[start - 1];
    size_t want = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;

    if (want > end - start)
        text[start - 1] = '\0';
}

/* Arguments may point into error->text, so the new text is made beside it. */
static ep_status store(struct ep_error *error, ep_status status, const char *text)
{
    error->status = status;
    memcpy(error->text, text, strlen(text) + 1);
    return status;
}

ep_status ep_error_set(struct ep_error *error, ep_status status, const char *format, ...)
{
    char text[EP_ERROR_TEXT_MAX] = "";
    va_list args;

    if (!error)
        return status;
    va_start(args, format);
    cut(text, sizeof text, vsnprintf(text, sizeof text, format, args));
    va_end(args);
    return store(error, status, text);
}

ep_status ep_error_errno(struct ep_error *error, ep_status status, const char *format, ...)
{
    int saved = errno;
    char text[EP_ERROR_TEXT_MAX] = "", joined[EP_ERROR_TEXT_MAX], reason[128];
    va_list args;

    if (!error)
        return status;
    va_start(args, format);
    cut(text, sizeof text, vsnprintf(text, sizeof text, format, args));
    va_end(args);
    cut(joined, sizeof joined,
        snprintf(joined, sizeof joined, "%s: %s", text,
                 strerror_r(saved, reason, sizeof reason)));
    errno = saved;
    return store(error, status, joined);
}

ep_status ep_error_prefix(struct ep_error *error, const char *format, ...)
{
    char text[EP_ERROR_TEXT_MAX] = "", joined[EP_ERROR_TEXT_MAX];
    va_list args;

    if (!error)
        return EP_INTERNAL;
    va_start(args, format);
    cut(text, sizeof text, vsnprintf(text, sizeof text, format, args));
    va_end(args);
    cut(joined, sizeof joined, snprintf(joined, sizeof joined, "%s: %s", text, error->text));
    return store(error, error->status, joined);
}
