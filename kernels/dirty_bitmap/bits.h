// Counts the set bits of a dirty bitmap and writes their positions.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

// The position of the lowest set bit; 64 if there is none.
inline int64_t lowest_bit(uint64_t word) {
#if defined(__BMI__)
    return static_cast<int64_t>(_tzcnt_u64(word));  // otherwise GCC adds a test for zero
#else
    return word ? __builtin_ctzll(word) : 64;
#endif
}

// The number of set bits in n words.
inline int64_t count_bits(const uint32_t* words, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n / 2; ++i) {
        total += __builtin_popcountll(load<uint64_t>(words + 2 * i));
    }
    return n % 2 ? total + __builtin_popcount(words[n - 1]) : total;
}

// Appends row + p to n ids for each set bit p. Returns the number of ids then. There must be room
// for ALWAYS more ids than n, even if fewer bits are set.
//
// The number of set bits is random, so a branch on each bit would often be mispredicted. Therefore
// ALWAYS ids are written in any case. Ids that follow overwrite the surplus.
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

// Pairs of words in a block. The room for ids is checked once a block.
constexpr int64_t BLOCK_PAIRS = 8;

template <int ALWAYS>
int64_t write_block(const uint32_t* words, int64_t row, int64_t* ids, int64_t n) {
    for (int64_t i = 0; i < BLOCK_PAIRS; ++i) {
        n = write_pair<ALWAYS>(load<uint64_t>(words + 2 * i), row + 64 * i, ids, n);
    }
    return n;
}

// Writes the ids of the marked rows of `n` words. The first bit of the first word is row `row`.
// Writes at most `room` ids. Returns how many rows are marked, even if they are more than `room`.
inline int64_t write_ids(
    const uint32_t* words, int64_t n, int64_t row, int64_t* ids, int64_t room
) {
    int64_t found = 0;
    const bool is_crowded = room > 3 * (n / 2);
    const int64_t blocks = n / (2 * BLOCK_PAIRS);
    int64_t done = 0;
    // If there is room for all 64 bits of each pair, no other check is needed.
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

// Words of a part, which a thread takes at a time: 65,536 rows. Their ids stay in the second-level
// cache.
constexpr int64_t PART_WORDS = 2048;

// Parts that a thread counts at a time. The processor prefetches by itself once memory has been
// read in order for some pages.
constexpr int64_t COUNTED_PARTS = 8;

inline int64_t parts_of(int64_t words) { return (words + PART_WORDS - 1) / PART_WORDS; }

}  // namespace recpoint::RECPOINT_SET
