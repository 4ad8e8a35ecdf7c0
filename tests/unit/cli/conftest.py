"""The command line as a user has it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from recpoint.catalog.run.run import Run
from recpoint.cli import app
from recpoint.format.manifest import Manifest
from tests.catalog_builder import build, new_run, publish, tables


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.stdout)
        return document


Invoke = Callable[..., Ended]


@pytest.fixture
def recpoint(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs one command; an exception that is not the exit of the command fails the test."""
    monkeypatch.delenv("COLUMNS", raising=False)  # of the terminal that the tests were started in

    def invoke(*arguments: object) -> Ended:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return invoke


class SavedRun(NamedTuple):
    """A run of three live checkpoints, at steps 10, 20 and 30, and a superseded one at 25."""

    run: Run
    directory: Path
    manifests: dict[int, Manifest]
    newest: dict[str, torch.Tensor]  # values of each table at step 30
    superseded: Manifest


STATE = {
    "batches_done": 30,
    "model": {"tensors": {"top.bias": torch.arange(3.0)}, "extra": {}},
    "rng": {"numpy": torch.arange(4, dtype=torch.int32).numpy(), "python": (3, (1, 2), None)},
}


@pytest.fixture
def saved_run(tmp_path: Path) -> SavedRun:
    directory = tmp_path / "run"
    run = new_run(directory)
    generator = torch.Generator().manual_seed(3)
    trained = tables(seed=1)
    first = run.claim(None).generation
    manifests = {10: publish(run, build(run, trained, step=10, generation=first, state=STATE))}

    def train(step: int, generation: int, parent: Manifest) -> Manifest:
        dirty = [torch.arange(0, table.rows, 3) for table in trained]
        for table, ids in zip(trained, dirty, strict=True):
            table.train(ids, generator)
        checkpoint = build(
            run,
            trained,
            step=step,
            generation=generation,
            parent=parent,
            dirty=dirty,
            state=STATE,
        )
        return publish(run, checkpoint)

    manifests[20] = train(20, first, manifests[10])
    superseded = train(25, first, manifests[20])
    second = run.claim(manifests[20].ref).generation
    # Back to what step 20 was is not needed: every row that 25 changed, 30 changes again.
    manifests[30] = train(30, second, manifests[20])
    newest = {table.name: table.values.clone() for table in trained}
    return SavedRun(run, directory, manifests, newest, superseded)
