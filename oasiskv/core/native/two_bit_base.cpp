// Any machine that the compiler knows.
#define OASIS_ISA base
#include "two_bit_scores.h"
