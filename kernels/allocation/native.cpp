// Weighs rows and chooses a width for each, with a row in each lane. See this folder's README.
#include "../quantize/lane_halves.h"
#include "../quantize/side_by_side.h"

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
    lanes.ends = lane_ends(ends_of_lanes(lanes.values, lanes.dim));
    const Floats span = lanes.ends.span;
    lanes.per_span = span >= SMALLEST_SPAN ? 1.0f / span : Floats{};
}

// What a width does to the row in each lane.
struct Stored {
    Floats total;  // BIAS and the squared error in units of the squared span
    Words is_possible;
    Words is_wide;
};

// Finds the error of the codes with asymmetric parameters, of binary16 if the row is not wide.
Stored store_at(const RowsInLanes& lanes, float levels) {
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
    return {total, parameters.is_stored, parameters.is_wide};
}

// Costs are compared in binary64, so half as many of them fit into a vector.
constexpr int HALF = LANES / 2;

typedef float HalfFloats __attribute__((vector_size(4 * HALF)));
typedef int32_t HalfWords __attribute__((vector_size(4 * HALF)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));
typedef int64_t Longs __attribute__((vector_size(8 * HALF)));

// The first half of the lanes, or the second one, if `second` is 1.
Doubles widened(const Floats& values, int second) {
    return __builtin_convertvector(
        load<HalfFloats>(reinterpret_cast<const float*>(&values) + second * HALF), Doubles
    );
}

Longs widened(const Words& words, int second) {
    return __builtin_convertvector(
        load<HalfWords>(reinterpret_cast<const int32_t*>(&words) + second * HALF), Longs
    );
}

// What is compared of the rows in half of the lanes.
struct Choice {
    Doubles weight;  // the importance
    Doubles span;
    Doubles best;
    Longs width;
    Longs is_kept;  // kept exactly, whatever the costs
};

// Whether no width from WIDTHS[i] on can cost less than the best: a width costs the price of its
// bits at least, and wider ones cost more.
bool is_decided(const Choice* choices, double least_cost) {
    const Longs is_open = ((choices[0].best > least_cost) & ~choices[0].is_kept) |
                          ((choices[1].best > least_cost) & ~choices[1].is_kept);
    int64_t any = 0;
    for (int lane = 0; lane < HALF; ++lane) any |= is_open[lane];
    return any == 0;
}

void choose(const RowsInLanes& lanes, const Prices& prices, Choice* choices) {
    for (int second = 0; second < 2; ++second) {
        choices[second].span = widened(lanes.ends.span, second);
        choices[second].best = __builtin_inf() - Doubles{};
        choices[second].width = EXACT - Longs{};
    }
    for (int i = 0; i < WIDTH_COUNT && !is_decided(choices, prices.narrow[i]); ++i) {
        const Stored stored = store_at(lanes, static_cast<float>((1 << WIDTHS[i]) - 1));
        for (int second = 0; second < 2; ++second) {
            Choice& choice = choices[second];
            const Doubles total = widened(stored.total, second) - static_cast<double>(BIAS);
            const Doubles error = total * choice.span * choice.span;
            const Doubles price = widened(stored.is_wide, second) ? prices.wide[i] - Doubles{}
                                                                  : prices.narrow[i] - Doubles{};
            const Doubles cost = choice.weight * error + price;
            const Longs is_less = widened(stored.is_possible, second) & (cost < choice.best);
            choice.best = is_less ? cost : choice.best;
            choice.width = is_less ? WIDTHS[i] - Longs{} : choice.width;
        }
    }
    for (int second = 0; second < 2; ++second) {
        Choice& choice = choices[second];
        const Longs is_coded = ~choice.is_kept & (choice.best <= prices.exact);
        choice.width = is_coded ? choice.width : EXACT - Longs{};
    }
}

// Loads the importances of `n` rows, at most LANES.
void load_importance(const float* importance, int64_t n, Choice* choices) {
    Floats values{};
    memcpy(&values, importance, n * sizeof(float));
    // Compares patterns, because a processor may take a subnormal value for zero.
    const Words pattern = bits_of(values);
    const Words size = pattern & 0x7FFFFFFF;
    const Words is_kept = (size >= INFINITY_KEY) | ((pattern < 0) & (size > 0));
    const Floats weight = size >= SMALLEST_KEY ? values : Floats{};
    for (int second = 0; second < 2; ++second) {
        choices[second].weight = widened(weight, second);
        choices[second].is_kept = widened(is_kept, second);
    }
}

void allocate_part(
    const float* rows, const float* importance, int64_t dim, const Prices& prices, uint8_t* widths,
    int64_t start, int64_t stop, char* scratch
) {
    RowsInLanes lanes{};
    lanes.dim = dim;
    lanes.values = reinterpret_cast<Floats*>(scratch);
    Choice choices[2]{};
    for (int64_t first = start; first < stop; first += LANES) {
        const int64_t n = least<int64_t>(LANES, stop - first);
        put_side_by_side(rows + first * dim, n, dim, lanes.values);
        load_importance(importance + first, n, choices);
        look_at(lanes);
        choose(lanes, prices, choices);
        for (int64_t lane = 0; lane < n; ++lane) {
            widths[first + lane] = static_cast<uint8_t>(choices[lane / HALF].width[lane % HALF]);
        }
    }
}

// Computes the importance of rows: see `weighed` in sums.py.
void weigh_part(
    const float* states, int64_t m, double initial, double factor, float* importance, int64_t start,
    int64_t stop, char* scratch
) {
    auto* values = reinterpret_cast<Floats*>(scratch);
    auto* sums = reinterpret_cast<Doubles*>(values + m);
    for (int64_t first = start; first < stop; first += LANES) {
        const int64_t n = least<int64_t>(LANES, stop - first);
        put_side_by_side(states + first * m, n, m, values);
        HalfFloats results[2];
        for (int second = 0; second < 2; ++second) {
            for (int64_t k = 0; k < m; ++k) {
                const Doubles above = widened(values[k], second) - initial;
                sums[k] = above < 0.0 ? Doubles{} : above;  // NaN stays
            }
            for (int64_t count = m; count > 1; count /= 2) {
                const int64_t half = count / 2;
                for (int64_t k = 0; k < half; ++k) sums[k] += sums[half + k];
                if (count % 2 == 1) sums[0] += sums[count - 1];
            }
            results[second] = __builtin_convertvector(sums[0] * factor, HalfFloats);
        }
        memcpy(importance + first, results, n * sizeof(float));
    }
}

Room weigh(
    const float* states, int64_t m, double initial, double factor, float* importance, int64_t n,
    int64_t threads
) {
    threads = least(threads, n);
    Scratch scratch(threads, m * static_cast<int64_t>(sizeof(Floats) + sizeof(Doubles)));
    if (!scratch.is_there()) return {false};
    over_rows_with(n, threads, scratch, [=](int64_t start, int64_t stop, char* own) {
        weigh_part(states, m, initial, factor, importance, start, stop, own);
    });
    return {true};
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
    {"weigh_rows", call<weigh>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
