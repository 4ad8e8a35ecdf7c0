"""What a new run would start with, before there is a trainer."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.catalog_builder import Table, build, new_run, publish
from tests.unit.cli.conftest import Invoke, SavedRun


def test_what_there_is_to_take(recpoint: Invoke, saved_run: SavedRun) -> None:
    before = sorted(info.key for info in saved_run.run.store.list())
    ended = recpoint("seed", saved_run.directory, "--json")
    assert ended.code == 0 and ended.json["script"] is None
    assert (ended.json["step"], ended.json["chain_length"]) == (30, 3)
    parts = {part["name"]: part for part in ended.json["parts"]}
    assert parts.keys() == {"items", "users", "top.bias"}
    assert parts["items"] == {
        "kind": "table",
        "name": "items",
        "as": [],
        "shape": [40, 3],
        "dtype": "F32",
        "row_states": ["state0", "state1"],
    }
    assert parts["top.bias"]["shape"] == [3]
    assert sorted(info.key for info in saved_run.run.store.list()) == before
    people = recpoint("seed", saved_run.directory).stdout
    assert "left out" in people and "--table NEW=NAME" in people
    # Whole, though the table below is narrower.
    assert people.splitlines()[0].rstrip().endswith("): 3 manifests, all of it exact")


def test_what_is_taken_and_the_line_for_the_script(recpoint: Invoke, saved_run: SavedRun) -> None:
    asked = ["--table", "ads=items", "--table", "users", "--dense", "top.*"]
    asked += ["--optimizer-states", "carry", "--step", "20"]
    document = recpoint("seed", saved_run.directory, *asked, "--json").json
    assert {part["name"]: part["as"] for part in document["parts"]} == {
        "items": ["ads"],
        "users": ["users"],
        "top.bias": ["top.bias"],
    }
    assert document["step"] == 20
    assert document["script"] == (
        f"ckpt.restore(seed=recpoint.Seed('{saved_run.directory}', "
        "tables={'ads': 'items', 'users': 'users'}, dense=['top.*'], "
        "optimizer_states='carry', step=20))"
    )


def test_wrong_names_are_told_with_those_near(recpoint: Invoke, saved_run: SavedRun) -> None:
    ended = recpoint("seed", saved_run.directory, "--table", "ads=itms")
    assert ended.code == 4 and "'itms' is not in it (near it: 'items')" in ended.stderr
    ended = recpoint("seed", saved_run.directory, "--dense", "bottom.*")
    assert ended.code == 4 and "'bottom.*'" in ended.stderr and "top.bias" in ended.stderr
    ended = recpoint("seed", saved_run.directory, "--table", "items", "--optimizer-states", "x")
    assert ended.code == 2 and "drop or carry" in ended.stderr


def test_one_new_table_is_not_taken_from_two(recpoint: Invoke, saved_run: SavedRun) -> None:
    asked = ["--table", "ads=items", "--table", "ads=users"]
    ended = recpoint("seed", saved_run.directory, *asked)
    assert ended.code == 2 and "from 'items' and from 'users'" in ended.stderr
    twice = ["--table", "ads=items", "--table", "ads=items", "--json"]
    assert "{'ads': 'items'}" in recpoint("seed", saved_run.directory, *twice).json["script"]


def test_tables_with_an_equals_sign_in_their_names(recpoint: Invoke, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    made = [Table(name, torch.zeros(4, 2)) for name in ("a=b", "b", "x=y")]
    publish(run, build(run, made, step=1, generation=1, state={}))

    def taken(*asked: str) -> dict[str, list[str]]:
        options = [word for one in asked for word in ("--table", one)]
        document = recpoint("seed", run.url, *options, "--json").json
        return {part["name"]: part["as"] for part in document["parts"] if part["as"]}

    assert taken("x=y") == {"x=y": ["x=y"]}
    assert taken("new=x=y", "n=e=w=b") == {"x=y": ["new"], "b": ["n=e=w"]}
    ended = recpoint("seed", run.url, "--table", "a=b")
    assert ended.code == 2
    assert "'a=b' taken as 'a=b'; 'b' taken as 'a'" in ended.stderr
    assert "Seed(tables={NEW: NAME})" in ended.stderr
