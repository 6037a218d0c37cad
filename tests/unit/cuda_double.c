/* cuda_fixture as a module: EP_CUDA_MODULE of a whole ep-server and its workers, on a machine without GPUs. */
#include "cuda_fixture.h"

const struct ep_cuda_api *ep_cuda_api(void);

const struct ep_cuda_api *ep_cuda_api(void)
{
    return cuda_fixture_api();
}
