from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
