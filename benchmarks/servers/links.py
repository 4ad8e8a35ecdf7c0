"""Compares the peers of one trainer on links of two rates, and counts what a cache moves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.criteo_plan import criteo_reader, drawn, new_rows, plan_alone
from benchmarks.report import Report, Spread, ratio, spread_of
from benchmarks.servers.network import ShapedNetwork
from benchmarks.servers.nodes import Servers
from benchmarks.servers.rounds import DELAY_SECONDS, GBIT, MOST_CORES, Round, Scene
from benchmarks.servers.torch_rpc import rpc_trainer
from benchmarks.servers.trainers import Job, PeerForm, Trainers

__all__ = [
    "COLUMNS",
    "COMPARED_KEYS",
    "COUNTED_KEYS",
    "LinkSizes",
    "Shape",
    "compare_peers",
    "count_moved",
]

#: Figures that need the network, and figures of the plan alone; each key ends in a shape's name.
COMPARED_KEYS = (
    "vs_no_cache",
    "vs_bound",
    "vs_no_cache_best",
    "vs_ceiling_best",
    "vs_lru",
    "vs_torch_rpc",
    "vs_torch_rpc_best",
    "moved_wire",
)
_MOVED_KEYS = ("moved_2k", "moved_16k")
COUNTED_KEYS = (*_MOVED_KEYS, *(f"{key}_least" for key in _MOVED_KEYS))

#: Headings of the table for people.
COLUMNS = (
    "link",
    "peer",
    "samples/s",
    "ms",
    "own ms",
    "net ms",
    "MB",
    "trainer CPU ms",
    "servers CPU ms",
    "cores",
)

_OURS, _LRU, _NONE = "planned cache", "LRU cache", "no cache"
_RPC = "torch RPC"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables and caches.

    Attributes:
        rows: most rows of a table.
        dim: values of a row.
        capacity: slots of a cache.
        warm: batches before the first round, after which rows leave.
    """

    rows: int
    dim: int
    capacity: int
    warm: int


@dataclass(frozen=True, kw_only=True)
class LinkSizes:
    """How large everything is.

    Attributes:
        servers: number of servers.
        lines: samples of a batch.
        window: window of the Lookahead.
        batches: batches of a round.
        best_batches: the same on the slow link.
        rounds: number of rounds.
        wait: seconds of the timed wait.
        plan_capacity: slots of the plan alone.
        plan_lines: samples of a batch of the plan alone.
        plan_batches: number of these batches.
    """

    servers: int = 2
    lines: int = 2048
    window: int = 200
    batches: int = 12
    best_batches: int = 6
    rounds: int = 3
    wait: float = 0.162
    plan_capacity: int = 4_000_000
    plan_lines: tuple[int, int] = (2048, 16_384)
    plan_batches: tuple[int, int] = (600, 300)


def count_moved(report: Report, name: str, shape: Shape, sizes: LinkSizes) -> None:
    """Count rows that are moved, on the plan alone."""
    for key, lines, count in zip(_MOVED_KEYS, sizes.plan_lines, sizes.plan_batches, strict=True):
        reader = criteo_reader(lines=lines, rows=shape.rows)
        batches = [batch.sparse for batch in drawn(reader, range(count))]
        plan = plan_alone(reader.tables, batches, capacity=sizes.plan_capacity, window=sizes.window)
        # The first half fills the cache.
        half = count // 2
        tables = [[ids.unique() for ids in table] for table in zip(*batches, strict=True)]
        unique = sum(len(ids) for table in tables for ids in table[half:])
        new = sum(new_rows(table, half) for table in tables)
        fetched, written = sum(plan.fetched[half:]), sum(plan.written[half:])
        # Each row that comes leaves later, when the cache is full.
        report.figures[f"{key}_{name}"] = fetched / unique
        report.figures[f"{key}_least_{name}"] = new / unique
        report.notes.append(
            f"{key}_{name}: {sum(reader.tables.values()):,} rows; of {unique / (count - half):,.0f}"
            f" rows a batch, {fetched / unique:.4f} come and {written / unique:.4f} leave; "
            f"{new / unique:.4f} come for the first time, so no cache moves fewer"
        )


def compare_peers(
    report: Report, network: ShapedNetwork, name: str, shape: Shape, sizes: LinkSizes
) -> None:
    """Compare all peers on tables of one shape, at 1 Gbit/s and on a slow link.

    Raises:
        NoNetwork: a node cannot be made.
    """
    with ExitStack() as stack:
        nodes = network.add_nodes(1 + sizes.servers)
        servers = stack.enter_context(Servers(nodes[1:], homes=3))
        played = sizes.rounds * (sizes.batches + sizes.best_batches)
        windows = (sizes.window, 0, 0)
        capacities = (shape.capacity, shape.capacity, 0)
        job = Job(
            rows=shape.rows,
            lines=sizes.lines,
            dim=shape.dim,
            batches=shape.warm + played + sizes.window + 2,
            delay_seconds=DELAY_SECONDS,
            peers={
                peer: PeerForm(access=access, window=window, capacity=capacity, is_filled=True)
                for peer, access, window, capacity in zip(
                    (_OURS, _LRU, _NONE), servers.access, windows, capacities, strict=True
                )
            },
        )
        scene = Scene(nodes[0])
        trainers = stack.enter_context(Trainers(job, nodes[:1]))
        scene.add(job.peers, trainers, servers.pids)
        by_rpc = stack.enter_context(rpc_trainer(replace(job, peers={}, batches=played + 2), nodes))
        scene.add([_RPC], by_rpc, by_rpc.pids[1:])
        for peer in (*job.peers, _RPC):
            scene.play(peer, shape.warm if peer in (_OURS, _LRU) else 2, 0)
        network.shape(GBIT)
        fast = scene.rounds(sizes.rounds, sizes.batches, sizes.wait)
        if not any(peer_round.played.written for peer_round in fast[_OURS]):
            raise RuntimeError("no row has left the cache in the rounds")
        # A batch of the planned cache takes a link of this rate just as long as the compute.
        best = (
            statistics.median(peer_round.up + peer_round.down for peer_round in fast[_OURS])
            / sizes.batches
        )
        best /= sizes.wait
        network.shape(best)
        slow = scene.rounds(sizes.rounds, sizes.best_batches, sizes.wait)
    _add_rows(report, f"{name}, 1 Gbit/s", fast, sizes.batches, sizes)
    _add_rows(report, f"{name}, {best * 8e-6:,.0f} Mbit/s", slow, sizes.best_batches, sizes)
    _put_all(report, name, fast, slow)


def _put_all(
    report: Report,
    name: str,
    fast: Mapping[str, Sequence[Round]],
    slow: Mapping[str, Sequence[Round]],
) -> None:
    def over(rounds: Mapping[str, Sequence[Round]], peer: str) -> Spread:
        return ratio(
            [peer_round.seconds for peer_round in rounds[peer]],
            [peer_round.seconds for peer_round in rounds[_OURS]],
        )

    moved = {link_speed: _moved(rounds) for link_speed, rounds in (("fast", fast), ("slow", slow))}
    report.put(f"moved_wire_{name}", spread_of(moved["slow"]))
    report.put(f"vs_no_cache_{name}", over(fast, _NONE))
    bounds = [
        none.seconds / max(none.played.step_seconds, part * none.net_seconds)
        for none, part in zip(fast[_NONE], moved["fast"], strict=True)
    ]
    speed_ups = [
        none.seconds / best.seconds for none, best in zip(fast[_NONE], fast[_OURS], strict=True)
    ]
    report.put(f"vs_bound_{name}", ratio(speed_ups, bounds))
    report.put(f"vs_no_cache_best_{name}", over(slow, _NONE))
    report.put(f"vs_lru_{name}", over(slow, _LRU))
    report.put(f"vs_torch_rpc_{name}", over(fast, _RPC))
    report.put(f"vs_torch_rpc_best_{name}", over(slow, _RPC))
    ceilings = [1 + 1 / part for part in moved["slow"]]
    speed_ups = [
        none.seconds / best.seconds for none, best in zip(slow[_NONE], slow[_OURS], strict=True)
    ]
    report.put(f"vs_ceiling_best_{name}", ratio(speed_ups, ceilings))
    share = statistics.median(
        peer_round.net_seconds / peer_round.seconds for peer_round in slow[_NONE]
    )
    report.notes.append(
        f"{name}: without a cache, {share:.0%} of the time on the slow link is spent on the "
        f"network; the ceiling there is {statistics.median(ceilings):.2f} (the paper reports up to "
        "5.6)"
    )


def _moved(rounds: Mapping[str, Sequence[Round]]) -> list[float]:
    """Return for each round the bytes of the planned cache, of those without a cache."""
    return [
        (own_round.up + own_round.down) / (none.up + none.down)
        for own_round, none in zip(rounds[_OURS], rounds[_NONE], strict=True)
    ]


def _add_rows(
    report: Report,
    link: str,
    rounds: Mapping[str, Sequence[Round]],
    batches: int,
    sizes: LinkSizes,
) -> None:
    """Add a row of the table for each peer, and its times."""
    for peer, peer_rounds in rounds.items():
        seconds = report.timed(
            f"{link}: {peer}, a batch", [peer_round.seconds / batches for peer_round in peer_rounds]
        )

        def middle(values: Sequence[float], per: float = batches) -> float:
            return statistics.median(values) / per

        cores = middle([peer_round.cores for peer_round in peer_rounds], 1)
        report.rows.append(
            (
                link,
                peer,
                sizes.lines / seconds,
                1000 * seconds,
                1000 * middle([peer_round.played.own_seconds for peer_round in peer_rounds]),
                1000 * middle([peer_round.net_seconds for peer_round in peer_rounds]),
                1e-6 * middle([peer_round.up + peer_round.down for peer_round in peer_rounds]),
                1000 * middle([peer_round.played.cpu_seconds for peer_round in peer_rounds]),
                1000 * middle([peer_round.servers_cpu for peer_round in peer_rounds]),
                f"{cores:.0%}",
            )
        )
        if cores > MOST_CORES:
            report.notes.append(
                f"{link}: {peer}: all roles used {cores:.0%} of the cores, more than "
                f"{MOST_CORES:.0%}"
            )
