"""restore into every kind of file, from good and damaged runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from recpoint.embeddings.tables.tables import plain_tables
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.units import bytes_text
from tests.catalog_builder import Table, build, new_run, publish
from tests.unit.cli.conftest import STATE, Invoke, SavedRun


def values_of(frame: pandas.DataFrame, dim: int) -> np.ndarray:
    return np.stack([frame[f"value.{index}"].to_numpy() for index in range(dim)], axis=1)


def test_restore_to_a_torch_file(recpoint: Invoke, saved_run: SavedRun, tmp_path: Path) -> None:
    arguments = ("--to", tmp_path / "model.pt", "--include", "all", "--json")
    ended = recpoint("restore", saved_run.directory, *arguments)
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
    arguments = ("restore", saved_run.directory, "--to", path, "--include", "all")
    assert recpoint(*arguments).code == 0
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
    assert recpoint("restore", saved_run.directory, "--to", path, "--include", "all").code == 0
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
    arguments = ("--to", tmp_path / "a.pt", "--include", "all")
    assert recpoint("restore", saved_run.directory, *arguments).code == 0
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
    made = [file.stat().st_size for file in path.glob("model*")]
    assert len(made) == 2 and ended.json["file_bytes"] == sum(made)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["attempt"] == saved_run.manifests[30].attempt
    for name, values in saved_run.newest.items():
        file = index["weight_map"][f"{name}.weight"]
        with safe_open(path / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(f"{name}.weight"), values)
    assert recpoint(*arguments).code == 0  # it is there
    other = recpoint(*arguments, "--step", "10")
    assert other.code == 2 and "of another checkpoint" in other.stderr
    more = recpoint(*arguments, "--include", "all")
    assert more.code == 2 and "restored with include=model" in more.stderr
    assert "--include model" in more.stderr
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


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Return what a restore has written, by name."""
    if path.suffix == ".pt":
        model: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return model
    if path.suffix == ".dcp":
        names = FileSystemReader(path).read_metadata().state_dict_metadata
        sizes: Any = names
        state = {
            name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype)
            for name in names
        }
        load_dcp(path, state)
        return state
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: rows for file in files for name, rows in load_file(file).items()}


@pytest.mark.parametrize("file", ["all.pt", "all.safetensors", "all.dcp", "all"])
def test_rows_that_are_stored_as_residuals_are_written_as_sums(
    recpoint: Invoke, tmp_path: Path, file: str
) -> None:
    residuals = Path(__file__).parents[2] / "golden" / "residuals"
    run, path = shutil.copytree(residuals / "run", tmp_path / "run"), tmp_path / file
    if not path.suffix:
        path.mkdir()
    assert recpoint("restore", run, "--to", path).code == 0
    expected_bits = json.loads((residuals / "expected.json").read_text())
    restored_rows = loaded(path)
    prefix = "model." if path.suffix == ".dcp" else ""
    assert restored_rows.keys() == {f"{prefix}{name}.weight" for name in expected_bits}
    for name, bits in expected_bits.items():
        rows = restored_rows[f"{prefix}{name}.weight"]
        word = torch.int16 if rows.dtype == torch.bfloat16 else torch.int32
        assert rows.view(word).tolist() == bits


def test_residuals_in_a_frame_are_sums(recpoint: Invoke, tmp_path: Path) -> None:
    residuals = Path(__file__).parents[2] / "golden" / "residuals"
    run, path = shutil.copytree(residuals / "run", tmp_path / "run"), tmp_path / "rows.parquet"
    assert recpoint("restore", run, "--table", "of_3_bits", "--to", path).code == 0
    rows = np.array(json.loads((residuals / "expected.json").read_text())["of_3_bits"], np.int32)
    frame = pandas.read_parquet(path)
    assert np.array_equal(values_of(frame, rows.shape[1]).view(np.int32), rows)


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
    restored = torch.load(path, weights_only=True)
    assert torch.equal(restored["items.weight"], saved_run.newest["items"])
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


def test_a_name_that_cannot_be_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "there.pt").touch()
    (tmp_path / "run.dcp").mkdir()
    names = ("model", "model.pkl", "missing/model.pt", "there.pt", "run.dcp")
    program = (
        "import sys\nfrom recpoint.cli import app\n"
        "for to in sys.argv[1:]:\n"
        "    print(app(['restore', 'no run', '--to', to], standalone_mode=False))\n"
        "print([name for name in ('torch', 'pandas') if name in sys.modules])"
    )
    paths = [str(tmp_path / name) for name in names]
    ended = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == ["2"] * len(names) + ["[]"], ended.stderr
    assert ended.stderr.count("SettingsError: --to") == len(names)


def test_a_table_has_all_its_columns_whatever_is_asked_for(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    arguments = ("restore", saved_run.directory, "--table", "items", "--to", tmp_path / "items.csv")
    refused = recpoint(*arguments, "--include", "model")
    assert refused.code == 2 and "--include" in refused.stderr
    assert not (tmp_path / "items.csv").exists()


class Norm(nn.Module):
    """A module that keeps what is no tensor beside its state."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Ranker(nn.Module):
    """Has what a file for `load_state_dict` is most easily wrong about.

    One table under two names, a tied dense layer, a buffer that is not persistent, and one that is.
    """

    transient: torch.Tensor

    def __init__(self, seed: int, *, extra: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.items = nn.Embedding(40, 3)
        self.targets = self.items
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("transient", torch.zeros(2), persistent=False)
        if extra:
            self.counts = Norm()
        mean = self.norm.running_mean
        assert mean is not None
        for tensor in (*self.parameters(), mean):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))


def stored(directory: Path, model: nn.Module) -> None:
    run = new_run(directory)
    run.claim(None)
    own = plain_tables(model).tables
    values = [Table(table.name, table.weight.detach(), (torch.rand(40, 3),)) for table in own]
    state = {"model": ModelState(model, own).capture(), "unused": torch.zeros(1000)}
    publish(run, build(run, values, step=1, generation=1, state=state))


def require_equal(loaded: nn.Module, trained: nn.Module) -> None:
    expected = trained.state_dict()
    for name, value in loaded.state_dict().items():
        same = torch.equal(value, expected[name]) if torch.is_tensor(value) else None
        assert same or value == expected[name], name


@pytest.mark.parametrize("ending", [".pt", ".safetensors", ".dcp", ""])
def test_what_is_restored_is_what_load_state_dict_takes(
    recpoint: Invoke, tmp_path: Path, ending: str
) -> None:
    trained, path = Ranker(1, extra=ending == ".pt"), tmp_path / f"model{ending}"
    if trained_has_extra := ending == ".pt":
        trained.counts.seen = 7
    stored(tmp_path / "run", trained)
    if not ending:
        path.mkdir()
    ended = recpoint("restore", tmp_path / "run", "--to", path, "--json")
    assert ended.code == 0 and ended.json["left_out"] == []
    model = Ranker(2, extra=trained_has_extra)
    if ending == ".pt":
        found = torch.load(path)
    elif ending == ".safetensors":
        found = load_file(path)
    elif ending == ".dcp":
        found = model.state_dict()
        load_dcp(path, {"model": found})
    else:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        found = {}
        for file in set(index["weight_map"].values()):
            found |= load_file(path / file)
        assert found.keys() == index["weight_map"].keys()
    model.load_state_dict(found)
    require_equal(model, trained)


def test_everything_has_the_same_model_and_the_rest(recpoint: Invoke, tmp_path: Path) -> None:
    trained, path = Ranker(1, extra=True), tmp_path / "all.safetensors"
    stored(tmp_path / "run", trained)
    ended = recpoint("restore", tmp_path / "run", "--to", path, "--include", "all")
    assert ended.code == 0 and "left out counts._extra_state, which is no tensor" in ended.stdout
    found = load_file(path)
    rest = {"buffers/transient", "row_states/items/state0", "ranks/0/unused"}
    assert rest == {name for name in found if not name.startswith("model/")}
    of_model = {
        name.removeprefix("model/"): tensor for name, tensor in found.items() if name not in rest
    }
    model = Ranker(2, extra=False)
    model.load_state_dict(of_model)
    require_equal(model, trained)
    (path := tmp_path / "files").mkdir()
    assert recpoint("restore", tmp_path / "run", "--to", path, "--include", "all").code == 0
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.dcp", "items.csv", "items.parquet"])
def test_a_file_has_the_mode_that_the_umask_leaves(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    table = ["--table", "items"] if name.startswith("items") else []
    before = os.umask(0o027)
    try:
        ended = recpoint("restore", saved_run.directory, "--to", path, *table, "--json")
    finally:
        os.umask(before)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    if path.is_dir():
        assert path.stat().st_mode & 0o777 == 0o750
    # What is printed is how large it is, not what was read for it.
    assert ended.json["file_bytes"] == sum(file.stat().st_size for file in files)
    assert ended.json["file_bytes"] != ended.json["bytes_read"]
    text = recpoint("restore", saved_run.directory, "--to", path, *table, "--force").stdout
    assert f", {bytes_text(ended.json['file_bytes'])} in " in text


def test_the_help_says_how_to_load_what_is_written(recpoint: Invoke) -> None:
    text = recpoint("restore", "--help").stdout
    assert "model.load_state_dict(safetensors.torch.load_file(FILE))" in text
    assert "model.load_state_dict(torch.load(FILE))" in text


def test_a_run_without_a_checkpoint_says_when_there_will_be_one(
    recpoint: Invoke, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    ended = recpoint("restore", tmp_path / "run", "--to", tmp_path / "model.pt", "--json")
    assert (ended.code, ended.json["error"]) == (1, "NothingToRestore")
    assert ended.json["next_step"].startswith(f"recpoint lag {run.url}")
    assert "superseded" not in ended.json["next_step"]


def test_restore_of_an_unknown_table(recpoint: Invoke, saved_run: SavedRun, tmp_path: Path) -> None:
    arguments = ("restore", saved_run.directory, "--to", tmp_path / "x.csv", "--table", "nobody")
    ended = recpoint(*arguments, "--json")
    assert ended.code == 4
    assert ended.json["error"] == "IncompatibleModel"
    assert "items" in ended.json["expected"]
