// Two-bit summaries of parts, from their keys: the same bytes as TwoBitScorer.summarise in ../scorers.py.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kTokens = 16;

float read(const void* numbers, int64_t format, int64_t i) {
    if (format == kFloat32) return static_cast<const float*>(numbers)[i];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(numbers)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t to_bfloat16(float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A number in [0, 2^22) rounded to the nearest whole one, ties to even: its last bits, once 2^23 is added.
uint32_t whole(float value) {
    value += 8388608.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits & 0x7fffffu;
}

// Writes the box's 2 x dim numbers in their format, and puts back what a reader will find.
void store_box(float* box, int64_t count, int64_t format, uint8_t* to) {
    if (format == kFloat32) {
        std::memcpy(to, box, static_cast<size_t>(4 * count));
    } else if (format == kBFloat16) {
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t rounded = to_bfloat16(box[i]);
            std::memcpy(to + 2 * i, &rounded, 2);
            const uint32_t bits = static_cast<uint32_t>(rounded) << 16;
            std::memcpy(box + i, &bits, 4);
        }
    } else {
        float largest = FLT_MIN;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(box[i]));
        const float scale = largest / 127;
        std::memcpy(to, &scale, 4);
        for (int64_t i = 0; i < count; ++i) {
            const float level = std::clamp(std::nearbyint(box[i] / scale), -127.0f, 127.0f);
            to[4 + i] = static_cast<uint8_t>(static_cast<int8_t>(level));
            box[i] = level * scale;
        }
    }
}

void summarise(const TwoBitSummaries& a, int64_t part, int64_t head) {
    float keys[kMostDim][kTokens], box[2 * kMostDim];
    const int64_t dim = a.dim;
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t d = 0; d < dim; ++d)
            keys[d][t] = read(a.keys, a.format, (a.first[part] + t) * a.token_stride + head * dim + d);
    for (int64_t d = 0; d < dim; ++d) {
        float low = keys[d][0], high = keys[d][0];
        for (int64_t t = 1; t < kTokens; ++t) {
            low = std::min(low, keys[d][t]);
            high = std::max(high, keys[d][t]);
        }
        box[d] = (high + low) * 0.5f;
        box[dim + d] = (high - low) * 0.5f;
    }
    uint8_t* to = a.store + head * a.head_stride + a.parts[part] * a.part_bytes;
    store_box(box, 2 * dim, a.box_format, to);
    to += a.box_format == kFloat32 ? 8 * dim : a.box_format == kBFloat16 ? 4 * dim : 4 + 2 * dim;
    for (int64_t group = 0; group < (dim + 15) / 16; ++group) {
        uint32_t words[kTokens] = {};
        for (int64_t d = 16 * group; d < std::min(dim, 16 * group + 16); ++d) {
            const float lowest = box[d] - box[dim + d];
            const float step = std::max(box[dim + d] * (2.0f / 3.0f), FLT_MIN);
            for (int64_t t = 0; t < kTokens; ++t) {
                const float code = std::clamp((keys[d][t] - lowest) / step, 0.0f, 3.0f);
                words[t] |= whole(code) << 2 * (d - 16 * group);
            }
        }
        std::memcpy(to + 64 * group, words, 64);
    }
}

}  // namespace

extern "C" int64_t oasis_two_bit_summaries(const TwoBitSummaries* a) {
    for (int64_t i = 0; i < a->count; ++i)
        if (!in_range(a->first[i], a->tokens - kTokens + 1) || !in_range(a->parts[i], a->all_parts)) return 0;
    const int64_t units = a->count * a->heads;
#pragma omp parallel for schedule(static) if (units > 1)
    for (int64_t i = 0; i < units; ++i) summarise(*a, i / a->heads, i % a->heads);
    return 1;
}

extern "C" int64_t oasis_write_summaries(const SummaryWrites* w, const SummaryLayer* a) {
    TwoBitSummaries of_keys = {a->keys,       a->format, a->token_stride, a->tokens,      w->bulk_first,
                               w->bulk_parts, w->bulk_count, a->heads,    a->dim,         a->store,
                               a->head_stride, a->all_parts, a->part_bytes, a->box_format};
    if (a->keys != nullptr) {
        const int64_t bytes = a->heads * a->dim * (a->format == kFloat32 ? 4 : 2);
        const int64_t from_stride = a->token_stride * (a->format == kFloat32 ? 4 : 2);
        for (int64_t i = 0; i < w->stage_count; ++i) {
            if (!in_range(w->stage_tokens[i], a->tokens) || !in_range(w->stage_slots[i], a->slots)) return 0;
            std::memcpy(a->stage + w->stage_slots[i] * bytes, a->keys + w->stage_tokens[i] * from_stride,
                        static_cast<size_t>(bytes));
        }
        if (w->bulk_count > 0 && !oasis_two_bit_summaries(&of_keys)) return 0;
    }
    if (w->staged_count == 0) return 1;
    TwoBitSummaries of_stage = of_keys;
    of_stage.keys = a->stage;
    of_stage.token_stride = a->heads * a->dim;
    of_stage.tokens = a->slots;
    of_stage.first = w->staged_first;
    of_stage.parts = w->staged_parts;
    of_stage.count = w->staged_count;
    return oasis_two_bit_summaries(&of_stage);
}
