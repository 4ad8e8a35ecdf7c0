"""Provides the runs for `bytes`: the rows that each interval changes, and what else is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.coded_chain import Rule, TableCopy, chain_rows
from benchmarks.criteo_dlrm import CriteoDLRM
from benchmarks.dirty_trace import Masks, fleet_masks
from benchmarks.learning import train_batch
from benchmarks.measured_mix import drawn_forms, measured_mix
from benchmarks.priced_job import give_price
from benchmarks.row_wise import RowWiseAdagrad
from benchmarks.stored_sizes import Form, MergedFull, check, form_of
from benchmarks.trained_rows import trained_rows
from benchmarks.workload import StagedTraining, examples_on_path, scratch, staged_run
from recpoint import Precision
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist.row_widths import importance
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.job import ids_name, open_slot, values_name
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.staging.slot_reading import Extent, read_into
from recpoint.catalog.store.store import open_store
from recpoint.format.job import Job
from recpoint.format.manifest import Kind, Manifest, TableSpec
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.settings import FixedBits, StateBits

__all__ = [
    "WIDTHS",
    "OptimizerName",
    "RowForms",
    "RowWidth",
    "Source",
    "criteo_shaped",
    "fleet",
    "retail",
]

#: The width of all rows; or "price": each row has one of its own, and increments have residuals.
RowWidth = FixedBits | Literal["price"]

WIDTHS: tuple[FixedBits, ...] = (2, 3, 4, 8, "lossless")
OptimizerName = Literal["row-wise Adagrad", "Adagrad", "Adagrad, state=16", "Adagrad, state=8"]

#: Of the jobs at a price: rows of several widths come of it.
_TEMPLATE_PRICE = 2.0**-40
_TEMPLATE_SCALE = 0.5
_SKEWED_BY = (1, 1, 1, 1, 1, 8, 16, 16, 16)

#: A job and its manifest as an agent stored them: everything of a checkpoint except its rows.
Stored = tuple[Job, Manifest]


@dataclass(frozen=True)
class RowForms:
    """The stored form of each row of each table.

    Attributes:
        full: in a full.
        increments: in increments: the share of the rows that change, and their forms; empty: as in
            a full.
    """

    full: tuple[Form, ...]
    increments: tuple[tuple[float, tuple[Form, ...]], ...] = ()

    def of_increment(self, share: float) -> tuple[Form, ...]:
        """Return the forms of an increment in which this share of the rows changes."""
        if not self.increments:
            return self.full
        return min(self.increments, key=lambda measured: abs(measured[0] - share))[1]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run whose bytes are counted.

    Attributes:
        name: for tables and plots.
        tables: the embedding tables that are trained.
        masks: for each interval, whether it changes each row; the tables' rows are concatenated.
        templates: for each width, a full and an increment of such a run.
        consolidated: for each width, the manifest of the full and the increment merged; not for
            "price", because residuals are not merged into their full.
        forms: for each width, the stored forms of the rows.
    """

    name: str
    tables: tuple[TableSpec, ...]
    masks: Masks
    templates: Mapping[RowWidth, Mapping[Kind, Stored]]
    consolidated: Mapping[RowWidth, Manifest]
    forms: Mapping[RowWidth, RowForms]


def fleet(*, smoke: bool, optimizer: OptimizerName = "row-wise Adagrad") -> Source:
    """Return a run with Check-N-Run's curve: 10 million rows of 64 values."""
    examples_on_path()
    from batches import Batch
    from train_dlrm import DLRM

    rows, dim = (50_000 if smoke else 10_000_000), 64

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(4)
        while True:
            ids = torch.randint(0, 2048, (512, 1), generator=generator)
            yield Batch(torch.randn(512, 13, generator=generator), ids, torch.ones(512))

    model = DLRM({"rows": 2048}, 13, dim=dim)
    templates, consolidated = _stored(model, optimizer, batches())
    templates["price"] = _stored_at_a_price(model, optimizer, batches())
    spec = templates["lossless"]["full"][0].tables[0].spec.model_copy(update={"rows": rows})
    sample = trained_rows(dim=dim, batches=4 if smoke else 120, rows=4096)
    forms: dict[RowWidth, RowForms] = {
        bits: RowForms((form,)) for bits, form in _forms_like(sample, rows).items()
    }
    mix = measured_mix(optimizer, smoke=smoke)
    forms["price"] = RowForms(
        (drawn_forms(mix.full, rows, seed=6),),
        tuple(
            (share, (drawn_forms(shares, rows, seed=7 + number),))
            for number, (share, shares) in enumerate(mix.increments)
        ),
    )
    return Source(
        name=f"26 % trace, {rows / 1e6:g} M x {dim}, {optimizer}",
        tables=(spec,),
        masks=fleet_masks(rows, 24, seed=1),
        templates=templates,
        consolidated=consolidated,
        forms=forms,
    )


def _forms_like(sample: Tensor, rows: int) -> dict[RowWidth, Form]:
    """Return forms of `rows` rows, each a row of `sample` with 1 % noise on its values."""
    forms: dict[RowWidth, Form] = {bits: np.zeros(rows, np.uint8) for bits in WIDTHS}
    generator = torch.Generator().manual_seed(5)
    for first in range(0, rows, len(sample)):
        noisy = sample * (1 + 0.01 * torch.randn(sample.shape, generator=generator))
        for bits, form in forms.items():
            if isinstance(bits, int):
                part = form[first : first + len(sample)]
                part[:] = form_of(noisy[: len(part)], bits)
    return forms


def retail(*, smoke: bool, optimizer: OptimizerName = "row-wise Adagrad") -> Source:
    """Return one pass of the bundled purchases: a checkpoint after each fiftieth, d = 16."""
    examples_on_path()
    from retail import RetailReader
    from train_dlrm import DLRM

    reader = (
        RetailReader(lines=64, rows=1 << 10, seed=0) if smoke else RetailReader(lines=512, seed=0)
    )
    batches = list(islice(reader, 8 if smoke else None))
    model = DLRM(reader.tables, 0)
    intervals = 4 if smoke else 50
    return _trained(f"retail, d = 16, {optimizer}", model, optimizer, batches, intervals)


def criteo_shaped(*, smoke: bool) -> Source:
    """Return a run on a log of Criteo's shape: tables of at most 2^20 rows of 16 values.

    It has 24 intervals. The ratio of an interval's lines to table rows equals the ratio of 2 % of
    the published log's lines to the published tables' rows.
    """
    examples_on_path()
    from criteo import CriteoShapeReader

    intervals, lines = (6, 512) if smoke else (24, 16_384)
    reader = CriteoShapeReader(lines=lines, rows=1 << (10 if smoke else 20))
    rows = sum(reader.tables.values())
    lines_each = max(1, round(0.02 * 45_840_617 * rows / 33_762_577 / lines))
    model = CriteoDLRM(reader.tables)
    for weight in model.tables.parameters():
        torch.nn.init.normal_(weight, std=len(weight) ** -0.5)
    batches = (reader.batch(number) for number in range(intervals * lines_each))
    name = f"Criteo's shape, {rows / 1e6:.1f} M x 16, row-wise Adagrad"
    return _trained(
        name,
        model,
        "row-wise Adagrad",
        batches,
        intervals,
        lines_each=lines_each,
        train=2 if smoke else 20,
    )


def _trained(
    name: str,
    model: Any,
    optimizer: OptimizerName,
    batches: Iterable[Any],
    intervals: int,
    *,
    lines_each: int | None = None,
    train: int | None = None,
) -> Source:
    """Return a source of the rows that training `model` changes.

    Args:
        name: of the source.
        model: trained here.
        optimizer: of the tables.
        batches: of the whole run, in order.
        intervals: number of intervals.
        lines_each: batches in each interval; None: `batches` is a list and is divided evenly.
        train: number of batches on which the model is really trained; the changed rows are taken
            from all batches.
    """
    rows = [len(table.weight) for table in model.tables.values()]
    starts = np.cumsum([0, *rows])
    masks = [np.zeros(starts[-1], np.bool_) for _ in range(intervals)]
    total = intervals * lines_each if lines_each else len(list(batches))
    optimizers = _optimizers(model, optimizer)
    first: list[Any] = []
    for number, batch in enumerate(batches):
        mask = masks[number * intervals // total]
        for column, start in enumerate(starts[:-1]):
            mask[start + batch.sparse[:, column].numpy()] = True
        if train is None or number < train:
            train_batch(model, optimizers, batch)
        if number < 40:
            first.append(batch)
    small = _smaller(model)
    modulo = torch.tensor([len(table.weight) for table in small.tables.values()])
    templates, consolidated = _stored(
        small,
        optimizer,
        (type(b)(b.dense[:512], b.sparse[:512] % modulo, b.label[:512]) for b in first),
    )
    specs = tuple(
        table.spec.model_copy(update={"rows": count})
        for table, count in zip(templates["lossless"]["full"][0].tables, rows, strict=True)
    )
    weights = [table.weight.detach() for table in model.tables.values()]
    forms: dict[RowWidth, RowForms] = {
        bits: RowForms(
            tuple(
                np.zeros(len(w), np.uint8) if bits == "lossless" else form_of(w, bits)
                for w in weights
            )
        )
        for bits in WIDTHS
    }
    return Source(
        name=name,
        tables=specs,
        masks=masks,
        templates=templates,
        consolidated=consolidated,
        forms=forms,
    )


def _smaller(model: Any) -> Any:
    """Return the model with at most 2,048 rows in each table; dense layers and names stay."""
    tables = {name: min(len(table.weight), 2048) for name, table in model.tables.items()}
    if isinstance(model, CriteoDLRM):
        return CriteoDLRM(tables)
    examples_on_path()
    from train_dlrm import DLRM

    return DLRM(tables, 0)


def _optimizers(model: Any, optimizer: OptimizerName) -> list[torch.optim.Optimizer]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    tables = model.tables.parameters()
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    of_tables = (
        RowWiseAdagrad(tables)
        if optimizer == "row-wise Adagrad"
        else torch.optim.Adagrad(tables, lr=0.1)
    )
    return [of_tables, torch.optim.Adagrad(dense, lr=0.02)]


def _stored(
    model: Any, optimizer: OptimizerName, batches: Iterator[Any]
) -> tuple[dict[RowWidth, dict[Kind, Stored]], dict[RowWidth, Manifest]]:
    """Store a full and an increment of `model` in each width, and compare them with the count.

    Returns:
        Both, and the manifest of the full into which consolidation merges them.

    Raises:
        RuntimeError: the counted bytes differ from the stored bytes.
    """
    optimizers = _optimizers(model, optimizer)
    templates: dict[RowWidth, dict[Kind, Stored]] = {}
    consolidated: dict[RowWidth, Manifest] = {}
    with scratch() as memory:
        for bits in WIDTHS:
            url = str(memory / str(bits))
            with staged_run(
                model,
                optimizers,
                url=url,
                staging=memory / "staging",
                bits=Precision(bits=bits, state=_state_bits(optimizer)),
                row_local_optimizers=(RowWiseAdagrad,),
            ) as tracked:
                templates[bits] = {}
                for kind in ("full", "increment"):
                    if kind == "increment":
                        train_batch(model, optimizers, next(batches))
                        tracked.checkpointer.step()
                    ids, forms, stored = _compared(tracked, url)
                    templates[bits][kind] = stored
            consolidated[bits] = _merged(url, *stored, ids, forms)
    return templates, consolidated


def _stored_at_a_price(
    model: Any, optimizer: OptimizerName, batches: Iterator[Any]
) -> dict[Kind, Stored]:
    """Store a full and an increment of `model` at a price, and compare them with the count.

    The increment has residuals.

    Raises:
        RuntimeError: the counted bytes differ from the stored bytes.
    """
    examples_on_path()
    from batches import Batch

    optimizers = _optimizers(model, optimizer)
    (table,) = model.tables.values()
    sums = optimizers[0].state[table.weight]["sum"]
    rule = Rule(price=_TEMPLATE_PRICE, residual=True)
    templates: dict[Kind, Stored] = {}
    copies: list[TableCopy] = []
    with (
        scratch() as memory,
        staged_run(
            model,
            optimizers,
            url=str(memory / "run"),
            staging=memory / "staging",
            bits=Precision(bits=8, residual=True, state=_state_bits(optimizer)),
            row_local_optimizers=(RowWiseAdagrad,),
        ) as tracked,
    ):
        kinds: tuple[Kind, Kind] = ("full", "increment")
        for kind in kinds:
            for part in _SKEWED_BY:  # so low ids are looked up more often, and matter more
                batch = next(batches)
                labels = (batch.dense[:, 0] > 0).float()
                train_batch(model, optimizers, Batch(batch.dense, batch.sparse // part, labels))
                tracked.checkpointer.step()
            path = tracked.cut()
            job = give_price(path, _TEMPLATE_PRICE, scale=_TEMPLATE_SCALE)
            copies.append(
                TableCopy(table.weight.detach().clone(), importance(sums, _TEMPLATE_SCALE))
            )
            ids = (
                None
                if kind == "full"
                else _read(open_slot(path, job).extent(ids_name(0)), np.int64)
            )
            changed = torch.arange(0) if ids is None else torch.from_numpy(ids)
            chain = chain_rows(copies[0], copies[-1], changed, changed, rule, seed=job.step)
            form = chain.full_forms
            if ids is not None:
                form = np.zeros_like(form)
                form[ids] = chain.increment_forms
            tracked.persist()
            manifest = Run.open(open_store(tracked.url)).manifest(job.step, job.generation)
            check(job, manifest, [ids], [form])
            if len({entry.bits for entry in manifest.chunks if entry.content == "rows"}) < 2:
                raise RuntimeError(f"step {job.step}: all rows have one width")
            templates[kind] = job, manifest
    return templates


def _state_bits(optimizer: OptimizerName) -> StateBits:
    bits: dict[OptimizerName, StateBits] = {"Adagrad, state=16": 16, "Adagrad, state=8": 8}
    return bits.get(optimizer, "lossless")


def _merged(url: str, job: Job, manifest: Manifest, ids: list[Any], forms: list[Form]) -> Manifest:
    """Consolidate an increment with its full, and compare the bytes with the counted bytes."""
    run = Run.open(open_store(url))
    plan = plan_consolidation(run, ManifestName(job.step, job.generation))
    consolidate(run, plan)
    merged = run.read_manifest(plan.target)
    counted = MergedFull(job, merged, forms)
    tables = zip(ids, merged.tables, strict=True)
    counted.merge([[np.arange(spec.rows) if ids is None else ids for ids, spec in tables]])
    stored = sorted((entry.content, entry.bytes) for entry in merged.chunks)
    if stored != counted.chunk_bytes:
        raise RuntimeError(f"{url}: counted {counted.chunk_bytes}, consolidated {stored}")
    return merged


def _compared(tracked: StagedTraining, url: str) -> tuple[list[Any], list[Form], Stored]:
    """Cut and persist a checkpoint; return its row ids, the rows' forms, and what was stored."""
    path = tracked.cut()
    staged = open_slot(path, read_job(path))
    ids: list[Any] = []
    forms: list[Form] = []
    for index, table in enumerate(staged.job.tables):
        if not table.row_count:
            ids.append(np.empty(0, np.int64))
            forms.append(np.empty(0, np.uint8))
            continue
        row_ids = None if table.all_rows else _read(staged.extent(ids_name(index)), np.int64)
        values = _read(staged.extent(values_name(index)), np.float32)
        values_read = torch.from_numpy(values).reshape(-1, table.spec.dim)
        form = np.zeros(table.spec.rows, np.uint8)
        if table.is_quantized:
            form[slice(None) if row_ids is None else row_ids] = form_of(values_read, table.bits)
        ids.append(row_ids)
        forms.append(form)
    tracked.persist()
    job = staged.job
    manifest = Run.open(open_store(url)).manifest(job.step, job.generation)
    check(job, manifest, ids, forms)
    return ids, forms, (job, manifest)


def _read(extent: Extent, dtype: Any) -> Any:
    array = np.empty(extent.length // np.dtype(dtype).itemsize, dtype)
    read_into(array.data.cast("B"), extent)
    return array
