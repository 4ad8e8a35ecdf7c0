"""Lists manifests that validations found damaged while others took their place (format §6.6).

Such a validation passes, so its key does not show the damage; its record does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import newest_of_bytes
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import VALIDATION_KEY, ManifestName, ValidationName
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.validation import PASSED_OVER, ValidationRecord

__all__ = [
    "KnownDamage",
]


class _Told(NamedTuple):
    """When a manifest was found damaged: by the store's clock, and by the validating host's."""

    stored_ms: int
    finished_ms: int


class KnownDamage:
    """Knows the manifests of a run that validations found damaged and did without.

    If every checkpoint has only one manifest, nothing is read, because no manifest can replace
    another. Otherwise one small record, seldom two, is read for each validated checkpoint that is
    not older than the oldest checkpoint with several manifests.

    Args:
        run: the run.
        there: every manifest, by checkpoint.
        infos: every object, by key.

    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        run: Run,
        there: Mapping[ManifestName, Sequence[Representation]],
        infos: Mapping[str, ObjectInfo],
    ) -> None:
        self._infos = infos
        self._told: dict[str, list[_Told]] = {}
        several = [name for name, forms in there.items() if len(forms) > 1]
        if not several:
            return
        # A validation walks from its checkpoint back to a full, so it can meet any manifest of an
        # earlier step.
        names = _telling(infos, first_step=min(several).step)
        for name, record in zip(names, _read(run, names), strict=True):
            at = _Told(
                infos[VALIDATION_KEY.of(*name)].modified_ms, record.finished_ms if record else 0
            )
            for finding in record.findings if record else ():
                if finding.what == PASSED_OVER:
                    self._told.setdefault(finding.subject, []).append(at)

    def covers(self, key: str, manifest: Manifest) -> bool:
        """Say whether a manifest was found damaged.

        A manifest that was written again later, by the store's clock and by its stamp, does not
        count as damaged.
        """
        info = self._infos.get(key)
        return any(
            info is None
            or info.modified_ms <= told.stored_ms
            or manifest.committed_ms <= told.finished_ms
            for told in self._told.get(key, ())
        )


def _telling(infos: Mapping[str, ObjectInfo], *, first_step: int) -> list[ValidationName]:
    """Return the validations that decide about each checkpoint from `first_step` on."""
    found: dict[ManifestName, list[ValidationName]] = {}
    for key in infos:
        name = VALIDATION_KEY.parse(key)
        if name is not None and name.step >= first_step:
            found.setdefault(ManifestName(name.step, name.generation), []).append(name)
    return [name for names in found.values() for name in newest_of_bytes(names)]


def _read(run: Run, names: Sequence[ValidationName]) -> Iterator[ValidationRecord | None]:
    """Yield their records; None for a record that is gone or cannot be read."""

    def read(name: ValidationName) -> ValidationRecord | None:
        try:
            return run.records(VALIDATION).read(*name)
        except (FormatError, ObjectNotFound):
            return None

    with ReadScheduler.of_records() as reads:
        yield from reads.results(names, read)
