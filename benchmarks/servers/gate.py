"""Compares training on embedding servers with training in memory, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.cache_peers import (
    INITIAL,
    OPTIMIZERS,
    AllInMemory,
    Batch,
    MakeOptimizer,
    same_bits,
    state_in_memory,
)
from benchmarks.servers.nodes import Servers, ThisMachine
from benchmarks.servers.trainers import Job, PeerForm, Trainers, batches_of
from recpoint.embeddings import fill

__all__ = ["CAPACITIES", "SMALL_JOB", "Together", "in_memory", "require_same_results"]

#: What is trained to compare results; the first tables are large and small.
SMALL_JOB = Job(rows=200, tables=8, lines=16, dim=4, batches=60)
#: Little more than what one batch may need, for one trainer and for several: rows leave.
CAPACITIES = {1: 220, 2: 330, 4: 520}
_WINDOW = 7
_SERVERS = 2
_UNCACHED = "no cache"


def require_same_results(ranks: int, batches: int) -> int:
    """Train with so many ranks, and compare losses, rows and row states.

    Args:
        ranks: number of trainers.
        batches: how many each trains.

    Returns:
        How many trainings were compared.

    Raises:
        RuntimeError: something differs, or a lookup missed.
    """
    machine = ThisMachine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpoint-servers-")))
        names = [*OPTIMIZERS, *([_UNCACHED] if ranks == 1 else [])]
        servers = stack.enter_context(Servers([machine] * _SERVERS, homes=len(names)))
        peers = {}
        for name, access in zip(names, servers.access, strict=True):
            is_cached = name != _UNCACHED
            peers[name] = PeerForm(
                access=access,
                window=_WINDOW,
                capacity=CAPACITIES[ranks] if is_cached else 0,
                optimizer=name if is_cached else "row-wise Adagrad",
            )
        job = replace(SMALL_JOB, peers=peers)
        trainers = stack.enter_context(Trainers(job, [machine] * ranks))
        for name, form in peers.items():
            expected = in_memory(job, OPTIMIZERS[form.optimizer], ranks)
            losses = expected.play_all(batches)
            played = trainers.play(name, batches, wait=0)
            is_same = [part.losses for part in played] == losses
            if form.capacity:
                trainers.save(name, folder / "state.pt")
                state = torch.load(folder / "state.pt")
                is_same = is_same and same_bits(state, state_in_memory(expected))
            missed = sum(part.misses for part in played)
            if not is_same or missed:
                raise RuntimeError(
                    f"{ranks} trainers, {name}: {'equal' if is_same else 'other'} results than in "
                    f"memory, {missed} lookups missed"
                )
    return len(peers)


def in_memory(job: Job, make: MakeOptimizer, ranks: int) -> Together:
    """Return plain tables that are trained as so many ranks would train them."""
    parts = [batches_of(job, rank) for rank in range(ranks)]
    return Together(parts[0][0], [batches for _, batches in parts], make, dim=job.dim)


class Together(AllInMemory):
    """Plain tables, trained with the batches of several ranks as these would train them.

    Args:
        rows: name of a table -> its rows.
        batches: of each rank.
        make: makes the optimizer of the tables.
        dim: values of a row.
    """

    def __init__(
        self,
        rows: dict[str, int],
        batches: Sequence[Sequence[Batch]],
        make: MakeOptimizer,
        *,
        dim: int,
    ) -> None:
        super().__init__(rows, batches[0], lambda model: fill(model, INITIAL), make, dim=dim)
        self._parts = batches

    def play_all(self, batches: int) -> list[list[float]]:
        """Train the first batches of all ranks; return each rank's losses."""
        if len(self._parts) == 1:
            return [self.play(batches, wait=0)]
        losses: list[list[float]] = [[] for _ in self._parts]
        for number in range(batches):
            gradients = []
            for part, part_losses in zip(self._parts, losses, strict=True):
                self.model.zero_grad()
                batch = part[number]
                loss = nn.functional.binary_cross_entropy_with_logits(
                    self.model(batch.sparse), batch.label
                )
                loss.backward()
                part_losses.append(loss.item())
                gradients.append([_given(parameter) for parameter in self.model.parameters()])
            for parameter, of_ranks in zip(
                self.model.parameters(), zip(*gradients, strict=True), strict=True
            ):
                parameter.grad = _added(of_ranks)
            self.trained.of_tables.step()
            self.trained.of_top.step()
        return losses


def _given(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _added(gradients: Sequence[Tensor]) -> Tensor:
    """Add gradients in order, each divided by their number."""
    count = len(gradients)
    if not gradients[0].is_sparse:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            total += gradient / count
        return total
    summed = [gradient.coalesce() for gradient in gradients]
    ids = torch.cat([gradient.indices()[0] for gradient in summed]).unique()
    values = torch.zeros(len(ids), *gradients[0].shape[1:], dtype=torch.float32, device="cpu")
    for gradient in summed:
        values.index_add_(
            0, torch.searchsorted(ids, gradient.indices()[0]), gradient.values() / count
        )
    return torch.sparse_coo_tensor(ids[None], values, gradients[0].shape, is_coalesced=True)
