#include "kernels.h"

#include <cstring>

namespace base {
void two_bit_scores(const TwoBitScores&);
void decode_attention(const AttentionBatch&, const AttentionLayer&);
}
#if defined(__x86_64__)
namespace avx2 {
void two_bit_scores(const TwoBitScores&);
void decode_attention(const AttentionBatch&, const AttentionLayer&);
}
namespace avx512 {
void two_bit_scores(const TwoBitScores&);
void decode_attention(const AttentionBatch&, const AttentionLayer&);
}
#endif

// Instruction sets, best last: 0 any machine, 1 AVX2, 2 AVX-512 with bfloat16.
extern "C" int64_t oasis_best_isa() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

extern "C" int64_t oasis_two_bit_scores(const TwoBitScores* a) {
    for (int64_t r = 0; r < a->requests; ++r) {
        if (!in_range(a->counts[r], a->columns + 1)) return 0;
        for (int64_t m = 0; m < a->counts[r]; ++m)
            if (!in_range(a->index[r * a->columns + m], a->blocks)) return 0;
        for (int row = 0; row < 2; ++row)
            if (a->row_counts[2 * r + row] && !in_range(a->rows[2 * r + row], a->tokens)) return 0;
    }
#if defined(__x86_64__)
    if (a->isa == 2) return avx512::two_bit_scores(*a), 1;
    if (a->isa == 1) return avx2::two_bit_scores(*a), 1;
#endif
    return base::two_bit_scores(*a), 1;
}

extern "C" int64_t oasis_decode_attention(const AttentionBatch* b, const AttentionLayer* a) {
    for (int64_t r = 0; r < b->requests; ++r) {
        const int64_t newest = b->starts[r + 1] - b->starts[r], pages = (b->seq_lens[r] + a->size - 1) / a->size;
        if (b->starts[r] < 0 || newest < 0 || b->starts[r + 1] > a->tokens) return 0;
        if (b->seq_lens[r] < newest || pages > b->columns) return 0;
        for (int64_t i = 0; i < pages; ++i)
            if (!in_range(b->table[r * b->columns + i], a->blocks)) return 0;
    }
#if defined(__x86_64__)
    if (a->isa == 2) return avx512::decode_attention(*b, *a), 1;
    if (a->isa == 1) return avx2::decode_attention(*b, *a), 1;
#endif
    return base::decode_attention(*b, *a), 1;
}

extern "C" int64_t oasis_copy_rows(const CopyRows* a) {
    for (int64_t i = 0; i < a->count; ++i)
        if (!in_range(a->source_rows[i], a->source_count) || !in_range(a->target_rows[i], a->target_count)) return 0;
#pragma omp parallel for schedule(static) if (a->count * a->row_bytes > 65536)
    for (int64_t i = 0; i < a->count; ++i)
        std::memcpy(a->target + a->target_rows[i] * a->target_stride, a->source + a->source_rows[i] * a->source_stride,
                    static_cast<size_t>(a->row_bytes));
    return 1;
}

extern "C" int64_t oasis_copy_blocks(const CopyBlocks* a) {
    for (int64_t i = 0; i < a->count; ++i)
        if (!in_range(a->source[i], a->source_blocks) || !in_range(a->target[i], a->target_blocks)) return 0;
#pragma omp parallel for schedule(static) if (a->count > 0)
    for (int64_t p = 0; p < a->plane_count; ++p) {
        const int64_t* plane = a->planes + 5 * p;
        const int64_t *from = plane + (a->reversed ? 2 : 0), *to = plane + (a->reversed ? 0 : 2);
        for (int64_t i = 0; i < a->count; ++i)
            std::memcpy(reinterpret_cast<uint8_t*>(to[0]) + a->target[i] * to[1],
                        reinterpret_cast<const uint8_t*>(from[0]) + a->source[i] * from[1],
                        static_cast<size_t>(plane[4]));
    }
    return 1;
}
