// Scale and offset of rows by their minimum and maximum, the ends of the row (format §3.2).
//
// The ends are found as integer keys, which order binary32 values as numbers (-0 below +0). A
// compiler may vectorize a minimum of integers. It may not vectorize a minimum of floats, whose
// result for NaN and ±0 depends on the order. The keys also show NaN and infinities, which lie
// outside the keys of finite values.
#pragma once

#include "../bit_packing/codes.h"
#include "binary16.h"

namespace recpoint::RECPOINT_SET {

constexpr int32_t INFINITY_KEY = 0x7F800000;
constexpr int32_t MINUS_INFINITY_KEY = -0x7F800001;
constexpr int32_t MINUS_ZERO_KEY = -1;
// The key of the smallest normal value. The key of its negative is -SMALLEST_KEY - 1.
constexpr int32_t SMALLEST_KEY = 0x00800000;
constexpr float TINY = 0x1p-126f;
constexpr float LARGE = 0x1p126f;
// The same as WIDEST_STEP of method.py.
constexpr float WIDEST_STEP = 1.0f + 0x1p-6f;

// Returns the key of a bit pattern, and the bit pattern of a key.
inline int32_t key_of(int32_t pattern) { return pattern ^ ((pattern >> 31) & 0x7FFFFFFF); }

struct Ends {
    int32_t low;
    int32_t high;
};

// What is stored of a row beside its codes. The scale is 0 if the row has none.
struct Parameters {
    float scale;
    float offset;
    bool is_exact;
    bool is_wide;
};

inline Ends ends_of_row(const float* row, int64_t dim) {
    int32_t low = 0x7FFFFFFF;
    int32_t high = -0x7FFFFFFF - 1;
    for (int64_t k = 0; k < dim; ++k) {
        const int32_t key = key_of(load<int32_t>(row + k));
        low = least(low, key);
        high = greatest(high, key);
    }
    return {low, high};
}

inline Parameters parameters_of_row(Ends ends, float levels, bool is_symmetric, bool in_half) {
    constexpr Parameters exact = {0.0f, 0.0f, true, false};
    if (ends.low <= MINUS_INFINITY_KEY || ends.high >= INFINITY_KEY) return exact;
    float low = float_of(key_of(ends.low));
    float high = float_of(key_of(ends.high));
    // Compares keys, not numbers: a thread that treats subnormals as zeros
    // (torch.set_flush_denormal) would take 0 and 1e-40 as equal, and 1e-40 for a value of
    // binary16.
    if (ends.low == ends.high) {
        if (ends.low == MINUS_ZERO_KEY) return exact;
        const bool is_normal = ends.low >= SMALLEST_KEY || ends.low < -SMALLEST_KEY;
        const bool fits = ends.low == 0 || (is_normal && half_below(low) == low &&
                                            magnitude(low) <= LARGEST_HALF);
        return {0.0f, low, false, in_half && !fits};
    }
    float span = high - low;
    if (!(span >= TINY * levels && span <= LARGE)) return exact;
    if (is_symmetric) {
        high = greatest(magnitude(low), magnitude(high));
        low = -high;
        span = high - low;
        if (span > LARGE) return exact;
    }
    const float scale = span / levels;
    if (!in_half) return {scale, low, false, false};
    const float half_offset = half_below(low);
    const float half_scale = half_above((high - half_offset) / levels);
    if (half_scale <= scale * WIDEST_STEP && half_scale <= LARGEST_HALF &&
        magnitude(half_offset) <= LARGEST_HALF) {
        return {half_scale, half_offset, false, false};
    }
    return {scale, low, false, true};
}

inline float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

}  // namespace recpoint::RECPOINT_SET
