// Two-bit summaries of blocks, from their keys: the same bytes as TwoBitScorer.summarise in ../scorers.py.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace {

// Blocks to summarise, from `keys` [tokens, heads, dim], `token_stride` numbers from one to the next.
struct Blocks {
    const void* keys;
    int64_t tokens, token_stride;
    const int64_t* blocks;
    int64_t count;
};

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

// Room for a block's keys as floats [parts][dim][16 tokens], and for its numbers by channel.
struct Scratch {
    explicit Scratch(const SummaryLayer& a)
        : parts(parts_of(a.body_bytes, a.dim)), keys(parts * a.dim * kPartTokens), low(parts * a.dim),
          high(parts * a.dim), box(2 * a.dim) {}
    int64_t parts;
    std::vector<float> keys, low, high, box;
};

void summarise(const SummaryLayer& a, const Blocks& of, int64_t first, int64_t block, int64_t head, Scratch& s) {
    const int64_t dim = a.dim;
    for (int64_t t = 0; t < s.parts * kPartTokens; ++t)
        for (int64_t d = 0; d < dim; ++d)
            s.keys[(t / kPartTokens * dim + d) * kPartTokens + t % kPartTokens] =
                read(of.keys, a.format, (first + t) * of.token_stride + head * dim + d);
    for (int64_t i = 0; i < s.parts * dim; ++i) {
        const float* keys = s.keys.data() + i * kPartTokens;
        s.low[i] = *std::min_element(keys, keys + kPartTokens);
        s.high[i] = *std::max_element(keys, keys + kPartTokens);
    }
    float *centre = s.box.data(), *half = centre + dim;
    for (int64_t d = 0; d < dim; ++d) {
        float low = s.low[d], high = s.high[d];
        for (int64_t p = 1; p < s.parts; ++p) {
            low = std::min(low, s.low[p * dim + d]);
            high = std::max(high, s.high[p * dim + d]);
        }
        centre[d] = (high + low) * 0.5f;
        half[d] = (high - low) * 0.5f;
    }
    store_box(centre, 2 * dim, a.box_format, a.outlines + (head * a.blocks + block) * a.outline_bytes);
    uint8_t* to = a.bodies + (head * a.blocks + block) * a.body_bytes;
    for (int64_t p = 0; p < s.parts; ++p) {
        float *first_of = s.low.data() + p * dim, *step_of = s.high.data() + p * dim;
        for (int64_t d = 0; d < dim; ++d) {
            const float base = centre[d] - half[d];
            if (s.parts == 1) {
                first_of[d] = base;
                step_of[d] = std::max(half[d] * (2.0f / 3.0f), FLT_MIN);
                continue;
            }
            const float level = std::max(half[d] * (2.0f / 255.0f), FLT_MIN);
            const uint32_t low = whole(std::clamp((first_of[d] - base) / level, 0.0f, 255.0f));
            const uint32_t high = whole(std::clamp((step_of[d] - base) / level, 0.0f, 255.0f));
            to[d] = static_cast<uint8_t>(low);
            to[dim + d] = static_cast<uint8_t>(high);
            first_of[d] = base + level * static_cast<float>(low);
            step_of[d] = std::max(level * (1.0f / 3.0f) * static_cast<float>(high - low), FLT_MIN);
        }
        if (s.parts > 1) to += 2 * dim;
        for (int64_t group = 0; group < (dim + 15) / 16; ++group, to += 64) {
            uint32_t words[kPartTokens] = {};
            for (int64_t d = 16 * group; d < std::min(dim, 16 * group + 16); ++d) {
                const float* keys = s.keys.data() + (p * dim + d) * kPartTokens;
                for (int64_t t = 0; t < kPartTokens; ++t) {
                    const float code = std::clamp((keys[t] - first_of[d]) / step_of[d], 0.0f, 3.0f);
                    words[t] |= whole(code) << 2 * (d - 16 * group);
                }
            }
            std::memcpy(to, words, 64);
        }
    }
}

// `row_tokens`: tokens from one of `first` to the next.
bool summarise(const SummaryLayer& a, const Blocks& of, const int64_t* first, int64_t row_tokens) {
    const int64_t size = parts_of(a.body_bytes, a.dim) * kPartTokens;
    for (int64_t i = 0; i < of.count; ++i)
        if (!in_range(first[i] * row_tokens, of.tokens - size + 1) || !in_range(of.blocks[i], a.blocks)) return false;
    const int64_t units = of.count * a.heads;
#pragma omp parallel if (units > 1)
    {
        Scratch scratch(a);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < units; ++i)
            summarise(a, of, first[i / a.heads] * row_tokens, of.blocks[i / a.heads], i % a.heads, scratch);
    }
    return true;
}

}  // namespace

extern "C" int64_t oasis_write_summaries(const SummaryWrites* w, const SummaryLayer* a) {
    const int64_t size = a->format == kFloat32 ? 4 : 2, row = a->heads * a->dim;
    if (a->keys != nullptr) {
        for (int64_t i = 0; i < w->stage_count; ++i) {
            if (!in_range(w->stage_tokens[i], a->tokens) || !in_range(w->stage_slots[i], a->slots)) return 0;
            std::memcpy(a->stage + w->stage_slots[i] * row * size,
                        a->keys + w->stage_tokens[i] * a->token_stride * size, static_cast<size_t>(row * size));
        }
        const Blocks of_keys = {a->keys, a->tokens, a->token_stride, w->bulk_blocks, w->bulk_count};
        if (w->bulk_count > 0 && !summarise(*a, of_keys, w->bulk_first, 1)) return 0;
    }
    const Blocks of_stage = {a->stage, a->slots, row, w->staged_blocks, w->staged_count};
    const int64_t block_size = parts_of(a->body_bytes, a->dim) * kPartTokens;
    return w->staged_count == 0 || summarise(*a, of_stage, w->staged_rows, block_size);
}
