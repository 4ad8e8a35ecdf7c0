"""What `make matrix` runs is there, and its record can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import ENVIRONMENTS, SUBSET
from tests.matrix_checkpoint import _require_equal

ROOT = Path(__file__).resolve().parents[2]


def test_what_it_runs_exists() -> None:
    assert all((ROOT / path).exists() for path in SUBSET)


def test_the_pinned_environment_has_the_pinned_versions() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = ENVIRONMENTS["pinned"]
    assert {pinned.torch, *pinned.torchrec} <= {line.split("+")[0] for line in constraints}


def test_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["newest", "older"]) == 2
    assert capsys.readouterr().out == f"older: expected one of {', '.join(ENVIRONMENTS)}\n"


def test_the_comparison_of_checkpoints_sees_differences() -> None:
    import torch

    facts = {"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1, "params": [0]}]}
    newer = {"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1, "params": [0], "new": True}]}
    _require_equal(facts, newer)
    for restored in (
        {**facts, "model": {"w": torch.tensor([1.0, 1.5])}},
        {**facts, "model": {}},
        {**facts, "groups": [{"lr": 0.2, "params": [0]}]},
        {**facts, "groups": []},
    ):
        with pytest.raises(RuntimeError, match="expected"):
            _require_equal(facts, restored)
