"""What a repository is expected to have beside its code can be read, and agrees with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_workflow_runs_what_a_contributor_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make test"]
    declared = " ".join(_project()["classifiers"])
    assert all(one in declared for one in workflow["jobs"]["test"]["strategy"]["matrix"]["python"])


@pytest.mark.parametrize("form", ["bug.yml", "idea.yml"])
def test_an_issue_form_asks_for_something(form: str) -> None:
    asked = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())
    assert asked["name"] and asked["description"]
    identifiers = [field["id"] for field in asked["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert any(field.get("validations", {}).get("required") for field in asked["body"])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = _project()
    assert citation["version"] == project["version"]
    assert citation["license"] in project["license"].split(" AND ")  # the other is the data's


def test_what_to_do_about_a_vulnerability_is_said() -> None:
    assert "privately" in (ROOT / "SECURITY.md").read_text()


def test_the_front_page_is_short_and_names_only_files_that_are_there() -> None:
    """Each is a link. Its text is the path, which is all that a package index shows of it."""
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 700
    links = re.findall(r"\[([^]]+)\]\(([^)]+)\)", page)
    assert len(links) >= 10
    for text, target in links:
        assert text == f"`{target}`" and (ROOT / target).is_file()
    assert len(re.findall(r"`[\w./-]+\.md`", page)) == len(links)


def test_no_page_guesses_the_port_of_the_local_server() -> None:
    """If port 4200 is taken, the server takes another. `recpoint server env` names it."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*"), ROOT / "flows/prefect.yaml"]
    texts = {page: page.read_text(errors="replace") for page in pages if page.is_file()}
    guesses = [
        str(page.relative_to(ROOT))
        for page, text in texts.items()
        if re.search(r"PREFECT_API_URL=\S*(4200|RECPOINT_SERVER_PORT)", text)
    ]
    assert len(texts) > 50 and not guesses
    assert "recpoint server env" in texts[ROOT / "docs/tutorials/prefect.md"]


def test_the_changelog_can_be_read_to_its_end() -> None:
    """Each release says what it has, not how it came about."""
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases[0].startswith(f"[{_project()['version']}]")
    assert all(0 < len(re.findall(r"^- ", one, re.MULTILINE)) <= 40 for one in releases)
