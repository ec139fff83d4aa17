// Attention of the few newest tokens of each request over its pages (see ../decode_attention.py, which says what a page
// is).
//
// One unit of work is a request, a KV head and a chunk of its tokens: logits of the chunk, their softmax, and the
// weighted values. A second pass adds up the chunks of a request. Chunks are cut by tokens alone, so that the result is
// the same for any number of threads.
#pragma once

#include "kernels.h"
#include "lanes.h"
#include "standard.h"

namespace OASIS_ISA {

constexpr int64_t kPiece = 2 * kLanes;       // tokens or channels that are read at once; 32 is a multiple of it
constexpr int64_t kChunk = 768;              // tokens, at most
constexpr int kTile = kLanes == 16 ? 8 : 6;  // query rows at a time, at most: as many as there are registers for
constexpr float kNever = -std::numeric_limits<float>::infinity();

// `kPiece` numbers of a page as floats: those at even places, those at odd places (bfloat16: two operations instead of
// four), or the first and the second half. `write_pair` puts them back in their order.
inline void read_pair(const uint16_t* from, Floats& a, Floats& b) {
    Ints bits;
    std::memcpy(&bits, from, sizeof bits);
    const Ints even = bits << 16, odd = bits & static_cast<int32_t>(0xffff0000u);
    a = reinterpret_cast<const Floats&>(even);
    b = reinterpret_cast<const Floats&>(odd);
}
inline void read_pair(const float* from, Floats& a, Floats& b) { a = load(from), b = load(from + kLanes); }

inline void write_pair(const uint16_t*, float* to, Floats a, Floats b) {
    store(to, first_in_turn(a, b, Lanes()));
    store(to + kLanes, second_in_turn(a, b, Lanes()));
}
inline void write_pair(const float*, float* to, Floats a, Floats b) { store(to, a), store(to + kLanes, b); }

inline float number(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float number(float value) { return value; }

inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *to = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A request's tokens in as few chunks as there may be, of about the same size.
inline int64_t chunks_of(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }
inline int64_t chunk_size(int64_t tokens) {
    const int64_t pieces = (tokens + kPiece - 1) / kPiece;
    return (pieces + chunks_of(tokens) - 1) / chunks_of(tokens) * kPiece;
}

// A request's chunk of tokens, in one KV head. `first`: where its rows' partial results lie.
struct ChunkOf {
    int64_t request, head, begin, end, first;
};

template <typename Number>
class Chunk {
  public:
    Chunk(const AttentionBatch& batch, const AttentionLayer& layer) : b_(batch), a_(layer) {}

    // Weighted values [rows, dim], the largest logit [rows] and the sum of the weights [rows] of a chunk.
    void run(const ChunkOf& c, float* partial) {
        const int64_t begin = b_.starts[c.request], tokens = b_.starts[c.request + 1] - begin;
        rows_ = tokens * a_.group;
        table_ = b_.table + c.request * b_.columns;
        head_ = static_cast<const Number*>(a_.cache) + c.head * page();
        read_queries(begin, tokens, c.head);
        const int64_t length = c.end - c.begin;
        stride_ = (length + kPiece - 1) / kPiece * kPiece;
        logits_.resize(padded_ * stride_);
        for (int64_t i = 0; i < length; i += kPiece) {
            const Number *keys = keys_of(c.begin + i), *next = keys_of(std::min(c.begin + i + kPiece, c.end - 1));
            for (int64_t r = 0; r < rows_; r += tile_) in_tiles(r, [&](auto n) { score<n>(keys, next, r, i); });
        }
        float *values = partial, *largest = partial + rows_ * a_.dim, *sum = largest + rows_;
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t seen = b_.seq_lens[c.request] - (tokens - 1 - r / a_.group) - c.begin;
            softmax(logits_.data() + r * stride_, std::clamp<int64_t>(seen, 0, length), largest + r, sum + r);
        }
        mixed_.assign(padded_ * a_.dim, 0.0f);
        for (int64_t i = 0; i < length; i += kPiece) {
            const Number *held = values_of(c.begin + i), *next = values_of(std::min(c.begin + i + kPiece, c.end - 1));
            for (int64_t r = 0; r < rows_; r += tile_)
                in_tiles(r, [&](auto n) { mix<n>(held, next, r, i, std::min(kPiece, length - i)); });
        }
        for (int64_t r = 0; r < rows_; ++r)
            for (int64_t d = 0; d < a_.dim; d += kPiece) {
                const float* from = mixed_.data() + r * a_.dim + d;
                write_pair(head_, values + r * a_.dim + d, load(from), load(from + kLanes));
            }
    }

    // The rows of a request and KV head, from the partial results of its chunks.
    void join(int64_t request, int64_t head, const float* partial) {
        const int64_t seen = b_.seq_lens[request], chunks = (seen + chunk_size(seen) - 1) / chunk_size(seen);
        const int64_t begin = b_.starts[request], tokens = b_.starts[request + 1] - begin, rows = tokens * a_.group;
        const int64_t size = rows * (a_.dim + 2);
        mixed_.resize(a_.dim);
        for (int64_t r = 0; r < rows; ++r) {
            float most = kNever, total = 0;
            for (int64_t c = 0; c < chunks; ++c) most = std::max(most, partial[c * size + rows * a_.dim + r]);
            std::fill(mixed_.begin(), mixed_.end(), 0.0f);
            for (int64_t c = 0; c < chunks; ++c) {
                const float* part = partial + c * size;
                const float largest = part[rows * a_.dim + r];
                if (largest == kNever) continue;
                const float share = std::exp(largest - most);
                total += share * part[rows * (a_.dim + 1) + r];
                for (int64_t d = 0; d < a_.dim; ++d) mixed_[d] += share * part[r * a_.dim + d];
            }
            const int64_t token = begin + r / a_.group, at = (head * a_.group + r % a_.group) * a_.dim;
            Number* out = static_cast<Number*>(a_.out) + token * a_.out_stride + at;
            for (int64_t d = 0; d < a_.dim; ++d) put(out + d, mixed_[d] / total);
        }
    }

  private:
    int64_t page() const { return 2 * a_.size * a_.dim; }
    const Number* page_of(int64_t token) const { return head_ + table_[token / a_.size] * a_.heads * page(); }
    const Number* keys_of(int64_t token) const { return page_of(token) + token % a_.size / kPiece * kPiece; }
    const Number* values_of(int64_t token) const {
        return page_of(token) + (a_.size + token % a_.size / kPiece * kPiece) * a_.dim;
    }

    // Rows of a KV head: token by token its group of query heads, times the softmax scale; zeros up to whole tiles,
    // which are as few as there may be, of about the same size.
    void read_queries(int64_t begin, int64_t tokens, int64_t head) {
        const int64_t tiles = (rows_ + kTile - 1) / kTile;
        tile_ = (rows_ + tiles - 1) / tiles;
        padded_ = tiles * tile_;
        queries_.assign(padded_ * a_.dim, 0.0f);
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t token = begin + r / a_.group, at = (head * a_.group + r % a_.group) * a_.dim;
            const Number* from = static_cast<const Number*>(a_.query) + token * a_.query_stride + at;
            for (int64_t d = 0; d < a_.dim; ++d) queries_[r * a_.dim + d] = number(from[d]) * a_.scale;
        }
    }

    // Call f with how many of the rows from r on are worked on together.
    template <typename F>
    void in_tiles(int64_t r, F f) const {
        switch (std::min(tile_, rows_ - r)) {
            case 1: return f(std::integral_constant<int, 1>());
            case 2: return f(std::integral_constant<int, 2>());
            case 3: return f(std::integral_constant<int, 3>());
            case 4: return f(std::integral_constant<int, 4>());
            case 5: return f(std::integral_constant<int, 5>());
            case 6: return f(std::integral_constant<int, 6>());
            case 7: return f(std::integral_constant<int, 7>());
            default: return f(std::integral_constant<int, 8>());
        }
    }

    // Logits of N rows and `kPiece` tokens, whose keys lie channel by channel.
    template <int N>
    void score(const Number* keys, const Number* next, int64_t r, int64_t i) {
        const float* queries = queries_.data() + r * a_.dim;
        Floats even[N] = {}, odd[N] = {};
        for (int64_t d = 0; d < a_.dim; ++d) {
            Floats a, b;
            read_pair(keys + d * a_.size, a, b);
            __builtin_prefetch(next + d * a_.size);
            for (int n = 0; n < N; ++n) {
                const Floats query = all(queries[n * a_.dim + d]);
                even[n] += query * a;
                odd[n] += query * b;
            }
        }
        for (int n = 0; n < N; ++n) write_pair(keys, logits_.data() + (r + n) * stride_ + i, even[n], odd[n]);
    }

    // Logits become weights; 0 beyond those seen.
    void softmax(float* row, int64_t seen, float* largest, float* sum) const {
        std::fill(row + seen, row + stride_, kNever);
        Floats most = all(kNever), total = {};
        for (int64_t i = 0; i < stride_; i += kLanes) {
            const Floats found = load(row + i);
            most = found > most ? found : most;
        }
        float peak = kNever;
        for (int n = 0; n < kLanes; ++n) peak = std::max(peak, most[n]);
        *largest = peak;
        for (int64_t i = 0; i < stride_; i += kLanes) {
            const Floats weights = seen > 0 ? exponential<7>(load(row + i) - peak) : Floats{};
            store(row + i, weights);
            total += weights;  // of what is not seen: 1e-38
        }
        std::fill(row + seen, row + stride_, 0.0f);
        *sum = 0;
        for (int n = 0; n < kLanes; ++n) *sum += total[n];
    }

    // Add the values of up to `kPiece` tokens to N rows, by their weights.
    template <int N>
    void mix(const Number* values, const Number* next, int64_t r, int64_t i, int64_t count) {
        const float* weights = logits_.data() + r * stride_ + i;
        for (int64_t d = 0; d < a_.dim; d += kPiece) {
            float* mixed = mixed_.data() + r * a_.dim + d;
            Floats even[N], odd[N];
            for (int n = 0; n < N; ++n) even[n] = load(mixed + n * a_.dim), odd[n] = load(mixed + n * a_.dim + kLanes);
            for (int64_t t = 0; t < count; ++t) {
                Floats a, b;
                read_pair(values + t * a_.dim + d, a, b);
                __builtin_prefetch(next + t * a_.dim + d);
                for (int n = 0; n < N; ++n) {
                    const Floats weight = all(weights[n * stride_ + t]);
                    even[n] += weight * a;
                    odd[n] += weight * b;
                }
            }
            for (int n = 0; n < N; ++n) store(mixed + n * a_.dim, even[n]), store(mixed + n * a_.dim + kLanes, odd[n]);
        }
    }

    const AttentionBatch& b_;
    const AttentionLayer& a_;
    int64_t rows_ = 0, tile_ = 0, padded_ = 0, stride_ = 0;
    const int32_t* table_ = nullptr;
    const Number* head_ = nullptr;
    std::vector<float> queries_, logits_, mixed_;
};

template <typename Number>
void run_chunks(const AttentionBatch& b, const AttentionLayer& a) {
    std::vector<ChunkOf> chunks;
    std::vector<int64_t> firsts;
    int64_t size = 0;
    for (int64_t r = 0; r < b.requests; ++r) {
        const int64_t rows = (b.starts[r + 1] - b.starts[r]) * a.group, tokens = rows > 0 ? b.seq_lens[r] : 0;
        for (int64_t head = 0; head < a.heads; ++head) {
            firsts.push_back(size);
            for (int64_t begin = 0; begin < tokens; begin += chunk_size(tokens)) {
                chunks.push_back({r, head, begin, std::min(begin + chunk_size(tokens), tokens), size});
                size += rows * (a.dim + 2);
            }
        }
    }
    const int64_t units = static_cast<int64_t>(chunks.size()), ends = static_cast<int64_t>(firsts.size());
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < size) kept.resize(size);
    float* partial = kept.data();
#pragma omp parallel
    {
        Chunk<Number> chunk(b, a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; ++i) chunk.run(chunks[i], partial + chunks[i].first);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < ends; ++i) {
            const int64_t request = i / a.heads;
            if (b.starts[request + 1] == b.starts[request]) continue;
            chunk.join(request, i % a.heads, partial + firsts[i]);
        }
    }
}

void decode_attention(const AttentionBatch& b, const AttentionLayer& a) {
    if (a.format == kFloat32) return run_chunks<float>(b, a);
    run_chunks<uint16_t>(b, a);
}

}  // namespace OASIS_ISA
