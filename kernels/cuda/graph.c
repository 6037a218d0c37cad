/* Captured work. */
#include "cuda_private.h"

#include <stdlib.h>

struct ep_cuda_graph {
    uint32_t device;
    CUgraphExec exec;
};

/* Of this thread's calls only: other threads may allocate and wait meanwhile. */
ep_status ep_cuda_graph_begin(uint32_t device, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuStreamBeginCapture(ep_cuda_stream(context, stream), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    ep_cuda_leave();
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuStreamBeginCapture on device %u", device);
    return EP_OK;
}

/* Ends the capture in any case. */
static ep_status instantiate(const struct ep_cuda_context *context, void *stream, CUgraphExec *exec,
                             struct ep_error *error)
{
    CUgraph graph = NULL;
    CUresult result = cuStreamEndCapture(ep_cuda_stream(context, stream), &graph);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuStreamEndCapture on device %u", context->device);
    result = cuGraphInstantiate(exec, graph, 0);
    cuGraphDestroy(graph);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuGraphInstantiate on device %u", context->device);
    return EP_OK;
}

ep_status ep_cuda_graph_end(uint32_t device, void *stream, struct ep_cuda_graph **out, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    struct ep_cuda_graph made = { .device = device }, *graph;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    status = instantiate(context, stream, &made.exec, error);
    if (status != EP_OK)
        goto leave;
    graph = malloc(sizeof *graph);
    if (!graph) {
        status = ep_error_set(error, EP_NO_MEMORY, "no memory for a graph's record");
        goto destroy;
    }
    *graph = made;
    *out = graph;
    goto leave;

destroy:
    cuGraphExecDestroy(made.exec);
leave:
    ep_cuda_leave();
    return status;
}

ep_status ep_cuda_graph_launch(struct ep_cuda_graph *graph, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(graph->device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuGraphLaunch(graph->exec, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuGraphLaunch on device %u", graph->device);
    return EP_OK;
}

void ep_cuda_graph_destroy(struct ep_cuda_graph *graph)
{
    const struct ep_cuda_context *context;

    if (!graph)
        return;
    if (ep_cuda_enter(graph->device, &context, NULL) == EP_OK) {
        cuGraphExecDestroy(graph->exec);
        ep_cuda_leave();
    }
    free(graph);
}
