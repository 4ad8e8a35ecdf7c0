"""Compares one trainer on servers with parity and without, and has it lose servers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.parity.gate import SERVERS
from benchmarks.report import Report, Spread, ratio, spread_of
from benchmarks.servers.network import ShapedNetwork
from benchmarks.servers.nodes import Servers, cpu_seconds_by_pid
from benchmarks.servers.rounds import DELAY_SECONDS, GBIT, MOST_CORES, Round, Scene
from benchmarks.servers.trainers import Job, PeerForm, Recovered, Trainers, batches_of, tables_of

__all__ = ["COLUMNS", "FORMS", "KEYS", "Measured", "Sizes", "compare"]

#: Rows and parity rows of a stripe; the first is what the keys without a form are about.
FORMS = {"4+1": (4, 1), "2+2": (2, 2)}
_PLAIN = "no parity"

_OF_FORMS = ("steady_vs_plain", "recovering_vs_plain", "whole_seconds")
KEYS = (*_OF_FORMS, *(f"{key}_2_2" for key in _OF_FORMS), "differences_vs_updates")

#: Headings of the table for people.
COLUMNS = (
    "what",
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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is.

    Attributes:
        rows: most rows of a table.
        dim: values of a row.
        capacity: slots of a cache.
        warm: batches before the first round, after which rows leave.
        lines: samples of a batch.
        window: window of the Lookahead.
        batches: batches of a round.
        rounds: number of rounds.
        losses: how often servers of each form are killed.
        most_batches: that are trained in one recovery.
        wait: seconds of the timed wait.
    """

    rows: int = 1_900_000
    dim: int = 48
    capacity: int = 400_000
    warm: int = 110
    lines: int = 2048
    window: int = 100
    batches: int = 12
    rounds: int = 3
    losses: int = 2
    most_batches: int = 400
    wait: float = 0.162

    @property
    def record_bytes(self) -> int:
        """Bytes of a row with the state of row-wise Adagrad."""
        return 4 * self.dim + 4

    @property
    def drawn(self) -> int:
        """Batches that the longest peer may train and look ahead to."""
        rounds = (self.rounds + self.losses) * self.batches
        return self.warm + rounds + self.losses * self.most_batches + self.window + 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates of stripes of 4 and 1, for the simulation.

    Attributes:
        step_seconds: of a batch, without parity.
        steady: throughput with parity over without.
        recovering: throughput while a server is recovered, over that without parity.
        rebuilt_bytes: bytes of rows and parity rows of a lost server, recovered in a second. The
            start of its successor counts.
    """

    step_seconds: float
    steady: float
    recovering: float
    rebuilt_bytes: float


def compare(report: Report, network: ShapedNetwork, sizes: Sizes) -> Measured:
    """Measure steady rounds of all peers in turns, then recoveries, each beside a plain round.

    Raises:
        NoNetwork: a node cannot be made.
    """
    with ExitStack() as stack:
        nodes = network.add_nodes(1 + SERVERS)
        forms: dict[str, tuple[int, int] | None] = {_PLAIN: None, **FORMS}
        servers = {
            name: stack.enter_context(
                Servers(
                    nodes[1:], homes=1, delay_seconds=DELAY_SECONDS, is_revived=form is not None
                )
            )
            for name, form in forms.items()
        }
        job = Job(
            rows=sizes.rows,
            lines=sizes.lines,
            dim=sizes.dim,
            batches=sizes.drawn,
            delay_seconds=DELAY_SECONDS,
            peers={
                name: PeerForm(
                    access=servers[name].access[0],
                    parity=form,
                    window=sizes.window,
                    capacity=sizes.capacity,
                    is_filled=True,
                )
                for name, form in forms.items()
            },
        )
        trainers = stack.enter_context(Trainers(job, nodes[:1]))
        scene = Scene(nodes[0])
        for name in forms:
            scene.add([name], trainers, servers[name].pids)
            scene.play(name, sizes.warm, 0)
        network.shape(GBIT)
        rows_before = servers["4+1"].difference_rows()
        steady = scene.rounds(sizes.rounds, sizes.batches, sizes.wait)
        sent = servers["4+1"].difference_rows() - rows_before
        if not sent:
            raise RuntimeError("no row has left the cache in the rounds")
        _put_differences(report, job, sizes, sent)
        lost = _lose(scene, trainers, servers, sizes)
    for name, rounds in steady.items():
        _add_row(report, "steady", name, rounds, sizes)
    return _put_all(report, job, steady, lost, sizes)


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """A recovery, and the round without parity before it.

    Attributes:
        plain: the round.
        recovered: what the trainer did.
        servers_cpu: seconds of the servers that live at the end.
    """

    plain: Round
    recovered: Recovered
    servers_cpu: float


def _lose(
    scene: Scene, trainers: Trainers, servers: Mapping[str, Servers], sizes: Sizes
) -> dict[str, list[_Loss]]:
    """Kill as many servers as parity makes up for, several times for each form."""
    losses: dict[str, list[_Loss]] = {name: [] for name in FORMS}
    for number in range(sizes.losses):
        for name, (_, parity) in FORMS.items():
            plain = scene.play(_PLAIN, sizes.batches, sizes.wait)
            killed = [(number + 2 * member) % SERVERS for member in range(parity)]
            cpu_before = cpu_seconds_by_pid(servers[name].pids)
            (recovered,) = trainers.recover(
                name, killed, sizes.most_batches, wait=sizes.wait, is_until_whole=True
            )
            cpu_after = cpu_seconds_by_pid(servers[name].pids)
            used = sum(seconds - cpu_before.get(pid, 0.0) for pid, seconds in cpu_after.items())
            losses[name].append(_Loss(plain=plain, recovered=recovered, servers_cpu=used))
    return losses


def _put_differences(report: Report, job: Job, sizes: Sizes, sent: int) -> None:
    """Add rows of differences that servers have sent, of the rows that steps have changed."""
    _, batches = batches_of(job, 0)
    first, count = sizes.warm, sizes.rounds * sizes.batches
    updates = sum(
        len(ids.unique()) for batch in batches[first : first + count] for ids in batch.sparse
    )
    report.figures["differences_vs_updates"] = sent / updates
    report.notes.append(
        f"4+1: a batch changes {updates / count:,.0f} rows; servers send {sent / count:,.0f} "
        "differences for it"
    )


def _add_row(report: Report, label: str, peer: str, rounds: Sequence[Round], sizes: Sizes) -> None:
    batches = sizes.batches
    seconds = report.timed(
        f"{label}: {peer}, a batch", [played.seconds / batches for played in rounds]
    )

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values) / batches

    cores = statistics.median(played.cores for played in rounds)
    report.rows.append(
        (
            label,
            peer,
            sizes.lines / seconds,
            1000 * seconds,
            1000 * middle([played.played.own_seconds for played in rounds]),
            1000 * middle([played.net_seconds for played in rounds]),
            1e-6 * middle([played.up + played.down for played in rounds]),
            1000 * middle([played.played.cpu_seconds for played in rounds]),
            1000 * middle([played.servers_cpu for played in rounds]),
            f"{cores:.0%}",
        )
    )
    if cores > MOST_CORES:
        report.notes.append(
            f"{label}: {peer}: all roles used {cores:.0%} of the cores, more than {MOST_CORES:.0%}"
        )


def _put_all(
    report: Report,
    job: Job,
    steady: Mapping[str, Sequence[Round]],
    lost: Mapping[str, Sequence[_Loss]],
    sizes: Sizes,
) -> Measured:
    rows = sum(tables_of(job).values())
    plain = [played.seconds for played in steady[_PLAIN]]
    measured = {}
    for name, (data, parity) in FORMS.items():
        suffix = "" if name == "4+1" else f"_{data}_{parity}"
        steady_ratio = ratio(plain, [played.seconds for played in steady[name]])
        report.put(f"steady_vs_plain{suffix}", steady_ratio)
        peer_losses = lost[name]
        report.put(f"recovering_vs_plain{suffix}", _recovering(peer_losses, sizes))
        whole = spread_of([loss.recovered.whole_seconds for loss in peer_losses])
        report.put(f"whole_seconds{suffix}", whole)
        share = (1 + parity / data) / SERVERS
        lost_bytes = parity * share * rows * (sizes.record_bytes + 1)
        measured[name] = Measured(
            step_seconds=statistics.median(plain) / sizes.batches,
            steady=steady_ratio.median,
            recovering=report.figures[f"recovering_vs_plain{suffix}"],
            rebuilt_bytes=lost_bytes / whole.median,
        )
        longest = max(loss.recovered.longest_seconds for loss in peer_losses)
        trained = sum(loss.recovered.batches for loss in peer_losses)
        trainer_cpu = sum(loss.recovered.cpu_seconds for loss in peer_losses)
        servers_cpu = sum(loss.servers_cpu for loss in peer_losses)
        report.notes.append(
            f"{name}: {parity} of {SERVERS} servers lost with {1e-6 * lost_bytes:,.0f} MB: whole "
            f"after {whole.median:.1f} s ({1e-6 * lost_bytes / whole.median:,.0f} MB/s), "
            f"{trained / len(peer_losses):,.0f} batches meanwhile, the longest {longest:.2f} s; "
            "CPU of "
            f"the trainer {trainer_cpu / len(peer_losses):.1f} s, of the servers "
            f"{servers_cpu / len(peer_losses):.1f} s"
        )
    return measured["4+1"]


def _recovering(losses: Sequence[_Loss], sizes: Sizes) -> Spread:
    """Return the throughput of recoveries over that of the plain rounds beside them."""
    return ratio(
        [loss.recovered.batches / loss.recovered.seconds for loss in losses],
        [sizes.batches / loss.plain.seconds for loss in losses],
    )
