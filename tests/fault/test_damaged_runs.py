"""Damage in a run, met by a trainer that restores and by a person at the command line.

The same damage has to be named by both, and the trainer goes on from the newest good checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from recpoint import Consecutive, errors
from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.cli import app
from recpoint.errors import RecpointError, UnsupportedVersion
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.format.records import pack_record
from recpoint.format.version import PAGED_VERSION
from tests.training_builder import Place, checkpointer, simple_training, train, until

States = dict[int, dict[str, Tensor]]


def make_run(place: Place) -> States:
    """Fulls at 2 and 6, increments at 4 and 8; the model at each."""
    states: States = {}
    training = simple_training()
    with place.agent(), checkpointer(training, place, policy=Consecutive(full_every=2)) as ckpt:
        ckpt.restore()
        while ckpt.batches_done < 8:
            train(training, ckpt, 2)
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 2)
            state = training.model.state_dict()
            states[ckpt.batches_done] = {name: t.clone() for name, t in state.items()}
    return states


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, States]:
    """Two runs of the same training, and what the model was; they are only copied."""
    folder = tmp_path_factory.mktemp("originals")
    for name in ("run", "other"):
        states = make_run(Place(str(folder / name), folder / "staging"))
    return folder / "run", folder / "other", states


@pytest.fixture
def place(originals: tuple[Path, Path, States], tmp_path: Path) -> Place:
    shutil.copytree(originals[0], tmp_path / "run")
    shutil.copytree(originals[1], tmp_path / "other")
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def manifest_of(place: Place, step: int) -> Manifest:
    return Run.open(open_store(place.run)).manifest(step, 1)


def row_chunk(place: Place) -> tuple[ChunkEntry, Path]:
    """A chunk of rows that only checkpoint 8 names."""
    entry = next(entry for entry in manifest_of(place, 8).chunks if entry.content == "rows")
    return entry, Path(place.run) / entry.key


def remove_chunk(place: Place) -> str:
    entry, path = row_chunk(place)
    path.unlink()
    return entry.key


def truncate_chunk(place: Place) -> str:
    entry, path = row_chunk(place)
    path.write_bytes(path.read_bytes()[:-8])
    return entry.key


def flip_chunk(place: Place) -> str:
    entry, path = row_chunk(place)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return entry.key


def take_foreign_chunk(place: Place) -> str:
    """The same rows, written by another run, under a manifest that has their digest."""
    manifest = manifest_of(place, 8)
    entry, path = row_chunk(place)
    other = Run.open(open_store(str(Path(place.run).with_name("other"))))
    theirs = next(
        found
        for found in other.manifest(8, 1).chunks
        if found.content == "rows" and found.table == entry.table
    )
    data = (Path(other.url) / theirs.key).read_bytes()
    path.write_bytes(data)
    swapped = entry.model_copy(update={"bytes": len(data), "crc32c": crc32c.crc32c(data)})
    chunks = tuple(swapped if found == entry else found for found in manifest.chunks)
    forged = manifest.model_copy(update={"chunks": chunks})
    (Path(place.run) / MANIFEST_KEY.of(8, 1)).write_bytes(pack_record(forged))
    return entry.key


def take_foreign_manifest(place: Place) -> str:
    key = MANIFEST_KEY.of(8, 1)
    shutil.copy(Path(place.run).with_name("other") / key, Path(place.run) / key)
    return key


def flip_manifest(place: Place) -> str:
    key = MANIFEST_KEY.of(8, 1)
    data = bytearray((Path(place.run) / key).read_bytes())
    data[data.index(b'"dirty_rows":') + len(b'"dirty_rows":')] ^= 1  # another digit
    (Path(place.run) / key).write_bytes(data)
    return key


DAMAGE: dict[str, tuple[Callable[[Place], str], str]] = {
    "missing chunk": (remove_chunk, "ObjectNotFound"),
    "truncated chunk": (truncate_chunk, "DigestMismatch"),
    "flipped chunk": (flip_chunk, "DigestMismatch"),
    "foreign chunk": (take_foreign_chunk, "ForeignObject"),
    "foreign manifest": (take_foreign_manifest, "ForeignObject"),
    "flipped manifest": (flip_manifest, "DigestMismatch"),
}


def assert_names(text: str, kind: str, key: str) -> None:
    assert kind in text and key in text
    assert "found " in text and "expected " in text and "Next: " in text


def recpoint(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document of a command."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_trainer_goes_on_from_the_newest_good_checkpoint(
    damage: str, place: Place, originals: tuple[Path, Path, States]
) -> None:
    hurt, kind = DAMAGE[damage]
    key = hurt(place)
    named = checkpointer(simple_training(9), place)
    expected: type[RecpointError] = getattr(errors, kind)
    with pytest.raises(expected) as caught:
        named.restore(8)
    assert_names(f"{kind}: {caught.value}", kind, key)

    training = simple_training(9)
    ckpt = checkpointer(training, place)
    report = ckpt.restore()
    assert report is not None and report.restored.step == ckpt.batches_done == 6
    (skipped,) = report.skipped
    assert skipped.name == (8, 1)
    assert_names(skipped.error, kind, key)
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, originals[2][6][name])
    with place.agent():
        train(training, ckpt, 2)
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (1, 0)
    run = Run.open(open_store(place.run))
    assert run.live_line() == [(8, 2), (6, 1), (4, 1), (2, 1)]
    # What is damaged counts for nobody any more.
    assert check(run, level="full").ok


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_person_is_told_what_is_damaged_and_gets_what_is_good(
    damage: str, place: Place, tmp_path: Path
) -> None:
    hurt, kind = DAMAGE[damage]
    key = hurt(place)
    code, found = recpoint("check", place.run, "--level", "full")
    assert code == 1 and found["ok"] is False
    assert key in {finding["key"] for finding in found["findings"]}
    restorable = {entry["step"]: entry["restorable"] for entry in found["checkpoints"]}
    assert restorable == {8: False, 6: True, 4: True, 2: True}

    code, refused = recpoint("restore", place.run, "--to", tmp_path / "8.pt", "--step", 8)
    assert code == (1 if kind == "ObjectNotFound" else 4)
    assert refused["error"] == kind and key in refused["subject"]
    assert refused["found"] and refused["expected"] and refused["next_step"]
    assert not (tmp_path / "8.pt").exists()

    code, restored = recpoint("restore", place.run, "--to", tmp_path / "newest.pt")
    assert code == 0 and restored["step"] == 6
    assert_names(restored["skipped"][0]["error"], kind, key)


def test_a_later_version_is_refused_by_name_and_never_passed_over(
    place: Place, tmp_path: Path
) -> None:
    key = MANIFEST_KEY.of(8, 1)
    later = manifest_of(place, 8).model_copy(update={"version": PAGED_VERSION + 1})
    (Path(place.run) / key).write_bytes(pack_record(later))
    training = simple_training(9)
    before = training.model.users.weight.detach().clone()
    with pytest.raises(UnsupportedVersion) as caught:
        checkpointer(training, place).restore()
    assert key in str(caught.value) and str(PAGED_VERSION + 1) in caught.value.found
    assert torch.equal(training.model.users.weight, before)
    assert Run.open(open_store(place.run)).generation_numbers() == [1], "nothing was claimed"
    code, refused = recpoint("restore", place.run, "--to", tmp_path / "newest.pt")
    assert code == 4 and refused["error"] == "UnsupportedVersion" and key in refused["subject"]
    # What an older release wrote is still there for the asking.
    code, restored = recpoint("restore", place.run, "--to", tmp_path / "6.pt", "--step", 6)
    assert code == 0 and restored["step"] == 6
