"""README, guide, help texts and errors use the field's words, and no group of pages grows past its limit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import house
from sparsebp_cli.cli.app import VERBS
from tests.docs.block import ROOT

PACKAGES = (
    "sparsebp_cli",
    *(f"plugins/{name}/{name.replace('-', '_')}" for name in ("sparsebp-lab", "sparsebp-shelf")),
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
# Each word of ours with the field's word for it.
WORDS = {
    r"gates?": "check, condition",
    r"doors?": "entry point, plug-in",
    r"house": "package",
    r"shelf": "package",
    r"price[sd]?|dear|charged": "cost, FLOPs",
    r"worth": "cost estimate; say what it costs or gains",
    r"exchange rate": "cost estimate before training",
    r"claimed FLOPs": "estimated FLOPs",
    r"ceilings?|possible saving": "speed-up limit",
    r"realised": "fraction of the limit reached",
    r"carried share|kept share": "fraction trained, fraction kept",
    r"census": "data statistics",
    r"journals?": "event log",
    r"seal(?:s|ed)?": "config fingerprint",
    r"referees?": "isolation check",
    r"control from below": "control, ablation",
    r"rows that no loss reads": "unpadding",
    r"(?:another|remote|local) (?:dispatcher|watcher)": "remote runner, local runner",
    r"(?:is|are) told": "name who says it",
    r"in the place of": "instead of",
    r"as ever|likewise|whoever|such that|the former|the latter": "plain words",
}
# Places that may keep a word, with the reason.
ALLOWED = {
    ("plugins/sparsebp-tools/sparsebp_tools/bench/table.py", "worth"): "a column of the bench, and a field of its JSON",
}
PATTERN = re.compile(rf"(?<![\w/.-])(?:{'|'.join(WORDS)})(?![\w/-]|\.\w)", re.IGNORECASE)


def read_page(text: str) -> str:
    """Return the prose of a page: no generated part, code, comment or target of a link."""
    for pattern in (r"<!--.*?-->", r"```.*?```", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(pattern, "", house.drop_generated(text), flags=re.DOTALL)
    return text


def read_literals(source: str) -> Iterator[str]:
    """Yield each literal of at least three words that is no docstring: help of options, errors, verdicts, notes."""
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docs and str(node.value).strip().count(" ") >= 2:
            yield re.sub(r"`[^`]*`", "", str(node.value))


def find_words(name: str, texts: Iterator[str]) -> list[str]:
    found = [match[0].lower() for text in texts for match in PATTERN.finditer(text)]
    return [f"{name}: {word}" for word in found if (name, word) not in ALLOWED]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_page_has_the_words_of_the_field(file: Path) -> None:
    assert find_words(file.name, iter([read_page(file.read_text(encoding="utf-8"))])) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_help_texts_and_errors_have_the_words_of_the_field(package: str) -> None:
    found = []
    for file in sorted((ROOT / package).rglob("*.py")):
        found += find_words(file.relative_to(ROOT).as_posix(), read_literals(file.read_text(encoding="utf-8")))
    assert found == []


def test_the_help_of_each_verb_has_the_words_of_the_field() -> None:
    verbs = [verb for panel in VERBS.values() for verb in panel]
    assert len(verbs) > 30
    assert [word for verb in verbs for word in find_words(verb.__name__, iter([read_page(verb.__doc__ or "")]))] == []


def test_every_exception_is_still_needed() -> None:
    for name, word in ALLOWED:
        assert word in (ROOT / name).read_text(encoding="utf-8").lower(), name


@pytest.mark.parametrize("text", ["A dear step.", "its price", "is told", "the journal of a run", "What is it worth?"])
def test_a_word_of_ours_is_found_in_prose_and_in_literals(text: str) -> None:
    assert len(find_words("x", iter([read_page(text)]))) == 1
    assert len(find_words("x", read_literals(f'raise ValueError("of a run, {text}")'))) == 1


@pytest.mark.parametrize("text", ["`sparsebp worth`", "[screen](worth.md)", "docs/guide/worth.md", "journal.jsonl"])
def test_names_of_verbs_and_files_are_no_prose(text: str) -> None:
    assert find_words("x", iter([read_page(text)])) == []


@pytest.mark.parametrize("group", house.PAGES)
def test_a_group_of_pages_keeps_to_its_limit(group: str) -> None:
    pages, by_hand, _ = house.count_pages(ROOT)[group]
    _, most_words, most_pages = house.PAGES[group]
    assert pages <= most_pages
    assert by_hand <= most_words


def test_generated_parts_of_a_page_are_not_by_hand() -> None:
    text = "one\n<!-- claim: a -->\ntwo\n<!-- wins -->\n| x | y |\n<!-- end of wins -->\nthree | four\n"
    assert house.count_words(house.drop_generated(text)) == 4
    assert house.count_words(text) == 6
    assert house.drop_generated(f"{house.WRITTEN} ... -->\nmore\n") == ""
