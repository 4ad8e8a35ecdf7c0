#include "../native/open_table.h"

namespace recpoint::RECPOINT_SET {
namespace {

constexpr int64_t DEPTH = 4;
constexpr int64_t AHEAD = 16;  // keys whose counts are asked for before they are needed
constexpr int64_t MOST = 255;

// Writes the four counts of a key. Stored sketches depend on this function.
void locate(uint8_t* counts, int64_t width, int64_t key, uint8_t** cells) {
    const uint64_t hash = spread_thrice(static_cast<uint64_t>(key));
    const auto step = static_cast<uint32_t>(hash) | 1;
    auto place = static_cast<uint32_t>(hash >> 32);
    for (int64_t row = 0; row < DEPTH; ++row, place += step) {
        cells[row] = counts + row * width + (place * static_cast<uint64_t>(width) >> 32);
    }
}

void expect(uint8_t* counts, int64_t width, int64_t key) {
    uint8_t* cells[DEPTH];
    locate(counts, width, key, cells);
    for (uint8_t* cell : cells) ask(cell);
}

// Writes the least of each key's counts.
void estimate_counts(
    uint8_t* counts, int64_t width, const int64_t* keys, int64_t n, int64_t* estimates
) {
    for (int64_t i = 0; i < least(AHEAD, n); ++i) expect(counts, width, keys[i]);
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) expect(counts, width, keys[i + AHEAD]);
        uint8_t* cells[DEPTH];
        locate(counts, width, keys[i], cells);
        int64_t estimate = MOST;
        for (const uint8_t* cell : cells) estimate = least<int64_t>(estimate, *cell);
        estimates[i] = estimate;
    }
}

// Raises each key's counts to its estimate and one. `estimates` has room for n numbers.
void add_counts(
    uint8_t* counts, int64_t width, const int64_t* keys, int64_t n, int64_t* estimates
) {
    // All estimates come first, so the order of the keys changes nothing.
    estimate_counts(counts, width, keys, n, estimates);
    for (int64_t i = 0; i < least(AHEAD, n); ++i) expect(counts, width, keys[i]);
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) expect(counts, width, keys[i + AHEAD]);
        uint8_t* cells[DEPTH];
        locate(counts, width, keys[i], cells);
        const auto raised = static_cast<uint8_t>(least(estimates[i] + 1, MOST));
        for (uint8_t* cell : cells) *cell = greatest(*cell, raised);
    }
}

// Halves n counts.
void halve_counts(uint8_t* counts, int64_t n) {
    for (int64_t i = 0; i < n; ++i) counts[i] >>= 1;
}

}  // namespace

extern const Operation key_sketch[] = {
    {"estimate_counts", call<estimate_counts>},
    {"add_counts", call<add_counts>},
    {"halve_counts", call<halve_counts>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
