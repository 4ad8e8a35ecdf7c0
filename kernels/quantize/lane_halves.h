// Rounds to values of binary16 as `binary16.h` does, in all lanes at once.
#pragma once

#include "binary16.h"
#include "lanes.h"

namespace recpoint::RECPOINT_SET {

inline Floats magnitude(Floats value) { return float_of(bits_of(value) & 0x7FFFFFFF); }

// For finite values that are not negative.
inline Floats half_toward_zero(Floats value) {
    const Floats near = minimum(value, spread(SMALLEST_HALF));  // so that the integer is in range
    const Floats few_units = whole(near * 0x1p24f) * 0x1p-24f;
    return value >= SMALLEST_HALF ? float_of(bits_of(value) & ~HALF_REST) : few_units;
}

inline Floats half_from_zero(Floats value) {
    const Floats units = minimum(value, spread(SMALLEST_HALF)) * 0x1p24f;
    const Floats below = whole(units);
    const Floats few_units = (below < units ? below + 1.0f : below) * 0x1p-24f;
    const Floats normal = float_of((bits_of(value) + HALF_REST) & ~HALF_REST);
    return value >= SMALLEST_HALF ? normal : few_units;
}

inline Floats half_below(Floats value) {
    const Floats size = magnitude(value);
    const Floats of_negative = -half_from_zero(size);
    const Floats of_positive = value > 0.0f ? half_toward_zero(size) : value;
    return value < 0.0f ? of_negative : of_positive;
}

inline Floats half_above(Floats value) { return half_from_zero(value); }

}  // namespace recpoint::RECPOINT_SET
