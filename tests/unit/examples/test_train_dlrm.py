"""The example's model learns, and its evidence tells apart what differs."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_dlrm
from batches import Reader
from criteo import CriteoShapeReader
from evidence import ProgressFile, digest, digests
from retail import RetailReader
from tests.forked_program import run_script
from train_dlrm import DLRM


def losses(reader: Reader, batches: int) -> list[float]:
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()
    model = DLRM(reader.tables, reader.dense_width)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizers = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.Adagrad(dense, lr=0.02),
    ]
    found = []
    for batch in itertools.islice(reader, batches):
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "reader",
    [RetailReader(rows=5000), CriteoShapeReader(rows=5000, batches=120)],
    ids=["retail", "criteo-shape"],
)
def test_a_few_dozen_batches_lower_the_loss(reader: Reader) -> None:
    found = losses(reader, 90)
    first, last = found[:10], found[-20:]
    assert sum(last) / len(last) < sum(first) / len(first) - 0.01


def test_digests_see_every_part_that_training_goes_on_from() -> None:
    def parts(*, weight: float = 0.0, draws: int = 0, batches: int = 0) -> dict[str, str]:
        torch.manual_seed(7)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adagrad(model.parameters())
        with torch.no_grad():
            model.weight[0, 0] += weight
        torch.rand(draws)
        reader = CriteoShapeReader(rows=100, lines=4)
        list(itertools.islice(reader, batches))
        return digests(model, [optimizer], reader)

    same = parts()
    assert parts() == same
    assert set(same) == {"weights", "optimizer", "rng", "reader", "next_batch"}

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name, value in other.items() if same[name] != value}

    assert differing(parts(weight=2**-20)) == {"weights"}
    assert differing(parts(draws=1)) == {"rng"}
    assert differing(parts(batches=1)) == {"reader", "next_batch"}


def test_digest_tells_structures_apart() -> None:
    values: list[object] = [
        None,
        0,
        False,
        0.0,
        -0.0,
        "",
        "0",
        [],
        [[]],
        [0],
        ["a", "b"],
        ["ab"],
        {},
        {"a": 1},
        {1: "a"},
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([0.0, -0.0]),
    ]
    found = [digest(value) for value in values]
    assert len(set(found)) == len(values)
    assert found == [digest(copy.deepcopy(value)) for value in values]
    with pytest.raises(TypeError, match="object"):
        digest(object())


def test_progress_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    progress = ProgressFile(path)
    for step in range(3):
        progress.write(step=step, loss=0.5)
        lines = path.read_text().splitlines()
        assert json.loads(lines[-1]) == {"step": step, "loss": 0.5}
    ProgressFile(None).write(step=1)


def test_the_script_runs_on_every_kind_of_data(tmp_path: Path) -> None:
    line = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26])
    other = "\t".join(["0", *[""] * 13, *["0a1b2c3d"] * 26])
    log = tmp_path / "train.txt"
    log.write_text("\n".join([line, other] * 40))
    expected = {"retail": 6, "criteo-shape": 6, str(log): 5}
    for data, steps in expected.items():
        arguments = [f"--data={data}", "--rows=1000", "--batch=16", "--steps=6"]
        ended = run_script(train_dlrm.__file__, *arguments)
        assert ended.returncode == 0, ended.stderr
        document = json.loads(ended.stdout.splitlines()[-1])
        assert document["steps"] == steps
        assert document["restored_step"] is None
        assert len(document["digests"]) == 5


def test_the_script_looks_raw_ids_up_by_key(tmp_path: Path) -> None:
    arguments = ["--keyed", "--rows=400", "--batch=128"]
    documents = []
    for steps in (9, 9, 10):
        ended = run_script(train_dlrm.__file__, *arguments, f"--steps={steps}")
        assert ended.returncode == 0, ended.stderr
        documents.append(json.loads(ended.stdout.splitlines()[-1])["digests"])
    assert documents[0] == documents[1] != documents[2]
    ended = run_script(train_dlrm.__file__, *arguments, "--data=criteo-shape")
    assert ended.returncode != 0 and "only retail has keys" in ended.stderr
