"""Closes an object at the end of its `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """Is closed at the end of its `with` block, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
