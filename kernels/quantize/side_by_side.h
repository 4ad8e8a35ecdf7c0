// Copies LANES rows so that they lie side by side: one vector for each value, a row in each lane.
//
// Value by value, this would take longer than all else that is done with short rows. So square
// blocks are transposed: each step exchanges the second half of one vector with the first half of
// another one, in ever smaller groups of lanes.
#pragma once

#include "lanes.h"

namespace recpoint::RECPOINT_SET {

// Returns the first halves of all groups of 2 · HALF lanes of `a`, each followed by that of `b`; or
// the second halves.
template <int HALF, bool SECOND, size_t... I>
Floats halves_of_both(Floats a, Floats b, Indices<I...>) {
    constexpr int OTHER = static_cast<int>(LANES) - HALF;  // from a lane to its partner in `b`
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(
        a, b,
        (static_cast<int>(I) +
         (static_cast<int>(I) / HALF % 2 == 0 ? (SECOND ? HALF : 0) : (SECOND ? LANES : OTHER)))...
    );
#else
    return __builtin_shuffle(
        a, b,
        Words{
            (static_cast<int>(I) +
             (static_cast<int>(I) / HALF % 2 == 0 ? (SECOND ? HALF : 0) : (SECOND ? LANES : OTHER)))...
        }
    );
#endif
}

template <int HALF, int I>
void exchange_halves(Floats* vectors) {
    if constexpr (I / HALF % 2 == 0) {
        using Lanes = typename MakeIndices<LANES>::type;
        const Floats a = vectors[I];
        const Floats b = vectors[I + HALF];
        vectors[I] = halves_of_both<HALF, false>(a, b, Lanes{});
        vectors[I + HALF] = halves_of_both<HALF, true>(a, b, Lanes{});
    }
}

// Transposes the blocks that WIDTH vectors have in each group of WIDTH lanes.
template <int HALF, size_t... I>
void transpose(Floats* vectors, Indices<I...> all) {
    (exchange_halves<HALF, static_cast<int>(I)>(vectors), ...);
    if constexpr (HALF > 1) transpose<HALF / 2>(vectors, all);
}

// Copies `dim` values of LANES rows, WIDTH values at a time. At least WIDTH values are there.
template <int WIDTH>
void copy_blocks(const float* const* rows, int64_t dim, Floats* values) {
    for (int64_t k = 0; k < dim; k += WIDTH) {
        // If the length is no multiple of WIDTH, the last block overlaps the block before.
        const int64_t first = least(k, dim - WIDTH);
        Floats vectors[WIDTH];
        for (int i = 0; i < WIDTH; ++i) {
            float of_group[LANES];
            for (int lane = 0; lane < LANES; lane += WIDTH) {
                memcpy(of_group + lane, rows[lane + i] + first, WIDTH * sizeof(float));
            }
            vectors[i] = load<Floats>(of_group);
        }
        transpose<WIDTH / 2>(vectors, typename MakeIndices<WIDTH>::type{});
        for (int i = 0; i < WIDTH; ++i) values[first + i] = vectors[i];
    }
}

// Copies `n` rows from `first` on into lanes, at most LANES; the last row again into lanes without
// one.
inline void put_side_by_side(const float* first, int64_t n, int64_t dim, Floats* values) {
    const float* rows[LANES];
    for (int lane = 0; lane < LANES; ++lane) rows[lane] = first + least<int64_t>(lane, n - 1) * dim;
    if (dim >= LANES) return copy_blocks<LANES>(rows, dim, values);
    if constexpr (LANES > 8) {
        if (dim >= 8) return copy_blocks<8>(rows, dim, values);
    }
    if constexpr (LANES > 4) {
        if (dim >= 4) return copy_blocks<4>(rows, dim, values);
    }
    for (int lane = 0; lane < LANES; ++lane) {
        for (int64_t k = 0; k < dim; ++k) values[k][lane] = rows[lane][k];
    }
}

}  // namespace recpoint::RECPOINT_SET
