"""Which checkpoint a follower is to serve, best first (format §6.9)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from recpoint.catalog.records.publications import publication_numbers
from recpoint.catalog.records.validations import Doubts
from recpoint.catalog.restoring.restore_order import Skipped
from recpoint.catalog.runs.run import Run
from recpoint.errors import FormatError, NothingToRestore, ObjectNotFound
from recpoint.format.naming import ManifestName
from recpoint.format.record_kinds import PUBLICATION

__all__ = ["CHANNELS", "Channel", "Wanted", "find_pinned", "find_wanted"]

_log = logging.getLogger("recpoint.serving")

#: `newest`: the newest checkpoint that no validation speaks against. `validated`: the newest that a
#: validation of its bytes has passed. `published`: the one that was published last.
Channel = Literal["newest", "validated", "published"]
CHANNELS: tuple[Channel, ...] = ("newest", "validated", "published")

#: Publications that a follower without anything to serve goes back through.
_MOST_PUBLICATIONS = 10


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What there is to move to.

    Attributes:
        names: checkpoints that are better than what is served, best first.
        skipped: those that would be better, but for what validations say.
        newest: the newest checkpoint of the live line, whatever is said of it.
        doubts: what validations say, at that look.
        published_ms: when the first of `names` was published; None: it was not.
    """

    names: Sequence[ManifestName]
    skipped: Sequence[Skipped]
    newest: ManifestName | None
    doubts: Doubts
    published_ms: int | None = None

    def after(self, served: ManifestName) -> Self:
        """The same for a follower that is pinned to `served`: what is newer than that."""
        return replace(self, names=[name for name in self.names if name > served])


def find_wanted(run: Run, channel: Channel, served: ManifestName | None) -> Wanted:
    """What a follower that serves `served` is to move to.

    A checkpoint that retention has deleted goes on being served; one that is no longer on the live
    line, or that a validation has found wrong meanwhile, is left for the newest that is good. What
    is published is another's choice, and is not left for what validations say of it.

    Raises:
        FormatError: a generation record, or the newest publication, is damaged.
        StoreError: the store cannot be read.
    """
    if channel == "published":
        return _published(run, served)
    generations = run.generation_numbers()  # before the checkpoints, as in `Run.live_line`
    there = set(run.manifest_names())
    line = run.line_of(generations, there if served is None else {*there, served})
    doubts = Doubts(run, validated_only=channel == "validated")
    names: list[ManifestName] = []
    skipped: list[Skipped] = []
    for name in line:
        doubt = doubts.about(name) if name in there else None
        if name == served and (doubt is None or name not in there):
            break
        if doubt is not None:
            skipped.append(Skipped(name, doubt))
        elif name in there:
            names.append(name)
    return Wanted(
        names=names,
        skipped=skipped,
        newest=next((name for name in line if name in there), None),
        doubts=doubts,
    )


def _published(run: Run, served: ManifestName | None) -> Wanted:
    live = run.live_line()
    newest = live[0] if live else None
    names: list[ManifestName] = []
    since: int | None = None
    for number in list(reversed(publication_numbers(run)))[:_MOST_PUBLICATIONS]:
        try:
            record = run.records(PUBLICATION).read(number)
        except (FormatError, ObjectNotFound) as error:
            if served is not None:
                raise  # an older publication is no reason to go back
            _log.warning("passing over publication %d: %s", number, error)
            continue
        name = ManifestName(record.checkpoint.step, record.checkpoint.generation)
        if name == served:
            break
        if name not in names:
            since = since or record.created_ms
            names.append(name)
        if served is not None:
            break
    return Wanted(
        names=names,
        skipped=(),
        newest=newest,
        doubts=Doubts(run, validated_only=False),
        published_ms=since,
    )


def find_pinned(run: Run, step: int, generation: int | None) -> ManifestName:
    """The checkpoint that a follower is pinned to.

    Raises:
        NothingToRestore: there is none of this step on the live line, or none of that name.
    """
    if generation is None:
        found = [name for name in run.live_line() if name.step == step]
        missing = "no checkpoint of this step on the live line"
    else:
        found = [name for name in run.manifest_names() if name == (step, generation)]
        missing = f"none of generation {generation}"
    if not found:
        raise NothingToRestore(
            f"{run.url}, step {step}",
            found=missing,
            expected="the checkpoint that the follower is pinned to",
            next_step=f"recpoint list {run.url}; then unpin, or pin another one",
        )
    return found[0]
