from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.kernels import quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, choice, grid, kmeans, reference

NAN = float("nan")
#: The search that torch calls optimized_qparams.
TORCH = Method(name="greedy", bins=200, ratio_permille=160)
REFIT = Method(name="refit", bins=4, refits=2)
FITTED = Method(name="refit", bins=0, refits=2)
LEVELED = Method(name="level", refits=2)
SEARCHES = [Method(name="greedy", bins=9, ratio_permille=500), REFIT, FITTED, LEVELED]


def gaussian(n: int, dim: int) -> Tensor:
    return 0.05 * torch.randn(n, dim, generator=torch.Generator().manual_seed(dim))


def squared_error(rows: Tensor, bits: int, method: Method) -> float:
    return choice.squared_error(rows, bits, method) / len(rows)


@pytest.mark.parametrize("method", SEARCHES, ids=lambda method: f"{method.name}-{method.bins}")
@pytest.mark.parametrize("dim", [1, 7, 12, 33])
def test_any_number_of_threads_gives_the_bytes_of_the_reference(
    dim: int, method: Method, threads: int
) -> None:
    rows = gaussian(50, dim) * torch.logspace(-44, 38, 50)[:, None]
    rows[7, 0], rows[8, -1] = NAN, float("inf")
    rows[20:30] = torch.randn(10, dim).round()
    rows[30:35] = torch.randn(5, dim) + 1000
    for bits, half in ((2, False), (3, True), (4, False), (4, True), (8, False)):
        expected = reference.quantize_packed(rows, bits, method, half_parameters=half)
        found = quantize.quantize_packed(rows, bits, method, half_parameters=half)
        for name, left, right in zip(expected._fields, expected, found, strict=True):
            assert torch.equal(left, right), (name, bits, half)


@pytest.mark.parametrize("method", [Method(name="greedy", bins=25, ratio_permille=600), REFIT])
def test_the_sign_of_a_zero_offset_is_that_of_the_reference(method: Method) -> None:
    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).relu()
    rows[rows == 0] = -0.0
    for bits in BITS:
        expected = reference.quantize(rows, bits, method, half_parameters=True).offset
        found = quantize.quantize(rows, bits, method, half_parameters=True).offset
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("dim", "farthest"), [(8, -2.0), (63, -2.0), (64, -1.0), (500, -1.0)])
def test_ends_of_long_rows_move_out_by_one_step_at_most(dim: int, farthest: float) -> None:
    slope, shift = torch.from_numpy(grid.candidates(dim, 4, 10).copy()).double().T
    step = 2.0 ** -grid.fraction_bits(dim, 4) / slope
    low = 7.5 - shift * step
    assert float(low.min()) == pytest.approx(farthest)
    assert float((15 - low - 15 * step).min()) == pytest.approx(farthest)


@pytest.mark.parametrize("dim", [129, 1000, 5000])
def test_rows_of_many_values_have_the_bytes_of_the_reference(dim: int) -> None:
    rows = torch.distributions.StudentT(3.0).sample((17, dim))
    for bits in (2, 4, 8):
        for method in (Method(name="greedy", bins=20, ratio_permille=300), REFIT, LEVELED):
            found = quantize.quantize_packed(rows, bits, method)
            expected = reference.quantize_packed(rows, bits, method)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", [2, 4])
def test_rows_too_long_for_exact_sums_are_quantized_plainly(bits: int) -> None:
    rows = torch.randn(2, grid.LARGEST_DIM + 1)
    plain = quantize.quantize_packed(rows, bits)
    for method in (TORCH, REFIT, LEVELED):
        found = quantize.quantize_packed(rows, bits, method)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def torch_error(rows: Tensor, bits: int) -> float:
    operations = torch.ops.quantized
    prepack = {2: operations.embedding_bag_2bit_prepack, 4: operations.embedding_bag_4bit_prepack}
    unpack = {2: operations.embedding_bag_2bit_unpack, 4: operations.embedding_bag_4bit_unpack}
    packed = prepack[bits](rows, True, 200, 0.16)
    return float((unpack[bits](packed) - rows).double().square().sum(dim=1).mean())


def test_the_greedy_search_is_that_of_torch() -> None:
    rows = gaussian(200, 64)
    assert squared_error(rows, 4, TORCH) == pytest.approx(torch_error(rows, 4), rel=0.01)
    # torch remembers ends only if both next moves cost more, which at 2 bits hardly happens.
    assert squared_error(rows, 2, TORCH) < torch_error(rows, 2)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_least_squares_shrink_a_row_and_leveling_does_not(dim: int, bits: int) -> None:
    rows = gaussian(2000, dim).double()
    centred = rows - rows.mean(dim=1, keepdim=True)
    errors, parts = {}, {}
    for method in (ASYMMETRIC, FITTED, LEVELED):
        coded = quantize.quantize(rows.float(), bits, method, half_parameters=True)
        error = quantize.dequantize(coded.codes, coded.scale, coded.offset).double() - rows
        errors[method] = float(error.square().sum())
        parts[method] = float((error * centred).sum()) / errors[method]
    assert errors[FITTED] < 0.92 * errors[ASYMMETRIC]
    assert errors[LEVELED] < 1.15 * errors[FITTED]
    assert parts[FITTED] < -0.7  # the part of the errors along their rows
    assert abs(parts[LEVELED]) < 0.35 * abs(parts[FITTED])
    assert parts[ASYMMETRIC] > 0


def test_a_grid_of_one_place_is_refused() -> None:
    with pytest.raises(ValueError, match="bins: 1 for refit"):
        Method(name="refit", bins=1, refits=2)


def test_the_default_search_is_near_the_best_and_better_than_torch() -> None:
    # Mean squared errors of a row of 64 values of N(0, 0.05²), from exhaustive searches.
    rows = gaussian(2000, 64)
    for bits, best in ((4, 1.052e-3), (2, 1.628e-2)):
        assert squared_error(rows, bits, quantize.default_method(bits)) < 1.02 * best
    for bits, of_theirs in ((4, 1.0), (2, 0.55)):
        ours = squared_error(rows[:200], bits, quantize.default_method(bits))
        assert ours < of_theirs * torch_error(rows[:200], bits)


def test_schemes_and_widths_are_ordered_as_in_the_paper() -> None:
    rows = gaussian(300, 16)
    errors = {
        bits: [
            squared_error(rows, bits, method)
            for method in (SYMMETRIC, ASYMMETRIC, TORCH, quantize.default_method(bits))
        ]
        for bits in (2, 3, 4)
    }
    for bits, of_scheme in errors.items():
        assert of_scheme == sorted(of_scheme, reverse=True), bits
        clusters = kmeans.decode(kmeans.kmeans(rows, bits)) - rows
        assert float(clusters.double().square().sum()) / 300 < of_scheme[-1]
    for coarse, fine in ((2, 3), (3, 4)):
        assert all(b < a for a, b in zip(errors[coarse], errors[fine], strict=True))


def test_symmetric_rows_reach_from_minus_the_largest_magnitude_to_it() -> None:
    rows = torch.tensor([[-1.0, 0.25, 3.0]])
    codes, scale, offset, _, _ = quantize.quantize(rows, 2, SYMMETRIC)
    assert scale.tolist() == [2.0] and offset.tolist() == [-3.0]
    assert codes.tolist() == [[1, 2, 3]]


def test_an_outlier_is_given_up_for_the_other_values() -> None:
    rows = torch.cat([torch.linspace(-1, 1, 63), torch.tensor([4.0])])[None]
    found = quantize.quantize(rows, 2, REFIT)
    top = found.offset + 3 * found.scale
    assert top < 3 and squared_error(rows, 2, REFIT) < 0.7 * squared_error(rows, 2, ASYMMETRIC)


def test_offsets_large_against_the_range_are_wide() -> None:
    rows = torch.tensor([[1000.1, 1000.2], [0.1, 0.1], [0.5, 0.5], [-1.0, 1e7], [-0.2, 0.3]])
    found = quantize.quantize(rows, 4, half_parameters=True)
    assert found.wide.tolist() == [True, True, False, True, False]
    assert not quantize.quantize(rows, 4).wide.any()


@pytest.mark.parametrize("low", [65504.0, 65520.0, 65535.0, 65536.0, 70000.0])
def test_offsets_at_the_end_of_binary16_are_wide_as_in_the_reference(low: float) -> None:
    rows = torch.linspace(low, low + 6e5, 16)[None]
    for bits in BITS:
        for given in (rows, -rows):
            expected = reference.quantize_packed(given, bits, half_parameters=True)
            found = quantize.quantize_packed(given, bits, half_parameters=True)
            for name, left, right in zip(expected._fields, expected, found, strict=True):
                assert torch.equal(left, right), (name, bits)


def test_k_means_needs_no_more_centroids_than_values() -> None:
    rows = gaussian(20, 8)
    assert torch.equal(kmeans.decode(kmeans.kmeans(rows, 8)), rows)
    found = kmeans.kmeans(rows, 2)
    assert found.codebook.shape == (20, 4) and (found.codebook.diff(dim=1) >= 0).all()
    assert kmeans.decode(kmeans.kmeans(rows[:0], 2)).shape == (0, 8)
    again = kmeans.kmeans(rows, 2)
    assert torch.equal(found.codes, again.codes) and torch.equal(found.codebook, again.codebook)


def test_a_choice_is_the_cheapest_that_is_good_enough(threads: int) -> None:
    rows = gaussian(9000, 16)
    chosen = choice.choose(rows, 4, seed=5)
    assert chosen == choice.choose(rows, 4, seed=5)
    sample = rows[choice.drawn(9000, 5)]
    errors = {m: choice.squared_error(sample, 4, m) for m in choice.candidates(4)}
    enough = [m for m, error in errors.items() if error <= 1.01 * min(errors.values())]
    assert chosen == enough[0] and chosen.name == "refit"
    for scale in (2.0**-20, 2.0**20):
        assert choice.choose(rows * scale, 4, seed=5) == chosen  # the margin is relative
    assert choice.choose(torch.ones(5, 3), 4, seed=0) == ASYMMETRIC  # nothing to gain
    assert choice.choose(rows, 8, seed=0) == ASYMMETRIC
    assert choice.choose(rows[:0], 2, seed=0) == ASYMMETRIC
    assert choice.choose(rows, 2, seed=0, name="greedy").name == "greedy"
    assert choice.choose(rows, 2, seed=0, name="symmetric") == SYMMETRIC


def test_a_draw_takes_distinct_rows_of_the_whole_table() -> None:
    for count in (choice.SAMPLE_ROWS + 1, 123_456, 2**40):
        drawn = choice.drawn(count, 3)
        assert len(drawn) == choice.SAMPLE_ROWS and (drawn.diff() > 0).all()
        assert 0 <= drawn[0] and drawn[-1] < count
    assert not torch.equal(choice.drawn(123_456, 3), choice.drawn(123_456, 4))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "best"}, "method: 'best'"),
        ({"name": "asymmetric", "bins": 1}, "bins: 1 for asymmetric"),
        ({"name": "greedy", "bins": 25}, "ratio_permille: 0 for greedy"),
        ({"name": "greedy", "bins": 25, "ratio_permille": 1001}, "ratio_permille: 1001"),
        ({"name": "refit", "bins": 1}, "bins: 1 for refit"),
        ({"name": "refit", "bins": 4, "refits": -1}, "refits: -1"),
        ({"name": "refit", "bins": 4.0}, "bins: 4.0"),
        ({"name": "refit", "bins": 4, "ratio_permille": 5}, "ratio_permille: 5 for refit"),
    ],
)
def test_parameters_that_a_method_does_not_have_are_refused(
    settings: dict[str, object], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        Method(**settings)  # type: ignore[arg-type]
