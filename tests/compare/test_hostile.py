"""What another program wrote into a store is shown as text: in the report, tables and pictures nothing obeys it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparsebp_cli.compare import Comparison, Question, View, compare_runs, load_all, picture, render, store_candidates
from sparsebp_cli.compare.report import write_report
from sparsebp_cli.tracking.content import RUN_ID
from tests.compare.database import ForeignStore

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")

EVIL = "</script><script>boom()</script><img src=x onerror=boom()>'\"&\x1b[2J\u202e$x_{$"
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
            if key.startswith("on") or (key in {"src", "href"} and not (value or "").startswith("#"))
        ]


@pytest.fixture
def hostile(fresh_database: Path, tmp_path: Path) -> Comparison:
    """Two groups whose names, parameters, keys, tags and metrics are hostile, and one that says it is ours."""
    store = ForeignStore(Path(shutil.copy(fresh_database, tmp_path / "mlflow.db")))
    for arm in ("a", "b"):
        for seed in range(3):
            params = {"seed": seed, "arm": f"{arm}{EVIL}", f"key{EVIL}": f"{arm}{EVIL}", "data_seed": EVIL}
            metrics = {"eval_loss": [(0, 0, 4.0), (5, 9, 3.0 + 0.01 * seed * (arm == "b"))], f"m{EVIL}": [(0, 0, 1.0)]}
            tags = {"mlflow.note.content": EVIL, "mlflow.source.git.commit": EVIL, "mlflow.source.name": EVIL}
            store.add(f"{arm}{EVIL}", params, metrics, tags)
    ours = {RUN_ID: EVIL, "sparsebp.state": "failed", "sparsebp.text": EVIL, "sparsebp.version": EVIL}
    run_id = store.add(f"ours{EVIL}", {"name": f"ours{EVIL}"}, {"eval_loss": [(0, 0, 1.0)]}, ours)
    folder = tmp_path / run_id
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"recipe": EVIL}))
    kept = {
        "facts": {"policies": EVIL},
        "environments": [{"cpu": EVIL}],
        "warm": [[1, 0]],
        "notes": [[1, "warning", EVIL]],
    }
    kept |= {"ends": 5, "layers": {"x": EVIL}, "examples": []}
    (folder / "history.json").write_text(json.dumps(kept))
    return compare_runs(load_all(store_candidates(store.uri))[0], Question(metric="eval_loss", curves=(f"m{EVIL}",)))


def test_hostile_content_of_a_store_is_text_in_the_report(hostile: Comparison, tmp_path: Path) -> None:
    page = write_report(hostile, tmp_path / "r.html", f"sparsebp compare {EVIL}").read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert found.dangerous == []
    assert found.scripts == 2
    assert "onerror=boom()&gt;" in page
    assert OBEYED.findall(page) == []
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data
    assert any("boom()" in label for label in json.loads(data)["groups"])
    assert OBEYED.findall(json.dumps(json.loads(data), ensure_ascii=False)) == []


def test_parts_of_a_stored_journal_that_are_odd_cost_one_line(hostile: Comparison) -> None:
    lines = [line for line in hostile.warnings if "of its event log cannot be read" in line]
    assert len(lines) == 1
    assert "facts, ends, layers" in lines[0]


@pytest.mark.parametrize("form", ["json", "csv", "md"])
def test_hostile_content_of_a_store_stays_data_in_every_form(hostile: Comparison, form: str) -> None:
    text = render(hostile, form, View())
    assert "boom()" in text
    if form == "md":
        assert "<script>" not in text
        assert "<img" not in text


def test_hostile_names_are_drawn_as_they_are(hostile: Comparison, tmp_path: Path) -> None:
    for view in (View(), View("curves")):
        assert picture(hostile, tmp_path / f"{view.kind}.svg", view).stat().st_size > 0
