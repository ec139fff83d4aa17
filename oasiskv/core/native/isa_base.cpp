// Any machine that the compiler knows.
#define OASIS_ISA base
#include "decode_attention.h"
#include "two_bit_scores.h"
