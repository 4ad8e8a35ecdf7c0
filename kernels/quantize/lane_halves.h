// Parameters of binary16 as `plain.h` chooses them, with a row in each lane.
#pragma once

#include "ends.h"

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
    // Without a sign, because the pattern of a NaN may overflow. Its row is exact.
    const Marks next = reinterpret_cast<Marks>(bits_of(value)) + static_cast<uint32_t>(HALF_REST);
    const Floats normal = float_of(reinterpret_cast<Words>(next) & ~HALF_REST);
    return value >= SMALLEST_HALF ? normal : few_units;
}

inline Floats half_below(Floats value) {
    const Floats size = magnitude(value);
    const Floats of_negative = -half_from_zero(size);
    const Floats of_positive = value > 0.0f ? half_toward_zero(size) : value;
    return value < 0.0f ? of_negative : of_positive;
}

inline Floats half_above(Floats value) { return half_from_zero(value); }

// The value of binary16 nearest to any value, ties to even, as the scalar form.
inline Floats half_nearest(Floats value) {
    const Floats size = magnitude(value);
    const Floats few_units = rounded(minimum(size, spread(SMALLEST_HALF)) * 0x1p24f) * 0x1p-24f;
    // Without a sign, because the pattern of a NaN may overflow.
    const Marks pattern = reinterpret_cast<Marks>(bits_of(size));
    const Marks next = pattern + static_cast<uint32_t>(HALF_REST >> 1) + ((pattern >> 13) & 1);
    const Floats normal = float_of(reinterpret_cast<Words>(next) & ~HALF_REST);
    const Floats nearest = size >= SMALLEST_HALF ? normal : few_units;
    const Floats with_sign = value < 0.0f ? -nearest : nearest;
    return value == 0.0f ? value : with_sign;
}

// What the parameters of LANES rows have in common at all widths. All flags are -1 if set, else 0.
struct LaneEnds {
    Floats low;
    Floats high;
    Floats span;
    Floats half_offset;  // the low end as a value of binary16
    Words is_finite;
    Words is_constant;
    Words is_wide_constant;
};

// The ends of LANES rows that lie side by side.
inline EndsOfRows ends_of_lanes(const Floats* values, int64_t dim) {
    EndsOfRows keys = {0x7FFFFFFF - Words{}, -0x7FFFFFFF - 1 - Words{}};
    for (int64_t k = 0; k < dim; ++k) {
        const Words own_keys = keys_of(bits_of(values[k]));
        keys.low = smaller(keys.low, own_keys);
        keys.high = larger(keys.high, own_keys);
    }
    return keys;
}

inline LaneEnds lane_ends(EndsOfRows keys) {
    LaneEnds ends;
    ends.low = float_of(keys_of(keys.low));
    ends.high = float_of(keys_of(keys.high));
    ends.span = ends.high - ends.low;
    ends.half_offset = half_below(ends.low);
    ends.is_finite = (keys.low > MINUS_INFINITY_KEY) & (keys.high < INFINITY_KEY);
    // Compares keys, not numbers, as `parameters_of_row` does and for its reasons.
    ends.is_constant = (keys.low == keys.high) & (keys.low != MINUS_ZERO_KEY);
    const Words is_normal = (keys.low >= SMALLEST_KEY) | (keys.low < -SMALLEST_KEY);
    const Words is_half =
        (ends.half_offset == ends.low) & (magnitude(ends.low) <= LARGEST_HALF) & is_normal;
    ends.is_wide_constant = ~(is_half | (keys.low == 0));
    return ends;
}

// The asymmetric parameters of LANES rows at a width.
struct LaneParameters {
    Floats scale;  // 0 if the row has no codes other than 0
    Floats offset;
    Words is_stored;  // not exact
    Words is_wide;    // means nothing if the row is exact
};

// Those of binary32.
inline LaneParameters lane_single_parameters(const LaneEnds& ends, float levels) {
    const Words is_spread = (ends.span >= TINY * levels) & (ends.span <= LARGE);
    return {
        is_spread ? ends.span / levels : Floats{},
        ends.low,
        ends.is_finite & (ends.is_constant | is_spread),
        Words{},
    };
}

// Those of binary16 if the row is not wide.

inline LaneParameters lane_parameters(const LaneEnds& ends, float levels) {
    const Floats scale = ends.span / levels;
    const Words is_spread = (ends.span >= TINY * levels) & (ends.span <= LARGE);
    const Floats half_scale = half_above((ends.high - ends.half_offset) / levels);
    const Words fits = (half_scale <= scale * WIDEST_STEP) & (half_scale <= LARGEST_HALF) &
                       (magnitude(ends.half_offset) <= LARGEST_HALF);
    return {
        is_spread ? (fits ? half_scale : scale) : Floats{},
        fits & is_spread ? ends.half_offset : ends.low,
        ends.is_finite & (ends.is_constant | is_spread),
        ends.is_constant ? ends.is_wide_constant : ~fits,
    };
}

// Stores the results of `parameters_of_row` for LANES rows, with parameters of binary16.
inline void store_half_parameters(
    EndsOfRows keys, float levels, float* scales, float* offsets, uint8_t* exact, uint8_t* wide
) {
    const LaneParameters found = lane_parameters(lane_ends(keys), levels);
    store(scales, found.is_stored ? found.scale : Floats{});
    store(offsets, found.is_stored ? found.offset : Floats{});
    store(exact, __builtin_convertvector(found.is_stored + 1, Bytes));
    store(wide, __builtin_convertvector(-(found.is_stored & found.is_wide), Bytes));
}

}  // namespace recpoint::RECPOINT_SET
