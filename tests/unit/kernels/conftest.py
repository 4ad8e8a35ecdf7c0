from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recpoint.kernels import native
from tests.instruction_sets import instruction_set as instruction_set

#: Modules whose tests compare native kernels with their references: on each instruction set.
_COMPARED = (
    "test_bit_packing",
    "test_dirty_bitmap",
    "test_dirty_rows",
    "test_erasure",
    "test_many_tables",
    "test_quantize",
    "test_quantize_rows",
    "test_quantize_searches",
    "test_row_blocks",
    "test_row_gather",
    "test_row_map",
    "test_row_set",
    "test_slot_map",
    "test_subnormals",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in _COMPARED:
        metafunc.parametrize("instruction_set", native.INSTRUCTION_SETS, indirect=True)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty starts as NaN or the largest integer: a forgotten write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Splits even the smallest work over this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr("recpoint.kernels.native.SPLIT_BYTES", 1)
    yield request.param
    torch.set_num_threads(before)
