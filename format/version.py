"""Names the versions of records that this release writes and reads (format §8)."""

from __future__ import annotations

from typing import Final

__all__ = ["FORMAT_VERSION", "PAGED_VERSION"]

#: Of all records but manifests that are stored in pages.
FORMAT_VERSION: Final = 1
#: Of the root of a manifest that is stored in pages, and of its pages.
PAGED_VERSION: Final = 2
