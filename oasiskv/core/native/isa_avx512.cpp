#if defined(__x86_64__)
// The standard library first, for any machine: of its templates the linker keeps one copy for all instruction sets.
#include "standard.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define OASIS_ISA avx512
#define OASIS_LANES 16
#define OASIS_BFLOAT16_PRODUCTS
#include "decode_attention.h"
#include "two_bit_scores.h"
#endif
