// Sixteen floats at a time, in GCC's portable vectors: the compiler maps them to what the machine has.
#pragma once

#include "standard.h"

namespace OASIS_ISA {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline Floats all(float value) { return value - Floats{}; }

inline Floats load_bfloat16(const uint16_t* from) {
    const Halves halves = *reinterpret_cast<const Halves*>(from);
    const Ints bits = __builtin_convertvector(halves, Ints) << 16;
    return reinterpret_cast<const Floats&>(bits);
}

inline Floats load_bytes(const uint8_t* from) {
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Floats);
}

// The sums of the lanes of 16 vectors, in a quarter of the operations that 16 single sums would take: each round adds
// halves of two vectors and puts them side by side.
inline Floats sums(const Floats* v) {
    Floats r[8], s[4], t[2];
    for (int i = 0; i < 8; ++i) {
        const Floats a = v[i / 4 * 8 + i % 4], b = v[i / 4 * 8 + i % 4 + 4];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; ++i) {
        const Floats a = r[i], b = r[i + 4];
        s[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; ++i) {
        const Floats a = s[2 * i], b = s[2 * i + 1];
        t[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    return __builtin_shufflevector(t[0], t[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(t[0], t[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// The same of N = 4 or 8 vectors.
template <int N>
inline void sums(const Floats* v, float* out) {
    typedef float Half __attribute__((vector_size(32)));
    Half h[N];
    for (int i = 0; i < N; ++i)
        h[i] = __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15);
    Half pairs[N / 2];
    for (int i = 0; i < N / 2; ++i)  // lanes of h[2i] and h[2i + 1] in turn
        pairs[i] = __builtin_shufflevector(h[2 * i], h[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   __builtin_shufflevector(h[2 * i], h[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < N / 4; ++i) {
        const Half f = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                       __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
        for (int k = 0; k < 4; ++k) out[4 * i + k] = f[k] + f[k + 4];
    }
}

// exp(x) to 6e-5 of itself (`Terms` 5) or 4e-6 (7) for x in [-87, 87]; smaller and larger x are taken as these.
template <int Terms = 5>
inline Floats exponential(Floats x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 87.0f ? all(87.0f) : x;
    const float magic = 12582912.0f;  // 1.5 x 2^23: a number added to it is rounded to a whole one
    const Floats shifted = x * 1.44269504f + magic;
    const Floats r = x * 1.44269504f - (shifted - magic);
    Floats p = all(0.00961813f);  // 2^r for r in [-0.5, 0.5]
    if (Terms == 7) p += (all(0.00133336f) + 0.00015404f * r) * r;
    p = p * r + 0.05550411f;
    p = p * r + 0.24022651f;
    p = p * r + 0.69314718f;
    p = p * r + 1.0f;
    const Ints bits = reinterpret_cast<const Ints&>(p) + (reinterpret_cast<const Ints&>(shifted) << 23);
    return reinterpret_cast<const Floats&>(bits);
}

}  // namespace OASIS_ISA
