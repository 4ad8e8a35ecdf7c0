// The searches for a better scale and offset, with a row in each lane. See this folder's README.
#pragma once

#include "lane_halves.h"

namespace recpoint::RECPOINT_SET {

// A lower rounded cost proves a lower exact cost if it is lower by this many units a value.
constexpr float COST_MARGIN = 1.25f;

// The parameters of a search, the same for all rows. See grid.py.
struct Search {
    const float* pairs;  // refit: slope and shift of each candidate
    int64_t pair_count;  // 0: least squares begin with the first pair, and nothing is compared
    float nearby;
    int64_t refits;
    int64_t levelings;  // refit: fits of codes to values, which come last
    float fraction;
    float coarser;  // values in units, times this, have squares that add up exactly
    int64_t bins;  // greedy, else 0
    int64_t steps;
    float unit;
    float largest;
};

// The parameters tried for the row in each lane, and their cost.
struct Trial {
    Floats scale;
    Floats offset;
    Floats cost;
};

// The rows in all lanes.
struct Block {
    int64_t dim;
    float levels;
    Floats* values;    // [dim]
    Floats* in_units;  // [dim], room for refit
    Floats step;       // the plain scale, in binary32
    Floats low;
    Floats per_step;
    Words halves;  // all bits set if the row's parameters must be binary16
    Trial plain;   // the plain parameters as stored
};

// Computes the cost of a trial: the squared errors of rows decoded with its parameters, in whole
// units.
inline void judge(const Search& search, const Block& block, Trial& trial) {
    const Floats scale = trial.scale;
    const Floats offset = trial.offset;
    const Floats inverse = 1.0f / scale;
    const Floats per_step = block.per_step;
    const Floats top = spread(block.levels);
    const Floats unit = spread(search.unit);
    const Floats largest = spread(search.largest);
    Floats total{};
    for (int64_t k = 0; k < block.dim; ++k) {
        const Floats value = block.values[k];
        const Floats place = (value - offset) * inverse + 0.5f;
        const Floats code = whole(maximum(minimum(place, top), Floats{}));
        const Floats steps = (value - (code * scale + offset)) * per_step;
        // An infinite error counts as `largest`. NaN cannot occur, because code · scale is finite.
        total = minimum(total + rounded(minimum(steps * steps * unit, largest)), largest);
    }
    trial.cost = total;
}

// Rounds the parameters to their stored form. Parameters that cannot be stored become the plain
// ones.
inline void keep_representable(const Block& block, Trial& trial) {
    constexpr float finite = 0x1.fffffep127f;
    const Words is_finite =
        (trial.scale >= TINY) & (trial.scale <= finite) & (magnitude(trial.offset) <= finite);
    const Floats half_scale = half_nearest(trial.scale);
    const Floats half_offset = half_nearest(trial.offset);
    const Words is_half = (half_scale > 0.0f) & (half_scale <= LARGEST_HALF) &
                          (magnitude(half_offset) <= LARGEST_HALF);
    const Words is_usable = is_finite & (~block.halves | is_half);
    const Floats scale = block.halves ? half_scale : trial.scale;
    const Floats offset = block.halves ? half_offset : trial.offset;
    trial.scale = is_usable ? scale : block.plain.scale;
    trial.offset = is_usable ? offset : block.plain.offset;
}

// The sums of least squares for the codes of a slope and shift. `codes` is the sum of the codes.
// `along` and `square` are the covariance with the values and the variance of the codes, times
// count². `score` is how much of the row's sum of squares the codes explain; it is 0 if codes do
// not rise with the values.
struct Explained {
    Floats codes;
    Floats along;
    Floats square;
    Floats score;
};

inline Explained explain(const Block& block, Floats slope, Floats shift, Floats total) {
    const Floats top = spread(block.levels);
    const Floats count = spread(static_cast<float>(block.dim));
    Floats codes{};
    Floats products{};
    Floats squares{};
    for (int64_t k = 0; k < block.dim; ++k) {
        const Floats value = block.in_units[k];
        const Floats code = rounded(maximum(minimum(value * slope + shift, top), Floats{}));
        codes += code;
        products = exact_multiply_add(code, value, products);
        squares = exact_multiply_add(code, code, squares);
    }
    const Floats along = count * products - codes * total;
    const Floats square = count * squares - codes * codes;
    const Words is_usable = (square > Floats{}) & (along > Floats{});
    return {codes, along, square, is_usable ? along * along / square : Floats{}};
}

// Fits codes to values, so that rows of errors have no part along their rows of values.
inline void level(
    const Search& search, const Block& block, Floats total, Floats& slope, Floats& shift
) {
    const Floats count = spread(static_cast<float>(block.dim));
    Floats sum{};
    Floats squares{};
    for (int64_t k = 0; k < block.dim; ++k) {
        const Floats value = rounded_signed(block.in_units[k] * search.coarser);
        sum += value;
        squares = exact_multiply_add(value, value, squares);
    }
    const Floats finer = spread(1.0f / search.coarser);
    const Floats own = (count * squares - sum * sum) * finer * finer;
    for (int64_t i = 0; i < search.levelings; ++i) {
        const Explained fit = explain(block, slope, shift, total);
        const Floats fitted_slope = fit.along / own;
        const Words is_usable = (fit.score > Floats{}) & (own > Floats{});
        slope = is_usable ? fitted_slope : slope;
        shift = is_usable ? (fit.codes - fitted_slope * total) / count : shift;
    }
}

// Takes the best pair of the grid, then the best of the nine pairs around it, if there is a grid;
// then fits least squares.
inline Trial refit(const Search& search, const Block& block) {
    const Floats unit = spread(search.fraction);
    const Floats top = spread(block.levels);
    const Floats half_levels = spread(block.levels * 0.5f);
    const Floats middle = half_levels * unit;
    Floats total{};
    for (int64_t k = 0; k < block.dim; ++k) {
        const Floats steps = (block.values[k] - block.low) * block.per_step;
        block.in_units[k] = rounded(steps * unit) - middle;
        total += block.in_units[k];
    }
    Floats best{};
    Floats slope = spread(search.pairs[0]);
    Floats shift = spread(search.pairs[1]);
    const auto consider = [&](Floats its_slope, Floats its_shift) {
        const Floats score = explain(block, its_slope, its_shift, total).score;
        const Words is_better = best < score;
        best = is_better ? score : best;
        slope = is_better ? its_slope : slope;
        shift = is_better ? its_shift : shift;
    };
    for (int64_t i = 0; i < search.pair_count; ++i) {
        consider(spread(search.pairs[2 * i]), spread(search.pairs[2 * i + 1]));
    }
    const Floats low = 0.0f - shift / slope;
    const Floats high = (top - shift) / slope;
    for (int i = 0; i < 9 && search.pair_count > 0; ++i) {
        const Floats its_low = low + search.nearby * static_cast<float>(i / 3 - 1);
        const Floats its_high = high + search.nearby * static_cast<float>(i % 3 - 1);
        const Floats its_slope = top / (its_high - its_low);
        consider(its_slope, 0.0f - its_low * its_slope);
    }
    for (int64_t i = 0; i < search.refits; ++i) {
        const Explained found = explain(block, slope, shift, total);
        const Floats its_slope = found.square / found.along;
        const Floats start = (total - found.along / found.square * found.codes) /
                             spread(static_cast<float>(block.dim));
        const Words is_usable = found.score > Floats{};
        slope = is_usable ? its_slope : slope;
        shift = is_usable ? 0.0f - start * its_slope : shift;
    }
    if (search.levelings > 0) level(search, block, total, slope, shift);
    const Floats unit_steps = 1.0f / unit;
    Trial trial = {
        block.step * (unit_steps / slope),
        block.low + block.step * (half_levels - shift / slope * unit_steps),
        Floats{},
    };
    keep_representable(block, trial);
    judge(search, block, trial);
    return trial;
}

// In each step, moves in the end that costs less. Returns the cheapest pair of ends seen.
inline Trial greedy(const Search& search, const Block& block) {
    const Floats levels = spread(block.levels);
    Floats low = block.low;
    Floats high = block.low + block.step * levels;
    const Floats move = block.step * levels / spread(static_cast<float>(search.bins));
    Trial best = block.plain;
    for (int64_t i = 0; i < search.steps; ++i) {
        Trial raised = {(high - (low + move)) / levels, low + move, Floats{}};
        Trial lowered = {((high - move) - low) / levels, low, Floats{}};
        keep_representable(block, raised);
        judge(search, block, raised);
        keep_representable(block, lowered);
        judge(search, block, lowered);
        const Words is_raised = raised.cost < lowered.cost;
        low = is_raised ? low + move : low;
        high = is_raised ? high : high - move;
        const Trial now = {
            is_raised ? raised.scale : lowered.scale,
            is_raised ? raised.offset : lowered.offset,
            is_raised ? raised.cost : lowered.cost,
        };
        const Words is_better = now.cost < best.cost;
        best.scale = is_better ? now.scale : best.scale;
        best.offset = is_better ? now.offset : best.offset;
        best.cost = is_better ? now.cost : best.cost;
    }
    return best;
}

}  // namespace recpoint::RECPOINT_SET
