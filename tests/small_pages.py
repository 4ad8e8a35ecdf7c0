"""Has small manifests stored in pages, as large ones are."""

from __future__ import annotations

import pytest

from recpoint.format import paging

__all__ = ["small_pages"]


def small_pages(patch: pytest.MonkeyPatch, *, chunks: int = 2, root: int = 3) -> None:
    """Have every manifest written in pages of at most `chunks`, and `root` of them in its root."""
    patch.setattr(paging, "ONE_RECORD_CHUNKS", 0)
    patch.setattr(paging, "LEAST_CHUNKS", 1)
    patch.setattr(paging, "MOST_CHUNKS", chunks)
    patch.setattr(paging, "ROOT_PAGES", root)
