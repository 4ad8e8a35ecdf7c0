"""Manifests that validations have found damaged while others stood in for them (format §6.6 T1).

Such a validation passes, so that its key does not tell: its record does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.records.validations import newest_of_bytes
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import VALIDATION_KEY, ManifestName, ValidationName
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.validation import PASSED_OVER, ValidationRecord

__all__ = ["KnownDamage"]


class _Told(NamedTuple):
    """When a manifest was found damaged: by the store's clock, and by the validation's host's."""

    stored_ms: int
    finished_ms: int


class KnownDamage:
    """What is known of a run's manifests from validations that did without some of them.

    Nothing is read where every checkpoint has one manifest alone: then none stands in for another.
    Else one small record, seldom two, of each checkpoint that was validated and is not older than
    the oldest one with several.

    Args:
        run: the run.
        there: every manifest, by checkpoint.
        infos: every object.

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
        # A validation reads back from its checkpoint, and looks for another manifest on its way.
        names = _telling(infos, first_step=min(several).step)
        for name, record in zip(names, _read(run, names), strict=True):
            at = _Told(
                infos[VALIDATION_KEY.of(*name)].modified_ms, record.finished_ms if record else 0
            )
            for finding in record.findings if record else ():
                if finding.what == PASSED_OVER:
                    self._told.setdefault(finding.subject, []).append(at)

    def covers(self, key: str, manifest: Manifest) -> bool:
        """Whether a manifest is one that was found damaged.

        One that was made anew since, by the store's clock and by the stamps, is another.
        """
        info = self._infos.get(key)
        return any(
            info is None
            or info.modified_ms <= told.stored_ms
            or manifest.committed_ms <= told.finished_ms
            for told in self._told.get(key, ())
        )


def _telling(infos: Mapping[str, ObjectInfo], *, first_step: int) -> list[ValidationName]:
    """The validations that tell what is known of each checkpoint from `first_step` on."""
    found: dict[ManifestName, list[ValidationName]] = {}
    for key in infos:
        name = VALIDATION_KEY.parse(key)
        if name is not None and name.step >= first_step:
            found.setdefault(ManifestName(name.step, name.generation), []).append(name)
    return [name for names in found.values() for name in newest_of_bytes(names)]


def _read(run: Run, names: Sequence[ValidationName]) -> Iterator[ValidationRecord | None]:
    """Their records; None for one that is gone or cannot be read, which tells nothing."""

    def read(name: ValidationName) -> ValidationRecord | None:
        try:
            return run.records(VALIDATION).read(*name)
        except (FormatError, ObjectNotFound):
            return None

    with ReadScheduler.of_records() as reads:
        yield from reads.results(names, read)
