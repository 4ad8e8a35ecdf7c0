"""Says which checkpoint a follower is to serve, best first (format §6.9)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from recpoint.catalog.restore.order import Skipped
from recpoint.catalog.run.publications import publication_numbers
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
from recpoint.errors import FormatError, NothingToRestore, ObjectNotFound
from recpoint.format.naming import ManifestName
from recpoint.format.record_kinds import PUBLICATION

__all__ = [
    "CHANNELS",
    "Channel",
    "FollowerGoal",
    "find_pinned",
    "find_wanted",
]


#: `newest`: the newest checkpoint that no validation speaks against. `validated`: the newest
#: checkpoint whose bytes passed a validation. `published`: the checkpoint that was published last.
Channel = Literal["newest", "validated", "published"]
CHANNELS: tuple[Channel, ...] = ("newest", "validated", "published")

#: A follower that serves nothing yet goes back through so many publications.
_MOST_PUBLICATIONS = 10

_log = logging.getLogger("recpoint.serving")


@dataclass(frozen=True, kw_only=True)
class FollowerGoal:
    """The checkpoints that a follower may move to.

    Attributes:
        names: checkpoints that are better than the served one, best first.
        skipped: better checkpoints that are left out because of what validations say.
        newest: the newest checkpoint of the live line, whatever validations say of it.
        doubts: what validations said at that look.
        published_ms: when the first publication after the served checkpoint's was made, as far as
            the last ten say; None: nothing better is published.
    """

    names: Sequence[ManifestName]
    skipped: Sequence[Skipped]
    newest: ManifestName | None
    doubts: Doubts
    published_ms: int | None = None

    def after(self, served: ManifestName) -> Self:
        """Return the same for a follower that is pinned to `served`: only newer checkpoints."""
        return replace(self, names=[name for name in self.names if name > served])


def find_wanted(run: Run, channel: Channel, served: ManifestName | None) -> FollowerGoal:
    """Return what a follower that serves `served` is to move to.

    If retention has deleted the served checkpoint, it stays in service. If it is no longer on the
    live line, or if a validation has found it wrong, the follower moves to the newest good one. A
    published checkpoint was chosen by somebody, and stays in service whatever validations say.

    Raises:
        FormatError: a generation record, or the newest publication, is damaged.
        StoreError: the store cannot be read.
    """
    if channel == "published":
        return _published(run, served)
    generations = run.generation_numbers()  # before the checkpoints, as in `Run.live_line`
    present = set(run.manifest_names())
    line = run.line_of(generations, present if served is None else {*present, served})
    doubts = Doubts(run, validated_only=channel == "validated")
    names: list[ManifestName] = []
    skipped: list[Skipped] = []
    for name in line:
        doubt = doubts.about(name) if name in present else None
        if name == served and (doubt is None or name not in present):
            break
        if doubt is not None:
            skipped.append(Skipped(name, doubt))
        elif name in present:
            names.append(name)
    return FollowerGoal(
        names=names,
        skipped=skipped,
        newest=next((name for name in line if name in present), None),
        doubts=doubts,
    )


def _published(run: Run, served: ManifestName | None) -> FollowerGoal:
    live = run.live_line()
    newest = live[0] if live else None
    names: list[ManifestName] = []
    since_ms: int | None = None
    for number in list(reversed(publication_numbers(run)))[:_MOST_PUBLICATIONS]:
        try:
            record = run.records(PUBLICATION).read(number)
        except (FormatError, ObjectNotFound) as error:
            if served is not None and not names:
                raise  # an older publication is no reason to go back
            _log.warning("passing over publication %d: %s", number, error)
            continue
        name = ManifestName(record.checkpoint.step, record.checkpoint.generation)
        if name == served:
            break
        since_ms = record.created_ms  # of ever older ones: a newer one must not restart the lag
        if not names or (served is None and name not in names):
            names.append(name)
    return FollowerGoal(
        names=names,
        skipped=(),
        newest=newest,
        doubts=Doubts(run, validated_only=False),
        published_ms=since_ms,
    )


def find_pinned(run: Run, step: int, generation: int | None) -> ManifestName:
    """Return the checkpoint that a follower is pinned to.

    Raises:
        NothingToRestore: the live line has no checkpoint of this step, or the run has none of this
            step and generation.
    """
    if generation is None:
        matching = [name for name in run.live_line() if name.step == step]
        missing = "no checkpoint of this step on the live line"
    else:
        matching = [name for name in run.manifest_names() if name == (step, generation)]
        missing = f"none of generation {generation}"
    if not matching:
        raise NothingToRestore(
            f"{run.url}, step {step}",
            found=missing,
            expected="the checkpoint that the follower is pinned to",
            next_step=f"recpoint list {run.url}; then unpin, or pin another one",
        )
    return matching[0]
