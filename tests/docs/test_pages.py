"""Pages that follow from the code are up to date, and what is written by hand names what there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sparsebp_cli.cli import verb_help
from sparsebp_cli.policy import shelf
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.run.stored_recipe import GONE, GONE_OPTIONS
from tests.docs.block import FILES, LINK, ROOT
from tests.docs.conftest import PLUGIN

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BY_HAND = ("api", "glossary", "stability", "verdicts", "definitions", "faults", "safety", "upgrade")
WRITTEN = [ROOT / "docs" / "reference" / f"{name}.md" for name in BY_HAND]
HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("huggingface", "co"))]
PATHS = [f"/{name}/" for name in ("work", "opt", "root")]
TEXTS = {".py", ".md", ".toml", ".yaml", ".json", ".txt", ".svg", ".csv", ""}


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _generate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs/generate.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_generated_pages_are_fresh_whatever_the_terminal_and_the_plugins(plugin_folder: Path) -> None:
    done = _generate("--check", COLUMNS="37", PYTHONPATH=f"{plugin_folder}{os.pathsep}{PLUGIN}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stale_page_is_named_and_a_wrong_option_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate  # type: ignore[import-not-found]

    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copy(ROOT / "README.md", tmp_path)
    page = tmp_path / "docs" / "reference" / "metrics.md"
    page.write_text(page.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    (tmp_path / "docs" / "reference" / "cli.md").unlink()
    names = [f"docs/reference/{name}.md" for name in ("metrics", "cli", "errors")]  # the others take a while
    monkeypatch.setattr(generate, "PAGES", {name: generate.PAGES[name] for name in names})
    assert {file.name for file in generate.find_stale(tmp_path)} == {"metrics.md", "cli.md"}
    assert generate.main(["--chek"]) == 2


def test_recorded_numbers_take_their_place_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generator import readme  # type: ignore[import-not-found]

    (tmp_path / "README.md").write_text("a\n<!-- numbers: quickstart -->\nold\n<!-- end of numbers -->\nb\n")
    record = tmp_path / readme.RECORDED
    record.parent.mkdir(parents=True)
    record.write_text("### Recipe differences\n\nno\n\n### Speed\n\n| step |\n\nnote\n\n### In words\n\n- x\n")
    assert readme.page(tmp_path) == "a\n<!-- numbers: quickstart -->\n- x\n<!-- end of numbers -->\nb\n"
    assert readme.page(tmp_path, "README.md", ("Speed", "In words")) == (
        "a\n<!-- numbers: quickstart -->\n**Speed**\n\n| step |\n\nnote\n\n**In words**\n\n- x\n"
        "<!-- end of numbers -->\nb\n"
    )


def test_the_first_page_has_the_time_of_the_recorded_quickstart() -> None:
    record = (ROOT / "docs" / "picture" / "quickstart.md").read_text(encoding="utf-8")
    shorter = re.search(r"step time -(\d+\.\d) %", record)
    assert shorter
    first = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    assert f"took {float(shorter[1]):.0f} % less time per step in the [quickstart]" in first


def test_every_metric_is_explained() -> None:
    assert [name for name, metric in METRICS.items() if not metric.about] == []


def test_the_details_are_those_of_metrics() -> None:
    text = (ROOT / "docs" / "reference" / "definitions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([a-z]+/[a-z_]+)`", text)) <= METRICS.keys()


def test_the_rooms_of_the_contributors_guide_are_those_of_the_layers() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rooms = [room for layer in contract[0]["layers"] for room in layer.split(" | ")]
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Rooms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == rooms


def _anchors(file: Path) -> set[str]:
    """The anchors that a forge and Sphinx give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("file", [*FILES, *WRITTEN, ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md"], ids=_name)
def test_links_lead_to_files_and_headings(file: Path) -> None:
    broken = []
    for link, anchor in LINK.findall(file.read_text(encoding="utf-8")):
        if "://" in link or not (link or anchor):
            continue
        page = file.parent / link if link else file
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in _anchors(page)):
            broken.append(f"{link}#{anchor}")
    assert broken == []


def test_every_page_of_the_guide_has_one_place_in_the_tree_and_one_link_above_it() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {file.stem for file in (ROOT / "docs" / "guide").glob("*.md")}
    in_tree = re.findall(r"^guide/([\w-]+)$", text, re.MULTILINE)
    assert sorted(in_tree) == sorted(pages)
    assert sorted(set(re.findall(r"\]\(guide/([\w-]+)\.md", text))) == sorted(pages)


def test_the_glossary_is_sorted_and_defines_each_word_once() -> None:
    words = re.findall(r"^\| ([a-z][\w -]*) \|", WRITTEN[1].read_text(encoding="utf-8"), re.MULTILINE)[1:]
    assert words == sorted(set(words))
    assert len(words) > 30


def test_the_page_on_upgrading_names_what_is_gone_or_moved() -> None:
    names = {*verb_help.REMOVED, *verb_help.HOMES, *shelf.REMOVED, *shelf.REMOVED_OPTIMIZERS, *shelf.OPTIMIZERS}
    names |= {path.rpartition(".")[2] for path in GONE} | {key for keys in GONE_OPTIONS.values() for key in keys}
    text = (ROOT / "docs" / "reference" / "upgrade.md").read_text(encoding="utf-8")
    told = {word for part in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[\w-]+", part)}
    assert sorted(names - told) == []


def test_no_file_names_this_machine_or_a_package_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and Path(name).suffix in TEXTS]
    assert len(files) > 50
    found = []
    for file in files:
        if not file.exists() or file == Path(__file__):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [f"{file.relative_to(ROOT)}: {word}" for word in (*HOSTS, *PATHS) if word in text]
    assert found == []


def test_the_image_gets_every_file_that_the_package_is_built_from() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, wheel = pyproject["project"], pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], *wheel["only-include"]}
    # Verbs of packages, and policies that recipes name of the shelf.
    needed |= {f"plugins/sparsebp-{name}" for name in ("audit", "lab", "shelf", "tools")}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        name for line in lines if line.startswith("COPY ") and "--from" not in line for name in line.split()[1:-1]
    }
    assert let_in == copied == needed
