"""Counts what CONTRIBUTING asks of names, in the sources of the repository.

The sources are the package, `benchmarks`, `examples`, `build_backend`, and the modules that tests
share (those directly in `tests`). `python -m tests.names` prints the counts, and
`python -m tests.names --list` also what was counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Words that point at a value and do not say what it is. `missing_ids` and `rank_before` are fine.
PRONOUNS = frozenset(
    """
    one it its this that these those them they mine ours theirs own other others each every some
    both such same what which who why when where here there then again before after since until
    within inside into of to at back rest thing left found said told heard asked wanted known given
    taken kept held seen made done gone begun meant has
    """.split()
)

#: Other words that begin docstrings, and that a verb's form is also the beginning of.
_NO_VERBS = {
    "As",
    "Retries",
    "Keys",
    "Numbers",
    "Positions",
    "Ranks",
    "Rows",
    "Shards",
    "Sizes",
    "Steps",
    "Sums",
    "Times",
}

_FOLDERS = (
    *("benchmarks", "build_backend", "catalog", "dashboards", "embeddings", "examples", "flows"),
    *("format", "kernels", "lookahead", "serving", "src/recpoint/cli", "src/recpoint/testing"),
    *("tasks", "trainer_plugin"),
)
_NOT_IN_THE_PACKAGE = ("benchmarks/", "build_backend/", "examples/", "tests/")

_BANNER = re.compile(r"^ *# -{3,}")
_PRAGMA = re.compile(r"^# (mypy|ruff|fmt): ")


@dataclass
class Names:
    """What was counted in the sources; each list has places as `file:line name`."""

    assigned: int = 0
    parameters: int = 0
    pronouns: list[str] = field(default_factory=list)
    pronoun_parameters: list[str] = field(default_factory=list)
    banners: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    first_words: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def pronoun_percent(self) -> float:
        """Assignments that go to a pronoun, in percent of all."""
        return 100 * len(self.pronouns) / self.assigned

    @property
    def pronoun_parameter_percent(self) -> float:
        """Parameters that are a pronoun, in percent of all."""
        return 100 * len(self.pronoun_parameters) / self.parameters

    @cached_property
    def namesakes(self) -> dict[str, list[str]]:
        """Classes of the package by names that stand in several modules; kernel twins are one."""
        namesakes = {}
        for name, places in sorted(self.classes.items()):
            modules = [place.split(":")[0] for place in places]
            if len({"kernels" if "kernels/" in module else module for module in modules}) > 1:
                namesakes[name] = places
        return namesakes

    @cached_property
    def descriptive_docstrings(self) -> list[str]:
        """Functions whose docstring begins with `Returns`, if another begins with `Return`."""
        return [
            place
            for word, places in sorted(self.first_words.items())
            if word not in _NO_VERBS
            for place in places
            if {word[: -len(end)] + root for end, root in _ENDINGS if word.endswith(end)}
            & self.first_words.keys()
        ]


#: Endings of verbs in the third person, and those of the imperative.
_ENDINGS = (("s", ""), ("es", ""), ("ies", "y"))


def sources() -> list[Path]:
    """Return the files that are counted."""
    files = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([*files, *(ROOT / "src/recpoint").glob("*.py"), *(ROOT / "tests").glob("*.py")])


def count(files: list[Path], root: Path = ROOT) -> Names:
    """Count the names in `files`, which lie below `root`."""
    names = Names()
    for path in files:
        module = str(path.relative_to(root))
        text = path.read_text()
        names.banners += [f"{module}:{line}" for line in _banners(text.split("\n"))]
        for node in ast.walk(ast.parse(text)):
            _count_node(names, module, node)
    return names


def _count_node(names: Names, module: str, node: ast.AST) -> None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            names.assigned += 1
            if _is_pronoun(name):
                names.pronouns.append(f"{module}:{node.lineno} {name}")
        case ast.arg(arg=name):
            names.parameters += 1
            if _is_pronoun(name):
                names.pronoun_parameters.append(f"{module}:{node.lineno} {name}")
        case ast.Module(body=body) if not module.startswith(_NOT_IN_THE_PACKAGE):
            for statement in body:
                if isinstance(statement, ast.ClassDef):
                    place = f"{module}:{statement.lineno} {statement.name}"
                    names.classes[statement.name.lstrip("_")].append(place)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if text := ast.get_docstring(node):
                word = text.split(maxsplit=1)[0]
                names.first_words[word].append(f"{module}:{node.lineno} {node.name}: {word}")


def _is_pronoun(name: str) -> bool:
    return not name.startswith("__") and name.strip("_") in PRONOUNS


def _banners(lines: list[str]) -> Iterator[int]:
    """Yield the lines of comments that head a part of a module: ruled, or between blank lines."""
    for index, line in enumerate(lines):
        if _BANNER.match(line):
            yield index + 1
        elif line.startswith("# ") and not lines[index - 1].strip():
            end = next(i for i in range(index, len(lines)) if not lines[i].startswith("#"))
            if not lines[end].strip() and not _PRAGMA.match(lines[end - 1]):
                yield index + 1


def main() -> None:
    """Print the counts, or with `--list` what was counted."""
    names = count(sources())
    print(f"{names.pronoun_percent:.2f} % of {names.assigned} assignments go to a pronoun")
    print(f"{names.pronoun_parameter_percent:.2f} % of {names.parameters} parameters are one")
    print(f"{len(names.namesakes)} names of classes stand in two or more modules")
    print(f"{len(names.banners)} banners stand inside modules")
    print(f"{len(names.descriptive_docstrings)} docstrings begin with `Returns` or the like")
    if "--list" in sys.argv:
        words = Counter(place.split()[1] for place in names.pronouns)
        print(*(f"{word} {times}" for word, times in words.most_common()), sep=", ")
        for places in names.namesakes.values():
            print(*places)
        print(*names.pronouns, *names.banners, *names.descriptive_docstrings, sep="\n")


if __name__ == "__main__":
    main()
