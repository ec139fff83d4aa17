// What the compiled kernels take. Everything is row-major and contiguous unless a stride is given. Formats and sizes
// are checked by the caller (../kernels.py), indices here: a kernel answers 0 if one of them is out of range.
#pragma once

#include <cstdint>

constexpr int kMostDim = 256;
constexpr int32_t kEmpty = -1;  // no block, no slot

inline bool in_range(int64_t i, int64_t count) { return 0 <= i && i < count; }

enum NumberFormat : int64_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct TwoBitScores {
    const uint8_t* outlines;  // [heads, blocks, outline_bytes]
    int64_t outline_bytes;
    const uint8_t* bodies;  // [heads, blocks, body_bytes]
    int64_t body_bytes, blocks, box_format;
    const int64_t* index;   // [requests, columns]: block of each candidate
    const int64_t* counts;  // [requests]: candidates, the first columns
    int64_t requests, columns;
    const void* queries;  // [tokens, heads * group, dim], `token_stride` numbers from one token to the next
    int64_t query_format, tokens, token_stride;
    const int64_t* rows;        // [requests, 2]: tokens whose queries speak for the request
    const uint8_t* row_counts;  // [requests, 2]: whether they do
    int64_t heads, group, dim;
    float scale;
    float read_on;   // share of a page's mass that is handed to the next page
    int64_t refine;  // pages whose codes are read
    float* out;      // [requests, heads, columns]: shares of mass, summed over queries; -inf beyond `counts`
    int64_t isa;     // instruction set, see kernels.cpp
};

struct SwapPlans {
    const float* scores;  // [requests, heads, columns]
    int64_t requests, heads, columns;
    const int32_t* resident;  // [requests, heads, slots]
    const int32_t* age;       // [requests, heads, slots]
    int64_t slots;
    const int64_t* hot_of;  // [requests]
    int64_t sinks;
    const int64_t* cap;  // [requests]
    int64_t width;
    int32_t* incoming;  // [requests, heads, width]
    int32_t* target;    // [requests, heads, width]
    uint8_t* kept;      // [requests, heads, slots]
    int64_t* counts;    // [requests, heads, 3]: kept, missing, left out because of the cap
};

struct CopyRows {
    const uint8_t* source;
    const int64_t* source_rows;
    int64_t source_count;
    uint8_t* target;
    const int64_t* target_rows;
    int64_t target_count, count, row_bytes, source_stride, target_stride;  // strides in bytes
};

struct CopyBlocks {
    // A plane is where one run of bytes of every block lies on both sides: addresses of block 0 and the distance to the
    // next, there and here, and how many bytes: [planes, 5].
    const int64_t* planes;
    int64_t plane_count;
    const int64_t* source;  // [count]: blocks
    const int64_t* target;  // [count]
    int64_t count, source_blocks, target_blocks;
    int64_t reversed;  // a plane's second side is the source
};

struct EnterSwaps {
    const int64_t* rows;  // [requests]: rows of the residency map
    int64_t requests, heads, slots, width;
    const int32_t* incoming;  // [requests, heads, width]
    const int32_t* target;    // [requests, heads, width]
    const uint8_t* kept;      // [requests, heads, slots]
    int32_t* block;           // [map rows, heads, slots]
    int32_t* age;             // [map rows, heads, slots]
    int64_t map_rows, step, copies;
    // What follows counts if `copies` is set. A set of slots is that of one KV head, or (`page_heads`) of so many.
    int64_t page_heads, sinks, columns;
    const int64_t* index;  // [requests, columns]: host block of each candidate
    const int64_t* hot;    // [requests, slots]: device block of each slot
    const uint8_t* host;   // [host_rows, row_bytes]
    int64_t host_rows, host_stride, host_first;  // row of block b and KV head h: host_stride * b + host_first + h
    uint8_t* device;                             // [device_rows, row_bytes]
    int64_t device_rows, device_stride, row_bytes;
};

// A whole choice: scores, plans and entries of a group of requests. What differs by layer is left out here ...
struct SwapBatch {
    TwoBitScores scores;
    SwapPlans plans;
    EnterSwaps enter;
    int32_t* resident;  // [requests, heads, slots]: room for the plans' input
    int32_t* age;
};

// ... and named here.
struct SwapLayer {
    int64_t layer;         // of the residency map
    const uint8_t* outlines;  // summaries, as in TwoBitScores
    int64_t outline_bytes;
    const uint8_t* bodies;
    int64_t body_bytes, blocks, box_format;
    const void* queries;
    int64_t query_format, tokens, token_stride, group, dim;
    float scale;
    const uint8_t* host;  // as in EnterSwaps; null: the pages stay where they are
    int64_t host_rows, host_stride, host_first;
    uint8_t* device;
    int64_t device_rows, device_stride, row_bytes;
    int64_t hits, misses, capped;  // the answer
};

// Tokens of one part of a page, and how many parts a two-bit summary is of: bounds and codes of each follow the
// outline, but a page of one part has no bounds.
constexpr int kPartTokens = 16;

inline int64_t code_bytes(int64_t dim) { return (dim + 15) / 16 * 4 * kPartTokens; }

inline int64_t parts_of(int64_t body_bytes, int64_t dim) {
    return body_bytes == code_bytes(dim) ? 1 : body_bytes / (2 * dim + code_bytes(dim));
}

// What every layer does with the keys of a step: copy those of unfinished blocks to the stage, then summarise whole
// blocks, straight from the keys and from the stage.
struct SummaryWrites {
    const int64_t* stage_tokens;  // [stage_count]
    const int64_t* stage_slots;   // [stage_count]
    int64_t stage_count;
    const int64_t* bulk_first;   // [bulk_count]: first token of each block
    const int64_t* bulk_blocks;  // [bulk_count]
    int64_t bulk_count;
    const int64_t* staged_rows;    // [staged_count]: row of the stage that holds each block
    const int64_t* staged_blocks;  // [staged_count]
    int64_t staged_count;
};

struct SummaryLayer {
    const uint8_t* keys;  // [tokens, heads, dim]; null: there are none in this step
    int64_t tokens, token_stride;
    uint8_t* stage;  // [slots, heads, dim]
    int64_t slots, format, heads, dim;
    uint8_t* outlines;  // [heads, blocks, outline_bytes]
    int64_t outline_bytes;
    uint8_t* bodies;  // [heads, blocks, body_bytes]
    int64_t body_bytes, blocks, box_format;
};

// A batch of requests: the newest tokens of each attend over the pages in its row of the table.
struct AttentionBatch {
    const int32_t* starts;    // [requests + 1]: first token of each request
    const int32_t* seq_lens;  // [requests]: tokens that its last token sees, itself included
    const int32_t* table;     // [requests, columns]: blocks
    int64_t requests, columns;
};

// One layer. A page: keys [dim, size], then values [size, dim].
struct AttentionLayer {
    const void* cache;  // [blocks, heads, 2 * size, dim]
    int64_t format, blocks, heads, size, dim, group;
    float scale;
    const void* query;  // [tokens, heads * group, dim], `query_stride` numbers from one token to the next
    void* out;          // the same, `out_stride`
    int64_t tokens, query_stride, out_stride, isa;
};
