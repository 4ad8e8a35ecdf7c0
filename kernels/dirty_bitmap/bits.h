// The bits of a dirty bitmap: counting them, and writing down which they are.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

// 64 for zero.
inline int64_t lowest_bit(uint64_t word) {
#if defined(__BMI__)
    return static_cast<int64_t>(_tzcnt_u64(word));  // GCC asks whether it is zero otherwise
#else
    return word ? __builtin_ctzll(word) : 64;
#endif
}

// How many bits of `words` words are set.
inline int64_t count_bits(const uint32_t* words, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n / 2; ++i) {
        total += __builtin_popcountll(load<uint64_t>(words + 2 * i));
    }
    return n % 2 ? total + __builtin_popcount(words[n - 1]) : total;
}

// Writes row + p for each bit p behind n ids; how many there are then. Room for `ALWAYS` ids more
// than n must be there.
//
// How often a word goes on is a toss, which no branch prediction survives. So some ids are always
// written; what is none yet is overwritten by those that follow.
template <int ALWAYS>
int64_t write_pair(uint64_t pair, int64_t row, int64_t* ids, int64_t n) {
    const int64_t bits = __builtin_popcountll(pair);
    for (int k = 0; k < ALWAYS; ++k) {
        ids[n + k] = row + lowest_bit(pair);
        pair &= pair - 1;
    }
    for (int64_t k = ALWAYS; k < bits; ++k) {
        ids[n + k] = row + lowest_bit(pair);
        pair &= pair - 1;
    }
    return n + bits;
}

// Pairs of words whose ids are written without a look at the room that each leaves.
constexpr int64_t BLOCK_PAIRS = 8;

template <int ALWAYS>
int64_t write_block(const uint32_t* words, int64_t row, int64_t* ids, int64_t n) {
    for (int64_t i = 0; i < BLOCK_PAIRS; ++i) {
        n = write_pair<ALWAYS>(load<uint64_t>(words + 2 * i), row + 64 * i, ids, n);
    }
    return n;
}

// Writes the marked rows of `n` words, the first of which holds row `row`. Writes `room` ids at
// most; returns how many are marked, also when that is more.
inline int64_t write_ids(
    const uint32_t* words, int64_t n, int64_t row, int64_t* ids, int64_t room
) {
    int64_t found = 0;
    const bool is_crowded = room > 3 * (n / 2);
    const int64_t blocks = n / (2 * BLOCK_PAIRS);
    int64_t done = 0;
    // Where all 64 bits of each word fit, nothing else has to.
    for (; done < blocks && found + 64 * BLOCK_PAIRS <= room; ++done) {
        const uint32_t* block = words + 2 * BLOCK_PAIRS * done;
        const int64_t first = row + 64 * BLOCK_PAIRS * done;
        found = is_crowded ? write_block<8>(block, first, ids, found)
                           : write_block<2>(block, first, ids, found);
    }
    for (int64_t i = BLOCK_PAIRS * done; i < (n + 1) / 2; ++i) {
        uint64_t pair = 2 * i + 1 < n ? load<uint64_t>(words + 2 * i) : words[2 * i];
        if (found + greatest<int64_t>(__builtin_popcountll(pair), 8) <= room) {
            found = write_pair<2>(pair, row + 64 * i, ids, found);
            continue;
        }
        for (; pair != 0; pair &= pair - 1, ++found) {
            if (found < room) ids[found] = row + 64 * i + lowest_bit(pair);
        }
    }
    return found;
}

// Words of a bitmap that a thread takes at a time: 65,536 rows, whose ids stay in the second-level
// cache.
constexpr int64_t PART_WORDS = 2048;

// Parts that a thread counts before it takes the next: the processor asks for memory by itself once
// it is read in order for some pages.
constexpr int64_t COUNTED_PARTS = 8;

inline int64_t parts_of(int64_t words) { return (words + PART_WORDS - 1) / PART_WORDS; }

}  // namespace recpoint::RECPOINT_SET
