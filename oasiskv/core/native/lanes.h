// Vectors of `kLanes` floats, as many as one register of the instruction set holds, in GCC's portable vectors. (Longer
// ones are allowed, but GCC keeps those in memory.)
#pragma once

#include "standard.h"

namespace OASIS_ISA {

constexpr int kLanes = OASIS_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

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

typedef std::make_integer_sequence<int, kLanes> Lanes;

// Lanes of a and b in turn: those of the first halves, and those of the second.
template <int... I>
inline Floats first_in_turn(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes)...);
}
template <int... I>
inline Floats second_in_turn(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I + kLanes) / 2 + I % 2 * kLanes)...);
}

// The sums of neighbouring runs of `Run` lanes: all of a's, then b's.
template <int Run, int... I>
inline Floats neighbours(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / Run * 2 * Run + I % Run)...) +
           __builtin_shufflevector(a, b, (I / Run * 2 * Run + I % Run + Run)...);
}

// In each four lanes, two sums of a's and two of b's: of lanes that are `3 - Apart` from one another, the first lanes
// of the two sums being `Apart` (1 or 2) from one another.
template <int Apart, int... I>
inline Floats pairs_in_fours(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 4 * 4 + I % 2 * Apart + I % 4 / 2 * kLanes)...) +
           __builtin_shufflevector(a, b, (I / 4 * 4 + I % 2 * Apart + I % 4 / 2 * kLanes + 3 - Apart)...);
}

// The sums of the lanes of `kLanes` vectors, in a quarter of the operations that so many single sums would take: each
// round adds halves of two vectors and puts them side by side.
template <int Count = kLanes>
inline Floats sums(const Floats* v) {
    Floats r[Count];
    for (int i = 0; i < Count; ++i) r[i] = v[i];
    if constexpr (Count == 16)
        for (int i = 0; i < 8; ++i)
            r[i] = neighbours<Count / 2>(v[i / 4 * 8 + i % 4], v[i / 4 * 8 + i % 4 + 4], Lanes());
    if constexpr (Count >= 8)
        for (int i = 0; i < 4; ++i) r[i] = neighbours<4>(r[i], r[i + 4], Lanes());
    for (int i = 0; i < 2; ++i) r[i] = pairs_in_fours<1>(r[2 * i], r[2 * i + 1], Lanes());
    return pairs_in_fours<2>(r[0], r[1], Lanes());
}

typedef float Four __attribute__((vector_size(16)));

// Four sums of lanes, each of every fourth.
template <int... I>
inline Four in_four(Floats v, std::integer_sequence<int, I...>) {
    const Four first = __builtin_shufflevector(v, v, 0, 1, 2, 3);
    return (first + ... + __builtin_shufflevector(v, v, 4 * I + 4, 4 * I + 5, 4 * I + 6, 4 * I + 7));
}

// The sums of neighbouring lanes: a's two, then b's.
inline Four of_neighbours(Four a, Four b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

// The sums of the lanes of each of N vectors, a multiple of four.
template <int N>
inline void sums_of(const Floats* v, float* out) {
    for (int i = 0; i < N; i += 4) {
        Four r[4];
        for (int k = 0; k < 4; ++k) r[k] = in_four(v[i + k], std::make_integer_sequence<int, kLanes / 4 - 1>());
        const Four found = of_neighbours(of_neighbours(r[0], r[1]), of_neighbours(r[2], r[3]));
        std::memcpy(out + i, &found, sizeof found);
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
