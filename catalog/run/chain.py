"""Finds the manifests that a restore reads; checks that they join up (format §4, invariant 4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.manifests_ahead import ManifestsAhead
from recpoint.catalog.run.run import Run
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "Chain",
    "DAMAGE",
    "PassedOver",
    "blamed",
    "check_link",
    "check_with_own",
    "has_chunk_of",
    "needed_beside",
    "read_base",
    "read_with_chain",
    "resolve_chain",
]


_NEXT_STEP = "restore another checkpoint: recpoint list URL"

#: Errors of a damaged chain; another chain of the same checkpoint may be good.
DAMAGE = (FormatError, ChainError, ObjectNotFound)
_Result = TypeVar("_Result")
_There = Mapping[ManifestName, Sequence[Representation]]


class PassedOver(NamedTuple):
    """A damaged representation that a cheaper chain would have used, and its error."""

    key: str
    error: str

    @classmethod
    def of(cls, key: str, error: RecpointError) -> PassedOver:
        """Return the representation `key` with its error as text."""
        return cls(key, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A full and the increments after it, in the order in which they are applied.

    Attributes:
        manifests: one representation of each checkpoint, the full first.
        passed_over: damaged representations that this chain does without.
        beside: the full that residuals are added to, if it is not in `manifests` (format §3.7).
    """

    manifests: tuple[Manifest, ...]
    passed_over: tuple[PassedOver, ...] = ()
    beside: Manifest | None = None

    @property
    def full(self) -> Manifest:
        """The full with which the chain starts."""
        return self.manifests[0]

    @property
    def base(self) -> Manifest:
        """The full that residuals are added to."""
        return self.beside or self.manifests[0]

    @property
    def all_manifests(self) -> tuple[Manifest, ...]:
        """The manifests of the chain, after the full that is beside it, if there is any."""
        return self.manifests if self.beside is None else (self.beside, *self.manifests)

    @property
    def newest(self) -> Manifest:
        """The checkpoint that the chain restores."""
        return self.manifests[-1]


def resolve_chain(
    run: Run,
    name: ManifestName,
    *,
    original: bool = False,
    avoid: Collection[str] = (),
    line: Sequence[ManifestName] = (),
    read: Callable[[Representation], Manifest] | None = None,
) -> Chain:
    """Return the chain of a checkpoint that is cheapest to restore, checked as format §4 asks.

    Args:
        run: the run of the checkpoint.
        name: the checkpoint to restore.
        original: use only manifests as they were committed, no consolidated ones.
        avoid: keys of manifests not to use.
        line: checkpoints, newest first, that probably include its parents; their manifests are
            read several at a time. An empty or wrong line costs only time.
        read: reads a manifest, for callers that cache some; `run.read_manifest` when not given.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        MissingLink: a checkpoint that it needs is gone, or another attempt is in its place.
        ChainError: the links do not join up in another way.
        FormatError: a manifest of the chain is damaged or of another run.
    """
    there: _There = {} if original else run.consolidated()
    try:
        return _walk(run, name, there, avoid, line, read)
    except (ChainError, ObjectNotFound):
        # A checkpoint may have been consolidated meanwhile, and its old manifest deleted.
        again = {} if original else run.consolidated()
        if again == there:
            raise
    return _walk(run, name, again, avoid, line, read)


def _walk(
    run: Run,
    name: ManifestName,
    there: _There,
    avoid: Collection[str],
    line: Sequence[ManifestName],
    read: Callable[[Representation], Manifest] | None,
) -> Chain:
    if read is not None:
        return _Walk(read, avoid).chain(name, there)
    with ManifestsAhead(run, line, there, avoid) as ahead:
        # Manifests beside the chain are read with `run.read_manifest`: they say nothing about it.
        return _Walk(ahead.read, avoid, run.read_manifest).chain(name, there)


def read_with_chain(
    run: Run,
    name: ManifestName,
    read: Callable[[Chain], _Result],
    *,
    line: Sequence[ManifestName] = (),
) -> tuple[_Result, Chain]:
    """Call `read` with a checkpoint's chain: the cheapest, or the next one if that is damaged.

    Args:
        run: the run of the checkpoint.
        name: the checkpoint.
        read: called with one chain after another until it raises no error of damage.
        line: see `resolve_chain`.

    Returns:
        The result of `read`, and the chain, which says what was passed over.

    Raises:
        ObjectNotFound, ChainError, FormatError: the error of the first chain, if no other chain
            does without the damaged manifest or chunk.
    """
    avoid: dict[str, PassedOver] = {}
    first: RecpointError | None = None
    while True:
        try:
            chain = resolve_chain(run, name, avoid=avoid, line=line)
        except DAMAGE as error:
            raise first or error from None
        try:
            result = read(chain)
        except DAMAGE as error:
            first = first or error
            key = blamed(chain, error)
            if key is None:
                raise first from None
            avoid[key] = PassedOver.of(key, error)
            continue
        return result, replace(chain, passed_over=(*avoid.values(), *chain.passed_over))


def blamed(chain: Chain, error: RecpointError) -> str | None:
    """Return the key of the manifest of `chain` that `error` is about, or that names its chunk."""
    for manifest in chain.all_manifests:
        key = Representation.of(manifest).key
        if key in error.subject or has_chunk_of(manifest, error):
            return key
    return None


def has_chunk_of(manifest: Manifest, error: RecpointError) -> bool:
    """Say whether `manifest` names the chunk that `error` is about."""
    # Stores name an object by its URL, parsers by its key; both end in the key.
    return any(error.subject.endswith(chunk.key) for chunk in manifest.chunks)


class _Walk:
    """Walks from a checkpoint to a full, and turns back if a representation leads nowhere."""

    def __init__(
        self,
        read: Callable[[Representation], Manifest],
        avoid: Collection[str],
        read_own: Callable[[Representation], Manifest] | None = None,
    ) -> None:
        self._read = read
        self._avoid = avoid
        self._read_own = read_own or read

    def chain(self, name: ManifestName, there: _There) -> Chain:
        """Return the first chain found; raise the first error met, as `resolve_chain`."""
        newest_first: list[Manifest] = []
        choices: list[Iterator[Representation]] = [iter(_choices(name, there))]
        dead_ends: set[Representation] = set()
        errors: dict[str, RecpointError] = {}
        # The loop ends: parents have lower steps (checked when a manifest is parsed), steps are
        # >= 0, and a representation that reached no full is not visited again.
        while choices:
            for choice in choices[-1]:
                if choice in dead_ends or choice.key in self._avoid:
                    continue
                try:
                    found = self._link(choice, newest_first[-1] if newest_first else None)
                except DAMAGE as error:
                    # Retention deletes the longer ones of several representations; no damage.
                    gone = isinstance(error.__cause__ or error, ObjectNotFound)
                    if not (gone and there.get(choice.name)):
                        errors.setdefault(choice.key, error)
                    continue
                newest_first.append(found)
                if found.parent is None:
                    return Chain(
                        manifests=tuple(reversed(newest_first)),
                        passed_over=tuple(PassedOver.of(*pair) for pair in errors.items()),
                        beside=needed_beside(newest_first, self._read_own, self._avoid),
                    )
                parent = ManifestName(found.parent.step, found.parent.generation)
                choices.append(iter(_choices(parent, there)))
                break
            else:
                choices.pop()
                if newest_first:
                    dead_ends.add(Representation.of(newest_first.pop()))
        for first in errors.values():
            raise first
        raise ObjectNotFound(
            MANIFEST_KEY.of(*name),
            found="no manifest",
            expected=f"a manifest of {name}",
            next_step=_NEXT_STEP,
        )

    def _link(self, choice: Representation, child: Manifest | None) -> Manifest:
        if child is None:
            found = self._read(choice)
            check_with_own(found, self._read_own)
            return found
        try:
            found = self._read(choice)
        except ObjectNotFound as error:
            raise _missing(child, choice.key, "no manifest") from error
        check_link(child, found)
        return found


def needed_beside(
    manifests: Collection[Manifest],
    read: Callable[[Representation], Manifest],
    avoid: Collection[str] = (),
) -> Manifest | None:
    """Return the full that residuals of a chain are added to, if it is not in the chain itself.

    Args:
        manifests: the manifests of a chain, or of the newer part of one, in any order.
        read: reads a manifest.
        avoid: keys of manifests not to use.

    Raises:
        ObjectNotFound, MissingLink: it is gone, or another attempt is in its place.
        FormatError: it is damaged.
        ChainError: it contradicts the chain.
    """
    child = next((manifest for manifest in manifests if manifest.needed_base is not None), None)
    if child is None or any(manifest.ref == child.base for manifest in manifests):
        return None
    assert child.base is not None  # an increment has one
    full = read_base(child.base, child.ref, read, avoid)
    if (full.tables, full.ranks) != (child.tables, child.ranks):
        raise _broken(child, "other tables or ranks than its base's", "the same in the whole chain")
    return full


def read_base(
    base: CheckpointRef,
    child: CheckpointRef,
    read: Callable[[Representation], Manifest],
    avoid: Collection[str] = (),
) -> Manifest:
    """Return the full that residuals of `child` are added to; see `needed_beside`.

    Raises:
        MissingLink: it is gone, or another attempt is in its place, or `avoid` has its key.
        FormatError: it is damaged.
    """
    key = MANIFEST_KEY.of(base.step, base.generation)
    if key in avoid:
        raise _missing_base(base, child, key, "a full whose chunks are damaged")
    try:
        full = read(Representation(ManifestName(base.step, base.generation)))
    except ObjectNotFound as error:
        raise _missing_base(base, child, key, "no manifest") from error
    if full.ref != base or full.kind != "full":
        text = f"a checkpoint of kind {full.kind}, attempt {full.attempt}"
        raise _missing_base(base, child, key, text)
    return full


def _missing_base(base: CheckpointRef, child: CheckpointRef, key: str, found: str) -> MissingLink:
    return MissingLink(
        key,
        found=found,
        expected=f"{base}, the full to whose rows {child} adds residuals",
        next_step=_NEXT_STEP,
    )


def _choices(name: ManifestName, there: _There) -> Sequence[Representation]:
    return (*there.get(name, ()), Representation(name))


def check_with_own(manifest: Manifest, read: Callable[[Representation], Manifest]) -> None:
    """Check that a consolidated manifest agrees with its checkpoint's own (format §4, invariant 6).

    For parents in a chain `check_link` does this, by comparing them with their child.

    Args:
        manifest: any representation. If the own manifest is missing or damaged, nothing is checked.
        read: reads a manifest.

    Raises:
        ChainError: the two disagree.
    """
    one = Representation.of(manifest)
    if one.form == "own":
        return
    try:
        own = read(Representation(one.name))
    except (FormatError, ObjectNotFound):
        return
    about = (manifest.ref, manifest.links, manifest.tables, manifest.ranks)
    if about != (own.ref, own.links, own.tables, own.ranks):
        raise ChainError(
            one.key,
            found="another attempt, other links or other tables than the checkpoint's own manifest",
            expected=f"the same as in {Representation(one.name).key}",
            next_step="remove the consolidated manifest; the checkpoint stays",
        )


def check_link(child: Manifest, parent: Manifest) -> None:
    """Check that the checkpoint under the name of an increment's parent really is its parent.

    Args:
        child: any representation of the increment.
        parent: any representation of the parent; the links it had when it was taken count.

    Raises:
        MissingLink: another attempt is in the parent's place.
        ChainError: the two contradict each other in another way.
    """
    links = parent.links
    if child.parent != parent.ref:
        raise _missing(child, Representation.of(parent).key, f"attempt {parent.attempt}")
    if parent.generation > child.generation:
        raise _broken(
            child,
            f"a parent of the later generation {parent.generation}",
            "a parent of the same or an earlier generation",
        )
    if child.chain_length != links.chain_length + 1:
        raise _broken(
            child,
            f"chain_length {child.chain_length}",
            f"{links.chain_length + 1}, one more than its parent's, {parent.ref}",
        )
    base = parent.ref if links.kind == "full" else links.base
    if child.base != base:
        raise _broken(child, f"base {child.base}", f"its parent's base, {base}")
    if child.tables != parent.tables:
        raise _broken(child, "other tables than its parent's", "the same in the whole chain")
    if child.ranks != parent.ranks:
        raise _broken(child, f"{child.ranks} ranks", f"as many as its parent has, {parent.ranks}")


def _missing(child: Manifest, parent_key: str, found: str) -> MissingLink:
    return MissingLink(
        parent_key,
        found=found,
        expected=f"{child.parent}, on which {child.ref} depends",
        next_step=_NEXT_STEP,
    )


def _broken(child: Manifest, found: str, expected: str) -> ChainError:
    key = Representation.of(child).key
    return ChainError(key, found=found, expected=expected, next_step=_NEXT_STEP)
