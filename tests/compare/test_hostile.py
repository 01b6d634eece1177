"""What a stranger wrote into an archive is shown as text: in the report, tables and pictures nothing obeys it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparsebp_cli.compare import (
    Comparison,
    Question,
    choose,
    compare_runs,
    load_all,
    local_candidates,
    render,
)
from sparsebp_cli.compare.archive import list_members, open_archive, write_archive
from sparsebp_cli.compare.report import write_report
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.run import JournalWriter

from .conftest import MakeRun

EVIL = "</script><script>boom()</script><img src=x onerror=boom()>'\"&\x1b[2J\u202e$x_{$"
SAFE = ("#", "data:text/yaml;base64,")  # an anchor, and a recipe to save
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Elements(HTMLParser):
    """The elements of a page, and everything that would run or load."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.dangerous: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.scripts += tag == "script"
        if tag in {"img", "iframe", "object", "embed", "link", "base", "form"}:
            self.dangerous.append(tag)
        self.dangerous += [
            f"{tag} {key}={value}"
            for key, value in attrs
            if key.startswith("on") or (key in {"src", "href"} and not (value or "").startswith(SAFE))
        ]


@pytest.fixture
def hostile(make_run: MakeRun, tmp_path: Path) -> Comparison:
    """Two groups of an archive whose recipes, keys, metrics, notes, environments, texts and commits are hostile."""
    runs = [
        make_run(
            arm,
            seed,
            loss=3.0 + 0.01 * seed * (arm == "b"),
            metrics={f"m{EVIL}": 1.0},
            environment={"cpu": f"{arm}{EVIL}", "packages": {"torch": f"{arm}{EVIL}", EVIL: EVIL}},
            facts={"dataset_digest": f"{arm}{EVIL}", "device": EVIL},
            provenance=Provenance(git_sha=EVIL, recipe_file=EVIL, sparsebp_version=EVIL),
            model={"name": f"{arm}{EVIL}"},
            tracking={"tags": {"who": EVIL}},
        )
        for arm in ("a", "b")
        for seed in range(3)
    ]
    runs.append(make_run("failed", end="failed", text=EVIL, model={"name": EVIL}))
    for run in runs:
        texts = {key: [f"{key}{EVIL}"] for key in ("prompt", "reference", "prediction")}
        with JournalWriter(run.path, durable=False) as journal:
            journal.write("note", level="warning", text=EVIL)
            journal.write("samples", step=20, split="validation", values=texts)
            journal.write("layers", step=20, values={EVIL: {"kept_share": 0.5}})
    write_archive(tmp_path / "runs.tar.gz", [member for run in runs for member in list_members(run)])
    found, _ = load_all(choose(local_candidates(open_archive(tmp_path / "runs.tar.gz")), [], None, "there"))
    return compare_runs(found, Question(curves=(f"m{EVIL}",)))


def test_hostile_content_of_an_archive_is_text_in_the_report(hostile: Comparison, tmp_path: Path) -> None:
    page = write_report(hostile, tmp_path / "r.html", f"sparsebp compare {EVIL}").read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert found.dangerous == []
    assert found.scripts == 2
    assert "onerror=boom()&gt;" in page
    assert OBEYED.findall(page) == []
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data
    assert "boom()" in data
    assert OBEYED.findall(json.dumps(json.loads(data), ensure_ascii=False)) == []


@pytest.mark.parametrize("form", ["json", "md"])
def test_hostile_content_of_an_archive_stays_data_in_every_form(hostile: Comparison, form: str) -> None:
    text = render(hostile, form)
    assert "boom()" in text
    if form == "md":
        assert "<script>" not in text
        assert "<img" not in text
