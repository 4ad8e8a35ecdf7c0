#include "../dirty_bitmap/bits.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Counts the gaps: ids, except the last, whose next id is not the next row. -1 if ids do not
// ascend.
int64_t count_gaps(const int64_t* ids, int64_t n, int64_t threads) {
    int64_t gaps = 0;
    int64_t wrong = 0;
    over_rows(n, threads, [&](int64_t start, int64_t stop) {
        // Each part also reads the first id of the next part, so that no pair of neighbours is
        // missed.
        stop = least(stop, n - 1);
        int64_t found = 0;
        int64_t disorder = 0;
        for (int64_t i = start; i < stop; ++i) {
            disorder |= ids[i + 1] <= ids[i];
            // Only the largest integer wraps, and no id can follow it.
            found += static_cast<uint64_t>(ids[i + 1]) != static_cast<uint64_t>(ids[i]) + 1;
        }
        __atomic_fetch_add(&gaps, found, __ATOMIC_RELAXED);
        __atomic_fetch_or(&wrong, disorder, __ATOMIC_RELAXED);
    });
    return wrong ? -1 : gaps;
}

// Sets the bits of n ids in words that are zero. The first id has bit 0.
void set_bits(const int64_t* ids, int64_t n, uint64_t* words, int64_t threads) {
    const int64_t first = n > 0 ? ids[0] : 0;
    const auto word_of = [=](int64_t k) { return (ids[k] - first) >> 6; };
    over_rows(n, threads, [=](int64_t start, int64_t stop) {
        // No two parts write to the same word. Each part skips ids in a word that the part before
        // has begun, and goes on to the last id in its own last word.
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

// Writes `first` + the position of each set bit, for `n` bits at most. `bits` are `bytes` bytes at
// any address.
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

// Writes for each run the difference between its first id and the position of this id, and the
// position. Writes n after the last position.
void split_runs(const int64_t* ids, int64_t n, int64_t* offsets, int64_t* starts) {
    int64_t run = -1;
    int64_t before = -2;
    starts[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        run += ids[i] != before + 1;
        before = ids[i];
        // Every id writes, even if it does not end its run. So there is no branch to predict.
        offsets[run] = before - i;
        starts[run + 1] = i + 1;
    }
}

// Undoes `split_runs`. The starts must ascend from 0 and be below n.
void join_runs(
    const int64_t* offsets, const int64_t* starts, int64_t runs, int64_t* ids, int64_t n
) {
    memset(ids, 0, 8 * n);
    // A loop for each run would mispredict the end of each run. Sums of jumps need no prediction.
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

// Writes the gaps between n numbers as `low` planes of bytes and as symbols. `symbols` must be
// filled with escapes (255). Returns the number of symbols.
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
        at += static_cast<int64_t>(escapes);  // these symbols are escapes already
        symbols[at++] = static_cast<uint8_t>(high - 255 * escapes);
    }
    return at;
}

// Writes n numbers below `limit`; numbers[0] is given. Returns the position after the last symbol
// read, or -1 if a number is not below the limit.
//
// The caller has checked that at least n - 1 symbols from `at` on end a gap, so no loop reads past
// the symbols.
int64_t read_symbols(
    const uint8_t* symbols, int64_t at, int64_t low, const uint8_t* planes, int64_t* numbers,
    int64_t n, int64_t limit
) {
    int64_t following = numbers[0] + 1;  // the smallest possible next number
    if (low == 0) {
        // Sums of bytes cannot overflow, so checking the last number checks all.
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
        // `high` is compared before it is shifted, and `gap` before it is added, so nothing
        // overflows.
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
