"""`recpoint restore --to` names the rows of a keyed table by their keys."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from tests.keyed_training import KeyedTraining, keyed_checkpointer
from tests.training_builder import Place, until
from tests.unit.cli.conftest import Invoke


@pytest.fixture
def trained(tmp_path: Path) -> tuple[KeyedTraining, Place]:
    """A training whose keyed table has been evicted from, and its run with one checkpoint."""
    training, place = KeyedTraining(12), Place(str(tmp_path / "run"), tmp_path / "staging")
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore()
        for _ in range(7):
            training.batch()
            ckpt.step()
        deleted = training.model.users.slots.row_states[KEY][3:4].clone()
        ckpt.delete_rows("users", deleted)
        assert ckpt.checkpoint()
        until(lambda: place.persist_all() > 0)
        until(lambda: ckpt.stats.committed == 1)
    return training, place


def test_a_table_has_a_column_of_keys(
    trained: tuple[KeyedTraining, Place], tmp_path: Path, recpoint: Invoke
) -> None:
    training, place = trained
    slots, weight = training.model.users.slots, training.model.users.weight.detach()
    path = tmp_path / "users.parquet"
    assert not recpoint("restore", place.run, "--to", path, "--table", "users").code
    frame = pandas.read_parquet(path)
    assert list(frame["key"]) == training.model.users.keys().tolist()
    assert "row" not in frame and KEY not in frame
    rows = slots.find(torch.tensor(training.model.users.keys().tolist()))
    values = frame[[f"value.{column}" for column in range(weight.shape[1])]].to_numpy(copy=True)
    assert torch.equal(torch.from_numpy(values), weight[rows])
    assert list(frame[LAST_USE]) == slots.row_states[LAST_USE][rows].tolist()


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_file_of_tensors_has_the_keys_beside_the_rows(
    trained: tuple[KeyedTraining, Place], form: str, tmp_path: Path, recpoint: Invoke
) -> None:
    training, place = trained
    path = tmp_path / ("model.safetensors" if form == "file" else "files")
    if form == "directory":
        path.mkdir()
    assert not recpoint("restore", place.run, "--to", path).code
    (file,) = [path] if form == "file" else path.glob("*.safetensors")
    tensors = load_file(file)
    states = training.model.users.slots.row_states
    assert torch.equal(tensors["users.weight"], training.model.users.weight.detach())
    assert torch.equal(tensors[f"users.{KEY}"], states[KEY])
    assert torch.equal(tensors[f"users.{LAST_USE}"], states[LAST_USE])


def test_show_and_list_say_what_the_keys_did(
    trained: tuple[KeyedTraining, Place], recpoint: Invoke
) -> None:
    training, place = trained
    slots = training.model.users.slots
    counts = {
        "used": slots.rows_used,
        "inserted": slots.inserted,
        "evicted": slots.evicted,
        "refused": 0,
    }
    assert counts["evicted"] > 0
    shown = recpoint("show", place.run, 7)
    assert f"{counts['used']} in 12 rows; {counts['inserted']} inserted" in " ".join(
        shown.stdout.split()
    )
    assert recpoint("list", place.run, "--json").json["checkpoints"][0]["keyed"] == {
        "users": counts
    }


def test_a_torch_file_has_what_the_module_loads(
    trained: tuple[KeyedTraining, Place], tmp_path: Path, recpoint: Invoke
) -> None:
    training, place = trained
    path = tmp_path / "model.pt"
    assert not recpoint("restore", place.run, "--to", path).code
    state = torch.load(path, weights_only=True)["users._extra_state"]
    slots = training.model.users.slots
    assert {key: state[key] for key in slots.state_dict()} == slots.state_dict()
    assert torch.equal(state["row_states"][KEY], slots.row_states[KEY])
