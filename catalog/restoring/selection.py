"""Says which checkpoint of a run is wanted: one that is named, or the newest that is good."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Final

from recpoint.catalog.runs.run import Run
from recpoint.errors import NothingToRestore, SettingsError
from recpoint.format.naming import MAX_GENERATION, MAX_STEP, ManifestName

__all__ = ["NEWEST", "Selection", "candidates"]

_NEXT: Final = (
    "recpoint list URL --all shows steps and generations; validated_within is how many batches "
    "may be trained once more for a validated checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which checkpoint of a run is wanted.

    Attributes:
        step: this checkpoint and no other; None: the newest good one.
        generation: with `step`: also one that is not on the live line.
        validated_only: without a step: pass over checkpoints that were not validated.
        validated_within: without a step: the newest validated checkpoint goes before newer ones
            that nobody has validated, if it is at most so many batches older than the newest that
            nothing speaks against; else that one. None: the newest goes first.

    Raises:
        SettingsError: a field cannot be that; or a generation comes without a step.
    """

    step: int | None = None
    generation: int | None = None
    validated_only: bool = False
    validated_within: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("step", 0, MAX_STEP),
            ("generation", 1, MAX_GENERATION),
            ("validated_within", 0, None),
        ):
            number = _plain_number(name, getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        if self.generation is not None and self.step is None:
            raise _refused("generation", "no step with it", "both")
        if not isinstance(self.validated_only, bool):
            raise _refused("validated_only", f"{self.validated_only!r:.100}", "True or False")

    @classmethod
    def of(cls, name: ManifestName) -> Selection:
        """That checkpoint and no other, on the live line or not."""
        return cls(step=name.step, generation=name.generation)

    @property
    def named(self) -> bool:
        """Whether one checkpoint is meant: no other takes its place, whatever is wrong with it."""
        return self.step is not None

    @property
    def in_words(self) -> str:
        """For people, in errors and logs."""
        if self.step is not None:
            if self.generation is None:
                return f"step {self.step}"
            return str(ManifestName(self.step, self.generation))
        if self.validated_only:
            return "the newest validated checkpoint"
        if self.validated_within is None:
            return "the newest checkpoint"
        return f"the newest checkpoint, or a validated one within {self.validated_within} batches"


def candidates(run: Run, selection: Selection, *, before: int | None = None) -> list[ManifestName]:
    """The checkpoints that a selection leaves to choose from, newest first.

    Args:
        run: the run.
        selection: what is wanted; what validations say is not looked at here.
        before: leave out this generation and later ones.

    Raises:
        NothingToRestore: the step is not on the live line.
        FormatError, GenerationRecordLost: see `Run.live_line`.
        StoreError: the store cannot be read.
    """
    step, generation = selection.step, selection.generation
    if step is None:
        return run.live_line(before=before)
    if generation is not None:
        # A person names it: whether it is on the live line does not matter (format §5), nor
        # whether the lineage can be followed at all.
        return [ManifestName(step, generation)]
    live = [name for name in run.live_line(before=before) if name.step == step]
    if live:
        return live
    others = [name for name in reversed(run.manifest_names()) if name.step == step]
    raise NothingToRestore(
        f"{run.url}, {selection.in_words}",
        found=f"superseded only: {', '.join(map(str, others))}" if others else "no checkpoint",
        expected="a checkpoint of this step on the live line",
        next_step=f"name its generation too: step {step}, generation {others[0].generation} "
        f"(--generation {others[0].generation})"
        if others
        else f"recpoint list {run.url} --all",
    )


def _plain_number(name: str, value: object, least: int, most: int | None) -> int | None:
    """The same as an `int`, since numpy's whole numbers are no `int`."""
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    raise _refused(name, f"{value!r:.100}", f"a whole number, {least} or more; or None")


def _refused(name: str, found: str, expected: str) -> SettingsError:
    return SettingsError(name, found=found, expected=expected, next_step=_NEXT)


#: The newest checkpoint of the live line that is good.
NEWEST: Final = Selection()
