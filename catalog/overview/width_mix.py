"""Says in which widths the rows of a checkpoint are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recpoint.format.manifest import ChunkEntry, TableSpec

__all__ = ["WidthMix", "width_mix"]


@dataclass(frozen=True, kw_only=True)
class WidthMix:
    """The widths of stored rows.

    Attributes:
        mean_bits: bits of a value, the mean over all values of the rows.
        row_shares: the share of the rows in each width, the narrowest first. A width is the bits of
            a code as a number; `exact`; or `with first values`, which take none.
    """

    mean_bits: float
    row_shares: tuple[tuple[str, float], ...]

    @property
    def is_one_width(self) -> bool:
        """Whether all rows have the same width."""
        return len(self.row_shares) == 1


def width_mix(chunks: Iterable[ChunkEntry], tables: Sequence[TableSpec]) -> WidthMix | None:
    """Return the widths of the rows in these chunks; None if there are no rows.

    Args:
        chunks: of one manifest, chunks of state among them.
        tables: the manifest's tables.
    """
    rows: Counter[tuple[int, str]] = Counter()
    bits = values = 0
    for chunk in chunks:
        if chunk.table is None or chunk.row_count is None or chunk.bits is None:
            continue
        # Exact rows of all dtypes are one width, behind all codes.
        words = {"exact": (64, "exact"), "first": (0, "with first values")}
        word = words.get(chunk.scheme or "", (chunk.bits, str(chunk.bits)))
        rows[word] += chunk.row_count
        values_of_chunk = chunk.row_count * tables[chunk.table].dim
        values += values_of_chunk
        bits += chunk.bits * values_of_chunk
    if not rows:
        return None
    return WidthMix(
        mean_bits=bits / values,
        row_shares=tuple((word, rows[bits, word] / rows.total()) for bits, word in sorted(rows)),
    )
