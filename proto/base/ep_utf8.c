#include "ep_utf8.h"

#include <string.h>

size_t ep_utf8_length(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;

    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4) /* continuation, overlong, above U+10FFFF */
        return 0;
    if ((p[1] & 0xc0u) != 0x80u)
        return 0;
    if (p[0] < 0xe0)
        return 2;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) /* overlong, surrogate */
        || (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    if ((p[2] & 0xc0u) != 0x80u)
        return 0;
    if (p[0] < 0xf0)
        return 3;
    return (p[3] & 0xc0u) == 0x80u ? 4 : 0;
}

bool ep_utf8_is_valid(const char *text)
{
    size_t n = 1;

    for (; *text && n; text += n)
        n = ep_utf8_length(text);
    return n != 0;
}

size_t ep_utf8_fit(const char *text, size_t most)
{
    size_t fit = strnlen(text, most);

    if (!text[fit])
        return fit;
    for (size_t back = 1; back < 4 && back <= fit; back++)
        if (ep_utf8_length(text + fit - back) > back)
            return fit - back;
    return fit;
}

void ep_utf8_mend(char *text)
{
    while (*text) {
        const size_t n = ep_utf8_length(text);

        if (n == 0)
            *text = '?';
        text += n ? n : 1;
    }
}
