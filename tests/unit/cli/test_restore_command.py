"""restore into every kind of file, from good and damaged runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from tests.unit.cli.conftest import STATE, Invoke, SavedRun


def values_of(frame: pandas.DataFrame, dim: int) -> np.ndarray:
    return np.stack([frame[f"value.{index}"].to_numpy() for index in range(dim)], axis=1)


def test_restore_to_a_torch_file(recpoint: Invoke, saved_run: SavedRun, tmp_path: Path) -> None:
    ended = recpoint("restore", saved_run.directory, "--to", tmp_path / "model.pt", "--json")
    assert ended.code == 0
    document = ended.json
    assert (document["step"], document["generation"], document["skipped"]) == (30, 2, [])
    assert document["validation"] is None
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["checkpoint"]["attempt"] == saved_run.manifests[30].attempt
    for name, values in saved_run.newest.items():
        assert torch.equal(saved["model"][f"{name}.weight"], values)
    assert torch.equal(saved["model"]["top.bias"], torch.arange(3.0))
    assert saved["row_states"]["items"]["state0"].shape == (40, 3)
    assert saved["row_states"]["items"]["state1"].shape == (40,)
    rank = saved["ranks"][0]
    assert rank["batches_done"] == STATE["batches_done"]
    # An array comes back as a tensor: the restricted loader of torch takes nothing else.
    assert torch.equal(rank["rng"]["numpy"], torch.arange(4, dtype=torch.int32))
    assert rank["rng"]["python"] == (3, (1, 2), None)


def test_restore_to_a_safetensors_file(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    assert recpoint("restore", saved_run.directory, "--to", path).code == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["step"] == "30"
        assert set(file.keys()) == {
            "model/items.weight",
            "model/users.weight",
            "model/top.bias",
            "row_states/items/state0",
            "row_states/items/state1",
            "ranks/0/rng/numpy",
        }
        for name, values in saved_run.newest.items():
            assert torch.equal(file.get_tensor(f"model/{name}.weight"), values)


def load_dcp(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=path)


def test_restore_to_a_directory_of_torchs_distributed_checkpoint(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    path = tmp_path / "model.dcp"
    assert recpoint("restore", saved_run.directory, "--to", path).code == 0
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert set(keys) == {
        "model.items.weight",
        "model.users.weight",
        "model.top.bias",
        "row_states.items.state0",
        "row_states.items.state1",
        "ranks.0.rng.numpy",
    }
    model = {f"{name}.weight": torch.full_like(t, 7) for name, t in saved_run.newest.items()}
    model["top.bias"] = torch.zeros(3)
    moments = torch.zeros(40, 3)
    load_dcp(path, {"model": model, "row_states": {"items.state0": moments}})
    for name, values in saved_run.newest.items():
        assert torch.equal(model[f"{name}.weight"], values)
    assert torch.equal(model["top.bias"], torch.arange(3.0))
    assert recpoint("restore", saved_run.directory, "--to", tmp_path / "a.pt").code == 0
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(moments, saved["row_states"]["items"]["state0"])
    assert list(tmp_path.glob(".tmp-*")) == []


def test_a_directory_is_replaced_only_when_told(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    path = tmp_path / "model.dcp"
    path.mkdir()
    (path / "notes").write_text("precious")
    arguments = ("restore", saved_run.directory, "--to", path)
    assert recpoint(*arguments).code == 2
    assert (path / "notes").read_text() == "precious"
    assert recpoint(*arguments, "--force").code == 0
    assert not (path / "notes").exists() and (path / ".metadata").exists()
    assert list(tmp_path.glob(".tmp-*")) == []


def test_restore_into_a_directory_that_is_there(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    (path := tmp_path / "a model").mkdir()
    (path / "notes").write_text("precious")
    arguments = ("restore", saved_run.directory, "--to", path)
    ended = recpoint(*arguments, "--json")
    assert (ended.code, ended.json["step"], ended.json["skipped"]) == (0, 30, [])
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["attempt"] == saved_run.manifests[30].attempt
    for name, values in saved_run.newest.items():
        file = index["weight_map"][f"model/{name}.weight"]
        with safe_open(path / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(f"model/{name}.weight"), values)
    assert recpoint(*arguments).code == 0  # it is there
    other = recpoint(*arguments, "--step", "10")
    assert other.code == 2 and "of another checkpoint" in other.stderr
    assert recpoint(*arguments, "--force").code == 2
    assert (path / "notes").read_text() == "precious"


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_restore_one_table_as_a_frame(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"items.{ending}"
    arguments = ("restore", saved_run.directory, "--table", "items", "--to", path)
    assert recpoint(*arguments).code == 0
    frame = (
        pandas.read_parquet(path)
        if ending == "parquet"
        else pandas.read_csv(path, dtype=dict.fromkeys([f"value.{i}" for i in range(3)], "float32"))
    )
    assert frame["row"].tolist() == list(range(40))
    states = ["state0.0", "state0.1", "state0.2", "state1"]
    assert list(frame.columns) == ["row", "value.0", "value.1", "value.2", *states]
    assert np.array_equal(values_of(frame, 3), saved_run.newest["items"].numpy())


def test_restore_an_older_step_and_a_superseded_one(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    path = tmp_path / "old.pt"
    first = recpoint("restore", saved_run.directory, "--to", path, "--step", "10", "--json")
    assert first.json["attempt"] == saved_run.manifests[10].attempt
    arguments = ("restore", saved_run.directory, "--to", tmp_path / "other.pt", "--step", "25")
    refused = recpoint(*arguments)
    assert refused.code == 1
    assert "superseded" in refused.stderr
    assert recpoint(*arguments, "--generation", "1", "--json").json["step"] == 25


@pytest.mark.parametrize("option", [("--validated",), ("--validated-within", "10")])
def test_restore_of_a_step_does_not_ask_for_a_validation(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, option: tuple[str, ...]
) -> None:
    """It would be restored without one, whatever whoever asks for both believes."""
    found = recpoint(
        "restore", saved_run.directory, "--to", tmp_path / "x.pt", "--step", "10", *option
    )
    assert found.code == 2 and "goes without --step" in found.stderr
    assert not (tmp_path / "x.pt").exists()


def test_restore_falls_back_and_says_so(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    chunk = saved_run.directory / saved_run.manifests[30].chunks[0].key
    chunk.write_bytes(chunk.read_bytes()[:-1])
    ended = recpoint("restore", saved_run.directory, "--to", tmp_path / "a.pt", "--json")
    assert ended.code == 0
    assert ended.json["step"] == 20
    assert [skipped["step"] for skipped in ended.json["skipped"]] == [30]
    text = recpoint("restore", saved_run.directory, "--to", tmp_path / "b.pt").stdout
    assert "skipped step 30" in text
    # A step that is asked for by name is that step or nothing.
    named = recpoint("restore", saved_run.directory, "--to", tmp_path / "c.pt", "--step", "30")
    assert named.code in (1, 4)
    assert not (tmp_path / "c.pt").exists()


def test_restore_replaces_a_file_only_when_told(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"precious")
    arguments = ("restore", saved_run.directory, "--to", path)
    refused = recpoint(*arguments)
    assert refused.code == 2
    assert "--force" in refused.stderr
    assert path.read_bytes() == b"precious"
    assert recpoint(*arguments, "--force").code == 0
    assert torch.load(path, weights_only=True)["checkpoint"]["step"] == 30
    assert [entry.name for entry in tmp_path.glob(".tmp-*")] == []


def test_a_restore_that_fails_leaves_the_file_as_it_was(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    for manifest in saved_run.manifests.values():
        (saved_run.directory / manifest.chunks[0].key).unlink()
    path = tmp_path / "model.pt"
    path.write_bytes(b"precious")
    ended = recpoint("restore", saved_run.directory, "--to", path, "--force", "--json")
    assert ended.code == 1
    assert ended.json["error"] == "NothingToRestore"
    assert path.read_bytes() == b"precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.pt", "run"]


@pytest.mark.parametrize(
    ("to", "table"),
    [
        ("model", None),
        ("model.parquet", None),
        ("model.pkl", None),
        ("items.pt", "items"),
        ("items.xlsx", "items"),
        ("missing/model.pt", None),
    ],
)
def test_restore_refuses_a_file_it_cannot_write(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, to: str, table: str | None
) -> None:
    chosen = [] if table is None else ["--table", table]
    ended = recpoint("restore", saved_run.directory, "--to", tmp_path / to, *chosen)
    assert ended.code == 2
    assert "--to" in ended.stderr


def test_restore_of_an_unknown_table(recpoint: Invoke, saved_run: SavedRun, tmp_path: Path) -> None:
    arguments = ("restore", saved_run.directory, "--to", tmp_path / "x.csv", "--table", "nobody")
    ended = recpoint(*arguments, "--json")
    assert ended.code == 4
    assert ended.json["error"] == "IncompatibleModel"
    assert "items" in ended.json["expected"]
