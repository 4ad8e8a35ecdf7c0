"""Compares embedding servers that keep parity with checkpoints alone: steady, and after a loss.

Five servers and one trainer are processes in network namespaces, as in the benchmark `servers`:
links of 1 Gbit/s in each direction, 0.2 ms more for each call, also between servers, and batches of
at least 162 ms. Tables have Criteo's shape, 10 M rows of 48 values with row-wise Adagrad's state.
The trainer has a planned cache. A stripe of 4+1 has four rows and one parity row, and the keys
without a form are about it. Keys that end in `_2_2` are about stripes of two rows and P and Q.

- `recovered_bit_identical`: losses, rows and row states of jobs whose servers are killed with
  SIGKILL in the middle, as many as parity makes up for, equal those in memory, for four optimizers.
  It is checked first.
- `steady_vs_plain`: samples a second with parity over without, in turns, no failure.
- `recovering_vs_plain`: samples a second from a kill until all rows have parity again, over a round
  without parity right before. `whole_seconds`: that time. With 2+2, two servers are killed.
- `differences_vs_updates`: rows of differences that the servers send, of the rows that batches
  change, counted in the steady rounds.
- `recovery_speedup_30min`, `recovery_speedup_60min`: what a failure costs with checkpoints alone,
  over what it costs with parity, for the paper's table: (restore + interval / 2) / lost. Lost is
  whole * (1 - recovering_vs_plain), because training goes on. Whole and restore are the bytes of
  that table over the rates of this run. The restore is that of a smaller table into the servers,
  over links of 1 Gbit/s.
- `whole_speedup_30min`, `whole_speedup_60min`: the same over whole, as if no batch were trained.
- `overhead_saved_best`: 1 - overhead with parity / overhead with checkpoints alone, the best of the
  mean times between failures and intervals in the notes; `break_even_hours`: from this mean time
  on, the best interval of checkpoints alone costs less. `overhead.py` says what is simulated.
- `xor_vs_memcpy`, `pq_vs_memcpy`, `vs_pyeclib`: see `erasure_kernels.py`.
"""

from __future__ import annotations

import torch

from benchmarks import erasure_kernels
from benchmarks.cache_peers import OPTIMIZERS
from benchmarks.parity import recovery
from benchmarks.parity.checkpoints import CheckpointSizes, measure_checkpoints
from benchmarks.parity.gate import require_recovered
from benchmarks.parity.overhead import (
    MTBF_HOURS,
    TABLE,
    Costs,
    auto_seconds,
    break_even_hours,
    costs_of,
    overhead_of_checkpoints,
    overhead_of_parity,
)
from benchmarks.parity.recovery import FORMS, Sizes
from benchmarks.report import Report
from benchmarks.servers.network import NoNetwork, ShapedNetwork

__all__ = ["KEYS", "NETWORK_KEYS", "run"]

_MINUTES = (30, 60)
_COST_KEYS = (
    *(
        f"{key}_{minutes}min"
        for key in ("recovery_speedup", "whole_speedup")
        for minutes in _MINUTES
    ),
    "overhead_saved_best",
    "break_even_hours",
)
#: Figures that need the network.
NETWORK_KEYS = (*recovery.KEYS, *_COST_KEYS)
KEYS = ("recovered_bit_identical", *NETWORK_KEYS, *erasure_kernels.KEYS)

_SMOKE = Sizes(
    rows=1 << 10,
    dim=4,
    capacity=3_000,
    warm=16,
    lines=64,
    window=10,
    batches=3,
    rounds=1,
    losses=1,
    wait=0.01,
)
_SMOKE_CHECKPOINTS = CheckpointSizes(
    rows=1 << 10, dim=4, capacity=3_000, lines=64, window=10, warm=4
)


def run(*, smoke: bool) -> Report:
    """Measure all figures.

    Raises:
        RuntimeError: results differ from those in memory.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns of the default
    report = Report(name="parity", columns=recovery.COLUMNS)
    _gate(report, smoke=smoke)
    erasure_kernels.measure(report, smoke=smoke)
    try:
        with ShapedNetwork() as network:
            measured = recovery.compare(report, network, _SMOKE if smoke else Sizes())
        with ShapedNetwork() as network:
            sizes = _SMOKE_CHECKPOINTS if smoke else CheckpointSizes()
            rates = measure_checkpoints(report, network, sizes)
    except NoNetwork as error:
        report.leave_out((key for key in NETWORK_KEYS if key not in report.figures), str(error))
        return report
    costs = costs_of(
        measured,
        stall_seconds=rates.stall_seconds,
        restored_bytes=rates.restored_bytes,
        stored_bytes=rates.stored_bytes,
    )
    _put_speedups(report, costs)
    _put_overheads(report, costs)
    return report


def _gate(report: Report, *, smoke: bool) -> None:
    if smoke:
        compared = require_recovered(1, FORMS["2+2"], ["SparseAdam"], 15)
    else:
        compared = sum(require_recovered(1, form, [*OPTIMIZERS], 30) for form in FORMS.values())
    report.figures["recovered_bit_identical"] = 1.0
    report.notes.append(f"recovered_bit_identical: {compared} trainings, servers killed in each")


def _put_speedups(report: Report, costs: Costs) -> None:
    for minutes in _MINUTES:
        back_s = costs.back_seconds(60 * minutes)
        # Where training is not slower while a server is recovered, a batch is the least loss.
        report.figures[f"recovery_speedup_{minutes}min"] = back_s / max(1.0, costs.lost_seconds)
        report.figures[f"whole_speedup_{minutes}min"] = back_s / costs.whole_seconds
    report.notes.append(
        f"{TABLE.rows:,} rows of {TABLE.record_bytes} bytes: a restore takes "
        f"{costs.restore_seconds:,.0f} s, and half of 30 and 60 minutes' work 900 and 1,800 s; a "
        f"lost server is recovered in {costs.whole_seconds:,.0f} s, of which "
        f"{costs.lost_seconds:,.0f} s are lost"
    )


def _put_overheads(report: Report, costs: Costs) -> None:
    """Add what is saved, and a line for each mean time between failures."""
    best = -float("inf")
    for hours in MTBF_HOURS:
        with_parity = overhead_of_parity(costs, hours)
        alone = {
            f"{minutes} min": overhead_of_checkpoints(costs, hours, 60 * minutes)
            for minutes in _MINUTES
        }
        auto = auto_seconds(costs, hours)
        alone[f"auto ({auto:,.0f} s)"] = overhead_of_checkpoints(costs, hours, auto)
        best = max(best, *(1 - with_parity / overhead for overhead in alone.values()))
        texts = ", ".join(
            f"{overhead:.1%} every {interval}" for interval, overhead in alone.items()
        )
        report.notes.append(
            f"a failure every {hours} h: {with_parity:.1%} more time with parity; with "
            f"checkpoints alone {texts}"
        )
    report.figures["overhead_saved_best"] = best
    intervals = [60 * minutes for minutes in _MINUTES]
    report.figures["break_even_hours"] = break_even_hours(costs, intervals)
