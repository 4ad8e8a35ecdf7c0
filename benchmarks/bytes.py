"""Counts bytes written and kept, by policy and width, against full fp32 checkpoints.

Every stored byte counts: codes, row parameters, optimizer state, row ids, dense layers, headers,
manifests. Bytes that consolidation writes in the background have their own column.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from benchmarks import byte_sources
from benchmarks.byte_sources import RowWidth, Source
from benchmarks.dirty_trace import Checkpoint, Mask, replay, rows_since
from benchmarks.report import Report
from benchmarks.stored_sizes import Ids, MergedFull, Parts, stored_parts
from benchmarks.workload import ROOT
from recpoint import Consecutive, Continuous, Intermittent, OneShot
from recpoint.format.dtypes import array_bytes, item_bytes
from recpoint.format.job import Job
from recpoint.format.manifest import TableSpec
from recpoint.trainer_plugin.policy import Policy

__all__ = ["KEYS", "Counted", "count", "run"]

_SUFFIXES = ("", "_retail", "_retail_adagrad", "_criteo")
#: The published trace with elementwise Adagrad has figures at a price alone.
_STATE = "_state"
KEYS = tuple(
    f"{figure}_x_{bits}bit{suffix}{suffix_of}"
    for suffix in _SUFFIXES
    for bits in (2, 8)
    for figure, suffix_of in (
        ("bandwidth", ""),
        ("capacity", ""),
        ("capacity", "_at_commit"),
        ("bandwidth", "_merging_counted"),
        ("bandwidth", "_all"),
        ("bandwidth", "_intermittent"),
        ("capacity", "_intermittent"),
        ("capacity", "_intermittent_at_commit"),
    )
) + ("written_x", "kept_x", "written_x_state")


class Plan(NamedTuple):
    """A policy, and after how many increments the chain is merged into a new full; None: never."""

    name: str
    policy: Policy
    merge_every: int | None = None


PLANS = (
    Plan("full each time", OneShot(full_every=1)),
    Plan("one-shot", OneShot()),
    Plan("intermittent", Intermittent()),
    Plan("consecutive", Consecutive()),
    Plan("continuous, 8 merged", Continuous(), 8),
    Plan("continuous, each merged", Continuous(), 1),
)
#: The reductions of write bandwidth and capacity that the paper reports for its fleet with the
#: intermittent policy.
PAPER: Mapping[RowWidth, str] = {2: "17 / 8", 8: "6 / 2.5"}


class Counted(NamedTuple):
    """One plan in one width: its checkpoints, and the bytes of a full fp32 checkpoint."""

    plan: str
    bits: RowWidth
    taken: list[Checkpoint]
    full_fp32: int

    @property
    def bandwidth(self) -> float:
        """The factor by which the trainer's checkpoints write fewer bytes than full fp32 ones."""
        return self.full_fp32 / statistics.fmean(interval.written for interval in self.taken)

    @property
    def bandwidth_merging(self) -> float:
        """`bandwidth` with the bytes that consolidation writes included."""
        return self.full_fp32 / statistics.fmean(t.written + t.merged[1] for t in self.taken)

    @property
    def capacity(self) -> float:
        """The factor by which fewer bytes are kept, at the worst interval."""
        return self.full_fp32 / max(interval.kept for interval in self.taken)

    @property
    def capacity_at_commit(self) -> float:
        """`capacity` at the moment of a commit, when the old chain is still stored."""
        return self.full_fp32 / max(interval.there for interval in self.taken)


def run(*, smoke: bool, plot: bool = False) -> Report:
    """Count the bytes of all plans in all widths on all sources.

    Means are over all checkpoints of a run, the first full included. Capacity is the peak of the
    bytes that must be kept to restore the newest checkpoint, as the paper counts it. A store holds
    more: `_at_commit` also counts the old chain, which is deleted only after a new or merged full
    is committed. `bandwidth_x` and `capacity_x` belong to one policy: the policy that writes the
    fewest bytes and, among equals, keeps the fewest. `_merging_counted` adds the bytes that
    consolidation writes for that policy. `bandwidth_x_…_all` is the best of all policies with those
    bytes added. `written_x` and `kept_x` are of the published trace with the policy `intermittent`,
    with a width for each row, the mix of widths that was measured on a trained model, and
    residuals; `written_x_state` is `written_x` with elementwise Adagrad and `state=8`.
    The gate: for each source and width, a full, an increment and both consolidated have as many
    stored bytes, object by object, as are counted here.
    """
    report = Report(
        name="bytes",
        columns=(
            "", "bits", "MB written", "x less", "MB merged", "x with it", "MB kept", "x less",
            "paper", "at a commit",
        ),
    )  # fmt: skip
    rounded = partial(byte_sources.retail, optimizer="Adagrad, state=16")
    sources: list[Callable[..., Source]] = [
        byte_sources.fleet,
        byte_sources.retail,
        rounded,
        byte_sources.criteo_shaped,
        partial(byte_sources.fleet, optimizer="Adagrad, state=8"),
    ]
    for suffix, new_source in zip((*_SUFFIXES, _STATE), sources, strict=True):
        source = new_source(smoke=smoke)
        counted = count(source)
        print(f"counted: {source.name}", file=sys.stderr, flush=True)
        _rows(report, source, counted)
        if suffix != _STATE:
            for bits in (2, 8):
                _figures(report, suffix, bits, [c for c in counted if c.bits == bits])
        if "price" in source.forms:
            _figures_at_a_price(report, suffix, counted)
        report.notes.append(_where(source))
        if plot:
            from benchmarks import byte_plots

            at_4 = [counts for counts in counted if counts.bits == 4]
            path = byte_plots.plot(f"bytes{suffix}", f"{source.name}, 4 bits", at_4)
            report.notes.append(f"plotted: {path.relative_to(ROOT)}")
    return report


def count(source: Source) -> list[Counted]:
    """Count all plans in all widths on one source."""
    sizes = _Sizes(source)
    intervals, full = len(source.masks), sizes.full_fp32
    counted = []
    for bits in source.forms:
        for plan in PLANS:
            if bits == "price" and plan.merge_every is not None:
                continue  # residuals are not merged into their full
            replayed = replay(
                plan.policy,
                intervals,
                sizes.of(bits),
                consolidate_every=plan.merge_every,
                merge=None if plan.merge_every is None else sizes.merging(bits),
            )
            counted.append(Counted(plan.name, bits, replayed, full))
    return counted


class _Sizes:
    """Computes the bytes of any checkpoint of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._starts = np.cumsum([0, *(spec.rows for spec in source.tables)])
        self.parts = cache(self._parts)

    @property
    def full_fp32(self) -> int:
        """Return the bytes of tables, row states and dense state, without headers and manifest."""
        job = self._source.templates["lossless"]["full"][0]
        tables = sum(_row_bytes(table.spec) * table.spec.rows for table in job.tables)
        real = sum(_row_bytes(spec) * spec.rows for spec in self._source.tables)
        return job.full_bytes - tables + real

    def of(self, bits: RowWidth) -> _OfWidth:
        """Return the sizes for one width."""
        return _OfWidth(self, bits)

    def merging(self, bits: RowWidth) -> Callable[[Sequence[int]], int]:
        """Return the argument `merge` of `replay`; it keeps its own merged full."""
        source = self._source
        job = self._with_rows(source.templates[bits]["increment"][0], None)
        manifest = source.consolidated[bits].model_copy(update={"tables": source.tables})
        full = MergedFull(job, manifest, source.forms[bits].full)

        def merge(links: Sequence[int]) -> int:
            return full.merge([self._ids(source.masks[link_to]) for link_to in links]).total()

        return merge

    def _ids(self, mask: Mask) -> list[Ids]:
        """Return the changed row ids of each table."""
        return [
            np.flatnonzero(mask[start : start + spec.rows])
            for start, spec in zip(self._starts[:-1], self._source.tables, strict=True)
        ]

    def _with_rows(self, job: Job, ids: Sequence[Ids] | None) -> Job:
        """Return the job with the real tables and these row ids; None: all rows."""
        tables = []
        for index, (spec, table) in enumerate(zip(self._source.tables, job.tables, strict=True)):
            rows = spec.rows if ids is None else len(ids[index])
            changes = {"spec": spec, "row_count": rows, "all_rows": ids is None}
            tables.append(table.model_copy(update=changes))
        return job.model_copy(update={"tables": tuple(tables)})

    def _parts(self, bits: RowWidth, base: int | None, interval: int) -> Parts:
        source = self._source
        job, manifest = source.templates[bits]["full" if base is None else "increment"]
        specs = manifest.model_copy(update={"tables": source.tables})
        if base is None:
            rows: list[Ids | None] = [None] * len(source.tables)
            return stored_parts(self._with_rows(job, None), specs, rows, source.forms[bits].full)
        mask = rows_since(source.masks, base, interval)
        ids = self._ids(mask)
        forms = source.forms[bits].of_increment(float(mask.mean()))
        return stored_parts(self._with_rows(job, ids), specs, ids, forms)


class _OfWidth:
    def __init__(self, sizes: _Sizes, bits: RowWidth) -> None:
        self._sizes, self._bits = sizes, bits

    def __call__(self, base: int | None, interval: int) -> int:
        # All fulls have the same size.
        return self._sizes.parts(self._bits, base, 0 if base is None else interval).total()


def _row_bytes(spec: TableSpec) -> int:
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return spec.dim * item_bytes(spec.dtype) + states


def _rows(report: Report, source: Source, counted: Sequence[Counted]) -> None:
    share = statistics.fmean(float(mask.mean()) for mask in source.masks)
    full = counted[0].full_fp32
    is_of_paper = source.name.startswith("26 %") and source.name.endswith("row-wise Adagrad")
    report.rows.append((f"{source.name}: fp32 each time", 32, full / 1e6, 1.0, *[""] * 6))
    for counts in counted:
        written, merged = (
            statistics.fmean(values) / 1e6
            for values in ([t.written for t in counts.taken], [t.merged[1] for t in counts.taken])
        )
        has_paper = is_of_paper and counts.plan == "intermittent"
        report.rows.append(
            (
                counts.plan, _width_text(counts.bits),
                written, counts.bandwidth, merged, counts.bandwidth_merging,
                max(t.kept for t in counts.taken) / 1e6, counts.capacity,
                PAPER.get(counts.bits, "") if has_paper else "", counts.capacity_at_commit,
            )
        )  # fmt: skip
    report.notes.append(
        f"{source.name}: {len(source.masks)} intervals, each changes {share:.1%} of the rows"
    )


def _figures(report: Report, suffix: str, bits: RowWidth, counted: Sequence[Counted]) -> None:
    best = max(counted, key=lambda counts: (counts.bandwidth, counts.capacity))
    cheapest = max(counted, key=lambda counts: counts.bandwidth_merging)
    paper = next(counts for counts in counted if counts.plan == "intermittent")
    report.figures |= {
        f"bandwidth_x_{bits}bit{suffix}": best.bandwidth,
        f"capacity_x_{bits}bit{suffix}": best.capacity,
        f"capacity_x_{bits}bit{suffix}_at_commit": best.capacity_at_commit,
        f"bandwidth_x_{bits}bit{suffix}_merging_counted": best.bandwidth_merging,
        f"bandwidth_x_{bits}bit{suffix}_all": cheapest.bandwidth_merging,
        f"bandwidth_x_{bits}bit{suffix}_intermittent": paper.bandwidth,
        f"capacity_x_{bits}bit{suffix}_intermittent": paper.capacity,
        f"capacity_x_{bits}bit{suffix}_intermittent_at_commit": paper.capacity_at_commit,
    }
    report.notes.append(
        f"best{suffix} at {bits} bits: {best.plan}; with merging counted: {cheapest.plan}"
    )


def _figures_at_a_price(report: Report, suffix: str, counted: Sequence[Counted]) -> None:
    (counts,) = (c for c in counted if (c.plan, c.bits) == ("intermittent", "price"))
    report.figures[f"written_x{suffix}"] = counts.bandwidth
    if suffix != _STATE:
        report.figures[f"kept_x{suffix}"] = counts.capacity


def _where(source: Source) -> str:
    """Return the share of each kind of content in the bytes of an increment."""
    lines = []
    for bits in [width for width in source.forms if width in (2, 8, "price")]:
        parts = _Sizes(source).parts(bits, 0, 1)
        total = parts.total()
        shares = ", ".join(
            f"{name} {size / total:.1%}" for name, size in Counter(parts).most_common() if size
        )
        lines.append(f"  an increment ({_width_text(bits)}), {total / 1e6:.2f} MB: {shares}")
    return "\n".join(lines)


def _width_text(bits: RowWidth) -> str:
    return "fp32" if bits == "lossless" else str(bits)
