"""Replicas of a model that is itself divided: each piece is stored once, and comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, model_tensors, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.fault.mesh_lives import Division, digest, mesh_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS
from tests.training_builder import InlineAgent


def train(place: Path, job: int, ranks: int, division: Division) -> list[dict[str, Any]]:
    told = [place / f"told-{job}-{rank}" for rank in range(ranks)]
    lives = [
        ForkedProcess(
            target=mesh_life,
            args=(str(place), job, rank, ranks, division, str(told[rank])),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(PATIENCE_SECONDS)
        assert life.exitcode == 0
    return [json.loads(path.read_text()) for path in told]


def test_replicas_of_a_divided_model_store_each_piece_once(tmp_path: Path) -> None:
    jobs: list[tuple[int, Division]] = [(4, "pieces"), (4, "replicas"), (1, "whole")]
    ended: list[dict[str, str]] = []
    with InlineAgent(tmp_path / "staging"):
        for job, (ranks, division) in enumerate(jobs):
            lives = train(tmp_path, job, ranks, division)
            for life in lives:
                assert life["restored"] == (2 * job or None)
                assert not ended or life["begun"] == ended[-1]
                assert life["ended"] == lives[0]["ended"] != life["begun"]
                if division == "pieces":
                    assert "'uneven'" in life["refused"], life["refused"]
                    assert "pieces at [0] and [5] that overlap" in life["refused"]
                    assert "'norm.weight': found other values in pieces" in life["unlike"]
            ended.append(lives[0]["ended"])
    run = Run.open(open_store(str(tmp_path / "run")))
    stored = []
    for job, digests in enumerate(ended):
        target = MemoryTarget()
        restore(run, target, Selection(step=2 * job + 2))
        tensors = model_tensors(target)
        assert {name: digest(tensor) for name, tensor in tensors.items()}.items() <= digests.items()
        stored.append(dense_elements(target.state))
    # A process has all that there is, once; ranks together store as much.
    assert stored[0] == stored[1] == stored[2]


def dense_elements(state: Mapping[int, Any]) -> int:
    """Of the trees of all ranks: layers, and what optimizers have of them beside steps."""
    found = 0
    for tree in state.values():
        values = list(tree["model"]["tensors"].values())
        for optimizer in tree["optimizers"]:
            for entry in optimizer["state"].values():
                values += [value for key, value in entry["values"].items() if key != "step"]
        for value in values:
            tensor = value["tensor"] if isinstance(value, dict) else value
            found += tensor.numel()
    return found
