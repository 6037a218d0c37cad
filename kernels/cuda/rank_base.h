/* rank_base.h: what kernels are told of a rank whatever the op. */
#ifndef EP_RANK_BASE_H
#define EP_RANK_BASE_H

#include "ep_cuda.h"
#include "ll_op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* EP_INVALID_ARGUMENT: the kernels cannot do such a group. */
ep_status ep_cuda_rank_check(const struct ep_cuda_rank_options *options, struct ep_error *error);
/* All of *rank, which is zeroed, but what depends on how many blocks fit. */
void ep_cuda_rank_base(const struct ep_cuda_rank_options *options, struct ep_ll_rank *rank);
/* The same rank, for HT. */
void ep_cuda_rank_ht_base(const struct ep_cuda_rank_options *options, const struct ep_ll_args *ll,
                          struct ep_ht_rank *rank);

#ifdef __cplusplus
}
#endif
#endif
