"""Fixtures of the trainer plugin's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training_builder import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A run URL and a staging area of one test."""
    return Place(str(tmp_path / "run"), tmp_path / "staging")


@pytest.fixture(autouse=True, scope="session")
def torch_sparse_choice() -> None:
    """torch warns, once a process, when sparse optimizers run and nobody has chosen."""
    torch.sparse.check_sparse_tensor_invariants.disable()
