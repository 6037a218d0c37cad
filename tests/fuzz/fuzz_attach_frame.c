/* Any bytes as a frame: parsed as they are or refused with a sentence. */
#include <stdlib.h>
#include <string.h>

#include "attach_frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_attach_frame frame;

    if (ep_attach_frame_parse(bytes, n, &frame, &error) != EP_OK) {
        if (error.status != EP_PROTOCOL || error.text[0] == '\0')
            abort();
        return 0;
    }
    if (n != sizeof frame || memcmp(&frame, bytes, n) != 0 || strlen(frame.text) >= sizeof frame.text)
        abort();
    return 0;
}
