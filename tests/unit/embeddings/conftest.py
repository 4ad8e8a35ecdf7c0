"""Fixtures of the tests of tables and marks."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def torch_sparse_choice() -> None:
    """torch warns, once a process, when sparse optimizers run and nobody has chosen."""
    torch.sparse.check_sparse_tensor_invariants.disable()
