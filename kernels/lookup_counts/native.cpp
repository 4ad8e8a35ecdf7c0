// Counts the lookups of rows, one byte a row. See this folder's README.
#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {
namespace {

// How many ids ahead a code is prefetched.
constexpr int64_t IDS_AHEAD = 64;

// Codes in which the step between counts stays the same, as a power of two.
constexpr int STEADY_BITS = 3;

// SplitMix64 of a lookup's number.
uint64_t mixed(uint64_t number) {
    uint64_t word = (number + 1) * 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

// Counts a lookup of each id. Returns -1. If an id is out of range, counts none and returns the
// position of the first such id.
template <typename Id>
int64_t count(uint8_t* codes, int64_t rows, const Id* ids, int64_t n, uint64_t start) {
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < 0 || ids[i] >= rows) return i;
    }
    for (int64_t i = 0; i < n; ++i) {
        if (i + IDS_AHEAD < n) __builtin_prefetch(codes + ids[i + IDS_AHEAD], 1, 3);
        uint8_t& code = codes[ids[i]];
        const int shift = code >> STEADY_BITS > 1 ? (code >> STEADY_BITS) - 1 : 0;
        const uint64_t mask = (uint64_t{1} << shift) - 1;
        const bool rises = (mixed(start + static_cast<uint64_t>(i)) & mask) == 0 && code < 255;
        code = static_cast<uint8_t>(code + (rises ? 1 : 0));
    }
    return -1;
}

}  // namespace

extern const Operation lookup_counts[] = {
    {"count_lookups32", call<count<int32_t>, Gil::kept>},
    {"count_lookups64", call<count<int64_t>, Gil::kept>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
