#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Constants of format §3.6; see shapes.py.
constexpr uint64_t FIRST = 0xD6E8FEB86659FD93;
constexpr uint64_t FOLD = 0x9E3779B97F4A7C15;
constexpr uint64_t LAST = 0xBF58476D1CE4E5B9;

uint64_t folded(uint64_t value, uint64_t word) {
    value = (value ^ word) * FOLD;
    return value ^ (value >> 32);
}

// The digest of a row of any length at any address: a chain over its 8-byte words. The last word is
// filled up with zeros.
uint64_t digest_row(const char* row, int64_t bytes, int64_t id) {
    uint64_t value = (static_cast<uint64_t>(id) + 1) * FIRST;
    int64_t at = 0;
    for (; at + 8 <= bytes; at += 8) value = folded(value, load<uint64_t>(row + at));
    if (at < bytes) {
        uint64_t word = 0;
        memcpy(&word, row + at, bytes - at);
        value = folded(value, word);
    }
    value = (value ^ (value >> 29)) * LAST;
    return value ^ (value >> 32);
}

// The sum of the digests of n rows. Their ids are `ids`, or count from `first` on if `ids` is null.
uint64_t digest_rows(
    const char* rows, const int64_t* ids, int64_t first, int64_t row_bytes, int64_t n
) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        total += digest_row(
            rows + i * row_bytes, row_bytes, ids != nullptr ? ids[i] : first + i
        );
    }
    return total;
}

void digest_each_row(
    const char* rows, const int64_t* ids, int64_t row_bytes, int64_t n, uint64_t* out
) {
    for (int64_t i = 0; i < n; ++i) out[i] = digest_row(rows + i * row_bytes, row_bytes, ids[i]);
}

}  // namespace

extern const Operation row_digest[] = {
    {"digest_rows", call<digest_rows>},
    {"digest_each_row", call<digest_each_row>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
