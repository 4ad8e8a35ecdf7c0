"""SIGKILL at steps of a consolidation on a local disk, after requests on a real S3 server.

Whatever was killed, wherever: everything restores to the same bits at every moment, the next call
finishes it, and a sweep leaves nothing that no manifest names. `make test` kills at a fixed sample
of the steps; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CHUNKS_PREFIX, LEASE_KEY
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import tables
from tests.consolidation import chain_of, merge, require_same, restored, trained
from tests.fault.kill_points import Death, at_steps, ended
from tests.fault.lives import begin, consolidation_life
from tests.stored_run import StoredRun


class _Place:
    def __init__(self, base: str, environment: dict[str, str]) -> None:
        self._base = base
        self.is_remote = "://" in base
        self.environment = environment

    def run_url(self, name: str) -> str:
        return f"{self._base}/run-{name}"

    def new_run(self) -> Run:
        run = Run.create(open_store(self.run_url("new")))
        run.claim(None)
        return run


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Place:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return _Place(str(tmp_path), {})
    server: SeaweedServer = request.getfixturevalue("s3_environment")
    return _Place(server.run_url(), server.environment())


def _chain(run: Run) -> list[Manifest]:
    return trained(run, tables(rows=60), [1, 2, 3, 4], bits=[4, None])


def _named(run: Run) -> set[str]:
    """Every chunk that a manifest names."""
    return {
        entry.key
        for several in run.representations().values()
        for one in several
        for entry in run.read_manifest(one).chunks
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "links", "swept"),
    [
        pytest.param("local", None, False, marks=pytest.mark.nightly("kills")),
        ("local", 2, True),
        pytest.param("s3", None, True, marks=pytest.mark.nightly("kills")),
    ],
    indirect=["place"],
)
def test_killed_at_any_step(tmp_path: Path, place: _Place, links: int | None, swept: bool) -> None:
    source = place.new_run()
    newest = _chain(source)[-1]
    truth, _ = restored(source, newest)
    start = StoredRun(source)
    committed: list[bool] = []

    def attempt(death: Death) -> bool:
        run = start.copy_to(place.run_url(str(death.die)))
        arguments = {"url": run.url, "step": 4, "links": links, **death._asdict()}
        code = ended(begin(consolidation_life, place.environment, **arguments))
        if code == 0:
            assert not list(run.store.list(LEASE_KEY.prefix))
            return False
        assert code == -signal.SIGKILL
        require_same(truth, restored(run, newest)[0])
        assert check(run, level="full").ok
        committed.append(bool(run.consolidated()))
        if swept:
            execute(run, plan_sweep(run, grace_seconds=0))
        if not run.consolidated():  # else the commit was done: only the lease is left
            assert merge(run, newest, links).outcome == "created"
        assert len(chain_of(run, newest)) == (1 if links is None else 3)
        require_same(truth, restored(run, newest)[0])
        execute(run, plan_sweep(run, grace_seconds=0))
        assert {info.key for info in run.store.list(CHUNKS_PREFIX)} == _named(run)
        assert not list(run.store.list_unfinished())
        assert check(run, level="full").ok
        return True

    steps = at_steps(attempt, tmp_path / "steps")
    assert steps >= (7 if place.is_remote else 8)
    # Only what comes after the commit finds it done.
    assert len(committed) - sum(committed) > 2


def test_beside_persists_restores_sweeps_and_another(tmp_path: Path) -> None:
    """Real processes on one run: a consolidation of each checkpoint while the chain grows."""
    run = _Place(str(tmp_path), {}).new_run()
    trainer = tables(rows=60)
    manifests = trained(run, trainer, [1, 2])
    lives = []
    for step in range(3, 9):
        manifests += trained(run, trainer, [step], parent=manifests[-1], seed=step)
        for links in (None, 2):
            lives.append(
                begin(consolidation_life, {}, url=run.url, step=step, links=links, die=None)
            )
        execute(run, plan_sweep(run, grace_seconds=3600))
        truth, _ = restored(run, manifests[-1])
    for life in lives:
        assert ended(life) == 0
    # Where two merged the same checkpoint in other ways, the slower one left chunks for the sweep.
    assert {finding.severity for finding in check(run, level="full").findings} <= {"info"}
    require_same(truth, restored(run, manifests[-1])[0])
    assert len(chain_of(run, manifests[-1])) == 1
    execute(run, plan_sweep(run, grace_seconds=0))
    assert {info.key for info in run.store.list(CHUNKS_PREFIX)} == _named(run)
