from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of kernels every torch.empty starts as NaN or the largest integer.

    For all examples of a test, so a result that an earlier example left there does not help.
    """
    if not request.path.name.startswith("test_kernels_"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
