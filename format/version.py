"""The version of docs/format.md that this release writes and reads (format §8)."""

__all__ = ["FORMAT_VERSION"]

FORMAT_VERSION = 1
