/* Any bytes as a frame, or a good frame with some of its words changed: parsed as they are, or refused with a
 * sentence. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "attach_frame.h"

static void check(bool good)
{
    if (!good)
        abort();
}

/* Whoever reads a frame of these types relies on it. */
static void check_promises(const struct ep_attach_frame *frame)
{
    const bool asks = frame->type == EP_ATTACH_REGISTER || frame->type == EP_ATTACH_UNREGISTER;
    const bool turns = frame->type >= EP_ATTACH_ASK && frame->type <= EP_ATTACH_TURN;

    check(frame->type >= EP_ATTACH_HELLO && frame->type <= EP_ATTACH_TURN);
    check(strlen(frame->text) < sizeof frame->text);
    check(frame->offset == 0 || frame->type == EP_ATTACH_REGISTER || frame->type == EP_ATTACH_WELCOME
          || frame->type == EP_ATTACH_PROMISE);
    check(!turns || frame->epoch != 0);
    check(frame->value != EP_ATTACH_NO_TURN || frame->type != EP_ATTACH_TURN);
    check(frame->type != EP_ATTACH_PROMISE || frame->status == EP_OK || frame->status == EP_ABORTED);
    check(frame->type != EP_ATTACH_PROMISE || (frame->offset <= EP_ATTACH_FURTHEST && frame->value <= frame->offset + 1));
    check(frame->region == 0 || asks);
    check(frame->value != 0 || (frame->type != EP_ATTACH_REGISTER && frame->type != EP_ATTACH_WELCOME));
    check(frame->count == 0 || (frame->type != EP_ATTACH_HELLO && frame->type != EP_ATTACH_BYE));
    if (frame->type == EP_ATTACH_ANSWER || frame->type == EP_ATTACH_REFUSED)
        check(strcmp(ep_status_name((ep_status)frame->status), "?") != 0);
}

static void parse(const void *bytes, size_t n)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_attach_frame frame;

    if (ep_attach_frame_parse(bytes, n, &frame, &error) == EP_OK) {
        check(n == sizeof frame && memcmp(&frame, bytes, n) == 0);
        check_promises(&frame);
    } else {
        check(error.status == EP_PROTOCOL && error.text[0] != '\0');
    }
}

/* Type, then (word, 4 bytes) as often as there are any: the magic is not left to chance. */
static void parse_patched(const uint8_t *bytes, size_t n)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, (enum ep_attach_type)(n ? bytes[0] % (EP_ATTACH_TURN + 1u) : 0));
    frame.value = 4096;
    for (size_t at = 1; at + 5 <= n; at += 5)
        memcpy((uint8_t *)&frame + bytes[at] % (sizeof frame / 4) * 4, bytes + at + 1, 4);
    parse(&frame, sizeof frame);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    parse(bytes, n);
    parse_patched(bytes, n);
    return 0;
}
