"""A flipped bit is found by the check, whatever object it is in, and is never restored.

`make nightly` flips a bit of every byte (`byte_flips.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recpoint.catalog.run.run import Run
from recpoint.cli import app
from recpoint.format.record_kinds import RUN, SIDE_KINDS
from tests.catalog_builder import copy_run
from tests.every_record import every_record
from tests.fault.byte_flips import flip_run

_EVERY = 193


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run, which is only copied."""
    return every_record(tmp_path_factory.mktemp("built"))


@pytest.mark.slow
def test_every_flip_is_found_and_none_is_restored(built: Run, tmp_path: Path) -> None:
    run = copy_run(built, tmp_path / "run")
    tally = flip_run(run, every=_EVERY)
    assert tally.missed == []
    size_bytes = sum(info.size_bytes for info in run.store.list())
    flips = sum(count for (_, what), count in tally.counts.items() if what == "flips")
    assert flips == -(-size_bytes // _EVERY)
    kinds = {kind.model.model_fields["format"].default for kind in (RUN, *SIDE_KINDS)}
    assert {f"recpoint/{kind}" for kind in tally.kinds} >= kinds
    # Step 30 has two manifests: damage in one of them is gone around.
    assert tally.counts["manifest", "newest"] > 0 and tally.counts["manifest", "around"] > 0
    assert tally.counts["chunk: sample", "newest"] == tally.counts["chunk: sample", "flips"]


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("run.json", 4),
        ("generations/00000002.json", 1),
        ("manifests/000000000040-00000002.json", 1),
        ("manifests/000000000030-00000001.json", 0),  # a consolidated one takes its place
        ("pins/000000000020-00000001-release-7.json", 0),
    ],
)
def test_the_command_names_the_object(built: Run, tmp_path: Path, key: str, code: int) -> None:
    run = copy_run(built, tmp_path / "run")
    path = Path(run.url, key)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = CliRunner().invoke(app, ["check", run.url, "--level", "full", "--json"])
    assert result.exit_code == code, result.output
    assert key in result.stdout
