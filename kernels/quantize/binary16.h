// Rounds binary32 values to values of binary16. The results are binary32. If a magnitude exceeds
// the largest of binary16, the result exceeds LARGEST_HALF; callers test for this.
#pragma once

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

constexpr float LARGEST_HALF = 65504.0f;
// The smallest normal magnitude. The values below are multiples of 2^-24.
constexpr float SMALLEST_HALF = 0x1p-14f;
// The 13 bits of fraction that only binary32 has.
constexpr int32_t HALF_REST = 0x1FFF;

inline int32_t bits_of(float value) { return load<int32_t>(&value); }
inline float float_of(int32_t bits) { return load<float>(&bits); }
inline float magnitude(float value) { return float_of(bits_of(value) & 0x7FFFFFFF); }

inline float half_toward_zero(float value) {
    if (value >= SMALLEST_HALF) return float_of(bits_of(value) & ~HALF_REST);
    return static_cast<float>(static_cast<int32_t>(value * 0x1p24f)) * 0x1p-24f;
}

inline float half_from_zero(float value) {
    if (value >= SMALLEST_HALF) return float_of((bits_of(value) + HALF_REST) & ~HALF_REST);
    const float units = value * 0x1p24f;  // exact: a power of two, and the result is normal
    const float whole = static_cast<float>(static_cast<int32_t>(units));
    return (whole < units ? whole + 1.0f : whole) * 0x1p-24f;
}

// The largest binary16 value that is not above a finite value. -0 stays -0.
inline float half_below(float value) {
    if (value > 0.0f) return half_toward_zero(value);
    return value < 0.0f ? -half_from_zero(-value) : value;
}

// The smallest binary16 value that is not below a value, which must be finite and not negative.
inline float half_above(float value) { return half_from_zero(value); }

// The binary16 value nearest to a finite value, ties to even. -0 stays -0.
inline float half_nearest(float value) {
    if (value == 0.0f) return value;
    float rounded = magnitude(value);
    if (rounded >= SMALLEST_HALF) {
        const int32_t pattern = bits_of(rounded);
        rounded = float_of((pattern + (HALF_REST >> 1) + ((pattern >> 13) & 1)) & ~HALF_REST);
    } else {
        const float units = rounded * 0x1p24f;
        int32_t whole = static_cast<int32_t>(units);
        const float rest = units - static_cast<float>(whole);
        whole += rest > 0.5f || (rest == 0.5f && (whole & 1) == 1);
        rounded = static_cast<float>(whole) * 0x1p-24f;
    }
    return value < 0.0f ? -rounded : rounded;
}

}  // namespace recpoint::RECPOINT_SET
