"""The two copies of what is served: requests read one while the other is changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from recpoint.errors import NotServing
from recpoint.serving.model_copy import ModelCopy
from recpoint.serving.served_model import ServedModel
from recpoint.serving.version import Version

__all__ = ["Copies"]


class Copies:
    """Who reads which copy, and the switch between them.

    Args:
        model: becomes one copy; None: there is none, only tables.
        url: of the run, for errors.
    """

    def __init__(self, model: nn.Module | None, url: str) -> None:
        self._url = url
        self._copies = [ModelCopy(None if model is None else ServedModel(model))]
        self._active = 0
        self.changed = threading.Condition()

    @property
    def version(self) -> Version | None:
        """What requests are given."""
        return self._copies[self._active].version

    @property
    def active(self) -> ModelCopy:
        """The copy that is read."""
        return self._copies[self._active]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for one in self._copies for table in list(one.tables.values()))

    @contextmanager
    def reading(self) -> Iterator[Version]:
        """The version in service; it stays as it is until the block ends."""
        with self.changed:
            held = self._copies[self._active]
            version = held.version
            if version is None:
                raise NotServing(
                    self._url,
                    found="no version in memory yet",
                    expected="a checkpoint that was read",
                    next_step="wait for Follower.wait(); Follower.status says what is missing",
                )
            held.readers += 1
        try:
            yield version
        finally:
            with self.changed:
                held.readers -= 1
                self.changed.notify_all()

    def standby(self, *, wait_seconds: float) -> ModelCopy:
        """The copy that nobody reads any more.

        Raises:
            NotServing: requests are still looking at it.
        """
        if self.version is None:
            return self.active
        if len(self._copies) == 1:
            model = self.active.model
            # Requests only read it.
            other = None if model is None else ServedModel(copy.deepcopy(model.model))
            self._copies.append(ModelCopy(other))
        standby = self._copies[1 - self._active]
        with self.changed:
            if not self.changed.wait_for(lambda: standby.readers == 0, timeout=wait_seconds):
                raise NotServing(
                    self._url,
                    found=f"{standby.readers} request(s) that look at an older version still",
                    expected=f"none after {wait_seconds:g} s",
                    next_step="end the blocks of Follower.reading(); until then nothing is updated",
                )
            standby.version = None
        return standby

    def switch(self, standby: ModelCopy, version: Version) -> ModelCopy:
        """Give `standby` to requests that begin from now on; the copy that was read so far."""
        with self.changed:
            before = self.active
            standby.version = version
            self._active = self._copies.index(standby)
            self.changed.notify_all()
        return before
