"""The page of answers: each compares only where a report does, and its figures stand in the pages that it names."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.docs.block import ROOT
from tests.docs.test_claims import COMPARES

PAGE = ROOT / "docs" / "guide" / "answers.md"
TEXT = PAGE.read_text(encoding="utf-8")
ANSWERS = re.findall(r"^\*\*(\d+)\. .*?(?=^\*\*\d+\. |^## )", TEXT, re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d+\.\d+")


def answer(number: int) -> str:
    return re.search(rf"^\*\*{number}\. .*?(?=^\*\*\d+\. |^## )", TEXT, re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]


def sources(text: str) -> list[Path]:
    named = re.search(r"^(?:.*[ .])?Sources?: .*", text, re.MULTILINE | re.DOTALL)
    assert named, text
    return [(PAGE.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", named[0])]


def test_the_report_of_the_fast_recipe_comes_again_from_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    thin, wins = importlib.import_module("thin"), importlib.import_module("wins")
    results = ROOT / "docs" / "results"
    archive = thin.find_archive(results / "fast")
    with tarfile.open(archive) as packed:
        runs = sorted({name.split("/")[1] for name in packed.getnames() if name.startswith("runs/")})
    assert len(runs) == 10
    words = ["compare", *runs, "--from", str(archive), "--baseline", "dense", "--margin", "0.02"]
    done = subprocess.run(
        [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", *words, "-o", "json"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"SPARSEBP_HOME": str(tmp_path)},
    )
    # Sums differ in their last bits between processors.
    printed, written = (
        json.loads(text, parse_float=lambda digits: f"{float(digits):.9g}")
        for text in (wins.shorten(done.stdout), (results / "fast.json").read_text(encoding="utf-8"))
    )
    assert printed == written


def missing(text: str) -> list[str]:
    there = "".join(path.read_text(encoding="utf-8") for path in sources(text))
    found = set(FIGURE.findall(there))
    return [
        figure for figure in FIGURE.findall(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)) if figure not in found
    ]


def test_there_are_nine() -> None:
    assert [int(number) for number in ANSWERS] == list(range(1, 10))


@pytest.mark.parametrize("number", range(1, 10))
def test_every_figure_stands_in_a_page_that_the_answer_names(number: int) -> None:
    own_sums = {7: {"1.33", "2.0"}}  # (1 + 2p)/(3p), derived on the page
    assert set(missing(answer(number))) <= own_sums.get(number, set())


def test_a_figure_that_no_source_has_is_found() -> None:
    assert missing(answer(3).replace("26.5", "26.4")) == ["26.4"]


def test_every_claim_stands_in_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generator import study  # type: ignore[import-not-found]

    assert len(study.CLAIM.findall(TEXT)) == TEXT.count("<!-- claim: ") > 12
    assert study.find_broken(ROOT, TEXT) == []


@pytest.mark.parametrize("number", [1, 4, 6, 7, 8])
def test_answers_that_compare_trainings_have_a_claim(number: int) -> None:
    assert COMPARES.search(answer(number))
    assert "<!-- claim: " in answer(number)


def test_the_table_of_published_claims_says_what_the_cards_say() -> None:
    from sparsebp_cli.policy import find_policies

    rows = re.findall(r"^\| `(\w[\w-]*)`[^|]*\| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 6
    for name, published, _ in rows:
        policy = find_policies()[name].policy_class
        assert policy is not None
        assert policy.card is not None
        figures = re.findall(r"\d+(?:\.\d+)?", published.replace("LLaMA-2", "").replace("T5", ""))
        assert figures
        assert set(figures) <= set(re.findall(r"\d+(?:\.\d+)?", policy.card.claimed)), name
