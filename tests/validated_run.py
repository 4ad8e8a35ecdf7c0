"""Builds a checkpointed run to validate, and damages its stored objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import crc32c
import torch

from recpoint.catalog.check.validate import Validation, validate
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk
from recpoint.catalog.run.run import Run
from recpoint.format.chunk import Section, build_chunk
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import pack_record
from tests.catalog_builder import Table, new_run
from tests.job_builder import Links, stage

__all__ = [
    "LEVELS",
    "STEPS",
    "Level",
    "at",
    "chunk_of",
    "rewrite",
    "subjects",
    "tables_of",
    "validated_run",
]

Level = Literal["metadata", "sample", "full"]
LEVELS: tuple[Level, ...] = ("metadata", "sample", "full")
STEPS = (10, 20, 30)


def tables_of(seed: int) -> list[Table]:
    """Return tables of three dtypes and widths, with rows that are hard to store."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randn(300, 8, generator=generator)
    items[7, 3] = float("nan")
    items[8] = 1.25
    return [
        Table("items", items, (torch.rand(300, 8), torch.rand(300)), bits=4, state_bits=16),
        Table("plain", torch.randn(80, 5, generator=generator), (torch.rand(80, 2),)),
        Table("half", torch.randn(120, 6, generator=generator).to(torch.bfloat16), bits=8),
    ]


def validated_run(folder: Path) -> tuple[Run, list[Manifest]]:
    """Persist a full at step 10 and increments at 20 and 30 from staged jobs with samples."""
    run = new_run(folder / "run")
    run.claim(None)
    tables, links = tables_of(0), Links()
    generator = torch.Generator().manual_seed(5)
    for step in STEPS:
        dirty = None
        if step > 10:
            dirty = [
                torch.randperm(table.rows, generator=generator)[: table.rows // 4].sort().values
                for table in tables
            ]
            for table, ids in zip(tables, dirty, strict=True):
                table.train(ids, generator)
        job = stage(
            run,
            folder / "staging",
            tables,
            step=step,
            generation=1,
            links=links,
            dirty=dirty,
            state={"step": step},
            samples=40,
        )
        assert persist.persist_job(job).result == "committed"
    return run, [run.manifest(step, 1) for step in STEPS]


def chunk_of(manifest: Manifest, content: str, table: int | None = None) -> ChunkEntry:
    """Return the first chunk with this content, of this table."""
    return next(
        entry
        for entry in manifest.chunks
        if entry.content == content and (table is None or entry.table == table)
    )


def rewrite(run: Run, entry: ChunkEntry, change: Callable[[dict[str, Section]], None]) -> None:
    """Store a chunk with changed contents, and a manifest with its new length and digest."""
    step = int(entry.key.split("/")[1][:12])
    manifest = run.manifest(step, 1)
    meta, sections = read_chunk(StoreChunks(run.store), manifest, entry)
    sections = {
        name: section._replace(data=bytearray(section.data_view))
        for name, section in sections.items()
    }
    change(sections)
    data = build_chunk(meta, list(sections.values()))
    run.store.put(entry.key, data)
    digest = {"bytes": len(data), "crc32c": crc32c.crc32c(data)}
    chunks = tuple(
        chunk.model_copy(update=digest) if chunk.key == entry.key else chunk
        for chunk in manifest.chunks
    )
    changed = manifest.model_copy(update={"chunks": chunks})
    run.store.put(MANIFEST_KEY.of(step, 1), pack_record(changed))


def at(run: Run, step: int, level: Level) -> Validation:
    """Validate a checkpoint of generation 1."""
    return validate(run, ManifestName(step, 1), level=level)


def subjects(validation: Validation) -> set[str]:
    """Return the subjects of the findings; chunks without the common start of all keys."""
    return {finding.subject.rpartition("chunks/")[2] for finding in validation.findings}
