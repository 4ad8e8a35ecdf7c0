"""Compares training on embedding servers behind slow links: a planned cache, an LRU cache, none.

Servers and trainers are processes in network namespaces of this machine. `tc tbf` bounds the rate
of each one's link in each direction. A call of a server waits 0.2 ms more, as on a longer cable.
The tables have Criteo's shape, with row-wise Adagrad's state, and all rows are at the servers from
the start. A timed wait stands for the dense layers on an accelerator: a batch takes at least 162 ms
from the moment when its rows are there. `_10m` is 10 M rows of 48 values, `_30m` 30 M of 16.

- `bit_identical`: tables, optimizer states and losses of 1, 2 and 4 trainers equal those in memory
  with the same order of reduction, for four optimizers. It is checked first.
- `vs_no_cache`: samples a second over reading each batch's rows when it comes, at 1 Gbit/s.
- `vs_bound`: the same, of the bound (compute + net) / max(compute, cached net). Net is what a batch
  without a cache waits for its servers; cached net is the same part of it as of the bytes.
- `vs_no_cache_best`: the same where a cache gains most: the link is so slow that it carries a
  batch of the planned cache in just the time of the compute. `vs_ceiling_best`: of 1 + 1 / moved.
- `vs_lru`: over the least recently used rows in as many slots, on that link.
- `vs_torch_rpc`, `vs_torch_rpc_best`: over a textbook parameter server on torch RPC, at 1 Gbit/s
  and on that link. Its servers take the steps, so that no optimizer state goes over the network.
- `moved_2k`, `moved_16k`: rows that come over the network, of those without a cache, with 4 M slots
  and a window of 200, counted on the plan alone. A row that comes leaves later. `moved_2k_least`,
  `moved_16k_least`: those that come for the first time, so no cache moves fewer. `moved_wire`:
  bytes on the trainer's link both ways, with headers, of those without a cache, in the measured
  rounds.

Two trainers share the rows of tables of 48 values, of at most 400,000 rows each, with Adagrad:

- `samples_2_vs_1`: samples a second over those of one trainer, on links of 1 Gbit/s.
- `vs_torchrec`: over two trainers between which TorchRec divides the rows, with row-wise Adagrad
  and its sparse pipeline on gloo. Calls of gloo have no added delay.
- `critical_share`: of the rows whose gradients go from one trainer to the other, those for which a
  step waits. `next_batch_share`: those that the next batch looks up, counted on the batches; the
  others could wait. `exchanged_share`: the rows that go, of the unique rows of a batch.
- `stall_vs_plain`: stall of a checkpoint, coordination apart, over that of one trainer with all
  tables in memory, after as many batches. `coordination_ms`: the part of a stall in which a rank
  does nothing for its own cut: it agrees with the others, and waits for them.
  `whole_stall_vs_plain`: with that part. Changed rows are sent to the servers afterwards.
- `tcp_*`, `ray_*`: rate of a stream to one server on this machine, time and CPU of all roles for a
  batch of 14,000 rows that are read and written.
"""

from __future__ import annotations

import torch

from benchmarks.report import Report
from benchmarks.servers import links, two_trainers
from benchmarks.servers.gate import require_same_results
from benchmarks.servers.links import LinkSizes, Shape
from benchmarks.servers.network import NoNetwork, ShapedNetwork
from benchmarks.servers.torch_rpc import require_same_losses
from benchmarks.servers.torchrec import require_torchrec_losses
from benchmarks.servers.transports import TRANSPORT_KEYS, measure_transports
from benchmarks.servers.two_trainers import RankSizes
from benchmarks.torchrec_tracker import installed

__all__ = ["KEYS", "NETWORK_KEYS", "run"]

_SHAPES = {
    "10m": Shape(rows=1_900_000, dim=48, capacity=800_000, warm=220),
    "30m": Shape(rows=7_500_000, dim=16, capacity=800_000, warm=220),
}
_SMOKE_SHAPES = {
    "10m": Shape(rows=1 << 10, dim=4, capacity=3_000, warm=16),
    "30m": Shape(rows=1 << 11, dim=2, capacity=3_000, warm=16),
}
_SMOKE_LINKS = LinkSizes(
    servers=1,
    lines=64,
    window=10,
    batches=3,
    best_batches=2,
    rounds=2,
    wait=0.01,
    plan_capacity=20_000,
    plan_lines=(64, 256),
    plan_batches=(30, 20),
)
_SMOKE_RANKS = RankSizes(
    rows=1 << 10,
    dim=4,
    lines=64,
    capacity=3_000,
    window=10,
    servers=1,
    warm=12,
    batches=3,
    rounds=2,
    wait=0.01,
)

#: Figures that need the network.
NETWORK_KEYS = (
    *(f"{key}_{shape}" for shape in _SHAPES for key in links.COMPARED_KEYS),
    *two_trainers.LINK_KEYS,
)
KEYS = (
    "bit_identical",
    *NETWORK_KEYS,
    *(f"{key}_{shape}" for shape in _SHAPES for key in links.COUNTED_KEYS),
    *two_trainers.TRACE_KEYS,
    *TRANSPORT_KEYS,
)


def run(*, smoke: bool) -> Report:
    """Compare the peers.

    Raises:
        RuntimeError: results differ from those in memory.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns of the default
    report = Report(name="servers", columns=links.COLUMNS)
    _gate(report, ranks=(2,) if smoke else (1, 2, 4), batches=8 if smoke else 30)
    shapes = _SMOKE_SHAPES if smoke else _SHAPES
    of_links = _SMOKE_LINKS if smoke else LinkSizes()
    of_ranks = _SMOKE_RANKS if smoke else RankSizes()
    for name, shape in shapes.items():
        links.count_moved(report, name, shape, of_links)
    two_trainers.count_exchanges(report, of_ranks)
    measure_transports(report, rows=20_000 if smoke else 400_000, rounds=of_links.rounds)
    try:
        for name, shape in shapes.items():
            with ShapedNetwork() as network:
                links.compare_peers(report, network, name, shape, of_links)
        with ShapedNetwork() as network:
            two_trainers.compare_ranks(report, network, of_ranks)
    except NoNetwork as error:
        report.leave_out((key for key in NETWORK_KEYS if key not in report.figures), str(error))
    return report


def _gate(report: Report, *, ranks: tuple[int, ...], batches: int) -> None:
    trained = [require_same_results(count, batches) for count in ranks]
    require_same_losses(batches)
    if installed():
        require_torchrec_losses(2, batches)
    report.figures["bit_identical"] = 1.0
    report.notes.append(
        f"bit_identical: {sum(trained)} trainings of {batches} batches with "
        f"{', '.join(map(str, ranks))} trainers"
    )
