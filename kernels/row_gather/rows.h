// Copies rows between given positions: the loops of gather, scatter and move.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

constexpr int64_t LINE = 64;
// How far ahead of the copy rows are prefetched: far enough to hide a memory access and a page
// walk.
constexpr int64_t AHEAD_BYTES = 8192;
// The most that is prefetched of a row. The processor prefetches the rest of a longer row by
// itself.
constexpr int64_t REACH_BYTES = 256;
// Smaller results should stay in the cache, so they are not streamed.
constexpr int64_t STREAM_BYTES = int64_t{4} << 20;

// Copies a line and writes it past the caches. A line that is streamed whole is not read first,
// which saves a third of the traffic of a large copy. `to` is divisible by 32.
inline void stream_line(char* to, const char* from) {
#if defined(__AVX__)
    for (int64_t at = 0; at < LINE; at += 32) {
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), part);
    }
#elif defined(__x86_64__)
    for (int64_t at = 0; at < LINE; at += 16) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), part);
    }
#else
    memcpy(to, from, LINE);
#endif
}

// Other threads see the streamed lines after this and a lock operation.
inline void end_streams() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Lines of a row if whole lines can be streamed and streaming pays, else 0.
inline int64_t lines_to_stream(int64_t row_bytes, int64_t rows, const void* to) {
    if (row_bytes % LINE != 0 || reinterpret_cast<uintptr_t>(to) % 32 != 0) return 0;
    return row_bytes * rows >= STREAM_BYTES ? row_bytes / LINE : 0;
}

// Copies row from[i] of `source` to row to[i] of `dest`. A null list stands for 0, 1, 2, …
//
// BYTES and LINES are the bytes and lines of a row if these are known at compile time, else 0. A
// loop that runs once or twice a row, or a call for four bytes, would cost more than the row
// itself.
template <int64_t BYTES, int64_t LINES>
void copy_rows_of(
    const char* source, const int64_t* from, char* dest, const int64_t* to, int64_t any_bytes,
    int64_t any_lines, int64_t n
) {
    const int64_t bytes = BYTES > 0 ? BYTES : any_bytes;
    const int64_t lines = BYTES > 0 ? LINES : any_lines;
    const int64_t ahead = greatest<int64_t>(1, AHEAD_BYTES / greatest(bytes, LINE));
    const int64_t reach = least(bytes, REACH_BYTES);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t later = least(i + ahead, n - 1);
        if (from != nullptr) {
            const char* coming = source + from[later] * bytes;
            for (int64_t at = 0; at < reach; at += LINE) ask_for(coming + at);
        }
        if (to != nullptr && lines == 0) {  // streaming does not read the line first
            const char* coming = dest + to[later] * bytes;
            for (int64_t at = 0; at < reach; at += LINE) ask_for(coming + at);
        }
        const char* row = source + (from != nullptr ? from[i] : i) * bytes;
        char* place = dest + (to != nullptr ? to[i] : i) * bytes;
        if (lines == 0) {
            memcpy(place, row, bytes);
        } else {
            for (int64_t k = 0; k < lines; ++k) stream_line(place + LINE * k, row + LINE * k);
        }
    }
    if (lines > 0) end_streams();
}

inline void copy_rows(
    const char* source, const int64_t* from, char* dest, const int64_t* to, int64_t bytes,
    int64_t lines, int64_t n
) {
    auto copy = copy_rows_of<0, 0>;
    if (lines == 1) {
        copy = copy_rows_of<64, 1>;
    } else if (lines == 2) {
        copy = copy_rows_of<128, 2>;
    } else if (lines == 4) {
        copy = copy_rows_of<256, 4>;
    } else if (lines == 0 && bytes == 4) {
        copy = copy_rows_of<4, 0>;
    } else if (lines == 0 && bytes == 8) {
        copy = copy_rows_of<8, 0>;
    } else if (lines == 0 && bytes == 32) {
        copy = copy_rows_of<32, 0>;
    }
    copy(source, from, dest, to, bytes, lines, n);
}

}  // namespace recpoint::RECPOINT_SET
