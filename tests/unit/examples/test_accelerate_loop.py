"""The Accelerate example goes on where it ended, to the same weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked_program import run_script
from tests.training_builder import InlineAgent

pytest.importorskip("accelerate", reason="the example needs accelerate")


@pytest.mark.nightly("accelerate")
def test_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "accelerate_loop.py"

    def train(run: str, epochs: int) -> dict[str, Any]:
        arguments = ["--run", str(tmp_path / run), "--epochs", str(epochs)]
        arguments += ["--staging", str(tmp_path / "staging")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = run_script(str(script), *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    with InlineAgent(tmp_path / "staging"):
        assert train("parts", 1)["updates"] == 32
        assert train("parts", 2) == train("whole", 2)
