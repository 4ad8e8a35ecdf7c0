"""Finding damage before a restore does (format §4, §6.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from recpoint.catalog.chain import Chain, resolve_chain
from recpoint.catalog.chunk_pool import ChunkPool
from recpoint.catalog.chunk_reader import check_entry, check_stored, read_rows, read_state
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.row_coverage import RowCoverage
from recpoint.catalog.run import Run
from recpoint.errors import ChainError, FormatError, NothingToRestore, ObjectNotFound
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import (
    RUN_KEY,
    attempt_prefix,
    generation_key,
    is_probe_key,
    manifest_key,
    parse_chunk_key,
    parse_generation_key,
    parse_manifest_key,
)
from recpoint.format.records import GenerationRecord

__all__ = ["CheckReport", "CheckpointHealth", "Finding", "Level", "Severity", "check"]

Level = Literal["metadata", "full"]
Severity = Literal["error", "warning", "info"]

_Damage: TypeAlias = FormatError | ChainError | ObjectNotFound
_DAMAGE = (FormatError, ChainError, ObjectNotFound)


class Finding(NamedTuple):
    """Something worth knowing. An error: a checkpoint that counts does not restore."""

    severity: Severity
    key: str
    text: str


class CheckpointHealth(NamedTuple):
    """One checkpoint, and whether its chain is good as far as was checked."""

    name: ManifestName
    live: bool
    restorable: bool


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What was checked, and what was found; checkpoints are newest first."""

    level: Level
    checkpoints: tuple[CheckpointHealth, ...]
    findings: tuple[Finding, ...]
    chunks_read: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether every checkpoint that counts restores, as far as was checked."""
        return not any(finding.severity == "error" for finding in self.findings)


def check(
    run: Run, *, level: Level = "metadata", step: int | None = None, threads: int = 4
) -> CheckReport:
    """Check a run; nothing is changed.

    Args:
        run: the run.
        level: `"metadata"`: every record, every chain, and whether each chunk is there in its
            length. `"full"`: also every byte of every chunk, decoded.
        step: only the checkpoints of this step and what they depend on.
        threads: chunks read at once.

    Raises:
        NothingToRestore: there is no checkpoint of `step`.
        StoreError: the store cannot be read.
    """
    checking = _Checking(run, step)
    checking.look_at_records()
    checking.look_at_objects()
    if level == "full":
        with ChunkPool(threads) as pool:
            checking.look_at_bytes(pool)
    return checking.report(level)


class _Checking:
    """One check: each object is looked at once, however many checkpoints depend on it."""

    def __init__(self, run: Run, step: int | None) -> None:
        self._run = run
        self._step = step
        self._findings: list[Finding] = []
        self._manifests: dict[ManifestName, Manifest | _Damage] = {}
        self._chains: dict[ManifestName, Chain] = {}
        self._broken: set[ManifestName] = set()  # own rows are damaged: nothing after it restores
        self._stateless: set[ManifestName] = set()  # own state is damaged, which nothing else needs
        self._chunks_read = self._bytes_read = 0
        self._live = self._live_line()
        # Manifests before chunks: whatever a manifest names was there before it, so that one which
        # is committed meanwhile cannot look damaged. At worst its chunks look unnamed.
        self._names = run.manifest_names()
        self._sizes = {info.key: info.size_bytes for info in run.store.list()}
        self._chosen = [name for name in reversed(self._names) if step in (None, name.step)]
        if step is not None and not self._chosen:
            raise NothingToRestore(
                f"{run.url}, step {step}",
                found="no checkpoint",
                expected="one of the run's steps",
                next_step=f"recpoint list {run.url}",
            )

    # --- records -------------------------------------------------------------------------------

    def _live_line(self) -> frozenset[ManifestName] | None:
        """None: unknown, since the lineage cannot be followed."""
        try:
            return frozenset(self._run.live_line())
        except _DAMAGE as error:
            self._add("error", error.subject, f"the lineage cannot be followed: {error}")
            return None

    def look_at_records(self) -> None:
        """Every generation record, and the chain of every chosen checkpoint."""
        for number, outcome in self._run.read_generations(self._run.generation_numbers()).items():
            if not isinstance(outcome, GenerationRecord):
                # Where the live line goes through it, it has been added as an error already.
                self._add_once("warning", generation_key(number), str(outcome))
        for name in self._chosen:
            try:
                self._chains[name] = resolve_chain(self._run, name, manifest=self._manifest)
            except _DAMAGE as error:
                self._add(self._weight(name), manifest_key(*name), f"does not restore: {error}")
                continue
            if not self._counts(name):
                self._add("info", manifest_key(*name), "superseded")

    def _manifest(self, step: int, generation: int) -> Manifest:
        name = ManifestName(step, generation)
        if name not in self._manifests:
            try:
                self._manifests[name] = self._run.manifest(step, generation)
            except (FormatError, ObjectNotFound) as error:
                self._manifests[name] = error
        found = self._manifests[name]
        if isinstance(found, Manifest):
            return found
        raise found

    # --- objects -------------------------------------------------------------------------------

    def look_at_objects(self) -> None:
        """Whether each chunk of each chain is there in its length, and what nobody names."""
        for name, manifest in self._links():
            for entry in manifest.chunks:
                try:
                    check_entry(manifest, entry)
                    check_stored(manifest, entry, self._sizes)
                except _DAMAGE as error:
                    self._damaged(name, entry.key, error, of_state=entry.content == "state")
        self._look_at_the_rest()

    def _look_at_the_rest(self) -> None:
        """Keys that are not ours, and chunks that no manifest names."""
        if self._step is not None:
            return  # what the other checkpoints name is not known
        for name in self._names:
            try:
                self._manifest(*name)
            except (FormatError, ObjectNotFound):
                return  # what that manifest names is unknown, and with it what nobody names
        named = {
            entry.key
            for manifest in self._manifests.values()
            if isinstance(manifest, Manifest)
            for entry in manifest.chunks
        }
        orphans: dict[str, int] = {}
        for key in self._sizes:
            attempt = parse_chunk_key(key)
            if attempt is not None:
                if key not in named:
                    prefix = attempt_prefix(*attempt)
                    orphans[prefix] = orphans.get(prefix, 0) + 1
            elif (
                key != RUN_KEY
                and not is_probe_key(key)
                and parse_generation_key(key) is None
                and parse_manifest_key(key) is None
            ):
                self._add("info", key, "not an object of recpoint; ignored")
        for prefix, count in orphans.items():
            chunks = "1 chunk" if count == 1 else f"{count} chunks"
            text = f"{chunks} that no manifest names; recpoint sweep removes old ones"
            self._add("info", prefix, text)

    # --- bytes ---------------------------------------------------------------------------------

    def look_at_bytes(self, pool: ChunkPool) -> None:
        """Read, verify and decode every chunk of every chain."""
        for name, manifest in self._links():
            self._look_at_rows(pool, name, manifest)
            try:
                read_state(self._run.store, manifest, pool, self._account)
            except _DAMAGE as error:
                # Stores name an object by its URL, a parser by its key: the same finding.
                subjects = (
                    entry.key for entry in manifest.chunks if error.subject.endswith(entry.key)
                )
                self._damaged(name, next(subjects, error.subject), error, of_state=True)

    def _look_at_rows(self, pool: ChunkPool, name: ManifestName, manifest: Manifest) -> None:
        by_table: dict[int, list[ChunkEntry]] = {}
        for entry in manifest.chunks:
            if entry.table is not None:
                by_table.setdefault(entry.table, []).append(entry)
        for table, entries in by_table.items():
            spec = manifest.tables[table]
            counts = [entry.row_count or 0 for entry in entries]
            coverage = RowCoverage(rows=spec.rows, row_counts=counts)
            good = True
            for entry, outcome in pool.in_order(
                entries, lambda entry: read_rows(self._run.store, manifest, entry)
            ):
                try:
                    coverage.add(outcome.result().rows)
                except _DAMAGE as error:
                    good = False
                    self._damaged(name, entry.key, error)
                self._account(entry)
            if good:
                try:
                    coverage.finish(key=manifest_key(*name), table=spec.name)
                except FormatError as error:
                    self._damaged(name, manifest_key(*name), error)

    def _account(self, entry: ChunkEntry) -> None:
        self._chunks_read += 1
        self._bytes_read += entry.bytes

    # --- what comes of it ----------------------------------------------------------------------

    def _links(self) -> Iterable[tuple[ManifestName, Manifest]]:
        """Every checkpoint that a chosen one needs, itself included, once each."""
        links = {
            ManifestName(manifest.step, manifest.generation): manifest
            for chain in self._chains.values()
            for manifest in chain.manifests
        }
        return sorted(links.items())

    def _needs(self, name: ManifestName) -> set[ManifestName]:
        chain = self._chains[name]
        return {ManifestName(link.step, link.generation) for link in chain.manifests}

    def _counts(self, name: ManifestName) -> bool:
        """Whether it is on the live line, or may be for all that is known."""
        return self._live is None or name in self._live

    def _weight(self, name: ManifestName) -> Severity:
        """Damage counts when a checkpoint on the live line needs it."""
        needed = self._counts(name) or any(
            name in self._needs(other) for other in self._chains if self._counts(other)
        )
        return "error" if needed else "warning"

    def _damaged(
        self, name: ManifestName, key: str, error: _Damage, *, of_state: bool = False
    ) -> None:
        # A restore reads the rows of a whole chain, but the state of its newest link only (§6.3).
        (self._stateless if of_state else self._broken).add(name)
        # A chunk that is missing fails again when its bytes are wanted.
        self._add_once(self._weight(name), key, str(error))

    def _add_once(self, severity: Severity, key: str, text: str) -> None:
        if not any(known.key == key and known.severity != "info" for known in self._findings):
            self._add(severity, key, text)

    def _add(self, severity: Severity, key: str, text: str) -> None:
        self._findings.append(Finding(severity, key, text))

    def report(self, level: Level) -> CheckReport:
        """The findings, worst first, and the health of each chosen checkpoint."""
        order: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
        return CheckReport(
            level=level,
            checkpoints=tuple(
                CheckpointHealth(
                    name,
                    self._live is not None and name in self._live,
                    name in self._chains
                    and name not in self._stateless
                    and not self._needs(name) & self._broken,
                )
                for name in self._chosen
            ),
            findings=tuple(
                sorted(self._findings, key=lambda found: (order[found.severity], found.key))
            ),
            chunks_read=self._chunks_read,
            bytes_read=self._bytes_read,
        )
