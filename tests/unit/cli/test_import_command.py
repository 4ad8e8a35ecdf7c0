"""What a checkpoint of another tool holds, for people and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from recpoint import Checkpointer, Options, Seed
from tests.unit.cli.conftest import Invoke


def _saved(folder: Path) -> str:
    model = nn.ModuleDict({"users": nn.Embedding(5, 3)})
    saved = {"net": model.state_dict(), "epoch": 3, "model": nn.Linear(1, 1)}
    torch.save(saved, folder / "a.pt")
    return str(folder / "a.pt")


def test_what_there_is_and_the_line_for_the_script(recpoint: Invoke, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    ended = recpoint("import", path, "--map", "net.*=tower.*", "--json")
    assert ended.code == 0
    document = ended.json
    assert document["form"] == "a torch.save file" and document["scalars"] == {"epoch": 3}
    assert document["entries"] == [
        {
            "name": "net.users.weight",
            "as": "tower.users.weight",
            "shape": [5, 3],
            "dtype": "float32",
            "bytes": 60,
        }
    ]
    assert document["left_out"] == {"model": "an object of torch.nn.modules.linear.Linear"}
    assert document["script"] == (
        f"ckpt.restore(seed=recpoint.Seed({path!r}, tables=['*'], dense=['*'], "
        "names={'net.*': 'tower.*'}))"
    )
    people = recpoint("import", path).stdout
    assert people.startswith("a torch.save file: 1 tensor, 60 B") and "left out: model" in people


def test_wrong_maps_and_paths_are_named(recpoint: Invoke, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    for word in ("net.*", "net.*=a", "*.*=*.*", "=a"):
        ended = recpoint("import", path, "--map", word)
        assert ended.code == 2 and "OLD=NEW" in ended.stderr
        assert ("1 * in 'net.*' and 0 * in 'a'" in ended.stderr) == (word == "net.*=a")
    ended = recpoint("import", path, "--map", "nat.*=*")
    assert ended.code == 2 and "no entry for 'nat.*'" in ended.stderr
    assert recpoint("import", str(tmp_path / "none")).code == 1
    (tmp_path / "b.pt").write_bytes(Path(path).read_bytes()[:-9])
    assert recpoint("import", str(tmp_path / "b.pt")).code == 4


def _model(folder: Path) -> tuple[nn.Module, str]:
    torch.manual_seed(3)
    model = nn.ModuleDict(
        {
            "users": nn.Embedding(500, 6),
            "top": nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)),
        }
    )
    optimizer = torch.optim.Adagrad(model.parameters())
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, folder / "a.pt")
    return model, str(folder / "a.pt")


def test_a_run_is_written_and_restored(recpoint: Invoke, tmp_path: Path) -> None:
    model, source = _model(tmp_path)
    run, scratch = str(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir()
    asked = [source, run, "--map", "net.*=*", "--table", "us*", "--scratch", str(scratch)]
    planned = recpoint("import", *asked, "--dry-run", "--json")
    assert planned.code == 0 and planned.json["checkpoint"] is None
    assert not Path(run).exists()
    written = recpoint("import", *asked, "--json")
    assert written.code == 0 and written.json["parts"] == planned.json["parts"]
    assert written.json["checkpoint"] and not list(scratch.iterdir())
    kinds = {part["name"]: part["kind"] for part in written.json["parts"]}
    assert kinds["users"] == "table" and set(kinds.values()) == {"table", "dense"}
    assert "opt.state.0.sum" in written.json["left_out"]

    into = tmp_path / "back.pt"
    assert recpoint("restore", run, "--to", str(into)).code == 0
    restored = torch.load(into, weights_only=True)
    stored = model.state_dict()
    assert restored.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in restored.items())
    assert recpoint("check", run, "--level", "full").code == 0

    # A trainer begins with it as a seed, and a model of these names goes on from it in part.
    for partial in (False, True):
        torch.manual_seed(9)
        new, _ = _model(tmp_path)
        url = run if partial else str(tmp_path / "next")
        parts: dict[str, Any] = {"tables": ["users"], "dense": ["top.*"]}
        with Checkpointer(
            new,
            torch.optim.Adagrad(new.parameters()),
            run=url,
            staging=tmp_path / f"staging {partial}",
            interval_batches=1,
            options=Options(announce=False, handle_sigterm=False),
        ) as checkpoints:
            named: Any = {"partial": parts} if partial else {"seed": Seed(run, **parts)}
            checkpoints.restore(**named)
            checkpoints.close(final=False)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in new.state_dict().items())

    again = recpoint("import", *asked)
    assert again.code == 2 and "a run without checkpoints" in again.stderr


def test_what_cannot_become_a_run_is_named_at_once(recpoint: Invoke, tmp_path: Path) -> None:
    _, source = _model(tmp_path)
    run = str(tmp_path / "run")
    ended = recpoint("import", source, run, "--table", "users", "--table", "items")
    assert ended.code == 2 and "'opt.state.0.sum' is state of an optimizer" in ended.stderr
    assert "no table matches 'items'" in ended.stderr
    for words, message in (
        (["--map", "net.*=*", "--table", "top.1"], "'net.top.1.weight' cannot be a table"),
        (["--map", "net.users.weight=a", "--map", "net.top.1.bias=a"], "two entries become 'a'"),
        (["--map", "net.users.weight=forward"], "no tensor of a model can have"),
        (["--map", "net.users.weight=a", "--map", "net.top.1.bias=a.b"], "no tensor of a model"),
    ):
        ended = recpoint("import", source, run, *words)
        assert ended.code == 2 and message in ended.stderr, ended.stderr
    ended = recpoint("import", source, "--dry-run")
    assert ended.code == 2 and "no RUN" in ended.stderr
