// Scores of pages from their two-bit summaries (see TwoBitScorer in ../scorers.py, which says what the bytes are).
//
//   outline of each page  a box: centre c [dim] and half-width h [dim], in one of three number formats
//   body of each page     for each part bounds uint8 [2][dim], in 255ths of the outline, if there are several; and
//                         codes uint32 [ceil(dim / 16)][16 tokens]: bits 2k and 2k + 1 of word (g, t) hold channel
//                         16 g + k
//
// One unit of work is one request and KV head. First every page is estimated from its outline alone; then the tokens
// of the best `refine` pages are read from their codes. A query's estimates are scaled to what the codes say where both
// are known, so that the two kinds add up to one distribution.
#pragma once

#include "kernels.h"
#include "lanes.h"
#include "standard.h"

#ifdef OASIS_BFLOAT16_PRODUCTS
#include <immintrin.h>
#endif

namespace OASIS_ISA {

// A token's logit by its code may be far above what any box promised: bounds that keep sums of such in a float's range.
constexpr float kMostAbove = 60, kMostScale = 1e30f;

constexpr int kChannels = 16;                   // in a word of codes
constexpr int kPart = kPartTokens / kLanes;     // vectors that hold a number for each token of a part
constexpr int kQueries = kLanes == 16 ? 8 : 4;  // for which tokens are read together, at most

// One request and KV head after another. `Wide` is the head dimension rounded up to whole vectors.
template <int64_t Wide>
class Unit {
  public:
    explicit Unit(const TwoBitScores& a)
        : a_(a),
          groups_((a.dim + kChannels - 1) / kChannels),
          parts_(parts_of(a.body_bytes, a.dim)),
          bound_bytes_(parts_ > 1 ? 2 * a.dim : 0),
          whole_(a.dim == Wide) {}

    void run(int64_t request, int64_t head) {
        const int64_t pages = a_.counts[request];
        float* out = a_.out + (request * a_.heads + head) * a_.columns;
        std::fill(out + pages, out + a_.columns, -INFINITY);
        if (pages == 0) return;
        outlines_ = a_.outlines + head * a_.blocks * a_.outline_bytes;
        bodies_ = a_.bodies + head * a_.blocks * a_.body_bytes;
        index_ = a_.index + request * a_.columns;
        read_queries(request, head);
        if (tile_ == 4) score<4>(pages, out);
        if constexpr (kLanes >= 8)
            if (tile_ == 8) score<8>(pages, out);
        if constexpr (kLanes >= 16)
            if (tile_ == 16) score<16>(pages, out);
    }

  private:
    template <int N>
    void score(int64_t pages, float* out) {
        estimate_pages<N>(pages);
        if (a_.refine < pages)
            choose<N>(pages);
        else {
            chosen_.resize(pages);
            for (int64_t m = 0; m < pages; ++m) chosen_[m] = static_cast<int32_t>(m);
        }
        refine<N>(pages, out);
    }

    const uint8_t* outline(int64_t page) const { return outlines_ + index_[page] * a_.outline_bytes; }

    const uint8_t* body(int64_t page) const { return bodies_ + index_[page] * a_.body_bytes; }

    // The query heads of this KV head, in each row that counts, times the softmax scale; and zeros up to whole tiles of
    // 4, 8 or 16, at most one query in a lane.
    void read_queries(int64_t request, int64_t head) {
        queries_.clear();
        count_ = 0;
        for (int row = 0; row < 2; ++row) {
            if (!a_.row_counts[2 * request + row]) continue;
            const int64_t token = a_.rows[2 * request + row];
            for (int64_t g = 0; g < a_.group; ++g, ++count_) {
                const int64_t at = token * a_.token_stride + (head * a_.group + g) * a_.dim;
                for (int64_t d = 0; d < Wide; ++d) {
                    float value = 0;
                    if (d < a_.dim && a_.query_format == kFloat32)
                        value = static_cast<const float*>(a_.queries)[at + d];
                    else if (d < a_.dim) {
                        const uint32_t bits = static_cast<const uint16_t*>(a_.queries)[at + d] << 16;
                        std::memcpy(&value, &bits, 4);
                    }
                    queries_.push_back(value * a_.scale);
                }
            }
        }
        tile_ = count_ <= 4 || kLanes == 4 ? 4 : count_ <= 8 || kLanes == 8 ? 8 : 16;
        padded_ = (count_ + tile_ - 1) / tile_ * tile_;
        queries_.resize(padded_ * Wide, 0.0f);
        read_reaches();
    }

    // Centre and half-width of a box as floats, zero beyond `dim`.
    void read_box(const uint8_t* box, float* centre, float* half) const {
        if (a_.box_format == kBFloat16 && whole_) {
            const uint16_t* from = reinterpret_cast<const uint16_t*>(box);
            for (int64_t d = 0; d < Wide; d += kLanes) {
                store(centre + d, load_bfloat16(from + d));
                store(half + d, load_bfloat16(from + Wide + d));
            }
            return;
        }
        float scale = 1;
        if (a_.box_format == kInt8) std::memcpy(&scale, box, 4);
        for (int64_t d = 0; d < Wide; ++d) {
            centre[d] = d < a_.dim ? scale * box_number(box, d) : 0.0f;
            half[d] = d < a_.dim ? scale * box_number(box, a_.dim + d) : 0.0f;
        }
    }

    float box_number(const uint8_t* box, int64_t i) const {
        float value;
        if (a_.box_format == kInt8) return static_cast<float>(static_cast<int8_t>(box[4 + i]));
        if (a_.box_format == kFloat32) {
            std::memcpy(&value, box + 4 * i, 4);
            return value;
        }
        uint16_t upper;
        std::memcpy(&upper, box + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(upper) << 16;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    // mass_: exp of the outlines' estimates, less the query's largest (offset_[q]), as [tile][page][N] with `stride_`
    // numbers from one tile to the next; promises_[q]: of all pages together. Estimates are made for `kLanes` / N pages
    // and N queries at a time, one in each lane.
    template <int N>
    void estimate_pages(int64_t pages) {
        constexpr int kPages = kLanes / N;
        const int64_t tiles = padded_ / N;
        stride_ = (pages + kPages - 1) / kPages * kLanes;
        mass_.resize(tiles * stride_);
        for (int64_t m = 0; m < pages; m += kPages) {
            for (int64_t p = 0; p < kPages; ++p) {
                const uint8_t* next = outline(std::min(m + p + kAhead, pages - 1));
                for (int64_t b = 0; b < a_.outline_bytes; b += 64) __builtin_prefetch(next + b);
                open_box(outline(std::min(m + p, pages - 1)), p);
            }
            for (int64_t t = 0; t < tiles; ++t) store(mass_.data() + t * stride_ + m * N, estimates<N>(t * N));
        }
        offset_.resize(padded_);
        promises_.resize(padded_);
        for (int64_t t = 0; t < tiles; ++t) {
            float* mass = mass_.data() + t * stride_;
            std::fill(mass + pages * N, mass + stride_, -INFINITY);
            float lanes[kLanes], offsets[kLanes];
            Floats largest = load(mass), total = {};
            for (int64_t i = kLanes; i < stride_; i += kLanes) {
                const Floats found = load(mass + i);
                largest = found > largest ? found : largest;
            }
            store(lanes, largest);
            for (int n = 0; n < kLanes; ++n) {
                offsets[n] = lanes[n % N];
                for (int p = 1; p < kPages; ++p) offsets[n] = std::max(offsets[n], lanes[n % N + p * N]);
            }
            for (int64_t i = 0; i < stride_; i += kLanes) {
                const Floats found = exponential(load(mass + i) - load(offsets));
                store(mass + i, found);
                total += found;
            }
            store(lanes, total);
            for (int n = 0; n < N; ++n) {
                offset_[t * N + n] = offsets[n];
                promises_[t * N + n] = lanes[n];
                for (int p = 1; p < kPages; ++p) promises_[t * N + n] += lanes[n + p * N];
            }
        }
    }

    // The masses of row i times the queries' factors, in all. Rows lie as `row_stride` numbers in tiles of
    // `tile_stride`.
    template <int N>
    float weighted(const std::vector<float>& rows, int64_t tile_stride, int64_t row_stride, int64_t i,
                   const std::vector<float>& factors) const {
        float lanes[N] = {};
        for (int64_t t = 0; t < padded_ / N; ++t)
            for (int n = 0; n < N; ++n) lanes[n] += rows[t * tile_stride + i * row_stride + n] * factors[t * N + n];
        for (int half = N / 2; half > 0; half /= 2)
            for (int n = 0; n < half; ++n) lanes[n] += lanes[n + half];
        return lanes[0];
    }

    // The pages whose outlines promise the largest shares of mass, all queries together; ties to the first.
    template <int N>
    void choose(int64_t pages) {
        factors_.assign(padded_, 0.0f);
        for (int64_t q = 0; q < count_; ++q) factors_[q] = 1 / promises_[q];
        share_.resize(pages);
        for (int64_t m = 0; m < pages; ++m) share_[m] = weighted<N>(mass_, stride_, N, m, factors_);
        ranked_ = share_;
        std::nth_element(ranked_.begin(), ranked_.begin() + (a_.refine - 1), ranked_.end(), std::greater<float>());
        const float least = ranked_[a_.refine - 1];
        int64_t ties = a_.refine;
        for (int64_t m = 0; m < pages; ++m) ties -= share_[m] > least;
        chosen_.clear();
        for (int64_t m = 0; m < pages; ++m)
            if (share_[m] > least || (share_[m] == least && ties-- > 0)) chosen_.push_back(static_cast<int32_t>(m));
    }

    template <int N>
    void refine(int64_t pages, float* out) {
        const int64_t chosen = static_cast<int64_t>(chosen_.size());
        fine_.assign(padded_ * chosen, 0.0f);
        for (int64_t k = 0; k < chosen; ++k) {
            const int64_t ahead = chosen_[std::min(k + kBodiesAhead, chosen - 1)];
            for (int64_t b = 0; b < a_.outline_bytes; b += 64) __builtin_prefetch(outline(ahead) + b);
            for (int64_t b = 0; b < a_.body_bytes; b += 64) __builtin_prefetch(body(ahead) + b);
            read_page(outline(chosen_[k]), body(chosen_[k]), fine_.data() + k * padded_);
        }
        known_.assign(padded_, 0.0f);
        promised_.assign(padded_, 0.0f);
        for (int64_t k = 0; k < chosen; ++k)
            for (int64_t q = 0; q < padded_; ++q) {
                known_[q] += fine_[k * padded_ + q];
                promised_[q] += mass_[q / N * stride_ + chosen_[k] * N + q % N];
            }
        // A page's share is its mass by the total; a mass by an outline is first scaled to what the codes say.
        factors_.assign(padded_, 0.0f);
        fine_factors_.assign(padded_, 0.0f);
        for (int64_t q = 0; q < count_; ++q) {
            const float scale = promised_[q] > 0 ? std::min(known_[q] / promised_[q], kMostScale) : 0;
            const float total = known_[q] + scale * std::max(0.0f, promises_[q] - promised_[q]);
            if (!(total > 0)) continue;
            factors_[q] = scale / total;
            fine_factors_[q] = 1 / total;
        }
        for (int64_t m = 0; m < pages; ++m) out[m] = weighted<N>(mass_, stride_, N, m, factors_);
        for (int64_t k = 0; k < chosen; ++k) out[chosen_[k]] = weighted<N>(fine_, N, padded_, k, fine_factors_);
        for (int64_t m = pages - 1; m > 0; --m) out[m] += a_.read_on * out[m - 1];
    }

    // Add the exp of the tokens' logits, less the query's offset, to fine[q].
    void read_page(const uint8_t* outline, const uint8_t* body, float* fine) {
        read_box(outline, base_, level_);
        const float share = parts_ > 1 ? 2.0f / 255.0f : 2.0f / 3.0f;  // of the half-width: a level of bounds or codes
        for (int64_t d = 0; d < Wide; d += kLanes) {
            const Floats half = load(level_ + d);
            store(base_ + d, load(base_ + d) - half);
            store(level_ + d, half * share);
        }
        for (int64_t p = 0; p < parts_; ++p, body += bound_bytes_ + code_bytes(a_.dim)) {
            if (parts_ > 1) read_bounds(body);
            unpack(body + bound_bytes_);
            const float *first = parts_ > 1 ? first_ : base_, *step = parts_ > 1 ? step_ : level_;
            int64_t q = 0;
            for (; q + kQueries <= padded_; q += kQueries) read_tokens<kQueries>(first, step, q, fine);
            if (q < padded_) read_tokens<4>(first, step, q, fine);
        }
    }

    // What code 0 of a part stands for, and the step to the next code.
    void read_bounds(const uint8_t* bounds) {
        const uint8_t *low = bounds, *high = bounds + a_.dim;
        if (!whole_) {
            std::memcpy(bytes_, low, a_.dim);
            std::memcpy(bytes_ + Wide, high, a_.dim);
            low = bytes_, high = bytes_ + Wide;
        }
        for (int64_t d = 0; d < Wide; d += kLanes) {
            const Floats level = load(level_ + d), from = load_bytes(low + d), to = load_bytes(high + d);
            store(first_ + d, load(base_ + d) + level * from);
            store(step_ + d, level * (1.0f / 3.0f) * (to - from));
        }
    }

    template <int N>
    void read_tokens(const float* first, const float* step_of, int64_t q, float* fine) {
        const float* queries = queries_.data() + q * Wide;
        Floats lowest[N] = {}, logits[N * kPart], masses[N] = {};
        for (int64_t d = 0; d < Wide; d += kLanes) {
            const Floats low = load(first + d), step = load(step_of + d);
            for (int n = 0; n < N; ++n) {
                const Floats values = load(queries + n * Wide + d);
                lowest[n] += values * low;
                weigh(values * step, n, d);
            }
        }
        float found[N];
        sums_of<N>(lowest, found);
        products<N>(logits);
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < kPart; ++v) {
                const Floats above = logits[n * kPart + v] + (found[n] - offset_[q + n]);
                masses[n] += exponential(above < kMostAbove ? above : all(kMostAbove));
            }
        sums_of<N>(masses, found);
        for (int n = 0; n < N; ++n) fine[q + n] += found[n];
    }

#ifdef OASIS_BFLOAT16_PRODUCTS
    // Each query, and half its absolute values, in bfloat16: [query][2][Wide].
    void read_reaches() {
        short_.resize(padded_ * 2 * Wide);
        for (int64_t q = 0; q < padded_; ++q)
            for (int64_t d = 0; d < Wide; d += kLanes) {
                const Floats values = load(queries_.data() + q * Wide + d);
                shorten(values, short_.data() + 2 * q * Wide + d);
                shorten(0.5f * (values < 0 ? -values : values), short_.data() + (2 * q + 1) * Wide + d);
            }
    }

    static void shorten(Floats values, uint16_t* to) {
        const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<const __m512&>(values));
        std::memcpy(to, &rounded, 32);
    }

    // One of the boxes that are estimated together, in bfloat16, where it lies or in a copy: [2][Wide].
    void open_box(const uint8_t* box, int64_t p) {
        boxes_at_[p] = reinterpret_cast<const uint16_t*>(box);
        if (a_.box_format == kBFloat16 && whole_) return;
        read_box(box, centre_, half_);
        for (int64_t d = 0; d < Wide; d += kLanes) {
            shorten(load(centre_ + d), box_copies_[p] + d);
            shorten(load(half_ + d), box_copies_[p] + Wide + d);
        }
        boxes_at_[p] = box_copies_[p];
    }

    template <int N>
    Floats estimates(int64_t q) const {
        constexpr int kBoxes = kLanes / N;
        const uint16_t* queries = short_.data() + 2 * q * Wide;
        __m512 total[kLanes];
        for (int i = 0; i < kLanes; ++i) total[i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < 2 * Wide; d += 2 * kLanes) {
            __m512i box[kBoxes];
            for (int p = 0; p < kBoxes; ++p) box[p] = _mm512_loadu_si512(boxes_at_[p] + d);
            for (int n = 0; n < N; ++n) {
                const __m512i values = _mm512_loadu_si512(queries + 2 * n * Wide + d);
                for (int p = 0; p < kBoxes; ++p)
                    total[p * N + n] = _mm512_dpbf16_ps(total[p * N + n], (__m512bh)box[p], (__m512bh)values);
            }
        }
        return sums(reinterpret_cast<const Floats*>(total));
    }

    void unpack(const uint8_t* codes) { codes_ = codes; }

    void weigh(Floats weights, int n, int64_t d) {
        shorten(weights, reinterpret_cast<uint16_t*>(weights_ + (n * Wide + d) / 2));
    }

    // A word's pairs of codes become pairs of bfloat16, which hold 0 to 3 exactly, in a lane for each token.
    template <int N>
    void products(Floats* logits) {
        alignas(64) static constexpr uint32_t kPairs[16] = {
            0x00000000, 0x00003f80, 0x00004000, 0x00004040, 0x3f800000, 0x3f803f80, 0x3f804000, 0x3f804040,
            0x40000000, 0x40003f80, 0x40004000, 0x40004040, 0x40400000, 0x40403f80, 0x40404000, 0x40404040};
        const __m512i pairs = _mm512_load_si512(kPairs);
        __m512 total[N];
        for (int n = 0; n < N; ++n) total[n] = _mm512_setzero_ps();
        for (int64_t g = 0; g < groups_; ++g) {
            __m512i words = _mm512_loadu_si512(codes_ + 64 * g);
#pragma GCC unroll 8
            for (int p = 0; p < 8; ++p) {
                const __m512bh tokens = (__m512bh)_mm512_permutexvar_epi32(words, pairs);
                words = _mm512_srli_epi32(words, 4);
                for (int n = 0; n < N; ++n)
                    total[n] = _mm512_dpbf16_ps(
                        total[n], tokens,
                        (__m512bh)_mm512_set1_epi32(static_cast<int>(weights_[n * Wide / 2 + 8 * g + p])));
            }
        }
        for (int n = 0; n < N; ++n) logits[n] = reinterpret_cast<const Floats&>(total[n]);
    }

    const uint8_t* codes_ = nullptr;
    alignas(64) uint32_t weights_[8 * Wide / 2];
    alignas(64) uint16_t box_copies_[4][2 * Wide];
    const uint16_t* boxes_at_[4] = {};
    std::vector<uint16_t> short_;
#else
    // Half the absolute values of the queries.
    void read_reaches() {
        reaches_.resize(padded_ * Wide);
        for (size_t i = 0; i < queries_.size(); ++i) reaches_[i] = 0.5f * std::fabs(queries_[i]);
    }

    void open_box(const uint8_t* box, int64_t p) { read_box(box, centres_[p], halves_[p]); }

    template <int N>
    Floats estimates(int64_t q) const {
        constexpr int kBoxes = kLanes / N;
        const float* queries = queries_.data() + q * Wide;
        const float* reaches = reaches_.data() + q * Wide;
        Floats total[kLanes] = {};
        for (int p = 0; p < kBoxes; ++p)
            for (int64_t d = 0; d < Wide; d += kLanes) {
                const Floats centre = load(centres_[p] + d), half = load(halves_[p] + d);
                for (int n = 0; n < N; ++n) {
                    total[p * N + n] += load(queries + n * Wide + d) * centre;
                    total[p * N + n] += load(reaches + n * Wide + d) * half;
                }
            }
        return sums(total);
    }

    void unpack(const uint8_t* codes) {
        for (int64_t g = 0; g < groups_; ++g) {
            for (int v = 0; v < kPart; ++v) {
                Ints words;
                std::memcpy(&words, codes + 4 * (g * kPartTokens + v * kLanes), sizeof words);
                float* to = tokens_ + g * kChannels * kPartTokens + v * kLanes;
                for (int k = 0; k < kChannels; ++k, to += kPartTokens) {
                    store(to, __builtin_convertvector(words & 3, Floats));
                    words >>= 2;
                }
            }
        }
    }

    void weigh(Floats weights, int n, int64_t d) { store(weights_ + n * Wide + d, weights); }

    template <int N>
    void products(Floats* logits) {
        constexpr int kPair = kPart < 2 ? 1 : 2;  // vectors at a time, so that all sums stay in registers
        for (int v = 0; v < kPart; v += kPair) {
            Floats total[N * kPair] = {};
            for (int64_t d = 0; d < Wide; ++d) {
                Floats tokens[kPair];
                for (int i = 0; i < kPair; ++i) tokens[i] = load(tokens_ + d * kPartTokens + (v + i) * kLanes);
                for (int n = 0; n < N; ++n) {
                    const Floats weight = all(weights_[n * Wide + d]);
                    for (int i = 0; i < kPair; ++i) total[n * kPair + i] += weight * tokens[i];
                }
            }
            for (int n = 0; n < N; ++n)
                for (int i = 0; i < kPair; ++i) logits[n * kPart + v + i] = total[n * kPair + i];
        }
    }

    alignas(64) float tokens_[Wide * kPartTokens] = {};  // [channel][token], zero beyond `dim`
    alignas(64) float centres_[4][Wide], halves_[4][Wide];
    alignas(64) float weights_[kQueries * Wide];
    std::vector<float> reaches_;
#endif

    static constexpr int kAhead = 8, kBodiesAhead = 4;  // pages

    const TwoBitScores& a_;
    const int64_t groups_, parts_, bound_bytes_;
    const bool whole_;
    const uint8_t *outlines_ = nullptr, *bodies_ = nullptr;
    const int64_t* index_ = nullptr;
    int64_t count_ = 0, padded_ = 0, tile_ = 0, stride_ = 0;
    alignas(64) float centre_[Wide];
    alignas(64) float half_[Wide];
    alignas(64) float base_[Wide];
    alignas(64) float level_[Wide];
    alignas(64) float first_[Wide];
    alignas(64) float step_[Wide];
    alignas(64) uint8_t bytes_[2 * Wide] = {};  // zero beyond `dim`
    std::vector<float> queries_, mass_, offset_, promises_, share_, ranked_, fine_, known_, promised_;
    std::vector<float> factors_, fine_factors_;
    std::vector<int32_t> chosen_;
};

template <int64_t Wide>
void run_units(const TwoBitScores& a) {
    const int64_t units = a.requests * a.heads;
#pragma omp parallel
    {
        Unit<Wide> unit(a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; ++i) unit.run(i / a.heads, i % a.heads);
    }
}

void two_bit_scores(const TwoBitScores& a) {
    if (a.dim <= 64) return run_units<64>(a);
    if (a.dim <= 128) return run_units<128>(a);
    run_units<kMostDim>(a);
}

}  // namespace OASIS_ISA
