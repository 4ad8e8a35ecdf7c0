"""The demo, end to end: real training, a real Prefect server, a real SIGKILL.

`make nightly` plays it without options in a part that takes less than a minute, and with each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store

_BY_NIGHT = pytest.mark.nightly("demo")


@pytest.mark.slow
@pytest.mark.xdist_group("prefect")
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, [], marks=pytest.mark.nightly("plain-demo")),
        pytest.param(2, [], marks=_BY_NIGHT),
        pytest.param(1, ["--lookahead"], marks=_BY_NIGHT),
        pytest.param(1, ["--keyed"], marks=_BY_NIGHT),
        pytest.param(1, ["--servers=3", "--parity=2+1"], marks=_BY_NIGHT),
        pytest.param(2, ["--servers=2"], marks=_BY_NIGHT),
    ],
)
def test_a_killed_trainer_ends_where_the_uninterrupted_one_does(
    tmp_path: Path, ranks: int, more: list[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    # A server of its own, which must not be one that somebody is looking at.
    environment |= {"RECPOINT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    demo = tmp_path / "demo"
    is_served = any("--servers" in one for one in more)
    has_parity = "--parity=2+1" in more
    # With rows at servers, training goes on until a checkpoint is staged, up to forty steps.
    steps = 240 if is_served else 120
    ended = subprocess.run(
        [sys.executable, "-m", "recpoint", "demo", f"--dir={demo}", "--stop-server"]
        + [f"--steps={steps}", "--interval=20", f"--ranks={ranks}", *more],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        check=False,
    )
    logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in demo.glob("*.log"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    *_, proof, last = ended.stdout.splitlines()
    document = json.loads(last)
    assert document["ok"] is True
    assert document["resumed_bit_identical"] is True
    assert set(document["digests_equal"].values()) == {True}
    assert document["auc"] == document["auc_uninterrupted"]
    assert (document["steps"], document["ranks"]) == (steps, ranks)
    assert steps // 2 <= document["killed_at_step"] < steps
    assert 0 < document["restored_step"] <= document["killed_at_step"]
    assert document["restored_step"] % 20 == 0
    assert document["persisted_by_prefect"] > 0
    assert document["bytes_written"] < document["bytes_full_fp32"]
    assert document["stall_ms_median"] > 0
    who = "" if ranks == 1 else "rank 1 of 2 "
    assert f"{who}killed with SIGKILL at step" in proof
    assert (document["server_killed_at_step"] is not None) is is_served
    assert proof.startswith("proof: an embedding server killed") is is_served

    # What it says is what is there.
    run = Run.open(open_store(document["run"]))
    manifests = [run.manifest(*name) for name in run.live_line()]
    assert len(manifests) == document["checkpoints"]
    assert sum(manifest.stored_bytes for manifest in manifests) == document["bytes_written"]
    stalls_ms = [manifest.stall_us / 1000 for manifest in manifests]
    assert document["stall_ms_median"] == pytest.approx(statistics.median(stalls_ms), abs=1e-3)
    ahead = [manifest.copied_ahead for manifest in manifests if manifest.copied_ahead is not None]
    assert document["checkpoints_copied_ahead"] == len(ahead)
    for what in ("rows", "bytes"):
        for when, name in (("before_stalls", "before"), ("in_stalls", "in_stall")):
            figure = sum(getattr(one, f"{what}_{name}") for one in ahead)
            assert document[f"{what}_copied_{when}"] == figure
    is_ahead = more == ["--lookahead"]
    assert (document["rows_copied_before_stalls"] > 0) is is_ahead
    assert ("copied ahead" in ended.stdout) is is_ahead
    assert (document["cache"] is not None) is is_served
    is_keyed = more == ["--keyed"]
    assert (document["keys"] is not None) is is_keyed
    if is_keyed:
        assert document["keys"]["evicted"] > 0 and "lost theirs to others" in ended.stdout
    if is_served:
        assert document["cache"]["misses"] == 0 < document["cache"]["written_rows"]
        assert all(manifest.cache is not None for manifest in manifests)
    assert manifests[0].step == steps
    assert {manifest.ranks for manifest in manifests} == {ranks}
    # A rewind begins a generation, too; with parity there is none.
    assert run.generation_numbers() == ([1, 2, 3] if is_served and not has_parity else [1, 2])
    assert ("training went on with rows of the others" in proof) is has_parity
    restored = run.generation(run.generation_numbers()[-1]).restored
    assert restored is not None and restored.step == document["restored_step"]
    assert check(run, level="full").ok

    # The progress of the killed trainer stops where the demo says that it was killed.
    progress = list(demo.glob("killed.progress*.jsonl"))
    assert len(progress) == ranks
    last_steps = [json.loads(file.read_text().splitlines()[-1])["step"] for file in progress]
    assert max(last_steps) == document["killed_at_step"]
    # Nothing is left behind: no process, no server, nothing in memory.
    assert not Path(StagedRun.of("/dev/shm", document["run"]).path).exists()
    left = subprocess.run(
        [sys.executable, "-m", "recpoint", "server", "status", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=True,
    )
    assert json.loads(left.stdout)["running"] is False
    assert not processes_that_name(str(tmp_path))


def processes_that_name(text: str) -> list[str]:
    """Command lines, other than this process's, with `text` in them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue  # it has ended meanwhile, or is not ours
            if text in line:
                found.append(line)
    return found
