"""Keeps the codes of a full on this host, for the residuals of the increments after it (format §7).

A cache costs nothing but room when it is lost or damaged: the store has the same rows. So nothing
in it is made durable, and each file begins with the crc32c of what follows.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Final

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.errors import MalformedObject, StagingRefused
from recpoint.format.dtypes import item_bytes
from recpoint.format.manifest import ChunkEntry, TableSpec
from recpoint.format.tensor_file import (
    Section,
    file_header,
    parse_file,
    section_tensor,
    tensor_section,
)
from recpoint.kernels import row_set
from recpoint.kernels.bit_packing.widths import packed_width

__all__ = ["BaseCache"]

_log = logging.getLogger("recpoint")

_DIGEST_BYTES: Final = 4
_NEXT_STEP: Final = "nothing: the rows are read from the store again"
_METADATA: Final = "recpoint"
_NAME: Final = re.compile(r"r([0-9]{5})-([0-9a-f]{32})-.+\Z")


class BaseCache:
    """The files of one rank with rows of one full, a file for each of the full's chunks.

    Only the process that holds `agent.lock` may use it.

    Args:
        staged_run: the run's directory in the staging area.
        rank: rank of the jobs whose residuals need the rows.
        attempt: of the full; None: no job needs a full any more.
    """

    def __init__(self, staged_run: StagedRun, rank: int, attempt: str | None) -> None:
        self._run = staged_run
        self._prefix = f"r{rank:05d}-"
        self._attempt = attempt

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._run.bases_directory

    def remove_others(self) -> None:
        """Remove the rank's rows of other fulls: their chains have ended. Never raises."""
        try:
            for name in owned.names(self._run.staging, self._run.bases_directory):
                if name.startswith(self._prefix) and self._of_name(name) != self._attempt:
                    owned.remove(self._run.staging, self._run.bases_directory / name)
        except (OSError, StagingRefused) as error:
            _log.warning("rows of an earlier full stay in the staging area: %s", error)

    def read(self, entry: ChunkEntry, spec: TableSpec) -> StoredRows | None:
        """Return the rows of a chunk of the full without row states; None: read the store.

        Args:
            entry: the chunk.
            spec: its table.
        """
        path = self._path(entry)
        try:
            data = owned.read(self._run.staging, path, entry.bytes + (1 << 20))
            return _parsed(data, path, entry, spec)
        except FileNotFoundError:
            return None
        except (OSError, StagingRefused, MalformedObject, ValueError, KeyError) as error:
            _log.warning("rows of a full are read from the store again: %s: %s", path, error)
            return None

    def write(self, entry: ChunkEntry, stored: StoredRows) -> bool:
        """Keep the rows of a chunk; tell whether there was room. Never raises.

        Rows with their first values are not kept: their chunk in the store has no rows either.
        """
        if stored.first is not None:
            return True
        path = self._path(entry)
        try:
            owned.make_directory(self._run.staging, path.parent)
            data = _packed(entry, stored)
            durable.step(f"keep {path.name}")
            owned.replace(self._run.staging, path, data, temporary=f"{path.name}.tmp")
        except (OSError, StagingRefused) as error:
            _log.info("rows of a full are not kept on this host: %s: %s", path, error)
            return False
        return True

    def _path(self, entry: ChunkEntry) -> Path:
        """Return the file of a chunk; the chunk's own name has rank, table and number."""
        name = entry.key.rpartition("/")[2]
        return self._run.bases_directory / f"{self._prefix}{self._attempt}-{name}"

    def _of_name(self, name: str) -> str | None:
        match = _NAME.match(name)
        return match[2] if match else None


def _packed(entry: ChunkEntry, stored: StoredRows) -> bytes:
    fields = {"key": entry.key, "coding": "range", "first": int(stored.rows[0])}
    sections = [tensor_section("values", stored.values)]
    if stored.scheme != "exact":
        parameters = {"scale": stored.scale, "offset": stored.offset}
        halves = {name: tensor.to(torch.float16) for name, tensor in parameters.items()}
        if all(torch.equal(halves[name].float(), parameters[name]) for name in halves):
            parameters = halves
        sections += [tensor_section(name, tensor) for name, tensor in parameters.items()]
    if isinstance(stored.rows, torch.Tensor):
        coded = row_set.encode(stored.rows)
        fields |= {"coding": coded.coding, "first": coded.first}
        if coded.payload is not None:
            sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
    sections.sort(key=lambda section: -item_bytes(section.dtype))  # so that each is aligned
    header = file_header({_METADATA: json.dumps(fields)}, sections)
    data = b"".join([header, *(section.data_view for section in sections)])
    return data + crc32c.crc32c(data).to_bytes(_DIGEST_BYTES, "little")


def _parsed(whole: bytes, path: Path, entry: ChunkEntry, spec: TableSpec) -> StoredRows:
    """Return the rows of a file.

    Raises:
        MalformedObject: the file is not what was written.
        ValueError: as `row_set.decode`.
    """
    data, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    if crc32c.crc32c(data).to_bytes(_DIGEST_BYTES, "little") != digest:
        raise _malformed(path, "bytes with another digest")
    metadata, sections = parse_file(data, name=str(path), next_step=_NEXT_STEP)
    fields = json.loads(metadata[_METADATA])
    count, bits, scheme = entry.row_count, entry.bits, entry.scheme
    if fields["key"] != entry.key or count is None or bits is None or scheme is None:
        raise _malformed(path, f"rows of {fields['key']!r:.200}")
    rows: range | Tensor = range(fields["first"], fields["first"] + count)
    if fields["coding"] != "range":
        payload = bytes(sections["row_set"].data_view)
        rows = row_set.decode(
            fields["coding"], fields["first"], payload, count=count, rows=spec.rows
        )
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    is_exact = scheme == "exact"
    values = section_tensor(sections["values"])
    width = spec.dim if is_exact else packed_width(spec.dim, bits)
    if tuple(values.shape) != (count, width):
        raise _malformed(path, f"values of shape {tuple(values.shape)}")
    return StoredRows(
        rows=rows,
        scheme=scheme,
        bits=bits,
        values=values,
        scale=none if is_exact else section_tensor(sections["scale"]).float(),
        offset=none if is_exact else section_tensor(sections["offset"]).float(),
        row_states=(),
    )


def _malformed(path: Path, found: str) -> MalformedObject:
    return MalformedObject(
        str(path), found=found, expected="the rows that were kept", next_step=_NEXT_STEP
    )
