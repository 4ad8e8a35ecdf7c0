"""Commits: one winner, and everybody knows who it is (format §6.1, §6.2)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run import manifest_pages
from recpoint.catalog.run.commit import check_fence, commit
from recpoint.catalog.run.run import Run
from recpoint.errors import (
    ChainError,
    CommitConflict,
    ForeignObject,
    FormatError,
    MalformedObject,
    MissingLink,
    NothingToRestore,
    RecpointError,
    StaleWriter,
    StoreAccessDenied,
    StoreUnavailable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import pack_record
from tests.catalog_builder import (
    Checkpoint,
    Table,
    build,
    new_run,
    publish,
    single_rows,
    tables,
    upload,
)
from tests.consolidation import chain_of, merge, trained
from tests.interposed_store import InterposedStore, unavailable


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


def increment(run: Run, parent: Manifest, step: int, generation: int = 1) -> Checkpoint:
    dirty = [torch.tensor([1, 4, 7]), torch.tensor([0])]
    return build(run, tables(), step=step, generation=generation, parent=parent, dirty=dirty)


def test_a_full_and_an_increment_are_committed_once(run: Run) -> None:
    full = build(run, tables(), step=5, generation=1)
    upload(run.store, full)
    assert commit(run, full.manifest) == "created"
    assert commit(run, full.manifest) == "already"
    later = increment(run, full.manifest, 6)
    upload(run.store, later)
    assert commit(run, later.manifest) == "created"
    assert run.manifest(6, 1) == later.manifest
    assert run.live_line() == [(6, 1), (5, 1)]


def test_a_replaced_trainer_commits_nothing_more(run: Run) -> None:
    full = publish(run, build(run, tables(), step=5, generation=1))
    run.claim(full.ref)
    stale = increment(run, full, 6)
    with pytest.raises(StaleWriter) as caught:
        commit(run, stale.manifest)
    assert "generation 2" in caught.value.found
    assert not caught.value.retryable
    assert run.manifest_names() == [(5, 1)]


def test_what_was_committed_stays_committed_for_a_replaced_trainer(run: Run) -> None:
    full = publish(run, build(run, tables(), step=5, generation=1))
    run.claim(None)
    assert commit(run, full) == "already"


def test_a_generation_that_nobody_claimed_cannot_commit(run: Run) -> None:
    with pytest.raises(MissingLink, match="recpoint relink URL 2"):
        commit(run, build(run, tables(), step=5, generation=2).manifest)


def test_where_nothing_is_left_of_a_run_its_jobs_wait(run: Run) -> None:
    shutil.rmtree(run.url)
    with pytest.raises(NothingToRestore):
        check_fence(run, 2, 4)


def test_the_fence_can_be_left_out(run: Run) -> None:
    full = build(run, tables(), step=5, generation=1).manifest
    run.claim(None)
    assert commit(run, full, expect_generation_newest=False) == "created"


def test_the_same_step_by_another_attempt_is_a_conflict(run: Run) -> None:
    first = publish(run, build(run, tables(), step=5, generation=1))
    with pytest.raises(CommitConflict) as caught:
        commit(run, build(run, tables(seed=1), step=5, generation=1).manifest)
    assert first.attempt in caught.value.found
    assert run.manifest(5, 1) == first


def test_what_only_a_consolidated_manifest_is_left_of_is_committed(run: Run) -> None:
    first, last = trained(run, tables(), [5, 6])
    merge(run, last)
    run.store.delete(MANIFEST_KEY.of(6, 1))
    other = increment(run, first, 6)
    upload(run.store, other)
    with pytest.raises(CommitConflict, match=last.attempt):
        commit(run, other.manifest)
    assert commit(run, last) == "already"
    assert run.manifest(6, 1).ref == last.ref
    assert [one.form for one in run.representations()[ManifestName(6, 1)]] == ["full"]


def test_an_increment_without_its_parent_is_a_missing_link(run: Run) -> None:
    absent = build(run, tables(), step=5, generation=1).manifest
    with pytest.raises(MissingLink) as caught:
        commit(run, increment(run, absent, 6).manifest)
    assert caught.value.subject == MANIFEST_KEY.of(5, 1)
    assert run.manifest_names() == []


def test_an_increment_after_another_attempt_of_the_step_is_a_missing_link(run: Run) -> None:
    publish(run, build(run, tables(), step=5, generation=1))
    other = build(run, tables(), step=5, generation=1).manifest
    with pytest.raises(MissingLink, match=other.attempt[:8]):
        commit(run, increment(run, other, 6).manifest)


def test_an_increment_that_contradicts_its_parent_is_refused(run: Run) -> None:
    full = publish(run, build(run, tables(), step=5, generation=1))
    wrong = increment(run, full, 6).manifest.model_copy(update={"chain_length": 3})
    with pytest.raises(ChainError, match="chain_length 3"):
        commit(run, wrong)
    assert run.manifest_names() == [(5, 1)]


def test_an_increment_on_a_damaged_parent_is_refused(run: Run) -> None:
    full = publish(run, build(run, tables(), step=5, generation=1))
    run.store.put(MANIFEST_KEY.of(5, 1), pack_record(full).replace(b'"step":5', b'"step":4'))
    with pytest.raises(FormatError, match=r"manifests/"):
        commit(run, increment(run, full, 6).manifest)


def test_an_increment_on_a_parent_that_only_its_consolidation_tells_of(run: Run) -> None:
    _, parent = trained(run, tables(), [5, 6])
    merge(run, parent)
    run.store.put(MANIFEST_KEY.of(6, 1), b"damaged")
    publish(run, increment(run, parent, 7))
    assert [one.step for one in chain_of(run, run.manifest(7, 1))] == [6, 7]


def test_an_increment_on_a_checkpoint_of_the_generation_before(run: Run) -> None:
    full = publish(run, build(run, tables(), step=5, generation=1))
    run.claim(full.ref)
    publish(run, increment(run, full, 6, generation=2))
    assert run.live_line() == [(6, 2), (5, 1)]


def test_a_manifest_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    other = new_run(tmp_path / "other")
    with pytest.raises(ForeignObject):
        commit(run, build(other, tables(), step=5, generation=1).manifest)


def test_a_manifest_larger_than_any_reader_takes_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = build(run, [Table("items", torch.zeros(4, 1))], step=5, generation=1).manifest
    rows = next(entry for entry in full.chunks if entry.content == "rows")
    monkeypatch.setattr(manifest_pages, "MAX_CHUNKS", 5_000)
    many = tuple(single_rows(rows, 5_001, attempt=full.attempt))
    with pytest.raises(MalformedObject, match="5,001 chunks.*at most 5,000") as caught:
        commit(run, full.model_copy(update={"chunks": many}))
    assert caught.value.subject == MANIFEST_KEY.of(5, 1)
    assert run.manifest_names() == [] and not list(run.store.list("chunks/"))


class TestLostAnswers:
    """The store wrote, or did not, and nobody can say (format §6.2)."""

    def test_an_answer_lost_after_writing_is_still_our_commit(self, run: Run) -> None:
        losing = [True]

        def lose(call: str, key: str) -> None:
            if call == "create" and losing:
                losing.pop()
                raise unavailable(key)

        full = build(run, tables(), step=5, generation=1)
        upload(run.store, full)
        shaky = Run.open(InterposedStore(run.store, after=lose))
        assert commit(shaky, full.manifest) == "already"
        assert run.manifest(5, 1) == full.manifest

    def test_an_answer_lost_before_writing_is_tried_again(self, run: Run) -> None:
        losing = [True, True]

        def lose(call: str, key: str) -> None:
            if call == "create" and losing:
                losing.pop()
                raise unavailable(key)

        full = build(run, tables(), step=5, generation=1)
        shaky = Run.open(InterposedStore(run.store, before=lose))
        assert commit(shaky, full.manifest) == "created"

    def test_an_answer_lost_while_another_attempt_wins_is_a_conflict(self, run: Run) -> None:
        winner = build(run, tables(), step=5, generation=1).manifest

        def win(call: str, key: str) -> None:
            if call == "create":
                run.store.put(key, pack_record(winner))
                raise unavailable(key)

        shaky = Run.open(InterposedStore(run.store, before=win))
        with pytest.raises(CommitConflict):
            commit(shaky, build(run, tables(), step=5, generation=1).manifest)
        assert run.manifest(5, 1) == winner

    def test_a_lost_answer_of_the_read_is_tried_again_too(self, run: Run) -> None:
        losing = [True]

        def lose(call: str, key: str) -> None:
            if call == "get" and losing:
                losing.pop()
                raise unavailable(key)

        full = publish(run, build(run, tables(), step=5, generation=1))
        shaky = InterposedStore(run.store)
        opened = Run.open(shaky)
        shaky.before = lose
        assert commit(opened, full) == "already"

    def test_a_store_that_stays_away_ends_the_commit(self, run: Run) -> None:
        def refuse(call: str, key: str) -> None:
            if call == "create":
                raise unavailable(key)

        shaky = Run.open(InterposedStore(run.store, before=refuse))
        with pytest.raises(StoreUnavailable) as caught:
            commit(shaky, build(run, tables(), step=5, generation=1).manifest)
        assert caught.value.retryable
        assert run.manifest_names() == []

    def test_a_refusal_is_not_tried_again(self, run: Run) -> None:
        tries = []

        def refuse(call: str, key: str) -> None:
            if call == "create":
                tries.append(key)
                raise StoreAccessDenied(key, found="403", expected="200", next_step="ask")

        shaky = Run.open(InterposedStore(run.store, before=refuse))
        with pytest.raises(StoreAccessDenied):
            commit(shaky, build(run, tables(), step=5, generation=1).manifest)
        assert len(tries) == 1


def _try_to_commit(run: Run, manifest: Manifest) -> str:
    try:
        return commit(run, manifest)
    except RecpointError as error:
        return type(error).__name__


def test_of_many_threads_one_wins_and_the_others_know(run: Run) -> None:
    candidates = [build(run, tables(), step=5, generation=1).manifest for _ in range(8)]
    barrier = threading.Barrier(len(candidates))

    def together(manifest: Manifest) -> str:
        barrier.wait(240)
        return _try_to_commit(run, manifest)

    with ThreadPoolExecutor(len(candidates)) as pool:
        outcomes = list(pool.map(together, candidates))
    assert sorted(outcomes) == ["CommitConflict"] * 7 + ["created"]
    assert run.manifest(5, 1) == candidates[outcomes.index("created")]


_COMMITTER = """
import sys
from pathlib import Path
from recpoint.catalog.run.commit import commit
from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.run.run import Run
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.records import unpack_record

run = Run.open(LocalStore(sys.argv[1]))
manifest = unpack_record(Manifest, Path(sys.argv[2]).read_bytes(), name="", next_step="")
print("ready", flush=True)
sys.stdin.readline()
try:
    print(commit(run, manifest))
except RecpointError as error:
    print(type(error).__name__)
"""


def test_of_many_processes_one_wins_and_the_others_know(run: Run, tmp_path: Path) -> None:
    candidates = [build(run, tables(), step=5, generation=1).manifest for _ in range(4)]
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for number, manifest in enumerate(candidates):
            path = tmp_path / f"candidate-{number}.json"
            path.write_bytes(pack_record(manifest))
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMITTER, run.url, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outcomes = [process.communicate(timeout=240)[0].strip() for process in processes]
    assert sorted(outcomes) == ["CommitConflict"] * 3 + ["created"]
    assert run.manifest(5, 1) == candidates[outcomes.index("created")]


def test_the_same_attempt_in_many_threads_is_created_once(run: Run) -> None:
    manifest = build(run, tables(), step=5, generation=1).manifest
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: commit(run, manifest), range(4)))
    assert sorted(outcomes) == ["already"] * 3 + ["created"]
