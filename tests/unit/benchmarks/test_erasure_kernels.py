"""The part of `benchmarks parity` that measures the kernels, with tiny sizes."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks import erasure_kernels
from benchmarks.report import Report
from recpoint.kernels import erasure


def test_it_has_its_figures_and_leaves_the_threads_as_they_were() -> None:
    threads = torch.get_num_threads()
    report = Report(name="parity", columns=("what",))
    erasure_kernels.measure(report, smoke=True)
    assert report.figures.keys() | report.not_run.keys() == set(erasure_kernels.KEYS)
    assert all(figure > 0 for figure in report.figures.values())
    lacks = {"vs_pyeclib"} if importlib.util.find_spec("pyeclib") is None else set()
    assert report.not_run.keys() == lacks
    assert torch.get_num_threads() == threads


def test_it_measures_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = erasure.encode

    def one_bit_off(*arguments: object) -> list[torch.Tensor]:
        found = right(*arguments)  # type: ignore[arg-type]  # what the benchmark passes
        found[-1][-1, -1] ^= 1
        return found

    monkeypatch.setattr(erasure, "encode", one_bit_off)
    with pytest.raises(AssertionError, match="other rows came out"):
        erasure_kernels.measure(Report(name="parity", columns=("what",)), smoke=True)
