/* Executor server: both halves of a mailbox. */
#include "cuda_private.h"

static ep_status none(struct ep_error *error)
{
    return ep_error_set(error, EP_UNIMPLEMENTED, "executor server is not there on GPUs yet");
}

ep_status ep_cuda_ring(uint32_t device, void *window, const struct ep_op *op, void *stream, struct ep_error *error)
{
    (void)device, (void)window, (void)op, (void)stream;
    return none(error);
}

ep_status ep_cuda_serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                             struct ep_error *error)
{
    (void)options, (void)out;
    return none(error);
}

ep_status ep_cuda_serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    (void)serve, (void)ops;
    return none(error);
}

ep_status ep_cuda_serve_wait(struct ep_cuda_serve *serve, struct ep_error *error)
{
    (void)serve;
    return none(error);
}

ep_status ep_cuda_serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error)
{
    (void)serve, (void)timeout_ms;
    return none(error);
}

void ep_cuda_serve_close(struct ep_cuda_serve *serve)
{
    (void)serve;
}
