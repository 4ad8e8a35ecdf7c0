"""Compares jobs that lose embedding servers with training in memory, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cache_peers import OPTIMIZERS, same_bits, state_in_memory
from benchmarks.servers.gate import CAPACITIES, SMALL_JOB, in_memory
from benchmarks.servers.nodes import Servers, ThisMachine
from benchmarks.servers.trainers import PeerForm, Trainers

__all__ = ["SERVERS", "require_recovered"]

SERVERS = 5
_WINDOW = 7
#: Of the servers, those that are killed; a form of stripe with one parity loses the first of them.
_KILLED = (1, 3)
#: Seconds of a batch, so that servers are lost and recovered while batches are trained.
_WAIT_SECONDS = 0.02


def require_recovered(
    ranks: int, form: tuple[int, int], optimizers: Sequence[str], batches: int
) -> int:
    """Train, kill servers in the middle, train on, and compare losses, row and row states.

    The first third of the batches is trained before servers are killed with SIGKILL, as many
    servers as parity makes up for. The second third is trained at once, the last third when all
    rows have parity again.

    Args:
        ranks: number of trainers.
        form: rows and parity rows of a stripe.
        optimizers: names of OPTIMIZERS.
        batches: how many each rank trains.

    Returns:
        How many trainings were compared.

    Raises:
        RuntimeError: something differs, or a lookup missed.
    """
    machine = ThisMachine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpoint-parity-")))
        servers = Servers([machine] * SERVERS, homes=len(optimizers), is_revived=True)
        stack.enter_context(servers)
        peers = {
            name: PeerForm(
                access=access,
                parity=form,
                window=_WINDOW,
                capacity=CAPACITIES[ranks],
                optimizer=name,
            )
            for name, access in zip(optimizers, servers.access, strict=True)
        }
        job = replace(SMALL_JOB, peers=peers)
        trainers = stack.enter_context(Trainers(job, [machine] * ranks))
        for name in optimizers:
            expected = in_memory(job, OPTIMIZERS[name], ranks)
            losses = expected.play_all(batches)
            third = batches // 3
            played_before = trainers.play(name, third, wait=0)
            amid = trainers.recover(
                name, _KILLED[: form[1]], third, wait=_WAIT_SECONDS, is_until_whole=False
            )
            played_after = trainers.play(name, batches - 2 * third, wait=0)
            trainers.save(name, folder / "state.pt")
            found_losses = [
                first_part.losses + two.losses + three.losses
                for first_part, two, three in zip(played_before, amid, played_after, strict=True)
            ]
            states = torch.load(folder / "state.pt")
            is_same = found_losses == losses and same_bits(states, state_in_memory(expected))
            missed = sum(played.misses for played in played_after)
            if not is_same or missed:
                raise RuntimeError(
                    f"{ranks} trainers, {name}, {form}: {'equal' if is_same else 'other'} results "
                    f"than in memory after a recovery, {missed} lookups missed"
                )
    return len(optimizers)
