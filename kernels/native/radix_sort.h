// Sorting of numbers and of items that have one.
#pragma once

#include "operation.h"

namespace recpoint::RECPOINT_SET {

// What an item is sorted by. A file with items of its own overloads it.
inline uint64_t number_of(uint64_t number) { return number; }
inline uint64_t number_of(int64_t number) { return static_cast<uint64_t>(number); }

// Sorts by number, ascending; equal ones keep their order. `other` has room for n.
template <typename T>
void sort(T* items, T* other, int64_t n) {
    if (n <= 24) {
        for (int64_t i = 1; i < n; ++i) {
            const T item = items[i];
            int64_t at = i;
            for (; at > 0 && number_of(items[at - 1]) > number_of(item); --at) {
                items[at] = items[at - 1];
            }
            items[at] = item;
        }
        return;
    }
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; ++i) bits |= number_of(items[i]);
    T* from = items;
    T* to = other;
    for (int64_t shift = 0; bits >> shift != 0; shift += 8) {
        int64_t places[257] = {};
        for (int64_t i = 0; i < n; ++i) ++places[(number_of(from[i]) >> shift & 255) + 1];
        for (int64_t digit = 0; digit < 256; ++digit) places[digit + 1] += places[digit];
        for (int64_t i = 0; i < n; ++i) to[places[number_of(from[i]) >> shift & 255]++] = from[i];
        T* const sorted = to;
        to = from;
        from = sorted;
        if (shift == 56) break;
    }
    if (from != items) memcpy(items, from, n * sizeof(T));
}

}  // namespace recpoint::RECPOINT_SET
