#include "code.h"
#include "search.h"
#include "side_by_side.h"

namespace recpoint::RECPOINT_SET {
namespace {

// How many rows are quantized together, so that the work done once a row is done side by side.
constexpr int64_t ROWS = 16;

// The rows and their results, in the layout of Python's array: each field is an int64.
struct Given {
    const float* rows;
    int64_t dim;
    int64_t bits;
    int64_t code_bits;  // bits of a stored code: `bits` or 8
    int64_t is_symmetric;
    int64_t in_half;  // take binary16 parameters if that is safe
    uint8_t* packed;
    float* scale;
    float* offset;
    uint8_t* exact;
    uint8_t* wide;

    int64_t width() const { return (dim * code_bits + 7) / 8; }
    float levels() const { return static_cast<float>((1 << bits) - 1); }
};

static_assert(sizeof(Given) == 88);

// Longer rows are packed one by one, because the codes of ROWS rows would take too much room.
constexpr int64_t LONG_DIM = 1024;

int64_t packed_together(const Given& given) { return given.dim <= LONG_DIM ? ROWS : 1; }

// Bytes of scratch for codes that are packed afterwards.
int64_t scratch_bytes(const Given& given) {
    return given.code_bits == 8 ? 0 : packed_together(given) * given.dim;
}

// Rows of at most this length are coded together, as one string of values. Each value has a copy of
// the scale and offset of its row.
constexpr int64_t SHORT_DIM = 16;

// Writes the codes of ROWS rows, one a byte. The scales and offsets are already stored.
template <int64_t DIM>
void code_short_rows(
    const Given& given, int64_t first, const float* inverse, uint8_t* codes
) {
    float inverses[ROWS * DIM];
    float offsets[ROWS * DIM];
    for (int64_t i = 0; i < ROWS; ++i) {
        for (int64_t k = 0; k < DIM; ++k) {
            inverses[i * DIM + k] = inverse[i];
            offsets[i * DIM + k] = given.offset[first + i];
        }
    }
    const float* values = given.rows + first * DIM;
    code_values<ROWS * DIM>(values, inverses, offsets, given.levels(), codes);
}

// Writes the packed codes of `n` rows, at most ROWS. The scales and offsets are already stored. DIM
// is 0 if the length is not known at compile time.
template <int64_t DIM>
void write_codes(const Given& given, int64_t first, int64_t n, uint8_t* scratch) {
    const int64_t dim = DIM > 0 ? DIM : given.dim;
    const int64_t width = given.width();
    const float top = given.levels();
    const int64_t together = least(n, packed_together(given));
    for (int64_t end = first + n; first < end; first += together) {
        uint8_t* packed = given.packed + first * width;
        uint8_t* codes = given.code_bits == 8 ? packed : scratch;
        float inverses[ROWS];
        if (together == ROWS) {
            // Side by side, because one by one they would take a fourth of the time of short rows.
            for (int64_t i = 0; i < ROWS; i += LANES) {
                const Floats scale = load<Floats>(given.scale + first + i);
                store(inverses + i, scale > 0.0f ? 1.0f / scale : Floats{});
            }
        } else {
            for (int64_t i = 0; i < together; ++i) inverses[i] = inverse_of(given.scale[first + i]);
        }
        if constexpr (0 < DIM && DIM <= SHORT_DIM) {
            if (together == ROWS) code_short_rows<DIM>(given, first, inverses, codes);
        }
        if (DIM == 0 || DIM > SHORT_DIM || together < ROWS) {
            for (int64_t i = 0; i < together; ++i) {
                const int64_t row = first + i;
                // Prefetches a row of the next group: finding its ends would wait for every line.
                const float* coming = given.rows + (row + together) * dim;
                for (int64_t k = 0; k < dim; k += 16) ask_for(coming + k);
                code_row<DIM>(
                    given.rows + row * dim, dim, inverses[i], given.offset[row], top,
                    codes + i * dim
                );
            }
        }
        if (given.code_bits == 8) continue;
        if (dim * given.code_bits % 8 == 0) {
            pack_codes(codes, packed, together * dim, given.code_bits);
            continue;
        }
        for (int64_t i = 0; i < together; ++i) {
            pack_codes(codes + i * dim, packed + i * width, dim, given.code_bits);
        }
    }
}

template <int64_t DIM>
void quantize_part(const Given& given, int64_t start, int64_t stop, uint8_t* scratch) {
    const int64_t dim = DIM > 0 ? DIM : given.dim;
    const float levels = given.levels();
    for (int64_t first = start; first < stop; first += ROWS) {
        const int64_t n = least(ROWS, stop - first);
        if (n == ROWS && !given.is_symmetric) {
            const auto store_all = given.in_half ? store_half_parameters : store_parameters;
            for (int64_t at = first; at < first + ROWS; at += LANES) {
                store_all(
                    ends_of_rows<DIM>(given.rows + at * dim, dim), levels, given.scale + at,
                    given.offset + at, given.exact + at, given.wide + at
                );
            }
        } else {
            for (int64_t row = first; row < first + n; ++row) {
                const Parameters found = parameters_of_row(
                    ends_of_row(given.rows + row * dim, dim), levels, given.is_symmetric,
                    given.in_half
                );
                given.scale[row] = found.scale;
                given.offset[row] = found.offset;
                given.exact[row] = found.is_exact;
                given.wide[row] = found.is_wide;
            }
        }
        write_codes<DIM>(given, first, n, scratch);
    }
}

// Usual row lengths have loops of their own.
template <template <int64_t> typename For>
auto of_length(int64_t dim) {
    switch (dim) {
        case 4: return For<4>::function;
        case 8: return For<8>::function;
        case 16: return For<16>::function;
        case 32: return For<32>::function;
        case 64: return For<64>::function;
        case 128: return For<128>::function;
        default: return For<0>::function;
    }
}

template <int64_t DIM>
struct WriteCodes {
    static constexpr auto function = write_codes<DIM>;
};

template <int64_t DIM>
struct QuantizePart {
    static constexpr auto function = quantize_part<DIM>;
};

// Quantizes rows by their minimum and maximum.
Room quantize_plain(const Given* given, int64_t rows, int64_t threads) {
    threads = least(threads, rows);
    Scratch scratch(threads, scratch_bytes(*given));
    if (!scratch.is_there()) return {false};
    const auto quantize = of_length<QuantizePart>(given->dim);
    over_rows_with<beside_torch>(rows, threads, scratch, [&](int64_t start, int64_t stop, char* own) {
        quantize(*given, start, stop, reinterpret_cast<uint8_t*>(own));
    });
    return {true};
}

// Loads `n` rows into lanes, at most LANES; the last one again into lanes without a row. Returns
// their plain parameters.
LaneParameters load_rows(const Given& given, int64_t first, int64_t n, Block& block) {
    put_side_by_side(given.rows + first * given.dim, n, given.dim, block.values);
    const LaneEnds ends = lane_ends(ends_of_lanes(block.values, given.dim));
    const LaneParameters single = lane_single_parameters(ends, block.levels);
    const LaneParameters plain =
        given.in_half ? lane_parameters(ends, block.levels) : single;
    const Words is_live = plain.is_stored & (plain.scale > 0.0f);
    const Floats one = spread(1.0f);
    block.step = is_live ? single.scale : one;
    block.low = is_live ? single.offset : Floats{};
    block.per_step = is_live ? 1.0f / single.scale : one;
    block.plain.scale = is_live ? plain.scale : one;
    block.plain.offset = is_live ? plain.offset : Floats{};
    block.halves = given.in_half ? ~plain.is_wide : Words{};
    for (int64_t k = 0; k < given.dim; ++k) {
        block.values[k] = is_live ? block.values[k] : Floats{};
    }
    return {
        is_live ? plain.scale : Floats{},
        plain.is_stored ? plain.offset : Floats{},
        plain.is_stored,
        plain.is_stored & plain.is_wide,
    };
}

// Stores the parameters of `n` rows, at most LANES.
void store_rows(const Given& given, int64_t first, int64_t n, const LaneParameters& parameters) {
    const Bytes is_exact = __builtin_convertvector(parameters.is_stored + 1, Bytes);
    const Bytes is_wide = __builtin_convertvector(-parameters.is_wide, Bytes);
    memcpy(given.scale + first, &parameters.scale, n * sizeof(float));
    memcpy(given.offset + first, &parameters.offset, n * sizeof(float));
    memcpy(given.exact + first, &is_exact, n);
    memcpy(given.wide + first, &is_wide, n);
}

void search_part(
    const Given& given, const Search& search, int64_t start, int64_t stop, char* scratch
) {
    Block block{};
    block.dim = given.dim;
    block.levels = given.levels();
    block.values = reinterpret_cast<Floats*>(scratch);
    block.in_units = block.values + given.dim;
    auto* codes = reinterpret_cast<uint8_t*>(block.in_units + given.dim);
    const auto write = of_length<WriteCodes>(given.dim);
    const Floats margin = spread(static_cast<float>(given.dim) * COST_MARGIN);
    for (int64_t first = start; first < stop; first += LANES) {
        const int64_t n = least<int64_t>(LANES, stop - first);
        LaneParameters chosen = load_rows(given, first, n, block);
        judge(search, block, block.plain);
        const Trial found = search.bins > 0 ? greedy(search, block) : refit(search, block);
        const Words is_better =
            (found.cost + margin <= block.plain.cost) & (chosen.scale > 0.0f);
        chosen.scale = is_better ? found.scale : chosen.scale;
        chosen.offset = is_better ? found.offset : chosen.offset;
        store_rows(given, first, n, chosen);
        write(given, first, n, codes);
    }
}

// Quantizes rows by the greedy search if `bins` is not 0, else by the refit search.
Room quantize_by_search(
    const Given* given, int64_t rows, const float* pairs, int64_t pair_count, float nearby,
    int64_t refits, int64_t levelings, float fraction, float coarser, int64_t bins, int64_t steps,
    float unit, float largest, int64_t threads
) {
    const Search search = {
        pairs, pair_count, nearby, refits, levelings, fraction, coarser, bins, steps, unit, largest
    };
    const int64_t block_bytes = 2 * given->dim * static_cast<int64_t>(sizeof(Floats));
    threads = least(threads, rows);
    Scratch scratch(threads, block_bytes + scratch_bytes(*given));
    if (!scratch.is_there()) return {false};
    over_rows_with(rows, threads, scratch, [&](int64_t start, int64_t stop, char* own) {
        search_part(*given, search, start, stop, own);
    });
    return {true};
}

// The place of a decoded row is prefetched ROWS_AHEAD rows ahead, and at most PLACE_BYTES of it.
constexpr int64_t ROWS_AHEAD = 32;
constexpr int64_t PLACE_BYTES = 256;

// Decodes row positions[i] of the codes to row ids[i] of `rows`. A null list stands for 0, 1, 2, …
Room dequantize(
    const uint8_t* packed, const float* scales, const float* offsets, float* rows, int64_t dim,
    int64_t bits, const int64_t* positions, const int64_t* ids, int64_t n, int64_t threads
) {
    const int64_t width = (dim * bits + 7) / 8;
    threads = least(threads, n);
    Scratch scratch(threads, bits == 8 ? 0 : dim);
    if (!scratch.is_there()) return {false};
    over_rows_with(n, threads, scratch, [=](int64_t start, int64_t stop, char* own) {
        auto* unpacked = reinterpret_cast<uint8_t*>(own);
        for (int64_t i = start; i < stop; ++i) {
            if (ids != nullptr) {
                // The rows lie apart, so the processor cannot predict which row comes next.
                const char* coming =
                    reinterpret_cast<const char*>(rows + ids[least(i + ROWS_AHEAD, stop - 1)] * dim);
                for (int64_t at = 0; at < least(4 * dim, PLACE_BYTES); at += 64) {
                    ask_for(coming + at);
                }
            }
            const int64_t position = positions != nullptr ? positions[i] : i;
            const uint8_t* codes = packed + position * width;
            if (bits != 8) {
                unpack_codes(codes, unpacked, dim, bits);
                codes = unpacked;
            }
            const float scale = scales[position];
            const float offset = offsets[position];
            float* row = rows + (ids != nullptr ? ids[i] : i) * dim;
            for (int64_t k = 0; k < dim; ++k) row[k] = static_cast<float>(codes[k]) * scale + offset;
        }
    });
    return {true};
}

}  // namespace

extern const Operation quantize[] = {
    {"quantize_plain", call<quantize_plain>},
    {"quantize_by_search", call<quantize_by_search>},
    {"dequantize", call<dequantize>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
