"""What a trainer asks its start for, and that it can be meant."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, SupportsInt

from recpoint.catalog.restoring.restore_order import check_validated_within
from recpoint.errors import SettingsError
from recpoint.format.naming import MAX_GENERATION, MAX_STEP
from recpoint.trainer_plugin.parts import Seed, parts_of

__all__ = ["Wanted"]


class Wanted(NamedTuple):
    """What a trainer asks for, see `Checkpointer.restore`."""

    step: int | None
    generation: int | None
    fresh: bool
    partial: Mapping[str, Sequence[str]] | None
    seed: Seed | None
    validated_only: bool
    validated_within: int | None

    def checked(self) -> Self:
        """The same, in plain numbers, if it can be had at once.

        Raises:
            SettingsError: options that exclude each other, or that cannot be meant.
        """
        step = _number("step", self.step, 0, MAX_STEP)
        generation = _number("generation", self.generation, 1, MAX_GENERATION)
        for one, others in (
            ("fresh", ("step", "generation", "partial", "seed")),
            ("seed", ("step", "generation", "partial")),
        ):
            if not getattr(self, one):
                continue
            for other in others:
                if getattr(self, other) is not None:
                    raise SettingsError(
                        f"restore({one}=...)",
                        found=f"{other} with it",
                        expected=f"{one} without {' or '.join(others)}",
                        next_step="see the docstring of Checkpointer.restore",
                    )
        if self.generation is not None and self.step is None:
            raise SettingsError(
                "restore(generation=...)",
                found="no step with it",
                expected="both",
                next_step="name the step too, as recpoint list URL --all shows it",
            )
        within = check_validated_within(self.validated_within)
        if self.partial is not None:
            parts_of(self.partial)
        if not isinstance(self.seed, Seed | None):
            raise SettingsError(
                "restore(seed=...)",
                found=f"a {type(self.seed).__name__}",
                expected="a recpoint.Seed",
                next_step="seed=recpoint.Seed(URL, tables=..., dense=...)",
            )
        return self._replace(step=step, generation=generation, validated_within=within)


def _number(name: str, value: object, least: int, most: int) -> int | None:
    if value is None:
        return None
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    number = int(value) if whole and isinstance(value, SupportsInt) else least - 1
    if not least <= number <= most:
        raise SettingsError(
            f"restore({name}=...)",
            found=f"{value!r:.100}",
            expected=f"a whole number, {least} or more",
            next_step=f"give the {name} as recpoint list URL --all shows it",
        )
    return number
