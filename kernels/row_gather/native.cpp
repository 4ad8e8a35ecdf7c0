#include "rows.h"

namespace recpoint::RECPOINT_SET {
namespace {

// The position of the first id outside 0 … limit - 1; -1 if there is none.
int64_t first_outside(const int64_t* ids, int64_t n, int64_t limit) {
    uint64_t largest = 0;
    // A negative id becomes a huge unsigned id.
    for (int64_t i = 0; i < n; ++i) largest = greatest(largest, static_cast<uint64_t>(ids[i]));
    if (n == 0 || largest < static_cast<uint64_t>(limit)) return -1;
    int64_t i = 0;
    while (static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(limit)) ++i;
    return i;
}

// The position of the first id outside start … stop - 1, or not above the id before it; -1 if there
// is none.
int64_t first_unordered(const int64_t* ids, int64_t n, int64_t start, int64_t stop) {
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < start || ids[i] >= stop) return i;
        if (i > 0 && ids[i] <= ids[i - 1]) return i;
    }
    return -1;
}

// Copies row from[i] of `source` to row to[i] of `dest`. A null list stands for 0, 1, 2, …
template <Runner run>
void move_rows(
    const char* source, const int64_t* from, char* dest, const int64_t* to, int64_t row_bytes,
    int64_t n, int64_t threads
) {
    const int64_t lines = lines_to_stream(row_bytes, n, dest);
    over_rows<run>(n, threads, [=](int64_t start, int64_t stop) {
        copy_rows(
            from != nullptr ? source : source + start * row_bytes,
            from != nullptr ? from + start : nullptr,
            to != nullptr ? dest : dest + start * row_bytes,
            to != nullptr ? to + start : nullptr, row_bytes, lines, stop - start
        );
    });
}

}  // namespace

extern const Operation row_gather[] = {
    {"first_outside", call<first_outside>},
    {"first_unordered", call<first_unordered>},
    {"move_rows", call<move_rows<run_in_pool>>},
    {"move_rows_beside_torch", call<move_rows<beside_torch>>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
