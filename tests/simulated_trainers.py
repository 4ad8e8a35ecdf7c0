"""Runs a function on ranks that are threads of this process and share the rows of one model."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint import Lookahead
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.install import put_in_cache
from recpoint.embeddings.cache.shared import shared_cache
from recpoint.embeddings.home.channel import Channel
from recpoint.embeddings.server.home import ServedHome
from recpoint.trainer_plugin.state import rng
from tests.cached_training import INITIAL, Batch, Batches, uncached_model
from tests.several_trainers import added, loss_of, present
from tests.simulated_ranks import Network, Servers

__all__ = ["Trainer", "on_threads", "ranks_that_draw_in_turns"]

T = TypeVar("T")

_LONGEST_SECONDS: Final = 60.0


@dataclass(kw_only=True)
class Trainer:
    """One rank.

    Attributes:
        rank, ranks: this rank, and how many there are.
        model: the model, whose tables are cached.
        cache: its cache.
        channel: to the other ranks, for what a test exchanges.
    """

    rank: int
    ranks: int
    model: Any
    cache: Cache
    channel: Channel

    def reader(
        self, *, window: int = 5, length: int = 12, seed: int = 0, **settings: Any
    ) -> Lookahead:
        """Return a reader of this rank's batches; see `Batches`."""
        batches = Batches(length, seed=seed + self.rank)
        return Lookahead(batches, self.model, window=window, **settings)

    def backward(self, batch: Batch, *, scale: float = 1.0) -> float:
        """Compute the gradients of a batch, and average those of the dense layer; the loss."""
        loss = loss_of(self.model, batch)
        (loss * scale).backward()
        for parameter in self.model.top.parameters():
            parameter.grad = self.averaged(present(parameter.grad))
        return loss.item()

    def averaged(self, gradient: Tensor) -> Tensor:
        """Average a tensor over all ranks."""
        gathered = self.channel.gather(gradient.contiguous().view(-1).view(torch.uint8))
        return added(
            [tensor.clone().view(gradient.dtype).view(gradient.shape) for tensor in gathered]
        )

    def train(
        self,
        reader: Lookahead,
        optimizers: Sequence[Optimizer],
        batches: int,
        *,
        after: Callable[[int], None] = lambda _: None,
    ) -> list[float]:
        """Train so many batches, `after` each of which a function is called; the losses."""
        losses: list[float] = []
        while len(losses) < batches:
            for batch in reader:
                losses.append(self.backward(batch))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                after(len(losses))
                if len(losses) == batches:
                    break
        return losses


def on_threads(
    act: Callable[[Trainer], T],
    *,
    ranks: int = 2,
    slots: dict[str, int] | None = None,
    new_model: Callable[..., nn.Module] = uncached_model,
    **form: Any,
) -> list[T | BaseException]:
    """Run `act` on each rank; return what each has returned or raised, in rank order.

    Args:
        act: is given the rank.
        ranks: number of ranks.
        slots: slots of each table.
        new_model: makes the model of a rank.
        form: what `new_model` is given; by default, as for `Model`.
    """
    network = Network(ranks, Servers(1, seed=0, repeats=0.0))
    results: list[T | BaseException] = [AssertionError("it has not ended")] * ranks
    models = [new_model(**form) for _ in range(ranks)]
    counts = slots or {"users": 80, "items": 90}

    def run(rank: int) -> None:
        try:
            results[rank] = _run(network, rank, models[rank], counts, act)
        except BaseException as error:
            results[rank] = error
        finally:
            network.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    with rng.untouched(), ranks_that_draw_in_turns():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LONGEST_SECONDS)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(2)
        raise AssertionError("a rank hangs")
    return results


def _run(
    network: Network,
    rank: int,
    model: nn.Module,
    slots: dict[str, int],
    act: Callable[[Trainer], T],
) -> T:
    channel = network.channel(rank, "job")

    def home_of(owner: int | None) -> ServedHome:
        return ServedHome(
            [network.transport(rank, 0)], owner=owner, trainer=rank, trainers=network.count
        )

    home = home_of(None) if rank == 0 else None
    owner_tensor = torch.tensor([0 if home is None else home.owner], dtype=torch.int64)
    owner = int(channel.gather(owner_tensor.view(torch.uint8))[0].clone().view(torch.int64))
    with home_of(owner) if home is None else home as home:
        cache = put_in_cache(
            model,
            slots,
            lambda tables: shared_cache(
                home, tables, open_channel=lambda name: network.channel(rank, name)
            ),
            initial=INITIAL,
        )
        try:
            return act(
                Trainer(rank=rank, ranks=network.count, model=model, cache=cache, channel=channel)
            )
        finally:
            cache.close()


@contextmanager
def ranks_that_draw_in_turns() -> Iterator[None]:
    """Ranks are threads here, which share the generators that each process has for itself.

    A reader puts its own generators in their place while it reads, which takes no other rank.
    """
    lock = threading.RLock()

    def in_turns(call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*given: Any) -> Any:
            with lock:
                return call(*given)

        return locked

    with pytest.MonkeyPatch.context() as patched:
        for place, name in (
            (rng, "capture_cpu"),
            (rng.OwnGenerators, "__init__"),
            (rng.OwnGenerators, "run"),
        ):
            patched.setattr(place, name, in_turns(getattr(place, name)))
        yield
