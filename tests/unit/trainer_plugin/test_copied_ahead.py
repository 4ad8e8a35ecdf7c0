"""What is copied before a cut is staged byte for byte as a plain cut would have staged it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Lookahead
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format.job import Job as StagedJob
from recpoint.format.manifest import Manifest
from tests.combinations import combinations
from tests.polling import until
from tests.training_builder import Place, checkpointer, seed_everything

USERS, ITEMS, DIM, BATCH = 9_000, 700, 8, 40
Batch = tuple[Tensor, Tensor, Tensor]


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=sparse)
        self.items = nn.EmbeddingBag(ITEMS, DIM, mode="sum", sparse=sparse)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.users(users), self.items(items)], dim=1))
        return scores.squeeze(1)


class Reader:
    """Batches that depend on their number alone."""

    def __init__(self, length: int = 10_000) -> None:
        self.position, self.length = 0, length

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.length:
            self.position += 1
            draw = torch.Generator().manual_seed(self.position)
            # Most lookups are of few rows, as in recommender training.
            skew = torch.rand(BATCH, generator=draw) ** 3
            users = (USERS * skew).long()
            items = torch.randint(0, ITEMS, (BATCH, 3), generator=draw)
            yield users, items, torch.rand(BATCH, generator=draw)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def ids_of(batch: Batch) -> dict[str, Tensor]:
    return {"users": batch[0], "items": batch[1]}


OPTIMIZERS: dict[str, Callable[[Model], list[torch.optim.Optimizer]]] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "sparse_adam": lambda model: [
        torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.1),
        torch.optim.Adam(model.top.parameters(), lr=0.1),
    ],
}


class Job:
    """One of two trainings that differ only in their reader."""

    def __init__(
        self, directory: Path, *, ids: Any = None, window: int = 0, optimizer: str = "sgd",
        sparse: bool = True, accumulate: int = 1, device: torch.device | str = "cpu",
        **settings: Any,
    ) -> None:  # fmt: skip
        seed_everything(7)
        self.device = device
        self.model = Model(sparse=sparse).to(device)
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        reader: Any = Reader()
        if window:
            reader = Lookahead(reader, ids=ids or ids_of, window=window)
        self.reader = reader
        self.schedulers: list[Any] = []
        self.accumulate = accumulate
        self.place = Place(str(directory / "run"), directory / "staging")
        self.checkpoints = checkpointer(
            self,  # type: ignore[arg-type]
            self.place,
            **{"interval_batches": 20, **settings},
        )
        self.checkpoints.restore()
        self.batches = iter(reader)
        self.done = 0

    def batch(self) -> None:
        users, items, target = (tensor.to(self.device) for tensor in next(self.batches))
        loss = nn.functional.mse_loss(self.model(users, items), target)
        if self.done % self.accumulate == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        loss.backward()
        self.done += 1
        if self.done % self.accumulate == 0:
            for optimizer in self.optimizers:
                optimizer.step()
        self.checkpoints.step()

    def staged_job(self) -> StagedJob:
        """Wait for the job of the newest checkpoint."""
        run = self.place.run_directory
        until(lambda: len(StagedRun(run).staged_jobs()) > 0)
        (path,) = StagedRun(run).staged_jobs()
        return job_files.read_job(path)

    def staged(self) -> dict[str, bytes]:
        """Wait for the job of the newest checkpoint; return the bytes and places of its rows."""
        run, job = self.place.run_directory, self.staged_job()
        slot = (StagedRun(run).slots_directory / job.slot).read_bytes()
        found: dict[str, bytes] = {"kind": job.kind.encode()}
        for segment in job.segments:
            # The state behind the tables has another reader's position.
            if segment.name.startswith("t") and segment.name[1].isdigit():
                content = slot[segment.offset : segment.offset + segment.bytes]
                found[segment.name] = f"{segment.shape} {segment.offset} ".encode() + content
        return found

    def persist(self) -> None:
        committed = self.checkpoints.stats.committed
        assert self.place.persist_all() == 1
        # Training may reach the next window before it hears of that.
        until(lambda: self.checkpoints.stats.committed == committed + 1)

    @property
    def copied(self) -> Any:
        return self.checkpoints.stats.copied


def _compare(plain: Job, ahead: Job) -> None:
    expected, found = plain.staged(), ahead.staged()
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, name
    plain.persist()
    ahead.persist()


def _train(plain: Job, ahead: Job, batches: int, every: int = 20) -> list[Any]:
    copied = []
    for done in range(1, batches + 1):
        plain.batch()
        ahead.batch()
        if done % every == 0:
            copied.append(ahead.copied)
            _compare(plain, ahead)
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)
    return copied


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    combinations(
        ["consecutive", "one_shot", "intermittent", "continuous"],
        ["sgd", "dense sgd", "adagrad", "dense adagrad", "sparse_adam"],
    ),
)
def test_staged_bytes_equal_those_of_a_plain_cut(
    tmp_path: Path, policy: str, optimizer: str
) -> None:
    chosen: dict[str, Any] = {
        "policy": policy,
        "optimizer": optimizer.removeprefix("dense "),
        "sparse": not optimizer.startswith("dense "),
    }
    plain = Job(tmp_path / "plain", **chosen)
    ahead = Job(tmp_path / "ahead", window=12, **chosen)
    copied = _train(plain, ahead, 60)
    assert [one.why_plain for one in copied[1:]] == [None] * 2  # the first may lack row states
    assert all(one.rows_before > 0 for one in copied[1:])


@pytest.mark.parametrize("window", [1, 5, 20, 200])
def test_any_window(tmp_path: Path, window: int) -> None:
    copied = _train(Job(tmp_path / "plain"), Job(tmp_path / "ahead", window=window), 60)
    reasons = {rows.why_plain for rows in copied}
    # A window of one batch races its plan, and a lost race is a plain cut of the same bytes.
    assert reasons <= ({None, "it was not planned in time"} if window == 1 else {None})


@pytest.mark.parametrize("seed", range(4))
def test_wrong_predictions_cost_no_byte(tmp_path: Path, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def lie(batch: Batch) -> Mapping[str, Tensor]:
        kind = int(torch.randint(0, 4, (1,), generator=draw))
        users = torch.randint(-50, USERS + 50, (30,), generator=draw)
        if kind == 0:
            return {}
        if kind == 1:
            return {"users": users}
        if kind == 2:
            return {"users": batch[0][: seed + 3], "items": torch.arange(ITEMS)}
        return ids_of(batch)

    plain, ahead = Job(tmp_path / "plain"), Job(tmp_path / "ahead", ids=lie, window=15)
    copied = _train(plain, ahead, 60)
    assert any(one.why_plain is None for one in copied)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_are_accumulated(tmp_path: Path, sparse: bool) -> None:
    chosen: dict[str, Any] = {"accumulate": 4, "sparse": sparse}
    plain, ahead = Job(tmp_path / "plain", **chosen), Job(tmp_path / "ahead", window=12, **chosen)
    copied = _train(plain, ahead, 40)
    assert all(one.why_plain is None for one in copied)


def test_a_cut_that_nobody_planned(tmp_path: Path) -> None:
    plain, ahead = Job(tmp_path / "plain"), Job(tmp_path / "ahead", window=12)
    for at in (20, 33, 41, 44):  # planned, early in a window, after its opening, without a window
        while plain.done < at:
            plain.batch()
            ahead.batch()
        if at > 20:
            assert plain.checkpoints.checkpoint()
            assert ahead.checkpoints.checkpoint()
        _compare(plain, ahead)
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


def test_rows_that_no_batch_announced(tmp_path: Path) -> None:
    plain, ahead = Job(tmp_path / "plain"), Job(tmp_path / "ahead", window=12)
    unknown = torch.arange(USERS - 300, USERS, 7)
    for done in range(1, 61):
        for job in (plain, ahead):
            job.batch()
            if done in (15, 55):
                with torch.no_grad():
                    job.model.users.weight[unknown] += 1
                job.checkpoints.mark("users", unknown)
            if done == 35:
                job.checkpoints.delete_rows("items", torch.arange(0, ITEMS, 50))
        if done % 20 == 0:
            assert ahead.copied.why_plain is None
            _compare(plain, ahead)
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


def test_no_row_is_taken_for_unmarked(tmp_path: Path) -> None:
    """The check of unmarked rows knows marks that were set aside and rows that were handed over."""
    checked: dict[str, Any] = {"verify_unmarked_rows": USERS}
    plain, ahead = Job(tmp_path / "plain", **checked), Job(tmp_path / "ahead", window=12, **checked)
    _train(plain, ahead, 60)
    assert ahead.checkpoints.stats.unmarked_rows == 0


def test_a_table_that_becomes_dirty_as_a_whole_makes_the_cut_plain(tmp_path: Path) -> None:
    plain, ahead = Job(tmp_path / "plain"), Job(tmp_path / "ahead", window=12)
    for done in range(1, 41):
        for job in (plain, ahead):
            job.batch()
            if done == 35:
                with torch.no_grad():
                    job.model.items.weight.mul_(0.9)
        if done % 20 == 0:
            _compare(plain, ahead)
    assert "'items'" in ahead.copied.why_plain
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


def test_job_and_manifest_say_what_stats_say(tmp_path: Path) -> None:
    ahead = Job(tmp_path / "ahead", window=12)
    for done in (20, 40):
        while ahead.done < done:
            ahead.batch()
        staged, copied = ahead.staged_job(), ahead.copied
        assert copied.rows_before > 0 and staged.copied_ahead is not None
        figures = staged.copied_ahead.model_dump()
        assert figures == {name: getattr(copied, name) for name in figures}
        assert copied.rows_before + copied.rows_in_stall >= staged.dirty_rows
        row_bytes = 4 * DIM  # no row states
        assert copied.bytes_before == row_bytes * copied.rows_before
        ahead.persist()
        assert newest_manifest(ahead).copied_ahead == staged.copied_ahead
    ahead.checkpoints.close(final=False)


def test_a_plain_cut_says_nothing_in_its_records_and_all_rows_in_stats(tmp_path: Path) -> None:
    ahead = Job(tmp_path / "ahead", window=12, optimizer="adagrad")
    while ahead.done < 3:
        ahead.batch()
    assert ahead.checkpoints.checkpoint()
    staged, copied = ahead.staged_job(), ahead.copied
    assert staged.copied_ahead is None and copied.why_plain
    assert (copied.rows_before, copied.bytes_before) == (0, 0)
    assert copied.rows_in_stall == staged.dirty_rows > 0
    assert copied.bytes_in_stall == 2 * 4 * DIM * staged.dirty_rows  # values and their sums
    path = StagedRun(ahead.place.run_directory).staged_jobs()[0]
    assert b"copied_ahead" not in path.read_bytes()
    ahead.persist()
    assert newest_manifest(ahead).copied_ahead is None
    ahead.checkpoints.close(final=False)


def newest_manifest(job: Job) -> Manifest:
    run = Run.open(open_store(job.place.run))
    return run.manifest(*run.live_line()[0])
