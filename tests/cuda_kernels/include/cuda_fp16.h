/* What kernels/cuda uses of it. */
#include "cuda_words.h"
