// Subtracts base rows from rows. See this folder's README.
#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {
namespace {

constexpr int32_t WITHOUT_SIGN = 0x7FFFFFFF;

// Returns whether the residual may be quantized.
bool subtract_row(
    const float* row, const float* base, float* residual, int64_t dim, float most_error, float most
) {
    int32_t greatest_base = 0;
    int32_t greatest_residual = 0;
    int32_t differs = 0;
    const float first = row[0];
    for (int64_t k = 0; k < dim; ++k) {
        const float difference = row[k] - base[k];
        residual[k] = difference;
        greatest_base = greatest(greatest_base, load<int32_t>(base + k) & WITHOUT_SIGN);
        greatest_residual = greatest(greatest_residual, load<int32_t>(&difference) & WITHOUT_SIGN);
        differs |= row[k] != first;
    }
    const float reach = load<float>(&greatest_base) + most_error * load<float>(&greatest_residual);
    return differs != 0 && reach <= most;
}

void subtract_base(
    const float* rows, const float* base, float* residuals, int64_t dim, float most_error,
    float most, int64_t n, int64_t threads
) {
    over_rows(n, threads, [=](int64_t start, int64_t stop) {
        for (int64_t at = start * dim; at < stop * dim; at += dim) {
            if (subtract_row(rows + at, base + at, residuals + at, dim, most_error, most)) continue;
            for (int64_t k = 0; k < dim; ++k) residuals[at + k] = __builtin_nanf("");
        }
    });
}

}  // namespace

extern const Operation residuals[] = {
    {"subtract_base", call<subtract_base>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
