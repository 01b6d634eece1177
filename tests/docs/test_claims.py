"""The guide says of its studies what their reports say, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.block import ROOT

COMPARES = re.compile(
    r"\b(better|worse|faster|slower|shorter|even with|equal to|as good|beats?|never|cheaper|wins?|larger loss)\b",
    re.IGNORECASE,
)
PAGE = (ROOT / "docs" / "results" / "studies.md").read_text(encoding="utf-8")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]  # a module of the documentation
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generator import study  # type: ignore[import-not-found]

    return study


def own_words(text: str) -> list[str]:
    """List items and paragraphs that are not generated."""
    written = re.sub(r"<!-- report: .*?<!-- end of report -->", "", text, flags=re.DOTALL)
    return [part.strip() for part in re.split(r"\n\n|\n(?=- )", written) if part.strip()]


def unsupported(text: str) -> list[str]:
    parts = [part for part in own_words(text) if "<!-- claim: " not in part]
    return [part for part in parts if COMPARES.search(re.sub(r"\*[^*]+\*", "", part))]


def test_every_claim_of_the_page_stands_in_its_report(study) -> None:  # type: ignore[no-untyped-def]
    assert len(study.CLAIM.findall(PAGE)) == PAGE.count("<!-- claim: ") > 3
    assert study.find_broken(ROOT, PAGE) == []


def test_a_sentence_that_compares_has_a_claim() -> None:
    assert unsupported(PAGE) == []
    assert len(unsupported(PAGE + "\n\nTokens at random came out even with dense.\n- Exact is faster.\n")) == 2


def test_a_claim_that_the_report_does_not_make_is_found(study, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "x.txt").write_text("Quality: a\n\nwarning: w\ndense: baseline.\np: no difference was\nshown.\n")
    assert study.find_verdicts(tmp_path, "x") == {"dense": "baseline.", "p": "no difference was shown."}
    assert study.find_broken(tmp_path, '<!-- claim: x p "is better" -->') != []
    assert study.find_broken(tmp_path, '<!-- claim: x p not "is better" -->') == []
    assert study.find_broken(tmp_path, '<!-- claim: x q not "is better" -->') != []
    (folder / "x.csv").write_text("label,seed\ndense,0\n")  # then a line that begins as a verdict does is none
    assert study.find_verdicts(tmp_path, "x") == {"dense": "baseline. p: no difference was shown."}
    (folder / "x.json").write_text('{"groups": [{"label": "p", "verdict": "is better by 1"}]}')  # JSON goes before text
    assert study.find_broken(tmp_path, '<!-- claim: x p "is better" -->') == []
