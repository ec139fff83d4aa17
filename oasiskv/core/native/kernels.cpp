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

// The sizes of all structures and a zero: by them the caller sees whether it is of the same version (__init__.py).
extern "C" {
extern const int64_t oasis_layout[];
const int64_t oasis_layout[] = {sizeof(TwoBitScores),  sizeof(SwapPlans),      sizeof(CopyRows),     sizeof(CopyBlocks),
                                sizeof(EnterSwaps),    sizeof(SwapBatch),      sizeof(SwapLayer),
                                sizeof(SummaryWrites), sizeof(SummaryLayer),   sizeof(AttentionBatch),
                                sizeof(AttentionLayer), 0};
}

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

extern "C" int64_t oasis_swap_plans(const SwapPlans*);
extern "C" int64_t oasis_enter_swaps(const EnterSwaps*);

extern "C" int64_t oasis_score_and_swap(const SwapBatch* batch, SwapLayer* l) {
    TwoBitScores scores = batch->scores;
    scores.outlines = l->outlines, scores.outline_bytes = l->outline_bytes, scores.bodies = l->bodies;
    scores.body_bytes = l->body_bytes, scores.blocks = l->blocks, scores.box_format = l->box_format;
    scores.queries = l->queries;
    scores.query_format = l->query_format, scores.tokens = l->tokens, scores.token_stride = l->token_stride;
    scores.group = l->group, scores.dim = l->dim, scores.scale = l->scale;
    if (!oasis_two_bit_scores(&scores)) return 0;

    EnterSwaps enter = batch->enter;
    const int64_t row = enter.heads * enter.slots;
    enter.block += l->layer * enter.map_rows * row;
    enter.age += l->layer * enter.map_rows * row;
    enter.copies = l->host != nullptr;
    enter.host = l->host, enter.host_rows = l->host_rows, enter.host_stride = l->host_stride;
    enter.host_first = l->host_first, enter.device = l->device, enter.device_rows = l->device_rows;
    enter.device_stride = l->device_stride, enter.row_bytes = l->row_bytes;
    for (int64_t r = 0; r < enter.requests; ++r) {
        if (!in_range(enter.rows[r], enter.map_rows)) return 0;
        std::memcpy(batch->resident + r * row, enter.block + enter.rows[r] * row, row * sizeof(int32_t));
        std::memcpy(batch->age + r * row, enter.age + enter.rows[r] * row, row * sizeof(int32_t));
    }
    oasis_swap_plans(&batch->plans);
    l->hits = l->misses = l->capped = 0;
    for (int64_t unit = 0; unit < enter.requests * enter.heads; ++unit) {
        l->hits += batch->plans.counts[3 * unit];
        l->misses += batch->plans.counts[3 * unit + 1];
        l->capped += batch->plans.counts[3 * unit + 2];
    }
    return oasis_enter_swaps(&enter);
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
