"""Names the test files nearest to what changed since a commit: `make check` runs them.

    python tests/changed.py [COMMIT]

Prints the files to run. Lists on stderr the other test files that depend on the change and are left
out; `make test` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("recpoint", "tests", "benchmarks")
_NATIVE = (".cpp", ".h")

#: What reads the documents of the repository.
_TESTS_OF_DOCUMENTS = (
    "tests/docs/test_blocks.py",
    "tests/docs/test_site.py",
    "tests/unit/test_repository.py",
)


def changed_files(commit: str) -> list[str]:
    """Return paths, new files included, that differ from the merge base of `commit` and HEAD."""
    base = _git("merge-base", commit, "HEAD").strip()
    return sorted(
        {
            *_git("diff", "--name-only", base).splitlines(),
            *_git("ls-files", "--others", "--exclude-standard").splitlines(),
        }
    )


def module_of(path: str) -> str:
    """Return the dotted name under which a file of this repository is imported.

    For a C++ file, that is the module that calls it.
    """
    if path.endswith(_NATIVE):
        folder = Path(path).parent.name
        return "recpoint.kernels." + ("native" if folder == "native" else f"{folder}.cpu")
    parts = Path(path.removeprefix("src/recpoint/")).with_suffix("").parts
    if path.startswith("src/recpoint/") or parts[0] not in _PACKAGES:
        parts = ("recpoint", *parts)
    return ".".join(parts).removesuffix(".__init__")


def nearest_tests(graph: grimp.ImportGraph, changed: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the test modules to run, and those that depend on the change less directly.

    The nearest test modules import a changed module directly or through helpers of the tests. If a
    changed module has none, the tests of the modules that import it are the nearest.

    Args:
        graph: of all imports.
        changed: modules; deleted modules are not in the graph and are ignored.
    """
    ring = {module for module in changed if module in graph.modules}
    far = {
        test
        for module in ring
        for test in graph.find_downstream_modules(module) | {module}
        if _is_test(test)
    }
    reached = set(ring)
    near: set[str] = set()
    while ring and not near:
        beyond: set[str] = set()
        helpers = set(ring)
        while helpers:
            importers = {
                importer
                for module in helpers
                for importer in graph.find_modules_that_directly_import(module)
            } - reached
            reached |= importers
            helpers = {m for m in importers if m.startswith("tests.") and not _is_test(m)}
            beyond |= importers - helpers
        near = {module for module in ring | beyond if _is_test(module)}
        ring = beyond
    return near, far - near


def touched_tests(changed: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the test files to run, and those that depend on the change less directly.

    Args:
        changed: paths from the root.
    """
    sys.path[:0] = [str(_ROOT), str(_ROOT / "examples")]
    graph = grimp.build_graph(*_PACKAGES, cache_dir=None)
    modules = [module_of(path) for path in changed if path.endswith((".py", *_NATIVE))]
    near, far = nearest_tests(graph, modules)
    return set(map(_file_of, near)), set(map(_file_of, far))


def _is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rsplit(".", 1)[1].startswith("test_")


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout


def main(commit: str = "main") -> None:
    """Print the files to run, and on stderr the files that are left out."""
    files = changed_files(commit)
    unknown_files = [path for path in files if not path.endswith((".py", *_NATIVE, ".md"))]
    near, far = touched_tests(files)
    if any(path.endswith(".md") for path in files):
        near.update(_TESTS_OF_DOCUMENTS)
    print(*sorted(near), sep="\n")
    if far:
        print(f"left out, {len(far)} test files that depend less directly:", file=sys.stderr)
        print(*(f"  {file}" for file in sorted(far)), sep="\n", file=sys.stderr)
    if unknown_files:
        print(f"no test is known for {', '.join(unknown_files)}. Next: make test", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
