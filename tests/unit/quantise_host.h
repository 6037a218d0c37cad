/* How the GPUs' kernels quantise a row, on the host.  hidden: a multiple of 16. */
#ifndef QUANTISE_HOST_H
#define QUANTISE_HOST_H

#include <stdint.h>

#include "ep_types.h"

#ifdef __cplusplus
extern "C" {
#endif

void quantise_host(ep_dtype dtype, const void *row, uint32_t hidden, ep_scale_format format, uint8_t *codes,
                   void *scales);

/* amax / 448, as the kernels divide where the quotient is a normal number. */
float quantise_host_by_448(float amax);

#ifdef __cplusplus
}
#endif
#endif
