// Any machine that the compiler knows.
#define OASIS_ISA base
#define OASIS_LANES 4
#include "decode_attention.h"
#include "two_bit_scores.h"
