"""Kernels of a cut on a GPU are compiled before training: every version that a cut launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recpoint.kernels import dirty_bitmap, row_gather
from recpoint.trainer_plugin.snapshot.warm_up import compile_of_device

pytest.importorskip("triton")

CPU = torch.device("cpu")


class Launches:
    """Stands in for a kernel where there is no GPU: notes the version that would be launched."""

    def __init__(self, name: str, versions: set[tuple[str, Any]]) -> None:
        self.name, self.versions = name, versions

    def __getitem__(self, _grid: tuple[int, ...]) -> Launches:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        integers = [one for one in arguments if isinstance(one, int)]
        kinds = tuple("1" if n == 1 else "16" if n % 16 == 0 else "n" for n in integers)
        self.versions.add((self.name, (kinds, tuple(sorted(constants.items())))))
        if self.name == "_count_many":
            arguments[1].fill_(1)  # rows are found, so that they are written, too


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any]]:
    from recpoint.kernels.dirty_bitmap import triton as bitmaps
    from recpoint.kernels.row_gather import triton as gathers

    found: set[tuple[str, Any]] = set()
    for module, names in (
        (bitmaps, ("_mark_many", "_count_many", "_collect_many", "_merge")),
        (gathers, ("_move_many",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Launches(name, found))
    return found


@pytest.mark.parametrize("tables", [1, 26, 32, 33, 70, 200])
@pytest.mark.parametrize("states", [0, 1, 2])
def test_no_cut_launches_a_version_that_was_not_compiled(
    versions: set[tuple[str, Any]], tables: int, states: int
) -> None:
    from recpoint.kernels.dirty_bitmap import triton as bitmaps
    from recpoint.kernels.row_gather import triton as gathers

    compile_of_device(CPU, tables=tables, arrays=3 * tables, bitmaps=bitmaps, gathers=gathers)
    compiled = set(versions)
    # Some tables may be stored whole, and collect no rows.
    for collected in {1, tables // 2 or 1, tables}:
        marks = [torch.zeros(words, dtype=torch.int32) for words in (1, 5, 16, 64)]
        of_tables = [marks[n % 4] for n in range(collected)]
        rows = [32 * one.numel() for one in of_tables]
        bitmaps.collect_many(of_tables, rows=rows)
        for one in marks:
            bitmaps.merge(one, one.clone())
        ids = torch.zeros(3, dtype=torch.int64)
        arrays = [torch.zeros(9, 1 + n % 5) for n in range(collected * (1 + states))]
        outs = [torch.zeros(3, array.shape[1]) for array in arrays]
        gathers.gather_many(arrays, [ids] * len(arrays), outs)
    assert versions == compiled
    assert {name for name, _ in compiled} >= {"_collect_many", "_move_many", "_merge"}


def test_on_a_cpu_the_same_calls_run() -> None:
    compile_of_device(CPU, tables=40, arrays=80, bitmaps=dirty_bitmap, gathers=row_gather)
