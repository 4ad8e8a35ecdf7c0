"""Rows that the trainer has quantized: the same chunks as of their values, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch
from torch import Tensor

from recpoint.catalog.persist import persist, plan
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import FormatError
from recpoint.format.manifest import ChosenMethod
from tests.catalog_builder import Table, copy_run
from tests.job_builder import Links, rewrite, stage

ROWS, DIM = 500, 5


def method(name: str, bins: int = 0, ratio_permille: int = 0, refits: int = 0) -> ChosenMethod:
    return ChosenMethod(
        method=name,
        bins=bins,
        ratio_permille=ratio_permille,
        refits=refits,
        sample_rows=17,
        seed=3,
    )


METHODS = (
    method("asymmetric"),
    method("symmetric"),
    method("refit", bins=5, refits=2),
    method("greedy", bins=25, ratio_permille=400),
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 900)
    monkeypatch.setattr(plan, "GROUP_BYTES", 3000)


def trained(bits: int, dtype: torch.dtype = torch.float32, *, odd: bool = True) -> Table:
    """Rows of all kinds: most of them ordinary, some wide, constant, or not quantizable."""
    generator = torch.Generator().manual_seed(bits)
    values = torch.randn(ROWS, DIM, generator=generator)
    if odd:
        values[3::11] = 0.0
        values[4::17] = 1.0 / 3.0
        values[5::13] *= 3e5
        values[6::29, 2] = float("nan")
        values[7:12] = float("inf")
        values[-1, 0] = float("-inf")
        values[90:95] = torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0])
    states = (torch.rand(ROWS, DIM, generator=generator), torch.rand(ROWS, generator=generator))
    return Table("items", values.to(dtype), states, bits=bits)


def chunks(run: Run) -> dict[str, bytes]:
    return {
        info.key: run.store.get(info.key, max_bytes=1 << 30) for info in run.store.list("chunks/")
    }


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(
    ("bits", "chosen", "dtype"),
    [
        (2, METHODS[2], torch.float32),
        (3, METHODS[1], torch.float16),
        (3, METHODS[3], torch.float32),
        (4, METHODS[0], torch.bfloat16),
        (4, METHODS[2], torch.float16),
        (8, METHODS[0], torch.float32),
        (8, METHODS[2], torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_codes_become_the_chunks_that_their_values_become(
    run: Run, tmp_path: Path, bits: int, chosen: ChosenMethod, dtype: torch.dtype, every: bool
) -> None:
    table = trained(bits, dtype)
    ids = None if every else torch.arange(0, ROWS, 3)
    found = []
    for name, codes in (("values", False), ("codes", True)):
        target = copy_run(run, tmp_path / name)
        links = Links()
        if ids is not None:
            first = stage(target, tmp_path / f"{name}-area", [table], step=1, generation=1)
            full = job_files.read_job(first)
            assert persist.persist_job(first).result == "committed"
            links.add(full.ref)
        job = stage(
            target,
            tmp_path / f"{name}-area",
            [table],
            step=2,
            generation=1,
            links=links,
            dirty=None if ids is None else [ids],
            method=chosen,
            codes=codes,
            attempt="5a" * 16,
        )
        outcome = persist.persist_job(job)
        assert outcome.result == "committed", outcome.error
        manifest = target.manifest(2, 1)
        assert outcome.quantizers == manifest.quantizers
        (quantizer,) = manifest.quantizers
        assert quantizer.chosen == chosen
        assert (manifest.quantized_by == "the builder") == codes
        found.append({key: data for key, data in chunks(target).items() if "5a5a" in key})
        memory = MemoryTarget()
        restore(target, memory)
    values, of_codes = found
    schemes = {entry.scheme for entry in manifest.chunks}
    assert {"exact", "asymmetric"} <= schemes
    assert values == of_codes


def test_a_table_without_odd_rows_needs_none_of_them(run: Run, tmp_path: Path) -> None:
    table = trained(4, odd=False)
    job = stage(
        run, tmp_path / "area", [table], step=1, generation=1, method=METHODS[2], codes=True
    )
    assert job_files.read_job(job).segment("t0.exact").bytes == 0
    assert persist.persist_job(job).result == "committed"


# --- a slot that nobody should have written ------------------------------------------------------


def altered(job: Path, name: str, change: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
    """Change an array in the slot, and its digest in the job."""
    found = job_files.read_job(job)
    segment = found.segment(name)
    slot = StagedRun(job.parent.parent).slots_directory / found.slot
    data = bytearray(slot.read_bytes())
    end = segment.offset + segment.bytes
    array = torch.frombuffer(data[segment.offset : end], dtype=dtype).clone()
    change(array)
    data[segment.offset : end] = array.view(torch.uint8).numpy().tobytes()
    slot.write_bytes(data)
    renewed = segment.model_copy(
        update={"crc32c": crc32c.crc32c(bytes(data[segment.offset : end]))}
    )
    rewrite(job, segments=tuple(renewed if s.name == name else s for s in found.segments))


def put(position: int, value: float) -> Callable[[Tensor], Any]:
    def change(array: Tensor) -> None:
        array[position] = value

    return change


#: Of `trained(3)`, rows 0 to 2 are narrow and row 5 is wide.
@pytest.mark.parametrize(
    ("segment", "dtype", "change"),
    [
        ("scale", torch.float32, put(0, float("nan"))),
        ("scale", torch.float32, put(0, float("inf"))),
        ("scale", torch.float32, put(5, 3e38)),
        ("scale", torch.float32, put(1, 1.0 / 3.0)),
        ("offset", torch.float32, put(0, float("-inf"))),
        ("offset", torch.float32, put(2, 1.0 / 3.0)),
        ("offset", torch.float32, put(5, float("nan"))),
        ("wide", torch.uint8, put(0, 2)),
        ("wide", torch.uint8, put(499, 255)),
        ("codes", torch.uint8, put(1, 0x80)),
        ("exact_at", torch.int64, put(0, -1)),
        ("exact_at", torch.int64, put(-1, ROWS)),
        ("exact_at", torch.int64, put(-1, 2**62)),
        ("exact_at", torch.int64, put(1, 0)),
        ("exact_at", torch.int64, lambda array: array.copy_(array.flip(0).clone())),
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_codes_that_no_quantization_gives_are_refused(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segment: str,
    dtype: torch.dtype,
    change: Callable[[Tensor], Any],
    small: bool,
) -> None:
    if small:
        monkeypatch.setattr(plan, "CHUNK_BYTES", 900)
    job = stage(
        run, tmp_path / "area", [trained(3)], step=1, generation=1, method=METHODS[2], codes=True
    )
    altered(job, f"t0.{segment}", change, dtype)
    outcome = persist.persist_job(job)
    assert (outcome.result, outcome.error_type) == ("rejected", "MalformedObject")
    assert f"t0.{segment}" in outcome.error
    assert run.manifest_names() == []


def _with_table(job: Path, **changes: Any) -> None:
    (table,) = job_files.read_job(job).tables
    fields = {name: getattr(table, name) for name in type(table).model_fields}
    rewrite(job, tables=(type(table).model_construct(**{**fields, **changes}),))


def _with_segment(job: Path, segment: str, **changes: Any) -> None:
    found = job_files.read_job(job).segments
    renewed = tuple(s.model_copy(update=changes) if s.name == segment else s for s in found)
    rewrite(job, segments=renewed)


@pytest.mark.parametrize(
    "change",
    [
        lambda job: _with_table(job, method=None),
        lambda job: _with_table(job, method=method("kmeans")),
        lambda job: _with_table(job, method=method("refit", bins=10**6)),
        lambda job: _with_table(job, method=method("asymmetric", bins=3)),
        lambda job: _with_table(job, bits=32),
        lambda job: _with_table(job, bits=4),
        lambda job: _with_table(job, codes=False),
        lambda job: _with_segment(job, "t0.exact_at", name="t0.exact_on"),
        lambda job: _with_segment(job, "t0.exact_at", shape=(), bytes=8),
        lambda job: _with_segment(job, "t0.exact_at", shape=(2**40,), bytes=2**43),
        lambda job: _with_segment(job, "t0.exact", shape=(1, DIM), bytes=4 * DIM),
        lambda job: _with_segment(job, "t0.scale", dtype="F16", bytes=2 * ROWS),
        lambda job: _with_segment(job, "t0.wide", dtype="U8"),
        lambda job: _with_segment(job, "t0.codes", shape=(ROWS, 1), bytes=ROWS),
    ],
)
def test_jobs_whose_codes_do_not_fit_are_refused(
    run: Run, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    job = stage(
        run, tmp_path / "area", [trained(3)], step=1, generation=1, method=METHODS[2], codes=True
    )
    change(job)
    with pytest.raises(FormatError):
        persist.PersistJob.open(job).groups  # noqa: B018
    assert persist.persist_job(job).result == "rejected"


def test_a_damaged_slot_is_noticed(run: Run, tmp_path: Path) -> None:
    job = stage(
        run, tmp_path / "area", [trained(3)], step=1, generation=1, method=METHODS[2], codes=True
    )
    found = job_files.read_job(job)
    slot = StagedRun(job.parent.parent).slots_directory / found.slot
    data = bytearray(slot.read_bytes())
    data[found.segment("t0.codes").offset] ^= 1
    slot.write_bytes(data)
    outcome = persist.persist_job(job)
    assert (outcome.result, outcome.error_type) == ("rejected", "DigestMismatch")
