"""Measures two trainers that share rows in embedding servers, TorchRec, and checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cache_peers import Batch
from benchmarks.report import Report, ratio, spread_of
from benchmarks.servers.network import Node, ShapedNetwork
from benchmarks.servers.nodes import Servers, cpu_seconds
from benchmarks.servers.torchrec import torchrec_trainers
from benchmarks.servers.trainers import Job, PeerForm, Played, Stall, Trainers, batches_of
from benchmarks.torchrec_tracker import INSTALL, installed
from benchmarks.workload import scratch
from recpoint.lookahead.shared_oracle import SharedOracle

__all__ = ["LINK_KEYS", "TRACE_KEYS", "RankSizes", "compare_ranks", "count_exchanges"]

_RANKS = 2
#: Figures that need the network, and those of the batches alone.
LINK_KEYS = (
    "samples_2_vs_1",
    "vs_torchrec",
    "critical_share",
    "stall_vs_plain",
    "whole_stall_vs_plain",
    "stall_ms",
    "plain_stall_ms",
    "coordination_ms",
)
TRACE_KEYS = ("next_batch_share", "exchanged_share")
_PEER = "planned cache"


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """How large everything is.

    Attributes:
        rows: most rows of a table.
        dim: values of a row.
        lines: samples of a batch of each trainer.
        capacity: slots of each trainer's cache.
        window: window of the Lookahead.
        servers: number of servers.
        delay_seconds: added to each call of a server.
        bytes_per_s: of each link, each way.
        warm: batches before the first round.
        batches: batches of a round, and between two checkpoints.
        rounds: of batches, and of checkpoints.
        wait: seconds of the timed wait.
    """

    rows: int = 400_000
    dim: int = 48
    lines: int = 2048
    capacity: int = 400_000
    window: int = 50
    servers: int = 2
    delay_seconds: float = 0.0002
    bytes_per_s: float = 1e9 / 8
    warm: int = 60
    batches: int = 12
    rounds: int = 3
    wait: float = 0.162


def count_exchanges(report: Report, sizes: RankSizes) -> None:
    """Count the rows that trainers exchange, and those of them that the next batch looks up."""
    count, half = sizes.warm, sizes.warm // 2
    job = Job(rows=sizes.rows, lines=sizes.lines, dim=sizes.dim, batches=count + 1)
    parts = [batches_of(job, rank) for rank in range(_RANKS)]
    tables = parts[0][0]
    exchanged = wanted_next = unique = 0
    for number, rows in enumerate(tables.values()):
        capacity = [min(rows, sizes.capacity)] * _RANKS
        oracle = SharedOracle(capacity, rank=0, rows=rows)
        ids = _ids([batches for _, batches in parts], number)
        for batch in range(count):
            exchange = oracle.plan(ids[batch]).exchange
            assert exchange is not None
            oracle.release(batch + 1)
            if batch < half:
                continue  # the caches are still filled
            exchanged_ids = torch.cat([rows.ids for rows in (*exchange.borrowed, *exchange.lent)])
            exchanged += len(exchanged_ids)
            wanted_next += int(torch.isin(exchanged_ids, torch.cat(ids[batch + 1])).sum())
            unique += len(torch.cat(ids[batch]).unique())
    report.figures["next_batch_share"] = wanted_next / exchanged
    report.figures["exchanged_share"] = exchanged / unique
    report.notes.append(
        f"{_RANKS} trainers: of {unique / (count - half):,.0f} unique rows of a batch, "
        f"{exchanged / unique:.1%} are exchanged; the next batch looks up "
        f"{wanted_next / exchanged:.1%} of those"
    )


def _ids(parts: Sequence[Sequence[Batch]], table: int) -> list[list[Tensor]]:
    """Return for each batch each rank's unique ids of a table."""
    return [
        [batch.sparse[table].unique() for batch in of_ranks]
        for of_ranks in zip(*parts, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Contender:
    """Trainers that take part in the rounds.

    Attributes:
        name: for people.
        trainers: the processes.
        nodes: of the trainers.
        servers: process ids of their servers.
        played: what each rank did in each round.
        servers_cpu: seconds of each round.
        moved: bytes on the links of all trainers, in each round.
    """

    name: str
    trainers: Trainers
    nodes: Sequence[Node]
    servers: Sequence[int] = ()
    played: list[list[Played]] = field(default_factory=list)
    servers_cpu: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    def play(self, sizes: RankSizes) -> None:
        """Play a round."""
        cpu, moved = cpu_seconds(self.servers), self._traffic()
        self.played.append(self.trainers.play(_PEER, sizes.batches, wait=sizes.wait))
        self.servers_cpu.append(cpu_seconds(self.servers) - cpu)
        self.moved.append(self._traffic() - moved)

    def _traffic(self) -> int:
        return sum(sum(node.traffic()) for node in self.nodes)

    @property
    def seconds(self) -> list[float]:
        """Of the slowest rank, for each round."""
        return [max(rank.seconds for rank in ranks) for ranks in self.played]


def compare_ranks(report: Report, network: ShapedNetwork, sizes: RankSizes) -> None:
    """Compare two trainers with one and with TorchRec, and their checkpoints with plain ones."""
    with ExitStack() as stack:
        nodes = network.add_nodes(1 + _RANKS + sizes.servers)
        one_node, two_nodes = nodes[:1], nodes[1 : 1 + _RANKS]
        servers = stack.enter_context(Servers(nodes[1 + _RANKS :], homes=2))
        for_one, for_two = (_job(sizes, access) for access in servers.access)
        single = _Contender(
            name="1 trainer",
            trainers=stack.enter_context(Trainers(for_one, one_node)),
            nodes=one_node,
            servers=servers.pids,
        )
        two = _Contender(
            name="2 trainers",
            trainers=stack.enter_context(Trainers(for_two, two_nodes)),
            nodes=two_nodes,
            servers=servers.pids,
        )
        contenders = [single, two]
        if installed():
            trainers = stack.enter_context(torchrec_trainers(for_two, two_nodes))
            contenders.append(
                _Contender(name="TorchRec, 2 trainers", trainers=trainers, nodes=two_nodes)
            )
        for contender in contenders:
            contender.trainers.play(_PEER, sizes.warm, wait=0)
        network.shape(sizes.bytes_per_s)
        for number in range(sizes.rounds):
            for contender in contenders[:: 1 if number % 2 == 0 else -1]:
                contender.play(sizes)
        for contender in contenders:
            _note(report, contender, sizes)
        report.put(
            "samples_2_vs_1", ratio([_RANKS * seconds for seconds in single.seconds], two.seconds)
        )
        if installed():
            report.put("vs_torchrec", ratio(contenders[-1].seconds, two.seconds))
        else:
            report.leave_out(["vs_torchrec"], f"torchrec is not installed: {INSTALL}")
        _put_reductions(report, two.played)
        for contender in contenders:
            if contender is not two:
                contender.trainers.close()
        folder = stack.enter_context(scratch())
        stalls = _checkpoints(
            two.trainers, sizes, folder / "servers", sizes.batches, network, at_servers=True
        )
        two.trainers.close()
        plain = stack.enter_context(Trainers(_job(sizes, {}), one_node))
        plain.play(_PEER, sizes.warm, wait=0)
        # It trains what two trainers train together.
        batches = _RANKS * sizes.batches
        plain_stalls = _checkpoints(
            plain, sizes, folder / "plain", batches, network, at_servers=False
        )
    _put_stalls(report, stalls, plain_stalls)


def _note(report: Report, contender: _Contender, sizes: RankSizes) -> None:
    """Add the times of a contender, and a line for people."""
    ranks, trained = len(contender.nodes), sizes.batches * len(contender.played)
    batch = report.timed(
        f"{contender.name}, a batch", [seconds / sizes.batches for seconds in contender.seconds]
    )
    used = sum(rank.cpu_seconds for played in contender.played for rank in played)
    report.notes.append(
        f"{contender.name}: {ranks * sizes.lines / batch:,.0f} samples a second; for a batch "
        f"{1e-6 * sum(contender.moved) / ranks / trained:,.2f} MB on the link of a trainer, CPU "
        "of all "
        f"trainers {1000 * used / trained:,.0f} ms, of all servers "
        f"{1000 * sum(contender.servers_cpu) / trained:,.0f} ms"
    )


def _put_reductions(report: Report, played: Sequence[Sequence[Played]]) -> None:
    reduced = sum(rank.reduced for ranks in played for rank in ranks)
    in_steps = sum(rank.reduced_in_steps for ranks in played for rank in ranks)
    report.figures["critical_share"] = in_steps / reduced


def _job(sizes: RankSizes, access: Mapping[str, Any]) -> Job:
    form = PeerForm(
        access=dict(access),
        window=sizes.window,
        capacity=sizes.capacity,
        # Steps of optimizers that recpoint does not know by itself are never made later.
        optimizer="Adagrad",
        is_filled=True,
    )
    played = _RANKS * sizes.batches * (2 * sizes.rounds + 2)
    return Job(
        rows=sizes.rows,
        lines=sizes.lines,
        dim=sizes.dim,
        batches=sizes.warm + played + sizes.window + 2,
        delay_seconds=sizes.delay_seconds,
        peers={_PEER: form},
    )


def _checkpoints(
    trainers: Trainers,
    sizes: RankSizes,
    folder: Path,
    batches: int,
    network: ShapedNetwork,
    *,
    at_servers: bool,
) -> list[list[Stall]]:
    """Take a full checkpoint without bounds on links, then increments with them."""
    trainers.begin_checkpoints(_PEER, folder, sizes.rounds + 1, at_servers=at_servers)
    network.shape(None)
    trainers.checkpoint()
    network.shape(sizes.bytes_per_s)
    checkpoints = []
    for _ in range(sizes.rounds):
        trainers.play(_PEER, batches, wait=0)
        checkpoints.append(trainers.checkpoint())
    return checkpoints


def _put_stalls(
    report: Report, stalls: Sequence[Sequence[Stall]], plain: Sequence[Sequence[Stall]]
) -> None:
    stall_ms = [max(rank.whole_ms for rank in ranks) for ranks in stalls]
    plain_ms = [max(rank.whole_ms for rank in ranks) for ranks in plain]
    # The part that is left waits for the other ranks, and agrees with them.
    settles = [max(rank.settle_ms for rank in ranks) for ranks in stalls]
    cuts = [max(rank.cut_ms for rank in ranks) for ranks in stalls]
    coordination_ms = [
        max(rank.whole_ms - rank.settle_ms - rank.cut_ms for rank in ranks) for ranks in stalls
    ]
    single_ms = [max(rank.settle_ms + rank.cut_ms for rank in ranks) for ranks in stalls]
    report.put("stall_ms", spread_of(stall_ms))
    report.put("plain_stall_ms", spread_of(plain_ms))
    report.put("stall_vs_plain", ratio(single_ms, plain_ms))
    report.put("whole_stall_vs_plain", ratio(stall_ms, plain_ms))
    report.put("coordination_ms", spread_of(coordination_ms))
    report.timed("stall, 2 trainers", [ms / 1e3 for ms in stall_ms])
    report.notes.append(
        f"checkpoints of 2 trainers: in the median stall of {statistics.median(stall_ms):,.1f} ms, "
        f"{statistics.median(settles):,.1f} ms prepare to send changed rows to the servers, and "
        f"{statistics.median(cuts):,.1f} ms are the slowest rank's own cut; in memory, a stall for "
        f"as many batches takes {statistics.median(plain_ms):,.1f} ms"
    )
