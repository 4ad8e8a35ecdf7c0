"""Reads the facts of a committed checkpoint, for its trainer and for reports."""

from __future__ import annotations

from typing import NamedTuple

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.errors import ChainError, FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest, Quantizer
from recpoint.format.naming import ManifestName

__all__ = [
    "Committed",
    "committed",
]


class Committed(NamedTuple):
    """A committed checkpoint: the bytes and number of its chunks, and the time of the commit.

    `rank_bytes`: bytes of one rank's chunks. `links_to_read`: manifests that a restore reads.
    `quantizers`: how this rank quantized the tables.
    """

    stored_bytes: int
    rank_bytes: int
    chunks: int
    committed_ms: int
    links_to_read: int
    quantizers: tuple[Quantizer, ...]


def committed(run: Run, manifest: Manifest, rank: int) -> Committed:
    """Return what rank `rank` of the trainer is told about its committed checkpoint."""
    return Committed(
        manifest.stored_bytes,
        sum(entry.bytes for entry in manifest.chunks if entry.rank == rank),
        len(manifest.chunks),
        manifest.committed_ms,
        _links_to_read(run, manifest),
        tuple(quantizer for quantizer in manifest.quantizers if quantizer.rank == rank),
    )


def _links_to_read(run: Run, manifest: Manifest) -> int:
    """Return how many manifests a restore of this checkpoint would read now."""
    as_taken = manifest.links.chain_length
    if as_taken == 1 or not run.consolidated():
        return as_taken
    try:
        chain = resolve_chain(run, ManifestName(manifest.step, manifest.generation))
    except (ChainError, FormatError, ObjectNotFound):
        return as_taken  # the checkpoint is committed anyway; a check finds what is wrong
    return len(chain.all_manifests)
