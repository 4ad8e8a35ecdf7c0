"""Measures second moments in 8 bits: speed on one core, errors, bytes of a full, and log loss.

A DLRM is trained on the bundled purchases with elementwise Adagrad. Its sums are restored on the
way as a checkpoint with `Precision(state=…)` would bring them back, and tables and dense layers
exactly. Right after such a restore the log loss is the same, because no forward pass looks at sums;
so all that counts is the end of the run, against the same run without restores.

`dynamic` is the map of published 8-bit optimizers for unsigned values (Dettmers et al., 2021):
256 values for each block of 2,048, scaled by the block's greatest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor

from benchmarks.accuracy import interval_of
from benchmarks.learning import Learned, Score, Task, evaluate, retail
from benchmarks.machine import keep_freed_memory
from benchmarks.report import Report, Spread, alternate, spread_of
from benchmarks.workload import scratch, staged_run
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import moments
from recpoint.kernels.moments import reference
from recpoint.trainer_plugin.settings import STATE_BITS, Precision

__all__ = ["KEYS", "run"]

KEYS = (
    "encode_gb_per_s",
    "decode_gb_per_s",
    "rms_error",
    "largest_error",
    "full_mb_lossless",
    "full_mb_16bit",
    "full_mb_8bit",
    "loss_after_restores",
    "loss_after_restores_ci95",
)

_DIMS = (16, 64)
_RESTORES = (1, 20)
_SEEDS = 3
_BLOCK: Final = 2048


def run(*, smoke: bool) -> Report:
    """Measure speeds and errors on trained sums of 16 and 64 values, then a full, then losses.

    Speeds are bytes of F32 values in a second. Errors are relative to each value that is not zero.
    Both are the worst of the two lengths. Bytes are of a full of the model with 16 values a row,
    its rows in 4 bits. `loss_after_restores` is the log loss at the end of the run, in percent
    above the same run without restores: the worst mean over three seeds of 1 and 20 restores with
    `state=8`.
    """
    keep_freed_memory()
    report = Report(
        name="moments", columns=("sums, values a row", "form", "error, rms", "largest", "zeroed")
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    try:
        tasks = {dim: _task(dim, smoke) for dim in _DIMS}
        learned = {dim: task.learn(0) for dim, task in tasks.items()}
        sums = {dim: _trained_sums(learned[dim]) for dim in _DIMS}
        _gate(sums)
        _speeds(report, sums, rounds=3 if smoke else 41)
        _errors(report, sums)
        _bytes(report, learned[16])
        _losses(report, tasks[16])
    finally:
        torch.set_num_threads(threads)
    return report


def _task(dim: int, smoke: bool) -> Task:
    return retail(dim=dim, batches=24, tests=4, rows=1 << 10) if smoke else retail(dim=dim)


def _trained_sums(learned: Learned) -> Tensor:
    """Return Adagrad's sums of all rows that were trained, f32 [n, dim]."""
    model, (of_tables, _) = learned
    sums = [of_tables.state[weight]["sum"].detach() for weight in model.tables.parameters()]
    return torch.cat([state[(state > 0).any(dim=1)] for state in sums]).contiguous()


def _gate(sums: Mapping[int, Tensor]) -> None:
    for dim, rows in sums.items():
        coded = moments.encode(rows[:500])
        for found, expected in zip(coded, reference.encode(rows[:500]), strict=True):
            if not torch.equal(found, expected):
                raise RuntimeError(f"sums of {dim} values: not the codes of the reference")
        decoded = moments.decode(coded.codes, coded.grids)
        if not torch.equal(decoded, reference.decode(coded.codes, coded.grids)):
            raise RuntimeError(f"sums of {dim} values: not the values of the reference")


def _speeds(report: Report, sums: Mapping[int, Tensor], rounds: int) -> None:
    worst: dict[str, list[Spread]] = {"encode_gb_per_s": [], "decode_gb_per_s": []}
    for dim, trained in sums.items():
        rows = trained[: (1 << 18) // dim]
        codes, grids, _ = moments.encode(rows)
        seconds = alternate(
            rounds, partial(moments.encode, rows), partial(moments.decode, codes, grids)
        )
        for key, times in zip(worst, seconds, strict=True):
            report.timed(f"{key}, dim {dim}", times)
            worst[key].append(spread_of([rows.nbytes / each / 1e9 for each in times]))
    for key, spreads in worst.items():
        report.put(key, min(spreads))


def _errors(report: Report, sums: Mapping[int, Tensor]) -> None:
    rms: list[float] = []
    largest: list[float] = []
    for dim, rows in sums.items():
        for form, narrowed in _FORMS.items():
            restored, is_used = narrowed(rows), rows > 0
            errors = ((restored - rows).abs() / rows)[is_used].double()
            zeroed = int(((restored == 0) & is_used).sum()) / int(is_used.sum())
            root, most = float(errors.square().mean().sqrt()), float(errors.max())
            report.rows.append((dim, form, root, most, f"{100 * zeroed:.2f} %"))
            if form == "state=8":
                rms.append(root)
                largest.append(most)
    report.figures |= {"rms_error": max(rms), "largest_error": max(largest)}


def _bytes(report: Report, learned: Learned) -> None:
    for bits in STATE_BITS:
        with (
            scratch() as memory,
            staged_run(
                learned.model,
                learned.optimizers,
                url=str(memory / "run"),
                staging=memory / "staging",
                bits=Precision(bits=4, state=bits),
            ) as tracked,
        ):
            _, outcome = tracked.cut_and_persist()
        suffix = "lossless" if bits == "lossless" else f"{bits}bit"
        report.figures[f"full_mb_{suffix}"] = outcome.stored_bytes / 1e6


def _losses(report: Report, task: Task) -> None:
    """Train the task without restores and with each number of them, in each form."""
    rises: dict[tuple[str, int], list[float]] = {}
    for seed in range(_SEEDS):
        never = evaluate(task.learn(seed).model, task.test)
        for form, restores in product(_STORED_FORMS, _RESTORES):
            end = _end(task, seed, restores, _FORMS[form]).worse_than(never)
            rises.setdefault((form, restores), []).append(end.loss)
            print(f"seed {seed}, {restores} restores, {form}: {end}", file=sys.stderr, flush=True)
    worst = (-math.inf, 0.0)
    for (form, restores), values in rises.items():
        mean, half = interval_of(values)
        report.notes.append(
            f"{restores} restores, {form}: log loss at the end {mean:+.4f} ± {half:.4f} % "
            f"({_SEEDS} seeds, {task.name})"
        )
        if form == "state=8":
            worst = max(worst, (mean, half))
    report.figures["loss_after_restores"], report.figures["loss_after_restores_ci95"] = worst


def _end(task: Task, seed: int, restores: int, narrowed: Callable[[Tensor], Tensor]) -> Score:
    steps = len(task.batches(seed))
    restore_steps = {number * steps // (restores + 1) for number in range(1, restores + 1)}

    def restore(learned: Learned, step: int) -> None:
        model, (of_tables, _) = learned
        for weight in model.tables.parameters():
            state = of_tables.state[weight]
            state["sum"].copy_(narrowed(state["sum"]))

    model = task.learn(seed, restores=restore_steps, restore=restore).model
    return evaluate(model, task.test)


def _coded(rows: Tensor) -> Tensor:
    codes, grids, refused = moments.encode(rows)
    if bool(refused.any()):
        raise RuntimeError("Adagrad's sums have rows without codes")
    return moments.decode(codes, grids)


def _rounded(rows: Tensor) -> Tensor:
    return to_bfloat16(rows).float()


def _dynamic(rows: Tensor) -> Tensor:
    """Return each value as the nearest of the dynamic map, by blocks of consecutive values."""
    flat = rows.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    greatest = padded.amax(dim=1, keepdim=True)
    shares = padded / greatest.clamp(min=torch.finfo(torch.float32).tiny)
    place = torch.searchsorted(_DYNAMIC, shares).clamp(1, len(_DYNAMIC) - 1)
    below, above = _DYNAMIC[place - 1], _DYNAMIC[place]
    nearest = torch.where(shares - below < above - shares, below, above)
    return (nearest * greatest).view(-1)[: len(flat)].view_as(rows)


def _dynamic_map() -> Tensor:
    """Return the 256 values from 0 to 1: of seven decades, each has twice the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1.0, 2 ** (decade + 1) + 1, dtype=torch.float64)
        values += (10.0 ** (decade - 6) * (ends[:-1] + ends[1:]) / 2).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


_DYNAMIC = _dynamic_map()

_FORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "state=16": _rounded,
    "state=8": _coded,
    "dynamic": _dynamic,
}
#: The forms that a checkpoint may have.
_STORED_FORMS = ("state=16", "state=8")
