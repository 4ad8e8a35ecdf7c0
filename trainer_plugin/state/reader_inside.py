"""Has the reader inside a Lookahead draw from generators of its own, wherever it stands.

Reads ahead come at other moments than reads without Lookahead. Whatever they draw from global
generators would change what the model draws. They therefore draw from generators of their own,
whose states belong to the position of the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.lookahead_state import ahead_state, drop_batches
from recpoint.trainer_plugin.state.reader import ResumableLoader, announce

__all__ = ["ReaderInside"]


class ReaderInside:
    """A reader, and the generators that are in place of the global ones while it reads.

    Args:
        reader: the reader.

    Attributes:
        is_touched: whether the reader was iterated since it has loaded a state.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._own_generators = rng.OwnGenerators()
        self.is_touched = False

    @property
    def loader(self) -> object:
        """The loader that has samplers and a dataset."""
        return self._reader.loader if isinstance(self._reader, ResumableLoader) else self._reader

    def read(self, read: Callable[[], None]) -> None:
        """Call `read` with the reader's own generators in place of the CPU's global ones."""
        self._own_generators.run(read)

    def read_beside_gpus(self, read: Callable[[], None]) -> None:
        """Do as `read`, and put the GPUs' generators back: the reader may load a state in it."""
        self._own_generators.run_beside_gpus(read)

    def state(self) -> dict[str, Any]:
        """Return the position of the reader, as `Lookahead.state_dict` does."""
        # Copied, because the reader goes on before this is stored.
        return self._own_generators.run_beside_gpus(
            lambda: ahead_state(deepcopy(self._reader.state_dict()), 0, rng.capture_cpu())
        )

    def state_or_error(self) -> dict[str, Any] | Exception:
        """Return the position of the reader, or the error of its `state_dict`."""
        try:
            return self.state()
        except Exception as error:  # raised by the user's reader
            if came_from_handler(error):
                raise
            return error

    def load(self, state: Any, generators: Mapping[str, Any]) -> None:
        """Have the reader go on from a state, and its generators from theirs."""

        def load() -> None:
            self._reader.load_state_dict(deepcopy(state))
            # A lazy reader (torchdata's loader) draws when it starts its iterator; it does now.
            self._reader.state_dict()

        self._own_generators.restore(generators)
        self._own_generators.run_beside_gpus(load)
        self._own_generators.restore(generators)
        self.is_touched = False

    def load_divided(self, states: Sequence[Any], rank: int, ranks: int) -> None:
        """Do as `Lookahead.load_divided`."""
        self._own_generators.run_beside_gpus(
            lambda: self._reader.load_state_dicts(states, rank, ranks)
        )
        self.follow_global()

    def follow_global(self) -> dict[str, Any]:
        """Set the own generators to the states that the global ones have now; return these."""
        generators = rng.capture_cpu()
        self._own_generators.restore(generators)
        return generators

    def iterate(
        self, forward: int, *, reads: int, generators: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """Iterate the reader.

        Args:
            forward: number of batches to read and drop.
            reads: number of batches that are read before the reader's state is next taken.
            generators: states of the reader's generators at the position that it has loaded.
        """

        def begin() -> Iterator[Any]:
            announce(self._reader, reads)
            return iter(self._reader)

        batches = self._own_generators.run_beside_gpus(begin)
        if forward:
            assert generators is not None  # a state was loaded
            # The reader did not begin to iterate at that position, so it drew nothing for that.
            self._own_generators.restore(generators)
            self._own_generators.run_beside_gpus(lambda: drop_batches(batches, forward))
        return batches
