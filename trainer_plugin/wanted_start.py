"""Validates what a trainer asks `Checkpointer.restore` for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.restoring.selection import Selection
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.parts import Seed, parts_of

__all__ = ["Wanted"]


class Wanted(NamedTuple):
    """What a trainer asks for, see `Checkpointer.restore`."""

    selection: Selection
    fresh: bool
    partial: Mapping[str, Sequence[str]] | None
    seed: Seed | None

    def check(self) -> None:
        """Check that all of it can be had at once.

        Raises:
            SettingsError: options that exclude each other, or that cannot be meant.
        """
        given = {
            "step": self.selection.step,
            "generation": self.selection.generation,
            "partial": self.partial,
            "seed": self.seed,
        }
        for one, others in (
            ("fresh", ("step", "generation", "partial", "seed")),
            ("seed", ("step", "generation", "partial")),
        ):
            if not getattr(self, one):
                continue
            for other in others:
                if given[other] is not None:
                    raise SettingsError(
                        f"restore({one}=...)",
                        found=f"{other} with it",
                        expected=f"{one} without {' or '.join(others)}",
                        next_step="see the docstring of Checkpointer.restore",
                    )
        if self.partial is not None:
            parts_of(self.partial)
        if not isinstance(self.seed, Seed | None):
            raise SettingsError(
                "restore(seed=...)",
                found=f"a {type(self.seed).__name__}",
                expected="a recpoint.Seed",
                next_step="seed=recpoint.Seed(URL, tables=..., dense=...)",
            )
