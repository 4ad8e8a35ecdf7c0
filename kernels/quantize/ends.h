// Finds the smallest and the largest key of several rows, side by side. On short rows this takes
// longer than all else.
//
// For a single row, the lanes of one vector would be reduced, and each step would leave half of the
// lanes idle. Here each step joins two vectors. After the last step each lane holds a row.
#pragma once

#include "lanes.h"
#include "plain.h"

namespace recpoint::RECPOINT_SET {

inline Words keys_of(Words patterns) { return patterns ^ ((patterns >> 31) & 0x7FFFFFFF); }

// The ends of LANES rows, as keys.
struct EndsOfRows {
    Words low;
    Words high;
};

inline Words smaller(Words a, Words b) { return a < b ? a : b; }
inline Words larger(Words a, Words b) { return a > b ? a : b; }

// Takes one half of each group of PARTS lanes, first from `a`, then from `b`. SHIFT is 0 for the
// first half and PARTS / 2 for the second half.
template <int PARTS, int SHIFT, size_t... I>
Words half_of_groups(Words a, Words b, Indices<I...>) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(
        a, b, (static_cast<int>(I) / (PARTS / 2) * PARTS + static_cast<int>(I) % (PARTS / 2) + SHIFT)...
    );
#else
    return __builtin_shuffle(
        a, b,
        Words{(static_cast<int>(I) / (PARTS / 2) * PARTS + static_cast<int>(I) % (PARTS / 2) + SHIFT)...}
    );
#endif
}

// Joins PARTS vectors into one vector with a row in each lane. In each of the PARTS vectors, PARTS
// neighbouring lanes belong to one row.
template <int PARTS>
EndsOfRows joined_ends(EndsOfRows* ends) {
    if constexpr (PARTS == 1) {
        return ends[0];
    } else {
        using Lanes = typename MakeIndices<LANES>::type;
        for (int i = 0; i < PARTS / 2; ++i) {
            const EndsOfRows a = ends[2 * i];
            const EndsOfRows b = ends[2 * i + 1];
            ends[i].low = smaller(
                half_of_groups<PARTS, 0>(a.low, b.low, Lanes{}),
                half_of_groups<PARTS, PARTS / 2>(a.low, b.low, Lanes{})
            );
            ends[i].high = larger(
                half_of_groups<PARTS, 0>(a.high, b.high, Lanes{}),
                half_of_groups<PARTS, PARTS / 2>(a.high, b.high, Lanes{})
            );
        }
        return joined_ends<PARTS / 2>(ends);
    }
}

// The ends of LANES rows of DIM values, if DIM is at most LANES. The rows fill DIM vectors.
template <int DIM>
EndsOfRows ends_of_short_rows(const float* rows) {
    EndsOfRows ends[DIM];
    for (int i = 0; i < DIM; ++i) {
        const Words keys = keys_of(load<Words>(rows + i * LANES));
        ends[i] = {keys, keys};
    }
    return joined_ends<DIM>(ends);
}

// The ends of LANES rows of LANES values or more. DIM is 0 if not known at compile time.
template <int64_t DIM>
EndsOfRows ends_of_long_rows(const float* rows, int64_t any_dim) {
    const int64_t dim = DIM > 0 ? DIM : any_dim;
    EndsOfRows ends[LANES];
    for (int i = 0; i < LANES; ++i) {
        const float* row = rows + i * dim;
        // Keys would cost three steps a value. The plain bit patterns order negative values in
        // reverse: below the positive values if signed, above them if unsigned. So three extremes
        // of the patterns give both ends.
        Words smallest = load<Words>(row);  // least if no value is negative, largest if all are
        Words largest = smallest;           // the largest value, unless all are negative
        Marks farthest = reinterpret_cast<Marks>(smallest);  // the least value, if one is negative
        for (int64_t k = LANES; k < dim; k += LANES) {
            // If the length is no multiple of LANES, the last vector overlaps the vector before.
            const Words patterns = load<Words>(row + least(k, dim - LANES));
            const Marks marks = reinterpret_cast<Marks>(patterns);
            smallest = smaller(smallest, patterns);
            largest = larger(largest, patterns);
            farthest = farthest > marks ? farthest : marks;
        }
        const Words lowest = reinterpret_cast<Words>(farthest);
        ends[i] = {
            keys_of(lowest < 0 ? lowest : smallest), keys_of(largest < 0 ? smallest : largest)
        };
    }
    return joined_ends<LANES>(ends);
}

template <int64_t DIM>
EndsOfRows ends_of_rows(const float* rows, int64_t any_dim) {
    const int64_t dim = DIM > 0 ? DIM : any_dim;
    if constexpr (DIM == 4 && LANES >= 4) return ends_of_short_rows<4>(rows);
    if constexpr (DIM == 8 && LANES >= 8) return ends_of_short_rows<8>(rows);
    if (dim >= LANES) return ends_of_long_rows<DIM>(rows, dim);
    EndsOfRows ends{};
    for (int i = 0; i < LANES; ++i) {
        const Ends found = ends_of_row(rows + i * dim, dim);
        ends.low[i] = found.low;
        ends.high[i] = found.high;
    }
    return ends;
}

// Stores the results of `parameters_of_row` for LANES rows with these ends. The parameters are
// asymmetric and binary32, so no row is wide.
inline void store_parameters(
    EndsOfRows ends, float levels, float* scales, float* offsets, uint8_t* exact, uint8_t* wide
) {
    const Floats low = float_of(keys_of(ends.low));
    const Floats span = float_of(keys_of(ends.high)) - low;
    const Words is_finite = (ends.low > MINUS_INFINITY_KEY) & (ends.high < INFINITY_KEY);
    const Words is_spread = (span >= TINY * levels) & (span <= LARGE);
    // Compares keys, not numbers: see `parameters_of_row`. A row of zeros with a -0 is exact, so
    // the sign stays.
    const Words is_constant = (ends.low == ends.high) & (ends.low != MINUS_ZERO_KEY);
    const Words is_kept = is_finite & (is_constant | is_spread);
    store(scales, (is_finite & is_spread) ? span / levels : Floats{});
    store(offsets, is_kept ? low : Floats{});
    store(exact, __builtin_convertvector((is_kept + 1), Bytes));
    store(wide, Bytes{});
}

}  // namespace recpoint::RECPOINT_SET
