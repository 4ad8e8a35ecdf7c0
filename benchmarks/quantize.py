"""Compares recpoint's quantizers with torch's and FBGEMM's: speed with equal threads, error.

Both sides turn rows of F32 into packed codes with row parameters, in memory that malloc reuses: the
page faults of fresh memory would take longer than the work. Errors are means over rows of the
squared error of a whole row. The exhaustive reference is `exhaustive_quantizer`.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.exhaustive_quantizer import least_error
from benchmarks.machine import keep_freed_memory
from benchmarks.report import Report, Spread, alternate, ratio
from benchmarks.trained_rows import trained_rows
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import (
    ASYMMETRIC,
    SYMMETRIC,
    Method,
    choice,
    default_method,
    dequantize_packed,
    kmeans,
    quantize_packed,
    reference,
)

__all__ = ["KEYS", "run"]

KEYS = (
    "error_vs_torch_4bit",
    "error_vs_torch_2bit",
    "error_vs_torch_2bit_any_dim",
    "least_vs_torch_2bit_any_dim",
    "error_vs_exhaustive",
    "speedup_vs_torch_4bit",
    "speedup_vs_torch_2bit",
    "byte_vs_torch",
    "plain4_vs_fbgemm",
)

#: FBGEMM is measured against, and is not a dependency. Its own dependencies would install another
#: torch.
INSTALL = "pip install --no-deps fbgemm-gpu-cpu==1.8.0"

DIMS = (8, 16, 17, 33, 64, 128)
#: With fewer values in a row, no scale and offset reach 0.55 of torch's error at 2 bits.
LONG_DIM = 64
BINS, RATIO = 200, 0.16
GREEDY = {
    2: Method(name="greedy", bins=25, ratio_permille=600),
    3: Method(name="greedy", bins=25, ratio_permille=400),
    4: Method(name="greedy", bins=45, ratio_permille=200),
    5: Method(name="greedy", bins=45, ratio_permille=150),
    6: Method(name="greedy", bins=45, ratio_permille=100),
    8: Method(name="greedy", bins=200, ratio_permille=100),
}

Inputs = dict[tuple[str, int], Tensor]


def run(*, smoke: bool) -> Report:
    """Measure errors on every input set, then speeds, then the paper's table of schemes.

    `error_vs_torch_2bit` is the worst of all sets with 64 or more values a row, and
    `error_vs_torch_2bit_any_dim` the worst of all sets; `least_vs_torch_2bit_any_dim` is the error
    of an exhaustive search on that set. The other errors are the worst of all sets, and speeds the
    worst of all row widths. torch takes only rows of even length; at 2 bits, of a multiple of four.
    """
    keep_freed_memory()
    inputs = _inputs(smoke)
    _gate(inputs, 4 if smoke else 20)
    report = Report(
        name="quantize",
        columns=("rows", "dim", "bits", "error", "vs plain", "vs torch", "vs exhaustive"),
    )
    _errors(report, inputs, 8 if smoke else 200)
    _speeds(report, smoke)
    _schemes(report, inputs, 20 if smoke else 400)
    return report


def _inputs(smoke: bool) -> Inputs:
    n = 256 if smoke else 4096
    inputs: Inputs = {}
    for dim in (16, 64):
        inputs["trained", dim] = trained_rows(dim=dim, batches=4 if smoke else 120, rows=n)
    torch.manual_seed(1)
    laplace, student = torch.distributions.Laplace(0.0, 0.05), torch.distributions.StudentT(3.0)
    for dim in DIMS:
        inputs["Gaussian", dim] = 0.05 * torch.randn(n, dim)
        inputs["Laplace", dim] = laplace.sample((n, dim))
        inputs["Student t3", dim] = 0.05 * student.sample((n, dim))
    return inputs


def _gate(inputs: Inputs, count: int) -> None:
    """Check that every fast method gives the bytes of its reference on the same `count` rows."""
    for (name, dim), rows in inputs.items():
        for bits in BITS:
            for method in (SYMMETRIC, ASYMMETRIC, default_method(bits), GREEDY[bits]):
                results, expected = (
                    kernel(rows[:count], bits, method) for kernel in (quantize_packed, reference_of)
                )
                for result, right in zip(results, expected, strict=True):
                    if not torch.equal(result, right):
                        raise RuntimeError(f"{name}, dim {dim}: {method} at {bits} bits differs")


def reference_of(rows: Tensor, bits: int, method: Method) -> Any:
    """Call the reference with the arguments of the fast version."""
    return reference.quantize_packed(rows, bits, method)


def _error(rows: Tensor, bits: int, method: Method) -> float:
    quantized = quantize_packed(rows, bits, method)
    decoded = dequantize_packed(*quantized[:3], dim=rows.shape[1], bits=bits)
    return _mean_square(decoded - rows)


def _mean_square(difference: Tensor) -> float:
    return float(difference.double().square().sum(dim=1).mean())


def _torch_search(bits: int) -> Callable[[Tensor], Tensor]:
    operations = torch.ops.quantized
    prepack = {2: operations.embedding_bag_2bit_prepack, 4: operations.embedding_bag_4bit_prepack}
    return lambda rows: prepack[bits](rows, True, BINS, RATIO)


def _torch_error(rows: Tensor, bits: int) -> float | None:
    if rows.shape[1] % (8 // bits):
        return None
    operations = torch.ops.quantized
    unpack = {2: operations.embedding_bag_2bit_unpack, 4: operations.embedding_bag_4bit_unpack}
    return _mean_square(unpack[bits](_torch_search(bits)(rows)) - rows)


def _errors(report: Report, inputs: Inputs, count: int) -> None:
    against: dict[int, dict[tuple[str, int], float]] = {2: {}, 4: {}}
    least_against: dict[tuple[str, int], float] = {}
    worst_exhaustive = 0.0
    for bits in (2, 4):
        for (name, dim), rows in inputs.items():
            sample = rows[:count]
            our_error, lowest = (
                _error(sample, bits, default_method(bits)),
                least_error(sample, bits),
            )
            their_error = _torch_error(sample, bits)
            worst_exhaustive = max(worst_exhaustive, our_error / lowest)
            if their_error is not None:
                against[bits][name, dim] = our_error / their_error
                if bits == 2:
                    least_against[name, dim] = lowest / their_error
            report.rows.append(
                (
                    name, dim, bits, our_error, our_error / _error(sample, bits, ASYMMETRIC),
                    "refuses" if their_error is None else our_error / their_error,
                    our_error / lowest,
                )
            )  # fmt: skip
    worst = max(against[2], key=lambda key: against[2][key])
    report.figures |= {
        "error_vs_torch_4bit": max(against[4].values()),
        "error_vs_torch_2bit": max(v for (_, d), v in against[2].items() if d >= LONG_DIM),
        "error_vs_torch_2bit_any_dim": against[2][worst],
        "least_vs_torch_2bit_any_dim": least_against[worst],
        "error_vs_exhaustive": worst_exhaustive,
    }


def _speeds(report: Report, smoke: bool) -> None:
    rounds, values = (2, 1 << 15) if smoke else (7, 1 << 19)
    for bits in (4, 2):
        ratios: dict[int, Spread] = {}
        for dim in (8, 16, 64, 128):
            # Enough rows for recpoint's threads to share, and about a second for torch's rounds.
            rows = 0.05 * torch.randn(values // dim, dim)
            method, their_search = default_method(bits), _torch_search(bits)
            quantize_packed(rows, bits, method)
            part = rows[: len(rows) // 8]
            slow, fast = alternate(
                rounds,
                partial(their_search, part),
                partial(quantize_packed, rows, bits, method),
            )
            of_as_many = [8 * seconds for seconds in slow]
            report.timed(f"{bits} bits, dim {dim}: torch's search", of_as_many)
            report.timed(f"{bits} bits, dim {dim}: ours", fast)
            ratios[dim] = ratio(of_as_many, fast)
        report.put(f"speedup_vs_torch_{bits}bit", min(ratios.values()))
        listed = ", ".join(f"{dim}: {speedup.median:.0f}x" for dim, speedup in ratios.items())
        report.notes.append(f"{bits} bits, speed over torch's search by values a row: {listed}")
    _plain_speeds(report, 2 * rounds + 1, 4 * values)


def _plain_speeds(report: Report, rounds: int, values: int) -> None:
    fbgemm = _fbgemm()
    byte: dict[int, Spread] = {}
    four: dict[int, Spread] = {}
    for dim in (8, 16, 64, 128):
        rows = torch.randn(values // dim, dim)
        torch_seconds, our_seconds = alternate(
            rounds,
            partial(torch.ops.quantized.embedding_bag_byte_prepack, rows),
            partial(quantize_packed, rows, 8),
        )
        byte[dim] = ratio(torch_seconds[1:], our_seconds[1:])
        report.timed(f"8 bits, dim {dim}: torch", torch_seconds[1:])
        report.timed(f"8 bits, dim {dim}: ours, plain", our_seconds[1:])
        if fbgemm is not None:
            torch_seconds, our_seconds = alternate(
                rounds,
                partial(fbgemm, rows, 4),
                partial(quantize_packed, rows, 4, half_parameters=True),
            )
            four[dim] = ratio(torch_seconds[1:], our_seconds[1:])
            report.timed(f"4 bits, dim {dim}: FBGEMM", torch_seconds[1:])
            report.timed(f"4 bits, dim {dim}: ours, plain", our_seconds[1:])
    for key, name, ratios in (
        ("byte_vs_torch", "8 bits, speed over embedding_bag_byte_prepack", byte),
        ("plain4_vs_fbgemm", "4 bits, speed over FBGEMM's SBHalf", four),
    ):
        if ratios:
            report.put(key, min(ratios.values()))
            listed = ", ".join(f"{dim}: {speedup.median:.2f}x" for dim, speedup in ratios.items())
            report.notes.append(f"{name} by values a row: {listed}")
        else:
            report.leave_out([key], f"FBGEMM is not installed: {INSTALL}")


def _fbgemm() -> Callable[[Tensor, int], Tensor] | None:
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("fbgemm_gpu")
    operation: Callable[[Tensor, int], Tensor] = (
        torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf
    )
    return operation


def _schemes(report: Report, inputs: Inputs, count: int) -> None:
    """Add the paper's table: mean squared error of a trained row, by scheme and width."""
    for dim in (16, 64):
        rows = inputs["trained", dim][:count]
        report.notes.append(f"trained rows of {dim} values, mean squared error of a row:")
        report.notes.append(f"  {'scheme':<22}" + "".join(f"{b:>4} bits   " for b in BITS))
        table: dict[str, list[float]] = {}
        for bits in BITS:
            clusters = kmeans.decode(kmeans.kmeans(rows, bits))
            for name, error in (
                ("symmetric", _error(rows, bits, SYMMETRIC)),
                ("asymmetric", _error(rows, bits, ASYMMETRIC)),
                ("adaptive (greedy)", _error(rows, bits, _chosen(rows, bits, "greedy"))),
                ("ours (refit)", _error(rows, bits, _chosen(rows, bits, "refit"))),
                ("k-means", _mean_square(clusters - rows)),
            ):
                table.setdefault(name, []).append(error)
        for name, errors in table.items():
            report.notes.append(f"  {name:<22}" + "".join(f"{e:<12.3e}" for e in errors))


def _chosen(rows: Tensor, bits: int, name: Any) -> Method:
    return choice.choose(rows, bits, seed=0, name=name)
