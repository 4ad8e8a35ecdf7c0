#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {
namespace {

// The SplitMix64 hash of a word (Steele et al., OOPSLA 2014). Stored rules depend on it.
uint64_t mixed(uint64_t word) {
    word *= 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

template <typename Value>
void draw(
    uint64_t seed, const int64_t* ids, int64_t n, uint64_t row_values, int64_t columns, double low,
    double width, Value* values
) {
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t first = static_cast<uint64_t>(ids[i]) * row_values + seed;
        for (int64_t k = 0; k < columns; ++k) {
            // 24 bits of the hash: an int32 holds them, and becomes a double faster than an int64.
            const auto unit = static_cast<int32_t>(mixed(first + static_cast<uint64_t>(k)) >> 40);
            const double value = unit * 0x1p-24 * width + low;
            values[i * columns + k] = static_cast<Value>(value);
        }
    }
}

// Writes [n, columns] values of rows, from column `first_column` on: doubles, or floats.
void draw_uniform(
    uint64_t key, const int64_t* ids, int64_t n, uint64_t row_values, int64_t first_column,
    int64_t columns, double low, double width, bool is_double, void* values
) {
    const uint64_t seed = mixed(key) + static_cast<uint64_t>(first_column) + 1;
    if (is_double) {
        draw(seed, ids, n, row_values, columns, low, width, static_cast<double*>(values));
    } else {
        draw(seed, ids, n, row_values, columns, low, width, static_cast<float*>(values));
    }
}

}  // namespace

extern const Operation first_values[] = {
    {"draw_uniform", call<draw_uniform>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
