"""Creates a lost generation record again, from what a person knows about it (format §5)."""

from __future__ import annotations

import secrets

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, NothingToRestore, ObjectNotFound, SettingsError
from recpoint.format.naming import GENERATION_KEY, ManifestName, generation_in_key
from recpoint.format.record_kinds import GENERATION
from recpoint.format.records import CheckpointRef, GenerationRecord

__all__ = [
    "relink",
]


def relink(
    run: Run,
    generation: int,
    restored: ManifestName | None,
    *,
    never_committed: bool = False,
) -> GenerationRecord:
    """Create the record of a generation whose own record is lost; nothing is replaced.

    The new record has an empty host and pid 0, because nobody knows where the trainer ran.

    Args:
        run: the run.
        generation: has no record, and something in the store names it or a later generation.
        restored: the checkpoint that its trainer restored; None: it began from nothing.
        never_committed: also accept the generation right after the newest that anything names,
            because its record was lost before its first checkpoint. No earlier trainer can commit
            after that.

    Raises:
        SettingsError: the generation has a record, readable or not; or nothing names it; or its
            checkpoints cannot follow from `restored`.
        NothingToRestore: there is no checkpoint `restored`.
        FormatError: the manifest of `restored` is damaged.
        StoreError: the store refuses, or cannot be reached.
    """
    key = GENERATION_KEY.of(generation)
    newest = max((generation_in_key(info.key) or 0 for info in run.store.list()), default=0)
    if generation > newest + 1 or (generation > newest and not never_committed):
        raise _unknown(key, generation, newest)
    if generation in run.generation_numbers():
        raise _there(run, generation)
    stands_on = _stands_on(run, generation)
    if stands_on is not None and (restored is None or restored.step < stands_on.step):
        raise _refused(
            key,
            f"{restored or 'nothing'} as restored, but its first increment has parent {stands_on}",
            "a restored checkpoint of that step or a later one",
        )
    record = GenerationRecord(
        run=run.id,
        generation=generation,
        token=secrets.token_hex(16),
        restored=None if restored is None else _reference(run, generation, restored),
        host="",
        pid=0,
        created_ms=now_ms(),
    )
    if run.records(GENERATION).create(record, generation) == "other":
        raise _there(run, generation)
    return record


def _reference(run: Run, generation: int, restored: ManifestName) -> CheckpointRef:
    if restored.generation >= generation:
        raise _refused(
            GENERATION_KEY.of(generation),
            f"{restored} as restored",
            "a checkpoint of an earlier generation",
        )
    steps = [name.step for name in run.manifest_names() if name.generation == generation]
    if restored.step > min(steps, default=restored.step):
        raise _refused(
            GENERATION_KEY.of(generation),
            f"{restored} as restored, but its own first checkpoint at step {min(steps)}",
            "a restored checkpoint of that step or an earlier one",
        )
    try:
        return run.manifest(*restored).ref
    except ObjectNotFound as error:
        raise NothingToRestore(
            f"{run.url}, {restored}",
            found="no manifest",
            expected="the checkpoint that the trainer restored; if it is gone, the newest one left "
            "before it",
            next_step=f"recpoint list {run.url} --all",
        ) from error


def _stands_on(run: Run, generation: int) -> ManifestName | None:
    """Return the parent of its first checkpoint, if an earlier trainer's and there; else None."""
    names = run.manifest_names()
    own = [name for name in names if name.generation == generation]
    try:
        parent = run.manifest(*min(own)).parent if own else None
    except (FormatError, ObjectNotFound):
        return None
    if parent is None or parent.generation >= generation:
        return None
    name = ManifestName(parent.step, parent.generation)
    return name if name in names else None  # if it is gone, a person names the newest before it


def _unknown(key: str, generation: int, newest: int) -> SettingsError:
    named = f"generation {newest} is the newest named here" if newest else "no generation is named"
    said = f"recpoint relink URL {generation} --never-committed"
    return SettingsError(
        key,
        found=f"no trace of that generation; {named}",
        expected="a generation that something in the store names",
        next_step=f"correct the number; or, if that trainer was started and committed nothing: "
        f"{said} (no earlier trainer can commit after that), with --step of the checkpoint that it "
        "went on from, or with --from-nothing"
        if generation == newest + 1
        else "correct the number",
    )


def _there(run: Run, generation: int) -> SettingsError:
    key, none = GENERATION_KEY.of(generation), "no record, because a record is never replaced"
    record = run.read_generations([generation])[generation]
    if not isinstance(record, FormatError):
        return _refused(key, "a generation record", none)
    return SettingsError(
        key,
        found=f"a generation record that cannot be used: {record.found}",
        expected=none,
        next_step="put it back from a backup; if there is none, move it out of the run and run "
        "this command again",
    )


def _refused(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        key, found=found, expected=expected, next_step="recpoint check URL says what is lost"
    )
