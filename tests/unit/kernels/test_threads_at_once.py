"""Kernels that several threads call at once on the same inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels import quantize, row_gather, row_set

THREADS = 4
ROUNDS = 24

Work = Callable[[], Sequence[Any]]


def _works() -> list[Work]:
    torch.manual_seed(3)
    table = torch.randn(1500, 16)
    table[::7] = 0.25
    ids = torch.randint(0, 1500, (900,))
    marked = torch.randperm(200_000)[:4000].sort().values
    crowded = torch.randperm(5000)[:2500].sort().values

    def plain() -> Sequence[Tensor]:
        return quantize.quantize_rows(table, ids, 4, half_parameters=True)

    def searched() -> Sequence[Tensor]:
        return quantize.quantize_packed(table, 2, quantize.default_method(2))

    def greedy() -> Sequence[Tensor]:
        method = quantize.Method(name="greedy", bins=10, ratio_permille=500)
        return quantize.quantize_packed(table[:400], 3, method)

    def decoded() -> Sequence[Tensor]:
        packed, scale, offset, *_ = quantize.quantize_packed(table, 8)
        return [quantize.dequantize_packed(packed, scale, offset, dim=16, bits=8)]

    def gathered() -> Sequence[Tensor]:
        out = torch.empty(len(ids), 16)
        row_gather.gather(table, ids, out)
        return [out]

    def coded(rows: Tensor) -> Work:
        def work() -> Sequence[Any]:
            stored = row_set.encode(rows)
            return [*stored, row_set.decode(*stored, count=len(rows), rows=200_000)]

        return work

    return [plain, searched, greedy, decoded, gathered, coded(marked), coded(crowded)]


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        if isinstance(left, Tensor)
        else left == right
        for left, right in zip(found, expected, strict=True)
    )


def test_each_has_the_result_that_one_alone_has(threads: int) -> None:
    works = _works()
    torch.set_num_threads(1)
    alone = [work() for work in works]
    torch.set_num_threads(threads)
    together = Barrier(THREADS, timeout=60)

    def rounds(first: int) -> list[str]:
        wrong = []
        for turn in range(ROUNDS):
            # The same work in all threads, then another in each.
            at = (turn // 2 + first * (turn % 2)) % len(works)
            together.wait()
            if not _equal(works[at](), alone[at]):
                wrong.append(f"work {at} in round {turn} of thread {first}")
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert [wrong for some in pool.map(rounds, range(THREADS)) for wrong in some] == []


_SEARCHES = """
import sys
from threading import Barrier, Thread

import torch
from recpoint.kernels import quantize
from recpoint.kernels.quantize import grid, reference

threads, keeps_grids = int(sys.argv[1]), sys.argv[2] == "kept"
torch.set_num_threads(1)
together, wrong = Barrier(threads, timeout=60), []
if not keeps_grids:
    grid.candidates = grid.candidates.__wrapped__

def search(rows, method, expected):
    for _ in range(20):
        together.wait()
        found = quantize.quantize(rows, 2, method)
        if not all(torch.equal(*pair) for pair in zip(found, expected)):
            wrong.append(method)

refit = quantize.Method(name="refit", bins=25, refits=1)
greedy = quantize.Method(name="greedy", bins=8, ratio_permille=500)
for dim in (16, 64):
    rows = torch.randn(1000, dim, generator=torch.Generator().manual_seed(dim))
    for method in (refit, greedy):
        work = rows, method, reference.quantize(rows, 2, method)
        team = [Thread(target=search, args=work) for _ in range(threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
print(len(wrong), "wrong")
"""


@pytest.mark.parametrize(
    ("threads", "grids"),
    [
        # What a kernel has let go of too early is another thread's then.
        (6, "kept"),
        # Two threads that make a grid at once have one each, and only one of them is kept.
        (1, "not kept"),
    ],
)
def test_a_search_uses_no_memory_that_was_given_back(threads: int, grids: str) -> None:
    one_heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_PERTURB_": "91"}  # and nothing stays as it was
    ran = subprocess.run(
        [sys.executable, "-c", _SEARCHES, str(threads), grids],
        env={**os.environ, **one_heap},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 wrong\n", "")
