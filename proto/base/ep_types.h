/*
 * ep_types: the few enumerations that the public API, the window and the wire share.
 * Values are part of the ABI and of the protocol: they never change.
 */
#ifndef EP_TYPES_H
#define EP_TYPES_H

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks of one group; the masks, which are part of windows, have a bit for each.  Raising it changes EP_WINDOW_VERSION
 * (but in tests/scale, which has no windows). */
#define EP_MASK_WORDS 16
#ifndef EP_MAX_RANKS
#define EP_MAX_RANKS (EP_MASK_WORDS * 64)
#endif
#define EP_MAX_TOP_K 16

/* Element type of a token.  FP8 rows come with one scale per 128 elements (1x128), see ep_scale_format. */
typedef enum ep_dtype {
    EP_BF16 = 1,
    EP_FP16 = 2,
    EP_FP32 = 3,
    EP_FP8_E4M3 = 4
} ep_dtype;
#define EP_FP8_BLOCK 128

/*
 * What a scale of FP8 rows is.  A row that is quantised on the way gets these, where amax is the largest
 * magnitude in the block of 128 elements (at the end of a row: of what is left):
 *
 *   FP32   amax / 448
 *   UE8M0  the smallest power of two that is not below amax / 448, as one byte: b means 2^(b - 127)
 *          (OCP Microscaling Formats, v1.0).  Bytes 0 to 247 are made; 255, which means NaN, is not.
 *
 * A block of zeros has scale 1.  NaN does not count for amax and stays NaN.  Of a block with an infinity,
 * FP32 makes NaN as a whole; in UE8M0 its scale is 2^120, and infinite elements are 448 of that, which is
 * an infinity in fp32 again.  An amax below 448 * 2^-127 has scale 2^-127 in UE8M0, in FP32 one that is
 * not a normal number, and 1 where that would be 0.  Scales that are given arrive as they are, whatever
 * they are.
 */
typedef enum ep_scale_format {
    EP_SCALE_FP32 = 0,
    EP_SCALE_UE8M0 = 1
} ep_scale_format;

/* Low latency: small batches into fixed slots.  High throughput: large batches to exact rows. */
typedef enum ep_mode {
    EP_MODE_LL = 1,
    EP_MODE_HT = 2
} ep_mode;

/*
 * How a dispatch lays out what a rank receives.  R ranks, L the most experts that any rank of
 * the group holds (ep_group_info.max_local_experts: shapes are the same on all ranks), T_max the
 * group's ll_max_tokens, K top-k, H hidden, N rows received.  Rows are ordered by
 * (source rank, token), so equal inputs give equal bytes.  An expert that a token names twice has one
 * row of it, and both weights count in the combine.
 *
 *   EXPERT_MAJOR  LL      [L, R*T_max, H]; the first counts[l] rows of expert l are valid
 *   RANK_MAJOR    LL      [R, T_max, H], zero copy in the window; the first counts[r] of rank r
 *   PACKED        LL, HT  [N, H] by expert, each expert's block starting at a multiple of
 *                         `alignment` rows (padding is zeroed); offsets[L + 1], counts[L]
 *   FLAT          HT      [N, H], each token once, whichever and however many local experts
 */
typedef enum ep_layout {
    EP_LAYOUT_EXPERT_MAJOR = 1,
    EP_LAYOUT_RANK_MAJOR = 2,
    EP_LAYOUT_PACKED = 3,
    EP_LAYOUT_FLAT = 4
} ep_layout;

/*
 * Who and which where a row comes from nobody (padding), or from no token: an HT dispatch places rows as their sources
 * announced them, and a source that falls out before it has sent them leaves its places behind.  They count as rows, are
 * zero, and name no expert; that rank has not arrived.  On GPUs of several nodes a rank that falls out is missed with what
 * was to pass through it (README, groups over several nodes).
 */
#define EP_NO_RANK UINT32_MAX
#define EP_NO_TOKEN UINT32_MAX

/* Bits of `flags` of a dispatch or combine. */
enum {
    EP_OP_SEND_ONLY = 1u << 0, /* LL: push and return; ep_complete() receives */
    EP_OP_CACHED = 1u << 1     /* dispatch: the handle's routing again, no topk inputs */
};

#ifdef __cplusplus
}
#endif
#endif
