// Swap plans for a batch of requests: the same choice as plan_swaps in ../swap_plan.py, which says what it is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels.h"

namespace {

// Orders like (score, then lowest column): no two keys are alike.
uint64_t key_of(float score, int64_t column) {
    score += 0.0f;  // -0.0 becomes a plain zero
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(column));
}

int64_t column_of(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

struct Scratch {
    std::vector<uint64_t> keys;
    std::vector<uint8_t> selected, resident;
    std::vector<int64_t> victims;
};

void plan(const SwapPlans& a, int64_t request, int64_t unit, Scratch& s) {
    const float* scores = a.scores + unit * a.columns;
    const int32_t* resident = a.resident + unit * a.slots;
    const int32_t* age = a.age + unit * a.slots;
    uint8_t* kept = a.kept + unit * a.slots;
    int32_t* incoming = a.incoming + unit * a.width;
    int32_t* target = a.target + unit * a.width;
    int64_t* counts = a.counts + unit * 3;
    const int64_t owned = a.hot_of[request];

    s.keys.clear();
    for (int64_t column = 0; column < a.columns; ++column)
        if (scores[column] > -INFINITY) s.keys.push_back(key_of(scores[column], column));
    const int64_t best = std::min<int64_t>(owned, s.keys.size());
    if (best < static_cast<int64_t>(s.keys.size()))
        std::nth_element(s.keys.begin(), s.keys.begin() + best, s.keys.end(), std::greater<>());
    s.keys.resize(best);
    s.selected.assign(a.columns, 0);
    for (const uint64_t key : s.keys) s.selected[column_of(key)] = 1;

    s.resident.assign(a.columns, 0);
    s.victims.clear();
    for (int64_t slot = 0; slot < a.slots; ++slot) {
        const int64_t column = resident[slot] - a.sinks;
        const bool is_candidate = slot < owned && column >= 0 && column < a.columns;
        if (is_candidate) s.resident[column] = 1;
        kept[slot] = is_candidate && s.selected[column];
        if (slot < owned && !kept[slot]) s.victims.push_back(slot);
    }
    int64_t held = 0;
    for (int64_t slot = 0; slot < a.slots; ++slot) held += kept[slot];

    s.keys.erase(std::remove_if(s.keys.begin(), s.keys.end(), [&](uint64_t key) { return s.resident[column_of(key)]; }),
                 s.keys.end());
    const int64_t missing = s.keys.size();
    const int64_t taken = std::min({missing, a.cap[request], a.width});
    std::partial_sort(s.keys.begin(), s.keys.begin() + taken, s.keys.end(), std::greater<>());
    const auto gives_way_first = [&](int64_t x, int64_t y) {
        const bool x_filled = resident[x] != kEmpty, y_filled = resident[y] != kEmpty;
        if (x_filled != y_filled) return y_filled;
        if (x_filled && age[x] != age[y]) return age[x] < age[y];
        return x < y;
    };
    std::partial_sort(s.victims.begin(), s.victims.begin() + taken, s.victims.end(), gives_way_first);
    for (int64_t i = 0; i < a.width; ++i) {
        incoming[i] = i < taken ? static_cast<int32_t>(column_of(s.keys[i]) + a.sinks) : kEmpty;
        target[i] = i < taken ? static_cast<int32_t>(s.victims[i]) : kEmpty;
    }
    counts[0] = held;
    counts[1] = missing;
    counts[2] = missing - taken;
}

}  // namespace

extern "C" int64_t oasis_swap_plans(const SwapPlans* a) {
    const int64_t units = a->requests * a->heads;
#pragma omp parallel if (units > 1)
    {
        Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) plan(*a, unit / a->heads, unit, scratch);
    }
    return 1;
}

extern "C" int64_t oasis_enter_swaps(const EnterSwaps* a) {
    const int64_t units = a->requests * a->heads;
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t request = unit / a->heads;
        if (!in_range(a->rows[request], a->map_rows)) return 0;
        for (int64_t i = unit * a->width; i < (unit + 1) * a->width; ++i) {
            if (a->incoming[i] == kEmpty) continue;
            if (!in_range(a->target[i], a->slots)) return 0;
            if (!a->copies) continue;
            const int64_t column = a->incoming[i] - a->sinks;
            if (!in_range(column, a->columns)) return 0;
            const int64_t from = a->index[request * a->columns + column] * a->host_stride + a->host_first;
            const int64_t to = a->hot[request * a->slots + a->target[i]] * a->device_stride;
            const int64_t heads = a->page_heads ? a->page_heads : a->heads;
            if (!in_range(from, a->host_rows) || !in_range(from + heads - 1, a->host_rows)) return 0;
            if (!in_range(to, a->device_rows) || !in_range(to + heads - 1, a->device_rows)) return 0;
        }
    }
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t request = unit / a->heads, head = unit % a->heads;
        const int64_t at = (a->rows[request] * a->heads + head) * a->slots;
        const int32_t step = static_cast<int32_t>(a->step);
        for (int64_t slot = 0; slot < a->slots; ++slot)
            if (a->kept[unit * a->slots + slot]) a->age[at + slot] = step;
        for (int64_t i = unit * a->width; i < (unit + 1) * a->width; ++i) {
            if (a->incoming[i] == kEmpty) continue;
            const int64_t slot = a->target[i];
            if (a->copies) {
                const int64_t column = a->incoming[i] - a->sinks;
                const int64_t from = a->index[request * a->columns + column] * a->host_stride + a->host_first;
                const int64_t to = a->hot[request * a->slots + slot] * a->device_stride;
                int64_t first = head, last = head + 1;
                if (a->page_heads) first = 0, last = head == 0 ? a->page_heads : 0;  // all sets are alike
                for (int64_t h = first; h < last; ++h)
                    std::memcpy(a->device + (to + h) * a->row_bytes, a->host + (from + h) * a->row_bytes,
                                static_cast<size_t>(a->row_bytes));
            }
            a->block[at + slot] = a->incoming[i];
            a->age[at + slot] = step;
        }
    }
    return 1;
}
