"""Runs each comparison on each instruction set and number of threads, inside one test.

By day each instruction set and each number of threads is taken at least once; by night, in the part
`examples`, each instruction set with each number of threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch

from recpoint.kernels import native
from tests.example_counts import draws_all

#: Modules whose tests compare native kernels with their references: on each instruction set.
_COMPARED = (
    "test_allocation",
    "test_bit_packing",
    "test_dirty_bitmap",
    "test_dirty_rows",
    "test_erasure",
    "test_first_values",
    "test_key_map",
    "test_key_order",
    "test_key_sketch",
    "test_lookup_counts",
    "test_many_tables",
    "test_moments",
    "test_quantize",
    "test_quantize_rows",
    "test_quantize_searches",
    "test_residuals",
    "test_row_blocks",
    "test_row_gather",
    "test_row_map",
    "test_row_set",
    "test_slot_map",
    "test_subnormals",
)
_THREADS = (1, 2, 5)
#: Each test takes one combination, drawn by its name: the sanitizers' sample of `make test`.
_SAMPLED = os.environ.get("RECPOINT_KERNELS_SAMPLED") == "1"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty starts as NaN or the largest integer: a forgotten write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    """The number of threads, over which even the smallest work is split.

    `pytest_pyfunc_call` replaces it at each call of the test.
    """
    number: int = getattr(request, "param", _THREADS[0])
    return number


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number of threads where a test changes its large table."""
    if metafunc.module.__name__.endswith("test_huge") and "threads" in metafunc.fixturenames:
        metafunc.parametrize("threads", _THREADS, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Call the test for each instruction set and number of threads that its kernels run with.

    A test that fails names the combination in a note below its error.
    """
    combinations = list(_combinations_of(pyfuncitem))
    if _SAMPLED:
        drawn = zlib.crc32(pyfuncitem.nodeid.encode()) % len(combinations)
        combinations = combinations[drawn : drawn + 1]
    pyfuncitem.obj = _called_for_each(pyfuncitem.obj, combinations)
    return (yield)


def _combinations_of(item: pytest.Function) -> Iterator[tuple[str | None, int | None]]:
    compared = item.module.__name__.rpartition(".")[2] in _COMPARED
    instruction_sets: Sequence[str | None] = native.INSTRUCTION_SETS if compared else [None]
    threads: Sequence[int | None] = [None]
    if "threads" in item.fixturenames:
        parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        threads = [parameters["threads"]] if "threads" in parameters else _THREADS
    if draws_all():
        return product(instruction_sets, threads)
    count = max(len(instruction_sets), len(threads))
    return islice(zip(cycle(instruction_sets), cycle(threads), strict=False), count)


def _called_for_each(
    test: Callable[..., None], combinations: list[tuple[str | None, int | None]]
) -> Callable[..., None]:
    @functools.wraps(test)
    def for_each(**arguments: object) -> None:
        for instruction_set, threads in combinations:
            with contextlib.ExitStack() as stack:
                if instruction_set is not None:
                    stack.enter_context(native.use(instruction_set))
                if threads is not None:
                    stack.enter_context(_split_over(threads))
                    if "threads" in arguments:
                        arguments["threads"] = threads
                try:
                    test(**arguments)
                except Exception as error:
                    error.add_note(f"with instruction set {instruction_set}, threads {threads}")
                    raise

    return for_each


@contextlib.contextmanager
def _split_over(threads: int) -> Iterator[None]:
    """Splits even the smallest work over this many threads."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "SPLIT_BYTES", 1)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
