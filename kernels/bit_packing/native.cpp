#include "codes.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Calls `row(codes, packed, n)` for each row of `dim` codes, or once for all rows of a thread's
// part if every row ends on a whole byte.
template <typename Row>
void each_row(int64_t dim, int64_t bits, int64_t rows, int64_t threads, const Row& row) {
    const int64_t width = (dim * bits + 7) / 8;
    over_rows(rows, threads, [&](int64_t start, int64_t stop) {
        if (dim * bits % 8 == 0) {
            row(start * dim, start * width, (stop - start) * dim);
        } else {
            for (int64_t i = start; i < stop; ++i) row(i * dim, i * width, dim);
        }
    });
}

void pack(
    const uint8_t* codes, uint8_t* packed, int64_t dim, int64_t bits, int64_t rows, int64_t threads
) {
    each_row(dim, bits, rows, threads, [=](int64_t from, int64_t to, int64_t n) {
        pack_codes(codes + from, packed + to, n, bits);
    });
}

void unpack(
    const uint8_t* packed, uint8_t* codes, int64_t dim, int64_t bits, int64_t rows, int64_t threads
) {
    each_row(dim, bits, rows, threads, [=](int64_t to, int64_t from, int64_t n) {
        unpack_codes(packed + from, codes + to, n, bits);
    });
}

}  // namespace

extern const Operation bit_packing[] = {
    {"pack", call<pack>},
    {"unpack", call<unpack>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
