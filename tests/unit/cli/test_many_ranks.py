"""Commands on a run of several ranks: tables by rows and columns, dense layers in pieces."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

import recpoint
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.resharding import rank_of_rows
from tests.unit.cli.conftest import Invoke

DENSE = torch.arange(12.0).reshape(4, 3)


def of_rank(rank: int) -> object:
    rows = slice(0, 3) if rank == 0 else slice(3, 4)
    piece = {"shard_of": [4, 3], "at": [rows.start, 0], "tensor": DENSE[rows].clone()}
    whole = {"top.bias": torch.ones(3)} if rank == 0 else {}
    return {"model": {"tensors": {"top.weight": piece, **whole}, "extra": {}}, "rng": rank}


@pytest.fixture
def invoke(recpoint: Invoke) -> Invoke:
    return recpoint


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, list[Table]]:
    """A run of two ranks, and its tables: `items` by columns and rows, `users` by table."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    items, users = tables()
    pieces = [*items.cut([1]), users]
    owners = [rank_of_rows(40, [17]), rank_of_rows(40, [5]), rank_of_rows(20, [0])]
    states = [of_rank(0), of_rank(1)]
    full = build(run, pieces, step=5, generation=1, states=states, owners=owners)
    parent = publish(run, full)
    ids = torch.tensor([0, 16, 17, 39])
    for tensor in (*(piece.values for piece in pieces[:2]), *(p.states[0] for p in pieces[:2])):
        tensor[ids] += 1
    for tensor in (items.values, items.states[0]):
        tensor[ids] += 1
    made = build(
        run,
        pieces,
        step=6,
        generation=1,
        parent=parent,
        dirty=[ids, ids, ids[:0]],
        states=states,
        owners=owners,
    )
    publish(run, made)
    return tmp_path / "run", [items, users]


def require_model(found: dict[str, torch.Tensor], expected: list[Table], prefix: str = "") -> None:
    for table in expected:
        assert torch.equal(found[f"{prefix}{table.name}.weight"], table.values)
    assert torch.equal(found[f"{prefix}top.weight"], DENSE)
    assert torch.equal(found[f"{prefix}top.bias"], torch.ones(3))


def test_export_to_safetensors(
    invoke: Invoke, sharded: tuple[Path, list[Table]], tmp_path: Path
) -> None:
    url, expected = sharded
    path = tmp_path / "model.safetensors"
    assert invoke("restore", url, "--to", path).code == 0
    require_model(load_file(path), expected)
    assert invoke("restore", url, "--to", path, "--force", "--include", "all").code == 0
    found = load_file(path)
    require_model(found, expected, "model/")
    for number, state in enumerate(expected[0].states):
        assert torch.equal(found[f"row_states/items/state{number}"], state)


def test_export_to_torch(invoke: Invoke, sharded: tuple[Path, list[Table]], tmp_path: Path) -> None:
    url, expected = sharded
    path = tmp_path / "model.pt"
    assert invoke("restore", url, "--to", path, "--include", "all").code == 0
    found = torch.load(path, weights_only=True)
    require_model(found["model"], expected)
    assert [tree["rng"] for tree in found["ranks"].values()] == [0, 1]


def test_export_to_torchs_distributed_checkpoint(
    invoke: Invoke, sharded: tuple[Path, list[Table]], tmp_path: Path
) -> None:
    url, expected = sharded
    path = tmp_path / "model.dcp"
    assert invoke("restore", url, "--to", path).code == 0
    model = {f"{table.name}.weight": torch.zeros_like(table.values) for table in expected}
    model |= {"top.weight": torch.zeros(4, 3), "top.bias": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load({"model": model}, checkpoint_id=path)
    require_model(model, expected)


def test_export_one_table_as_a_frame(
    invoke: Invoke, sharded: tuple[Path, list[Table]], tmp_path: Path
) -> None:
    url, (items, _) = sharded
    path = tmp_path / "items.parquet"
    assert invoke("restore", url, "--table", "items", "--to", path).code == 0
    frame = pandas.read_parquet(path)
    values = np.stack([frame[f"value.{column}"].to_numpy() for column in range(3)], axis=1)
    assert np.array_equal(values, items.values.numpy())
    assert np.array_equal(frame["state1"].to_numpy(), items.states[1].numpy())


def test_pieces_are_shown(invoke: Invoke, sharded: tuple[Path, list[Table]]) -> None:
    ended = invoke("show", sharded[0], "6")
    assert ended.code == 0 and ended.stdout.count("items") == 2
    assert "0 … 0 of 3" in ended.stdout and "1 … 2 of 3" in ended.stdout


def test_a_new_run_sees_whole_tables(invoke: Invoke, sharded: tuple[Path, list[Table]]) -> None:
    ended = invoke("seed", sharded[0], "--table", "ads=items", "--dense", "top.*", "--json")
    assert ended.code == 0
    parts = {part["name"]: part for part in ended.json["parts"]}
    assert parts.keys() == {"items", "users", "top.weight", "top.bias"}
    assert (parts["items"]["shape"], parts["items"]["as"]) == ([40, 3], ["ads"])
    assert parts["items"]["row_states"] == ["state0", "state1"]
    assert (parts["top.weight"]["shape"], parts["top.weight"]["as"]) == ([4, 3], ["top.weight"])


def test_rows_of_a_table_for_any_process(sharded: tuple[Path, list[Table]]) -> None:
    url, (items, _) = sharded
    part = recpoint.TablePart(
        table="items", values=torch.zeros(10, 2), first_row=12, first_column=1
    )
    report = recpoint.restore_parts(str(url), [part])
    assert report.restored.step == 6
    assert torch.equal(part.values, items.values[12:22, 1:])
    recpoint.restore_parts(str(url), [part], step=5)
    assert not torch.equal(part.values, items.values[12:22, 1:])  # before rows 16 and 17 changed
