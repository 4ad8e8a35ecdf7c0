"""Two trainings on each of two ranks, which differ in their readers only, and what they stage."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recpoint import Checkpointer, Lookahead, Options, Precision, Staging, Timeouts
from recpoint.catalog.persist import persist
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import RanksMissing, SettingsError
from recpoint.trainer_plugin.policy import FULL
from tests.polling import until
from tests.running_parts import pipeline_of
from tests.training_builder import seed_everything

__all__ = ["RankJob", "ahead_ranks", "train_alike"]

_USERS, _ITEMS, _DIM, _BATCH = 9_000, 700, 8, 40
INTERVAL, WINDOW = 20, 12
Batch = tuple[Tensor, Tensor]


class _Model(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(_USERS, _DIM, sparse=sparse)
        self.items = nn.EmbeddingBag(_ITEMS, _DIM, mode="sum", sparse=sparse)
        self.top = nn.Linear(2 * _DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.users(users), self.items(items)], dim=1))
        return scores.sum()


class _Epochs:
    """Batches that depend on their number and the rank alone, in epochs of one length."""

    def __init__(self, rank: int, epoch_batches: int) -> None:
        self.position, self._rank, self._epoch_batches = 0, rank, epoch_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._epoch_batches):
            self.position += 1
            draw = torch.Generator().manual_seed(1_000 * self.position + self._rank)
            skew = torch.rand(_BATCH, generator=draw) ** 3
            yield (_USERS * skew).long(), torch.randint(0, _ITEMS, (_BATCH, 3), generator=draw)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _ids_of(batch: Batch) -> dict[str, Tensor]:
    return {"users": batch[0], "items": batch[1]}


def _wrong_ids(seed: int) -> Callable[[Batch], Mapping[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)

    def wrong_ids(batch: Batch) -> Mapping[str, Tensor]:
        kind = int(torch.randint(0, 3, (1,), generator=draw))
        if kind == 0:
            return {}
        if kind == 1:
            return {"users": torch.randint(-50, _USERS + 50, (30,), generator=draw)}
        return {"users": batch[0][:5].int(), "items": torch.arange(_ITEMS)}

    return wrong_ids


class RankJob:
    """One training of this rank.

    Args:
        folder: of run and staging area.
        model: the model, as it is trained.
        optimizers: of the model.
        reader: gives the batches.
        train: trains one batch of an iterator.
        settings: of the Checkpointer.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: Any,
        reader: Any,
        train: Callable[[Iterator[Any]], None],
        **settings: Any,
    ) -> None:
        self.model: Any = model
        self._reader, self._train = reader, train
        self._batches: Iterator[Any] = iter(reader)
        self.batches_done = 0
        self.checkpoints = Checkpointer(
            model,
            optimizers,
            reader=reader,
            run=str(folder / "run"),
            bits=Precision(small_table_values=0),
            staging=Staging(directory=str(folder / "staging")),
            timeouts=Timeouts(close_seconds=60.0, drain_seconds=60.0, ranks_seconds=90.0),
            **{
                "interval_batches": INTERVAL,
                "options": Options(handle_sigterm=False, announce=False, on_error="raise"),
                **settings,
            },
        )
        self.checkpoints.restore()
        self._staged = StagedRun.of(folder / "staging", str(folder / "run"))

    def batch(self) -> None:
        try:
            self._train(self._batches)
        except StopIteration:
            self._batches = iter(self._reader)
            self._train(self._batches)
        self.batches_done += 1
        self.checkpoints.step()

    def staged(self) -> dict[str, bytes]:
        """Wait for this rank's job; return the bytes and places of its rows."""
        rank = dist.get_rank()

        def own_jobs() -> list[Any]:
            jobs = [job_files.read_job(path) for path in self._staged.staged_jobs()]
            return [job for job in jobs if job.rank == rank]

        until(lambda: len(own_jobs()) > 0)
        (job,) = own_jobs()
        slot = (self._staged.slots_directory / job.slot).read_bytes()
        rows = {"kind": job.kind.encode()}
        for segment in job.segments:
            # The state behind the tables has another reader's position.
            if segment.name.startswith("t") and segment.name[1].isdigit():
                content = slot[segment.offset : segment.offset + segment.bytes]
                rows[segment.name] = f"{segment.shape} {segment.offset} ".encode() + content
        return rows

    def persist(self) -> None:
        """Persist the jobs of all ranks, and wait until this rank hears of that."""
        committed = self.checkpoints.stats.committed
        dist.barrier()
        if dist.get_rank() == 0:
            while jobs := self._staged.staged_jobs():
                for path in jobs:
                    with suppress(RanksMissing):  # until the last part
                        persist.persist_job(path)
        dist.barrier()
        until(lambda: self.checkpoints.stats.committed == committed + 1)

    @property
    def copied(self) -> Any:
        return self.checkpoints.stats.copied


def train_alike(
    plain: RankJob, ahead: RankJob, batches: int, each: Callable[[RankJob, int], None] | None = None
) -> dict[str, Any]:
    """Train both, compare what they stage at each checkpoint, and return what was copied before.

    Args:
        plain: copies its rows in the stall.
        ahead: has the same batches, and knows them before.
        batches: how many to train.
        each: called after each batch, for each of them.
    """
    different: list[str] = []
    reasons, rows_before, rows_in_stall, kinds = [], [], [], []
    for step in range(1, batches + 1):
        for job in (plain, ahead):
            job.batch()
            if each is not None:
                each(job, step)
        if step % INTERVAL == 0:
            expected, staged = plain.staged(), ahead.staged()
            kinds.append(expected["kind"].decode())
            different += [
                f"{step} {name}"
                for name in sorted(expected.keys() | staged.keys())
                if expected.get(name) != staged.get(name)
            ]
            reasons.append(ahead.copied.why_plain)
            rows_before.append(ahead.copied.rows_before)
            rows_in_stall.append(ahead.copied.rows_in_stall)
            plain.persist()
            ahead.persist()
    for job in (plain, ahead):
        job.checkpoints.close(final=False)
    return {
        "different": different,
        "kinds": kinds,
        "reasons": reasons,
        "before": rows_before,
        "in_stall": rows_in_stall,
    }


def _replicated(
    folder: Path, *, sparse: bool = True, epoch_batches: int = 10_000, window: int = 0,
    ids: Any = _ids_of, **settings: Any,
) -> RankJob:  # fmt: skip
    """A training under DistributedDataParallel; rank 0 stores the tables."""
    rank = dist.get_rank()
    seed_everything(7)
    model = DistributedDataParallel(_Model(sparse=sparse))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    reader: Any = _Epochs(rank, epoch_batches)
    if window:
        reader = Lookahead(reader, ids=ids, window=window)

    def train(batches: Iterator[Batch]) -> None:
        batch = next(batches)
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return RankJob(folder, model, optimizer, reader, train, **settings)


def _pair(folder: Path, **chosen: Any) -> tuple[RankJob, RankJob]:
    ahead = {"window": WINDOW, "ids": chosen.pop("ids", _ids_of)}
    return _replicated(folder / "plain", **chosen), _replicated(folder / "ahead", **chosen, **ahead)


def _slots(folder: Path, is_free_at: Callable[[int], bool]) -> dict[str, Any]:
    """On rank 0, which stores the tables, a slot is free after these batches only."""
    plain, ahead = _pair(folder)
    pipeline = pipeline_of(ahead.checkpoints)
    assert pipeline.ahead is not None
    is_free, stores_none = pipeline.ahead._is_free, dist.get_rank() > 0
    pipeline.ahead._is_free = lambda: (
        (stores_none or is_free_at(ahead.batches_done + 1)) and is_free()
    )
    return train_alike(plain, ahead, 3 * INTERVAL)


def _other_kind(folder: Path) -> dict[str, Any]:
    """At the second checkpoint, rank 1 wants a full, and rank 0 has a window for an increment."""
    plain, ahead = _pair(folder)
    for job in (plain, ahead) if dist.get_rank() else ():
        cutter = pipeline_of(job.checkpoints)._cutter
        cutter.link = partial(_full_in_the_middle, cutter.link)  # type: ignore[method-assign]
    if dist.get_rank():
        pipeline = pipeline_of(ahead.checkpoints)
        assert pipeline.ahead is not None
        pipeline.ahead._is_free = lambda: False
    return train_alike(plain, ahead, 3 * INTERVAL)


def _full_in_the_middle(link: Callable[..., Any], *, step: int, **arguments: Any) -> Any:
    own_link, tables = link(step=step, **arguments)
    return FULL if step == 2 * INTERVAL else own_link, tables


def _warned_of_seconds(folder: Path) -> dict[str, Any]:
    """Ranks whose interval is in seconds."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recpoint").addHandler(handler)
    job = _replicated(folder, window=WINDOW, interval_batches=None, interval_seconds=60.0)
    job.checkpoints.close(final=False)
    logging.getLogger("recpoint").removeHandler(handler)
    return {"lines": [line for line in lines if line.startswith("Lookahead")]}


def _changed_otherwise(folder: Path) -> dict[str, Any]:
    """Rows change that no batch looks up, and a checkpoint comes that nobody expected."""
    changed_ids = torch.arange(_USERS - 300, _USERS, 7)

    def change(job: RankJob, step: int) -> None:
        if step in (15, 35):
            with torch.no_grad():
                job.model.module.users.weight[changed_ids] += 1
            job.checkpoints.mark("users", changed_ids)

    return train_alike(*_pair(folder), 2 * INTERVAL, change)


def _left_alone(folder: Path) -> dict[str, Any]:
    """Rank 1 ends training before it asks; rank 0 has asked, and ends after it."""
    job = _replicated(folder, window=WINDOW)
    while job.batches_done < INTERVAL - WINDOW - 1:
        job.batch()
    if dist.get_rank() == 0:
        coming = job.checkpoints._parts.coming
        assert coming is not None
        coming.tell(job.batches_done, WINDOW)
        answer = coming._answers[-1].batches
    job.checkpoints.close(final=False)
    if dist.get_rank() == 1:
        return {}
    return {"error": str(answer.exception(60))}


def _refused(folder: Path) -> dict[str, Any]:
    """Only rank 1 looks ahead."""
    try:
        _replicated(folder, window=WINDOW * dist.get_rank())
    except SettingsError as error:
        return {"error": str(error)}
    return {}


_CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sparse": lambda folder: train_alike(*_pair(folder), 3 * INTERVAL),
    "dense": lambda folder: train_alike(*_pair(folder, sparse=False), 3 * INTERVAL),
    "cumulative": lambda folder: train_alike(*_pair(folder, policy="one_shot"), 3 * INTERVAL),
    "wrong": lambda folder: train_alike(
        *_pair(folder, ids=_wrong_ids(dist.get_rank())), 3 * INTERVAL
    ),
    # Rank 1 never has more than seven batches before it.
    "epochs": lambda folder: train_alike(
        *_pair(folder, epoch_batches=(50, 7)[dist.get_rank()]), 3 * INTERVAL
    ),
    "otherwise": _changed_otherwise,
    "no slot": lambda folder: _slots(folder, lambda step: step > 2 * INTERVAL),
    # Three batches after the ranks have told each other.
    "late slot": lambda folder: _slots(folder, lambda step: step % INTERVAL > 10),
    "other kind": _other_kind,
    "alone": _left_alone,
    "seconds": _warned_of_seconds,
    "refused": _refused,
}


def ahead_ranks(folder: str, rank: int, cases: list[str]) -> None:
    """Be one of two ranks; tell in the file `told-<rank>` what came of each case."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    results = {}
    for case in cases:
        results[case] = _CASES[case](Path(folder) / case)
    (Path(folder) / f"told-{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()
