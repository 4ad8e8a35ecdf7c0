#include "../dirty_bitmap/bits.h"

namespace recpoint::RECPOINT_SET {
namespace {

// How many of n ids are not followed by the next row, the last left out. -1: they do not ascend.
int64_t count_gaps(const int64_t* ids, int64_t n, int64_t threads) {
    int64_t gaps = 0;
    int64_t wrong = 0;
    over_rows(n, threads, [&](int64_t start, int64_t stop) {
        // One id more, so that no pair of neighbours is left out between two parts.
        stop = least(stop, n - 1);
        int64_t found = 0;
        int64_t disorder = 0;
        for (int64_t i = start; i < stop; ++i) {
            disorder |= ids[i + 1] <= ids[i];
            // Wraps for the largest integer only, which no id follows.
            found += static_cast<uint64_t>(ids[i + 1]) != static_cast<uint64_t>(ids[i]) + 1;
        }
        __atomic_fetch_add(&gaps, found, __ATOMIC_RELAXED);
        __atomic_fetch_or(&wrong, disorder, __ATOMIC_RELAXED);
    });
    return wrong ? -1 : gaps;
}

// Sets the bits of n ids, of which the first has bit 0, in words that are zero.
void set_bits(const int64_t* ids, int64_t n, uint64_t* words, int64_t threads) {
    const int64_t first = n > 0 ? ids[0] : 0;
    const auto word_of = [=](int64_t k) { return (ids[k] - first) >> 6; };
    over_rows(n, threads, [=](int64_t start, int64_t stop) {
        // No two parts write to one word: each leaves the word that the part before it has begun,
        // and goes on until its own last word is full.
        while (start > 0 && start < stop && word_of(start) == word_of(start - 1)) ++start;
        if (start == stop) return;
        while (stop < n && word_of(stop) == word_of(stop - 1)) ++stop;
        int64_t at = -1;
        uint64_t word = 0;
        for (int64_t k = start; k < stop; ++k) {
            word = word_of(k) == at ? word : 0;
            at = word_of(k);
            word |= uint64_t{1} << ((ids[k] - first) & 63);
            words[at] = word;
        }
    });
}

// Writes `first` + the position of each of `n` bits that are set in `bytes` bytes at any address.
void read_bits(const uint8_t* bits, int64_t bytes, int64_t first, int64_t* ids, int64_t n) {
    int64_t found = 0;
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bits + at, least<int64_t>(8, bytes - at));
        for (; word != 0 && found < n; word &= word - 1) {
            ids[found++] = first + 8 * at + lowest_bit(word);
        }
    }
}

// For each run its first id less that id's position, and that position; n at the end.
void split_runs(const int64_t* ids, int64_t n, int64_t* offsets, int64_t* starts) {
    int64_t run = -1;
    int64_t before = -2;
    starts[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        run += ids[i] != before + 1;
        before = ids[i];
        // Each id writes, whether it ends its run or not: there is nothing to predict.
        offsets[run] = before - i;
        starts[run + 1] = i + 1;
    }
}

// Undoes `split_runs`: starts ascend from 0 and are below n.
void join_runs(
    const int64_t* offsets, const int64_t* starts, int64_t runs, int64_t* ids, int64_t n
) {
    memset(ids, 0, 8 * n);
    // A loop for each run would guess its end wrong each time; sums of jumps guess nothing.
    int64_t before = 0;
    for (int64_t run = 0; run < runs; ++run) {
        ids[starts[run]] = offsets[run] - before;
        before = offsets[run];
    }
    int64_t offset = 0;
    for (int64_t i = 0; i < n; ++i) {
        offset += ids[i];
        ids[i] = offset + i;
    }
}

// Writes the gaps between n numbers as `low` planes of bytes and, over escapes, symbols. Returns how
// many symbols.
int64_t write_symbols(
    const int64_t* numbers, int64_t n, int64_t low, uint8_t* planes, uint8_t* symbols
) {
    const int64_t gaps = n - 1;
    for (int64_t plane = 0; plane < low; ++plane) {
        uint8_t* to = planes + plane * gaps;
        for (int64_t i = 0; i < gaps; ++i) {
            to[i] = static_cast<uint8_t>((numbers[i + 1] - numbers[i] - 1) >> 8 * plane);
        }
    }
    int64_t at = 0;
    for (int64_t i = 0; i < gaps; ++i) {
        const uint64_t high = static_cast<uint64_t>(numbers[i + 1] - numbers[i] - 1) >> 8 * low;
        const uint64_t escapes = high / 255;
        at += static_cast<int64_t>(escapes);  // the room is full of escapes
        symbols[at++] = static_cast<uint8_t>(high - 255 * escapes);
    }
    return at;
}

// Writes n numbers below `limit`, the first of which is there. Returns the symbol after those that
// stand for them, or -1 where one is not below the limit.
//
// n - 1 or more of the symbols from `at` end a gap: with that no loop leaves the symbols.
int64_t read_symbols(
    const uint8_t* symbols, int64_t at, int64_t low, const uint8_t* planes, int64_t* numbers,
    int64_t n, int64_t limit
) {
    int64_t following = numbers[0] + 1;  // the smallest number that may come next
    if (low == 0) {
        // Sums of bytes cannot overflow, so the last number is checked for all.
        for (int64_t k = 1; k < n;) {
            const int64_t symbol = symbols[at++];
            following += symbol;
            numbers[k] = following;
            const int64_t ends = symbol != 255;
            following += ends;
            k += ends;
        }
        return numbers[n - 1] < limit ? at : -1;
    }
    for (int64_t i = 0; i < n - 1; ++i) {
        int64_t high = 0;
        for (; symbols[at] == 255; ++at) high += 255;
        high += symbols[at++];
        // Compared before it is shifted and before it is added, so that no sum overflows.
        if (following >= limit || high > (limit - following) >> 8 * low) return -1;
        int64_t gap = high << 8 * low;
        for (int64_t plane = 0; plane < low; ++plane) {
            gap |= static_cast<int64_t>(planes[plane * (n - 1) + i]) << 8 * plane;
        }
        if (gap >= limit - following) return -1;
        numbers[i + 1] = following + gap;
        following += gap + 1;
    }
    return at;
}

}  // namespace

extern const Operation row_set[] = {
    {"count_gaps", call<count_gaps>},
    {"set_bits", call<set_bits>},
    {"read_bits", call<read_bits>},
    {"split_runs", call<split_runs>},
    {"join_runs", call<join_runs>},
    {"write_symbols", call<write_symbols>},
    {"read_symbols", call<read_symbols>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
