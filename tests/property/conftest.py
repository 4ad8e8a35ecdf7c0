from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recpoint.kernels import native
from tests.instruction_sets import instruction_set as instruction_set


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of kernels on each instruction set that this processor has."""
    if metafunc.module.__name__.rpartition(".")[2].startswith("test_kernels_"):
        metafunc.parametrize("instruction_set", native.INSTRUCTION_SETS, indirect=True)


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
