"""Plans and executes a sweep: removes objects that no checkpoint will ever need from a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self

from recpoint.catalog.retention.named_chunks import NamedChunks
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo, Store, host_seconds, now_ms, store_ms
from recpoint.catalog.store.deletes import deletions
from recpoint.errors import SettingsError, StoreError
from recpoint.format.naming import (
    PART_KEY,
    AttemptName,
    ManifestName,
    NamedCheckpoint,
    PartName,
    ValidationName,
    attempt_prefix,
    is_probe_key,
    parse_chunk_key,
)
from recpoint.format.record_kinds import PART, PIN, kind_of

__all__ = [
    "GRACE_NEEDED",
    "SweepPlan",
    "SweepResult",
    "execute",
    "plan_sweep",
    "spared_words",
]


#: Why a command refuses a shorter grace than `recpoint.catalog.retention.grace` allows.
GRACE_NEEDED = "objects that are still being written are younger"

#: This long after an attempt was checked, it is checked again before more of it is removed, because
#: a consolidation may have continued with it. A consolidation waits twice as long before its last
#: check (format §6.8, consolidation order, rule 6).
_LOOK_AGAIN_SECONDS: Final = 10.0

#: If checks themselves take longer than that, after this many in a row each allows one removal.
_SLOW_LOOKS: Final = 3


class SweptObject(NamedTuple):
    """One object to remove, and why nothing needs it."""

    key: str
    size_bytes: int
    reason: str


class KeptPrefix(NamedTuple):
    """A prefix of chunks that no manifest names but that stay for now, and why."""

    prefix: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep would do, found without removing anything.

    Attributes:
        prefixes: attempts with chunks or parts to remove.
        objects: these chunks and parts, probes left by killed processes, and validations and
            metrics of checkpoints that are gone.
        unfinished: temporary files and multipart uploads to remove.
        kept: attempts whose unnamed chunks stay.
        lost: why some of those stay: checkpoints are needed whose manifests are lost, and a person
            has to restore the manifests.
        young: number of other objects that a later sweep will find old enough.
        unrecognised: keys that are not recpoint's; never removed.
        blocked: manifests that cannot be read. The chunks that they name are unknown, so no chunk
            is removed while there are any.
        grace_seconds: younger objects stay.
        now_ms: when the plan was begun, by the slower clock of this host's and the store's.
        keep: returns the attempts that staged jobs name now.
        spare_newest: keep attempts that the newest generation can still commit.
    """

    prefixes: tuple[AttemptName, ...]
    objects: tuple[SweptObject, ...]
    unfinished: tuple[SweptObject, ...]
    kept: tuple[KeptPrefix, ...]
    lost: tuple[str, ...]
    young: int
    unrecognised: tuple[str, ...]
    blocked: tuple[str, ...]
    grace_seconds: float
    now_ms: int
    keep: Callable[[], Collection[str]]
    spare_newest: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that `execute` would free."""
        return sum(swept.size_bytes for swept in self.objects + self.unfinished)


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The outcome of a sweep; `spared` became needed between the plan and its execution."""

    removed: tuple[SweptObject, ...]
    spared: tuple[KeptPrefix, ...]

    @property
    def removed_bytes(self) -> int:
        """Bytes freed."""
        return sum(swept.size_bytes for swept in self.removed)


def spared_words(spared: Sequence[tuple[str, str]]) -> str:
    """Name the first object that was to be removed and is needed now, for a line of a report.

    Args:
        spared: keys or prefixes of such objects, each with the reason.

    Returns:
        The words, with "; " before them; empty if there is none.
    """
    if not spared:
        return ""
    key, reason = spared[0]
    others_text = f", and {len(spared) - 1} more" if len(spared) > 1 else ""
    return f"; not removed, because it is needed now: {key} ({reason}){others_text}"


class _Listing(NamedTuple):
    """The objects of a store, sorted by their keys.

    Attributes:
        chunks: the chunks of each attempt.
        parts: the parts of each attempt.
        probes: objects of tests whether the store supports create-once.
        said: metrics and validations, each with the checkpoint that it is about.
        pins: names of the pins of each checkpoint.
        unrecognised: keys that are not recpoint's.
    """

    chunks: dict[AttemptName, list[ObjectInfo]]
    parts: dict[AttemptName, list[ObjectInfo]]
    probes: list[ObjectInfo]
    said: list[tuple[ObjectInfo, ManifestName]]
    pins: dict[ManifestName, list[str]]
    unrecognised: list[str]

    @classmethod
    def of(cls, infos: Iterable[ObjectInfo]) -> Self:
        """Sort objects by their keys."""
        listing = cls({}, {}, [], [], {}, [])
        for info in infos:
            if (attempt := parse_chunk_key(info.key)) is not None:
                listing.chunks.setdefault(attempt, []).append(info)
            elif is_probe_key(info.key):
                listing.probes.append(info)
            elif (kind := kind_of(info.key)) is None:
                listing.unrecognised.append(info.key)
            else:
                match kind.keys.parse(info.key):
                    case PartName() as part:
                        listing.parts.setdefault(part.checkpoint, []).append(info)
                    case NamedCheckpoint() as pin if kind is PIN:
                        checkpoint = ManifestName(pin.step, pin.generation)
                        listing.pins.setdefault(checkpoint, []).append(pin.name)
                    case NamedCheckpoint() | ValidationName() as about:
                        checkpoint = ManifestName(about.step, about.generation)
                        listing.said.append((info, checkpoint))
        return listing


def plan_sweep(
    run: Run,
    *,
    grace_seconds: float,
    keep: Collection[str] | Callable[[], Collection[str]] = (),
    spare_newest: bool = False,
    ask_store: bool = True,
    on_step: OnStep = unwatched,
) -> SweepPlan:
    """Plan a sweep: find the objects to remove; nothing is changed.

    Args:
        run: the run.
        grace_seconds: objects modified less long ago, by the store's times, stay: they may belong
            to a checkpoint that is being written. Must exceed the longest time that a persist or a
            consolidation takes.
        keep: attempts of jobs in a staging area, which an agent will finish. A function is called
            after the store was listed, and again before each attempt is removed.
        spare_newest: keep attempts that the newest generation can still commit, however old; for a
            sweep on another host than the trainer's, where the staged jobs are not known.
        ask_store: ask the store for its time, which writes and removes a small object; if the store
            accepts none, the time of its newest object is used. Without it nothing is written, but
            a clock of this host that is ahead is not noticed; for plans that are not executed.
        on_step: called after each manifest that was read, in this thread.

    Raises:
        SettingsError: the grace is negative.
        FormatError: a staged job cannot be read, so that it is unknown what it needs.
        StoreError: the store cannot be read.
    """
    if grace_seconds < 0:
        raise SettingsError(
            "grace_seconds",
            found=str(grace_seconds),
            expected="0 or more",
            next_step="give the longest time that writing a checkpoint may take",
        )
    # Lists chunks before manifests: if a chunk listed here is committed before the second listing,
    # that shows its manifest. In the other order a new commit would look like an orphan.
    there_now = list(run.store.list())
    began_ms = _by_both_clocks(run.store if ask_store else None, there_now)
    listing = _Listing.of(there_now)
    objects: list[SweptObject] = []
    young = 0
    for probe in listing.probes:
        if _is_old((probe,), began_ms, grace_seconds):
            objects.append(SweptObject(probe.key, probe.size_bytes, "left by a killed probe"))
        else:
            young += 1
    named = NamedChunks(run, spare_newest=spare_newest, pins=listing.pins)
    named.read_new_manifests(on_step)
    stored = run.representations()
    for info, checkpoint in listing.said:
        if checkpoint in stored or named.unreadable or named.lost.why_needed(checkpoint):
            continue
        if _is_old((info,), began_ms, grace_seconds):
            orphan_reason = f"is of {checkpoint}, which has no manifest"
            objects.append(SweptObject(info.key, info.size_bytes, orphan_reason))
        else:
            young += 1
    # After the listing: a job with listed objects was staged before it, so it is found now.
    read_needed: Callable[[], Collection[str]] = (
        keep if callable(keep) else partial(frozenset, keep)
    )
    needed = read_needed()
    doomed: list[AttemptName] = []
    kept_prefixes: list[KeptPrefix] = []
    lost: dict[str, None] = {}
    for attempt in {**listing.parts, **listing.chunks}:
        all_infos = listing.chunks.get(attempt, [])
        infos = [info for info in all_infos if info.key not in named.chunks]
        # Parts before chunks: a part states that its chunks are there.
        infos = listing.parts.get(attempt, []) + infos
        if not infos:
            continue
        reason = _reason_to_keep(attempt, infos, named, needed, began_ms, grace_seconds)
        if reason:
            prefix_of = attempt_prefix if all_infos else PART_KEY.under
            kept_prefixes.append(KeptPrefix(prefix_of(*attempt), reason))
            if reason == _why_needed(named, attempt):
                lost[reason] = None
            continue
        doomed.append(attempt)
        more = " any more" if len(infos) < len(all_infos) else ""
        orphan_reason = f"no manifest names attempt {attempt.attempt} of step {attempt.step}{more}"
        if attempt in named.attempts:
            orphan_reason = (
                f"attempt {attempt.attempt} of step {attempt.step} is committed without it"
            )
        objects.extend(SweptObject(info.key, info.size_bytes, orphan_reason) for info in infos)
    unfinished = list(run.store.list_unfinished())
    old = [info for info in unfinished if _is_old((info,), began_ms, grace_seconds)]
    return SweepPlan(
        prefixes=tuple(doomed),
        objects=tuple(objects),
        unfinished=tuple(
            SweptObject(info.key, info.size_bytes, "left unfinished by a killed writer")
            for info in old
        ),
        kept=tuple(kept_prefixes),
        lost=tuple(lost),
        young=young + len(unfinished) - len(old),
        unrecognised=tuple(listing.unrecognised),
        blocked=tuple(named.unreadable),
        grace_seconds=grace_seconds,
        now_ms=began_ms,
        keep=read_needed,
        spare_newest=spare_newest,
    )


def execute(run: Run, plan: SweepPlan, *, on_step: OnStep = unwatched) -> SweepResult:
    """Execute a plan. If it is killed, the next sweep finds and removes the rest.

    Every attempt is checked again right before it is removed, and again if the removal takes long:
    an attempt that was committed or written to after the plan was made stays.

    Args:
        run: the run.
        plan: the plan from `plan_sweep`.
        on_step: called after each object that was removed, in this thread.

    Raises:
        FormatError: a job that was staged meanwhile cannot be read.
        StoreError: the store refuses or cannot be reached; what was not yet removed stays.
    """
    removed: list[SweptObject] = []
    spared: list[KeptPrefix] = []
    total = len(plan.objects) + len(plan.unfinished)

    def note(swept: SweptObject) -> None:
        removed.append(swept)
        on_step("removing objects", len(removed), total)

    reasons = {swept.key: swept for swept in plan.objects}
    named = NamedChunks(run, spare_newest=plan.spare_newest)
    for attempt in plan.prefixes:
        vain_looks = 0
        while True:
            may_begin = _LookedJustNow(allow_one=vain_looks >= _SLOW_LOOKS)
            parts, chunks, reason = _still_doomed(run, plan, named, attempt, reasons)
            if reason:
                spared.append(KeptPrefix(attempt_prefix(*attempt), reason))
                break
            removed_before = len(removed)
            # Parts are gone before the first chunk goes: a part states that its chunks are there.
            for keys in (parts, chunks):
                for key in deletions(run.store, keys, may_begin=may_begin):
                    note(reasons[key])
                if len(removed) - removed_before < len(parts):
                    break
            removed_count = len(removed) - removed_before
            if removed_count == len(parts) + len(chunks):
                break
            vain_looks += not removed_count
    others = [
        swept.key
        for swept in plan.objects
        if parse_chunk_key(swept.key) is None and kind_of(swept.key) is not PART
    ]
    for key in deletions(run.store, others):
        note(reasons[key])
    for swept in plan.unfinished:
        run.store.delete_unfinished(swept.key)
        note(swept)
    return SweepResult(removed=tuple(removed), spared=tuple(spared))


class _LookedJustNow:
    """Says, before each request to remove objects of an attempt, whether it may begin.

    Asked before each, because this process may have stood still since its look. Made right before
    that look.

    Args:
        allow_one: allow one request however long the look has taken.
    """

    def __init__(self, *, allow_one: bool) -> None:
        self._began_seconds = host_seconds()
        self._late_requests = threading.Semaphore(1 if allow_one else 0)

    def __call__(self) -> bool:
        long_ago = host_seconds() - self._began_seconds >= _LOOK_AGAIN_SECONDS
        return not long_ago or self._late_requests.acquire(blocking=False)


def _still_doomed(
    run: Run,
    plan: SweepPlan,
    named: NamedChunks,
    attempt: AttemptName,
    planned: Collection[str],
) -> tuple[list[str], list[str], str]:
    """Return the keys of an attempt's parts and chunks to remove; and why it must stay, or ""."""
    prefix = attempt_prefix(*attempt)
    present = [info for info in run.store.list(prefix) if parse_chunk_key(info.key) == attempt]
    parts = [info for _, info in run.records(PART).listed(*attempt)]
    named.read_new_manifests()
    chunks = [info for info in present if info.key not in named.chunks]
    infos = parts + chunks
    if present and not infos:
        return [], [], "a manifest names it now"
    reason = _reason_to_keep(attempt, infos, named, plan.keep(), plan.now_ms, plan.grace_seconds)
    if not reason and any(info.key not in planned for info in infos):
        reason = "chunks were added to it"
    return [info.key for info in parts], [info.key for info in chunks], reason


def _reason_to_keep(
    attempt: AttemptName,
    infos: Sequence[ObjectInfo],
    named: NamedChunks,
    keep: Collection[str],
    at_ms: int,
    grace_seconds: float,
) -> str:
    if named.unreadable:
        return f"{named.unreadable[0]} cannot be read and may name it"
    if attempt.attempt in keep:
        return "a staged job names it"
    if needed := _why_needed(named, attempt):
        return needed
    if named.may_be_committed(attempt, infos):
        return "its trainer may still commit it"
    if not _is_old(infos, at_ms, grace_seconds):
        return f"younger than {grace_seconds:g} s"
    return ""


def _why_needed(named: NamedChunks, attempt: AttemptName) -> str:
    return named.lost.why_needed(ManifestName(*attempt[:2]), attempt.attempt)


def _is_old(infos: Iterable[ObjectInfo], at_ms: int, grace_seconds: float) -> bool:
    """Tell whether all were last modified before the grace; a time in the future is young."""
    return all(at_ms - info.modified_ms >= grace_seconds * 1000 for info in infos)


def _by_both_clocks(store: Store | None, there: Sequence[ObjectInfo]) -> int:
    """Return this host's time in ms, or the store's, which dated the objects, if that is behind."""
    here_ms = now_ms()
    if store is None:
        return here_ms
    try:
        return min(here_ms, store_ms(store))
    except StoreError:
        # The store may be full, which the sweep is to cure. Its time is at least the newest
        # object's.
        return min(here_ms, max((info.modified_ms for info in there), default=here_ms))
