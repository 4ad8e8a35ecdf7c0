// Chooses a width for each row, with a row in each lane. See this folder's README.
#include "../quantize/lane_halves.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Widths in ascending order, so that of equal costs the narrower width is taken. 0 is an exact row.
constexpr int64_t WIDTHS[] = {2, 3, 4, 5, 6, 8};
constexpr int WIDTH_COUNT = 6;
constexpr int64_t EXACT = 0;

// The same as in costs.py.
constexpr float BIAS = 0x1p-60f;
constexpr float SMALLEST_SPAN = 0x1p-56f;

// price · bits of a row: at each width, with narrow and with wide parameters, and of an exact row.
struct Prices {
    double narrow[WIDTH_COUNT];
    double wide[WIDTH_COUNT];
    double exact;
};

static_assert(sizeof(Prices) == 104);

// LANES rows.
struct RowsInLanes {
    int64_t dim;
    Floats* values;  // [dim]
    LaneEnds ends;
    Floats per_span;  // 0 if the row has no error at any width
};

// Finds what does not depend on the width.
void look_at(RowsInLanes& lanes) {
    EndsOfRows keys = {0x7FFFFFFF - Words{}, -0x7FFFFFFF - 1 - Words{}};
    for (int64_t k = 0; k < lanes.dim; ++k) {
        const Words own_keys = keys_of(bits_of(lanes.values[k]));
        keys.low = smaller(keys.low, own_keys);
        keys.high = larger(keys.high, own_keys);
    }
    lanes.ends = lane_ends(keys);
    const Floats span = lanes.ends.span;
    lanes.per_span = span >= SMALLEST_SPAN ? 1.0f / span : Floats{};
}

// What a width does to the row in each lane.
struct Stored {
    float total[LANES];  // BIAS and the squared error in units of the squared span
    int32_t is_possible[LANES];
    int32_t is_wide[LANES];
};

// Finds the error of the codes with asymmetric parameters, of binary16 if the row is not wide.
void store_at(const RowsInLanes& lanes, float levels, Stored& stored) {
    const LaneParameters parameters = lane_parameters(lanes.ends, levels);
    const Floats step = parameters.scale;
    const Floats offset = parameters.offset;
    const Floats inverse = step > 0.0f ? 1.0f / step : Floats{};
    const Floats top = spread(levels);
    Floats total = spread(BIAS);
    for (int64_t k = 0; k < lanes.dim; ++k) {
        const Floats value = lanes.values[k];
        // As `codes_of`. NaN becomes code 0; a row that has one is not quantized.
        const Floats place = maximum((value - offset) * inverse + 0.5f, Floats{});
        const Floats code = whole(minimum(place, top));
        const Floats share = (value - (code * step + offset)) * lanes.per_span;
        total += share * share;
    }
    store(stored.total, total);
    store(stored.is_possible, parameters.is_stored);
    store(stored.is_wide, parameters.is_wide);
}

// What is compared of the row in each lane, in binary64.
struct Choice {
    double weight[LANES];  // the importance
    double span[LANES];
    double best[LANES];
    int64_t width[LANES];
    bool is_kept[LANES];  // kept exactly, whatever the costs
};

// Whether no width from WIDTHS[i] on can cost less than the best: a width costs the price of its
// bits at least, and wider ones cost more.
bool is_decided(const Choice& choice, double least_cost) {
    bool is_open = false;
    for (int lane = 0; lane < LANES; ++lane) {
        is_open |= choice.best[lane] > least_cost && !choice.is_kept[lane];
    }
    return !is_open;
}

void choose(const RowsInLanes& lanes, const Prices& prices, Choice& choice) {
    for (int lane = 0; lane < LANES; ++lane) {
        choice.span[lane] = static_cast<double>(lanes.ends.span[lane]);
        choice.best[lane] = __builtin_inf();
        choice.width[lane] = EXACT;
    }
    for (int i = 0; i < WIDTH_COUNT && !is_decided(choice, prices.narrow[i]); ++i) {
        Stored stored;
        store_at(lanes, static_cast<float>((1 << WIDTHS[i]) - 1), stored);
        for (int lane = 0; lane < LANES; ++lane) {
            const double span_once = choice.span[lane];
            const double total = static_cast<double>(stored.total[lane]) - static_cast<double>(BIAS);
            const double error = total * span_once * span_once;
            const double price = stored.is_wide[lane] ? prices.wide[i] : prices.narrow[i];
            const double cost = choice.weight[lane] * error + price;
            const bool is_less = stored.is_possible[lane] != 0 && cost < choice.best[lane];
            choice.best[lane] = is_less ? cost : choice.best[lane];
            choice.width[lane] = is_less ? WIDTHS[i] : choice.width[lane];
        }
    }
    for (int lane = 0; lane < LANES; ++lane) {
        const bool is_coded = !choice.is_kept[lane] && choice.best[lane] <= prices.exact;
        choice.width[lane] = is_coded ? choice.width[lane] : EXACT;
    }
}

void allocate_part(
    const float* rows, const float* importance, int64_t dim, const Prices& prices, uint8_t* widths,
    int64_t start, int64_t stop, char* scratch
) {
    RowsInLanes lanes{};
    lanes.dim = dim;
    lanes.values = reinterpret_cast<Floats*>(scratch);
    Choice choice{};
    for (int64_t first = start; first < stop; first += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            // The last block repeats its last row in the lanes that are left.
            const int64_t row = least(first + lane, stop - 1);
            for (int64_t k = 0; k < dim; ++k) lanes.values[k][lane] = rows[row * dim + k];
            // Compares patterns, because a processor may take a subnormal value for zero.
            const int32_t pattern = load<int32_t>(importance + row);
            const int32_t size = pattern & 0x7FFFFFFF;
            choice.is_kept[lane] = size >= INFINITY_KEY || (pattern < 0 && size > 0);
            choice.weight[lane] = size >= SMALLEST_KEY ? static_cast<double>(importance[row]) : 0.0;
        }
        look_at(lanes);
        choose(lanes, prices, choice);
        const int64_t n = least<int64_t>(LANES, stop - first);
        for (int lane = 0; lane < n; ++lane) {
            widths[first + lane] = static_cast<uint8_t>(choice.width[lane]);
        }
    }
}

Room allocate(
    const float* rows, const float* importance, int64_t dim, const Prices* prices, uint8_t* widths,
    int64_t n, int64_t threads
) {
    threads = least(threads, n);
    Scratch scratch(threads, dim * static_cast<int64_t>(sizeof(Floats)));
    if (!scratch.is_there()) return {false};
    over_rows_with(n, threads, scratch, [=](int64_t start, int64_t stop, char* own) {
        allocate_part(rows, importance, dim, *prices, widths, start, stop, own);
    });
    return {true};
}

}  // namespace

extern const Operation allocation[] = {
    {"allocate_widths", call<allocate>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
