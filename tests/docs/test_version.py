"""The version, the changelog and the page on stability tell one story."""

from __future__ import annotations

import re
import tomllib
from datetime import date

import pytest
import yaml

from tests.docs.block import ROOT

KINDS = ["Breaking", "New", "Fixed"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_changelog(text: str) -> dict[str, str]:
    """Return the body of each version's section by its heading, newest first."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


SECTIONS = read_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
RELEASED = [heading for heading in SECTIONS if heading != "[Unreleased]"]


def _version(heading: str) -> tuple[int, ...]:
    found = re.match(r"\[(\d+)\.(\d+)\.(\d+)\]", heading)
    assert found, heading
    return tuple(map(int, found.groups()))


def test_the_project_has_the_version_of_the_newest_section_of_the_changelog() -> None:
    assert RELEASED[0].startswith(f"[{PROJECT['version']}]")


def test_a_citation_names_this_version_and_its_day() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert RELEASED[0].endswith(str(citation["date-released"]))
    assert citation["license"] == PROJECT["license"]


def test_versions_of_the_changelog_descend_from_what_is_unreleased_and_have_dates() -> None:
    assert next(iter(SECTIONS)) == "[Unreleased]"
    versions = [_version(heading) for heading in RELEASED]
    assert versions == sorted(set(versions), reverse=True)
    dates = [date.fromisoformat(heading.partition(" - ")[2]) for heading in RELEASED]
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_version_has_each_kind_of_change_once_and_in_order(heading: str) -> None:
    kinds = re.findall(r"^### (.+)$", SECTIONS[heading], re.MULTILINE)
    assert kinds == [kind for kind in KINDS if kind in kinds]


def test_plugins_here_need_the_minor_version_that_they_are_tested_with() -> None:
    needed = f"sparsebp>={PROJECT['version'].rpartition('.')[0]}"
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        assert needed in tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"], file


def test_every_group_of_entry_points_is_named_as_public() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    groups = [*PROJECT["entry-points"], "sparsebp.layouts"]
    assert [group for group in groups if f"`{group}`" not in page] == []
