#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define OASIS_ISA avx2
#include "decode_attention.h"
#include "two_bit_scores.h"
#endif
