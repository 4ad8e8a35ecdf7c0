// What maps in open addressing share: a hash, and how memory is asked for before it is needed.
#pragma once

#include "operation.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace recpoint::RECPOINT_SET {

// A hash whose high bits depend on all bits of `id`. Two multiplications and a fold, so that ids at
// equal distances spread as all others do. Both factors are odd.
inline uint64_t spread(
    uint64_t id, uint64_t first = 0x9E3779B97F4A7C15u, uint64_t second = 0xD6E8FEB86659FD93u
) {
    uint64_t hash = id * first;
    hash ^= hash >> 32;
    return hash * second;
}

// A hash whose halves are good apart. With drawn factors, two multiplications alone would let keys at
// equal distances of 2^40 meet for some draws.
inline uint64_t spread_thrice(
    uint64_t id, uint64_t first = 0x9E3779B97F4A7C15u, uint64_t second = 0xD6E8FEB86659FD93u
) {
    uint64_t hash = spread(id, first, second);
    hash ^= hash >> 32;
    return hash * 0xFF51AFD7ED558CCDu;
}

// Prefetches a line that will be written.
inline void ask(const void* address) { __builtin_prefetch(address, 1, 3); }

#if defined(__linux__)

// Advises the system about the pages that lie wholly within `memory`, if there are enough for a
// large page. An error changes nothing but the speed.
inline void advise(void* memory, int64_t bytes, int advice) {
    constexpr uintptr_t page = 4096;
    constexpr int64_t large_page = 1 << 21;
    if (bytes < 2 * large_page) return;
    const auto start = (reinterpret_cast<uintptr_t>(memory) + page - 1) & ~(page - 1);
    const auto stop = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(page - 1);
    madvise(reinterpret_cast<void*>(start), stop - start, advice);
}

// Asks for large pages, because nearly every access is on another page.
inline void ask_for_large_pages(void* memory, int64_t bytes) {
    advise(memory, bytes, MADV_HUGEPAGE);
}

// Asks for small pages, which come in microseconds, where a large one takes up to milliseconds.
inline void ask_for_small_pages(void* memory, int64_t bytes) {
    advise(memory, bytes, MADV_NOHUGEPAGE);
}

// Gives pages back to the system. What they held is lost.
inline void give_back_pages(void* memory, int64_t bytes) { advise(memory, bytes, MADV_DONTNEED); }

#else

inline void ask_for_large_pages(void*, int64_t) {}
inline void ask_for_small_pages(void*, int64_t) {}
inline void give_back_pages(void*, int64_t) {}

#endif

}  // namespace recpoint::RECPOINT_SET
