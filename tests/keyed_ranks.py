"""Trains a keyed table on several ranks, which share each batch, and tells what they have then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recpoint import LeastUsed, Lookahead, Seen
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.keyed_rows import KEY
from recpoint.catalog.staging.area import StagedRun
from recpoint.embeddings import local, servers
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.parity.stripes import Parity
from recpoint.errors import RanksMissing, SettingsError
from tests.keyed_training import KeyedReader, KeyedTraining, arrays_of, ids_of, keyed_checkpointer
from tests.polling import until
from tests.training_builder import Place

__all__ = ["Life", "keyed_ranks", "trained"]

#: Keys of a batch of all ranks together.
_BATCH = 12


class Life(NamedTuple):
    """One life of a run.

    Attributes:
        folder: of the run.
        last: batches after which it ends, with a checkpoint.
        sparse: whether gradients are sparse, which DistributedDataParallel cannot average.
        window: batches that a `Lookahead` reads ahead; None: there is none.
        differs: the second rank does something else than the first.
        capacity_rows: slots of the table.
        cached_rows: slots of a cache whose home all ranks share; 0: there is none.
        dies: the last rank kills itself after so many batches; 0: it does not.
        at_servers: embedding servers stage their rows of checkpoints.
        kills: rank 0 kills an embedding server after so many batches, whose rows come back from
            parity; 0: it does not, and there is no parity.
    """

    folder: str
    last: int
    sparse: bool = False
    window: int | None = None
    differs: bool = False
    capacity_rows: int = 14
    cached_rows: int = 0
    dies: int = 0
    at_servers: bool = False
    kills: int = 0


class RankReader(KeyedReader):
    """Reads the part of each batch that is this rank's."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__()
        self._part = slice(rank, _BATCH, count)

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([self.seed, self.position])
        keys = generator.integers(0, self.spread, _BATCH) + self.position // 2
        target = generator.random(_BATCH)
        self.position += 1
        return torch.from_numpy(keys[self._part]), torch.from_numpy(target[self._part]).float()

    def load_state_dicts(self, states: Sequence[Any], rank: int, ranks: int) -> None:
        """Go on where another number of ranks stopped: all had parts of the same batches."""
        self.load_state_dict(states[0])


def trained(life: Life, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Train to the end of a life, and return what this rank has then."""
    if not life.cached_rows:
        return _trained(life, rank, count, None)
    if count == 1:
        return _trained(life, rank, count, local())
    form = Parity(data=2, parity=1) if life.kills else None
    with servers(count=3 if life.kills else 2, parity=form) as home:
        return _trained(life, rank, count, home)


def _trained(life: Life, rank: int, count: int, home: Any) -> dict[str, Any]:
    rules: dict[str, Any] = {"evict": LeastUsed(), "admit": Seen(times=2)}
    training: Any = KeyedTraining(
        life.capacity_rows,
        sparse=life.sparse,
        home=home,
        cached_rows={"users": life.cached_rows, "items": 9},
        **rules,
    )
    model: Any = training.model
    reader: Any = RankReader(rank, count)
    if life.window is not None:
        reader = Lookahead(reader, model, ids=ids_of, window=life.window)
    if count > 1:
        training.model = DistributedDataParallel(model)
    training.reader = reader
    place = Place(f"{life.folder}/run", Path(life.folder) / "staging")
    settings: dict[str, Any] = {
        "on_error": "raise",
        "interval_batches": 1000,
        "close_seconds": 60.0,
        "drain_seconds": 60.0,
        "ranks_seconds": 90.0,
        "at_servers": life.at_servers,
    }
    ckpt = keyed_checkpointer(training, place, **settings)
    ckpt.restore()
    if life.differs or (life.sparse and home is None):
        ckpt.close(final=False)
        return {"errors": _refusals(training, rank) if life.differs else [_refusal(training.batch)]}
    for keys, target in ckpt.batches(total=life.last):
        nn.functional.mse_loss(training.model(keys), target).backward()
        training.step()
        if ckpt.batches_done + 1 == life.kills and rank == 0:
            os.kill(home.greetings[0].pid, signal.SIGKILL)
        if ckpt.batches_done + 1 == life.dies and rank == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    assert ckpt.checkpoint()
    _persist(place, count)
    until(lambda: ckpt.stats.committed == 1)
    ckpt.close(final=False)
    training.model = model
    slots = training.model.users.slots
    state = slots.state_dict()
    arrays = arrays_of(training)
    cache = cache_of(model)
    if cache is not None:
        cache.close()
    return {
        "row_states": dict(slots.row_states),
        "arrays": arrays,
        "counts": training.model.users.counts,
        "sketch": state["admission"]["counts"],
        "steps": state["steps"],
        "top": training.model.top.weight.detach(),
    }


def _refusals(training: Any, rank: int) -> list[str]:
    """Return why lookups are refused on ranks that differ, in several ways."""
    keys, users = torch.arange(5), training.model.module.users
    slots = users.slots
    texts = [_refusal(lambda: _joined_batch(training))]
    users(keys)
    users(keys)  # `Seen(times=2)`
    slots.steps += rank
    texts.append(_refusal(lambda: users(keys)))
    slots.steps -= rank
    slots.delete(keys[:rank])
    texts.append(_refusal(lambda: users(keys)))
    slots.delete(keys[:1])
    users(keys)
    if rank:  # as if it had loaded the state of the same step of another run
        slots.row_states[KEY][2] += 100
    slots.load_state_dict(slots.state_dict())
    texts.append(_refusal(lambda: users(keys)))
    return texts


def _joined_batch(training: Any) -> None:
    with training.model.join():
        training.batch()


def _refusal(lookup: Callable[[], object]) -> str:
    with pytest.raises(SettingsError) as refused:
        lookup()
    return str(refused.value)


def _persist(place: Place, count: int) -> None:
    """Persist the jobs of all ranks."""
    if count == 1:
        until(lambda: place.persist_all() > 0)
        return
    dist.barrier()
    if dist.get_rank() == 0:
        staged = StagedRun.of(place.staging, place.run)
        until(lambda: len(staged.staged_jobs()) == count)
        while paths := staged.staged_jobs():
            for path in paths:
                with suppress(RanksMissing):  # until the last part
                    persist.persist_job(path)
    dist.barrier()


def keyed_ranks(folder: str, rank: int, count: int, lives: list[Life]) -> None:
    """Be one of the ranks; tell in the file `told-<rank>` what came of each life."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=count)
    torch.save([trained(life, rank, count) for life in lives], Path(folder) / f"told-{rank}")
    dist.destroy_process_group()
