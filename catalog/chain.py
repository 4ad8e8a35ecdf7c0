"""Which checkpoints must be read to restore one, and whether they join up (format §4, I4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run
from recpoint.errors import ChainError, MissingLink, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import manifest_key

__all__ = ["Chain", "check_link", "resolve_chain"]

_NEXT_STEP = "restore another checkpoint: recpoint list URL"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A full and the increments after it, in the order in which they are applied."""

    manifests: tuple[Manifest, ...]

    @property
    def full(self) -> Manifest:
        """The checkpoint the chain starts from."""
        return self.manifests[0]

    @property
    def newest(self) -> Manifest:
        """The checkpoint the chain restores."""
        return self.manifests[-1]


def resolve_chain(
    run: Run,
    name: ManifestName,
    *,
    manifest: Callable[[int, int], Manifest] | None = None,
) -> Chain:
    """The chain of one checkpoint, with every check of format §4 (I4) made.

    Args:
        run: whose checkpoint it is.
        name: the checkpoint to restore.
        manifest: reads a manifest by step and generation; `run.manifest` when not given.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        MissingLink: a checkpoint it depends on is gone, or is another one of that step.
        ChainError: the links do not join up in another way.
        FormatError: a manifest of the chain is damaged or of another run.
    """
    read = manifest or run.manifest
    newest_first = [read(*name)]
    # Ends: a manifest's parent is of a lower step (checked when it is parsed), and steps are >= 0;
    # its length is that of the chain, which is at most 10,000.
    while (child := newest_first[-1]).parent is not None:
        parent_key = manifest_key(child.parent.step, child.parent.generation)
        try:
            parent = read(child.parent.step, child.parent.generation)
        except ObjectNotFound as error:
            raise _missing(child, parent_key, "no manifest") from error
        check_link(child, parent)
        newest_first.append(parent)
    full, newest = newest_first[-1], newest_first[0]
    if newest.base is not None and newest.base != full.ref:
        raise _broken(newest, f"base {newest.base}", f"the full its parents lead to, {full.ref}")
    return Chain(manifests=tuple(reversed(newest_first)))


def check_link(child: Manifest, parent: Manifest) -> None:
    """Whether an increment follows directly after the checkpoint found under its parent's key.

    Raises:
        MissingLink: that checkpoint is another one than the increment was taken after.
        ChainError: they contradict each other in another way.
    """
    if child.parent != parent.ref:
        key = manifest_key(parent.step, parent.generation)
        raise _missing(child, key, f"attempt {parent.attempt}")
    if parent.generation > child.generation:
        raise _broken(child, f"a parent of the later generation {parent.generation}", "an earlier")
    if child.chain_length != parent.chain_length + 1:
        raise _broken(
            child,
            f"chain_length {child.chain_length}",
            f"{parent.chain_length + 1}, one more than that of its parent, {parent.ref}",
        )
    base = parent.ref if parent.kind == "full" else parent.base
    if child.base != base:
        raise _broken(child, f"base {child.base}", f"that of its parent, {base}")
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
    key = manifest_key(child.step, child.generation)
    return ChainError(key, found=found, expected=expected, next_step=_NEXT_STEP)
