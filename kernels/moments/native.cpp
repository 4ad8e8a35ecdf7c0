#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Constants of format §3.5; see grid.py.
constexpr uint32_t LARGEST = 0x7F000000;
constexpr uint32_t LEAST_SHIFT = 8;
constexpr uint32_t BASE_SHIFT = 19;
constexpr uint32_t MOST_STEPS = 254;
// Places lie apart in a table, so each is prefetched so many rows ahead.
constexpr int64_t AHEAD = 16;

struct Grid {
    uint32_t base;
    uint32_t shift;
};

uint32_t nearest(uint32_t pattern, uint32_t shift) {
    return (pattern + (uint32_t{1} << (shift - 1))) >> shift;
}

uint32_t base_of(uint32_t least, uint32_t shift) {
    const uint32_t multiple = greatest(shift, BASE_SHIFT);
    return least >> multiple << multiple;
}

// The finest grid from a row's least value that is not zero to its greatest value. A grid that
// reaches so far has at least the first shift that is tried: 255 steps are less than 2^(8 + shift).
Grid grid_of(uint32_t least, uint32_t greatest_value) {
    const uint32_t span = greatest_value - base_of(least, 0);
    const uint32_t length = span == 0 ? 0 : 32 - static_cast<uint32_t>(__builtin_clz(span));
    uint32_t shift = length > 8 + LEAST_SHIFT ? length - 8 : LEAST_SHIFT;
    while (nearest(greatest_value, shift) - (base_of(least, shift) >> shift) > MOST_STEPS) ++shift;
    return {base_of(least, shift), shift};
}

// Returns whether the row has codes.
bool encode_row(const uint32_t* row, int64_t m, uint8_t* codes, uint16_t* grid) {
    uint32_t high = 0;
    uint32_t below_least = ~uint32_t{0};  // the least value less 1: so zero counts as the greatest
    for (int64_t k = 0; k < m; ++k) {
        high = greatest(high, row[k]);
        below_least = least(below_least, row[k] - 1);
    }
    if (high == 0 || high > LARGEST) {
        memset(codes, 0, m);
        *grid = 0;
        return high == 0;
    }
    const Grid finest = grid_of(below_least + 1, high);
    const uint32_t half = uint32_t{1} << (finest.shift - 1);
    const uint32_t before = (finest.base >> finest.shift) - 1;
    for (int64_t k = 0; k < m; ++k) {
        const uint32_t step = greatest((row[k] + half) >> finest.shift, uint32_t{1});
        codes[k] = static_cast<uint8_t>(row[k] == 0 ? 0 : step - before);
    }
    *grid = static_cast<uint16_t>(
        finest.base >> BASE_SHIFT | (finest.shift - LEAST_SHIFT) << 12
    );
    return true;
}

void decode_row(const uint8_t* codes, int64_t m, uint16_t grid, uint32_t* row) {
    const uint32_t shift = LEAST_SHIFT + (grid >> 12);
    // Sums are modulo 2^32, and each sum of a code above 0 is below 2^32.
    const uint32_t before = (static_cast<uint32_t>(grid & 0xFFF) << BASE_SHIFT) -
                            (uint32_t{1} << shift);
    for (int64_t k = 0; k < m; ++k) {
        const uint32_t code = codes[k];
        const uint32_t pattern = least(before + (code << shift), LARGEST);
        row[k] = code == 0 ? 0 : pattern;
    }
}

void encode_moments(
    const uint32_t* rows, int64_t m, int64_t n, uint8_t* codes, uint16_t* grids, uint8_t* refused,
    int64_t threads
) {
    over_rows(n, threads, [&](int64_t start, int64_t stop) {
        for (int64_t i = start; i < stop; ++i) {
            refused[i] = !encode_row(rows + i * m, m, codes + i * m, grids + i);
        }
    });
}

// Decodes the rows at `positions` (null: all) to the rows `ids` of a table (null: in order).
void decode_moments(
    const uint8_t* codes, const uint16_t* grids, uint32_t* table, int64_t m,
    const int64_t* positions, const int64_t* ids, int64_t count, int64_t threads
) {
    over_rows(count, threads, [&](int64_t start, int64_t stop) {
        for (int64_t i = start; i < stop; ++i) {
            if (ids != nullptr && i + AHEAD < stop) ask_for(table + ids[i + AHEAD] * m);
            const int64_t from = positions != nullptr ? positions[i] : i;
            const int64_t to = ids != nullptr ? ids[i] : i;
            decode_row(codes + from * m, m, grids[from], table + to * m);
        }
    });
}

}  // namespace

extern const Operation moments[] = {
    {"encode_moments", call<encode_moments>},
    {"decode_moments", call<decode_moments>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
