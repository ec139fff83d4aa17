#if defined(__x86_64__)
// The standard library first, for any machine: of its templates the linker keeps one copy for all instruction sets.
#include "standard.h"
#pragma GCC target("avx2,fma")
#define OASIS_ISA avx2
#define OASIS_LANES 8
#include "decode_attention.h"
#include "two_bit_scores.h"
#endif
