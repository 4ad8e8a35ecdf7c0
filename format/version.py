"""Names the version of docs/format.md that this release writes and reads (format §8)."""

from __future__ import annotations

from typing import Final

__all__ = ["FORMAT_VERSION"]

FORMAT_VERSION: Final = 1
