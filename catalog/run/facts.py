"""Collects what retention must know of a run, from its store (format §6.6, plan)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from recpoint.catalog.run.chain import check_with_own
from recpoint.catalog.run.known_damage import KnownDamage
from recpoint.catalog.run.leases import Held
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.metrics import read_metrics
from recpoint.catalog.run.pins import pinned
from recpoint.catalog.run.representations import Opinion, RunFacts, StoredManifest
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import verdicts
from recpoint.catalog.store.contract import ObjectInfo, now_ms
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName

__all__ = ["OnStep", "gather", "leased_by", "unwatched"]


#: Called with the name of the work, how many items are done, and how many there are.
OnStep = Callable[[str, int, int], None]


def unwatched(what: str, done: int, total: int) -> None:
    """Ignore its arguments: an `OnStep` for callers that show no progress."""


def gather(
    run: Run,
    *,
    metrics: Iterable[str] = (),
    leases: Iterable[Held] = (),
    on_step: OnStep = unwatched,
) -> RunFacts:
    """Read every manifest and list every object once.

    Args:
        run: the run.
        metrics: the metrics that the policy uses.
        leases: the leases that are alive.
        on_step: called after each manifest, from this thread.

    Raises:
        FormatError, GenerationRecordLost: the live line cannot be followed.
        StoreError: the store cannot be read.
    """
    # Manifests are listed before chunks. Chunks are stored before their manifest, so a checkpoint
    # that is committed meanwhile cannot look as if its chunks were missing.
    numbers = run.generation_numbers()
    there = run.representations()
    # From the checkpoints just listed: one that is committed meanwhile would look superseded.
    live = run.line_of(numbers, there)
    forms = [form for forms in there.values() for form in forms]
    pins = pinned(run)
    infos = {info.key: info for info in run.store.list()}
    damage = KnownDamage(run, there, infos)
    manifests: list[StoredManifest] = []
    unreadable: list[str] = []

    def read(form: Representation) -> StoredManifest | str | None:
        try:
            manifest = run.read_manifest(form)
            usable = _agrees(run, manifest) and not damage.covers(form.key, manifest)
            return _stored(form.key, manifest, infos, usable=usable)
        except ObjectNotFound:
            return None  # deleted after the listing
        except FormatError:
            return form.key

    with ReadScheduler.of_records() as reads:
        for number, found in enumerate(reads.results(forms, read), 1):
            on_step("reading manifests", number, len(forms))
            if isinstance(found, str):
                unreadable.append(found)
            elif found is not None:
                manifests.append(found)
    read_names = {manifest.name for manifest in manifests}
    return RunFacts(
        manifests=manifests,
        live=[name for name in live if name in read_names],
        now_ms=now_ms(),
        pins=pins,
        leased=leased_by(leases),
        metrics=read_metrics(run, metrics, of=read_names),
        verdicts=_opinions(run),
        unreadable=unreadable,
        lost=run.lost_generations((form.name.generation for form in forms), listed=numbers),
        generations=numbers,
    )


def leased_by(leases: Iterable[Held]) -> dict[ManifestName, str]:
    """Return who reads which checkpoint, for leases that name their checkpoints."""
    return {
        ManifestName(ref.step, ref.generation): held.who
        for held in leases
        for ref in held.covers or ()
    }


def _opinions(run: Run) -> dict[ManifestName, Opinion]:
    opinions: dict[ManifestName, Opinion] = {}
    for name, verdict in verdicts(run).items():
        if verdict.result != "passed":
            opinions[name] = verdict.result
        elif verdict.level != "metadata":
            opinions[name] = verdict.level
    return opinions


def _agrees(run: Run, manifest: Manifest) -> bool:
    """Say whether a manifest agrees with its checkpoint's own; readers skip it otherwise."""
    try:
        check_with_own(manifest, run.read_manifest)
    except ChainError:
        return False
    return True


def _stored(
    key: str, manifest: Manifest, infos: Mapping[str, ObjectInfo], *, usable: bool
) -> StoredManifest:
    parent, base = manifest.parent, manifest.base
    own = infos.get(key)
    missing = {
        chunk.content
        for chunk in manifest.chunks
        if chunk.key not in infos or infos[chunk.key].size_bytes != chunk.bytes
    }
    return StoredManifest(
        key=key,
        name=ManifestName(manifest.step, manifest.generation),
        attempt=manifest.attempt,
        parent=None if parent is None else ManifestName(parent.step, parent.generation),
        parent_attempt="" if parent is None else parent.attempt,
        taken_ms=manifest.snapshot_ms,
        # Not listed: it was deleted and put back meanwhile, so only its stamp gives a time.
        modified_ms=manifest.snapshot_ms if own is None else own.modified_ms,
        stored_bytes=manifest.stored_bytes,
        # Missing samples do not count, because no restore reads them.
        whole=usable and "rows" not in missing,
        base=None if base is None else ManifestName(base.step, base.generation),
        state_whole="state" not in missing,
        base_attempt="" if manifest.needed_base is None else manifest.needed_base.attempt,
    )
