"""The line of lossless is written into a script where it has one place, and nothing else of the script changes."""

from __future__ import annotations

import ast
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsebp_audit.report import LOSSLESS_ADVICE, LOSSLESS_REFUSED, Applied, AuditReport, StepTimes
from sparsebp_audit.verb import audit_process
from sparsebp_audit.verb.audit_process import AuditedCommand
from sparsebp_audit.verb.script_line import find_change, find_objection
from sparsebp_cli.cli.app import app
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.cli.test_programs import AUDIT

PLAIN = """from transformers import Trainer

trainer = Trainer(1)
trainer.train()
"""
LINE = 'sbp.PolicyCallback("lossless").join(trainer)'
PLACES = {
    "plain": (PLAIN, [2, 5]),
    "of a module": ("import transformers as tf\ntrainer = tf.trainer.Trainer()\ntrainer.train()\n", [2, 4]),
    "in a function, with tabs": (
        "def main():\n\tfrom trl import SFTTrainer as T\n\ttrainer: T = T(\n1)  # made\n\tif 1:\n\t\ttrainer.train()\n",
        [3, 6],
    ),
    "a class of its own": (
        "from transformers import (\n    Trainer,\n)\nclass Mine(Trainer):\n    pass\nclass Last(Mine):\n    pass\n"
        "trainer = Last()\nx = trainer.train()\n",
        [4, 10],
    ),
    "ends of lines as on Windows": (PLAIN.replace("\n", "\r\n"), [2, 5]),
    "a form feed and another alphabet": (PLAIN.replace("\n\n", "\n\f\nname = 'Überprüfung'\n"), [2, 6]),
    "a mark at the beginning": ("\ufeff" + PLAIN, [2, 5]),
    "one trainer a fold": (
        "from trl import DPOTrainer\nfor fold in (1, 2):\n    trainer = DPOTrainer(fold)\n    trainer.train()\n",
        [2, 5],
    ),
}
REFUSED = {
    "two trainers": (PLAIN + "other = Trainer(2)\nother.train()\n", "creates 2 trainers, in lines 3, 5"),
    "no name": (
        "from transformers import Trainer\nTrainer(1).train()\n",
        "script.py:2 creates a trainer without assigning it",
    ),
    "wrapped": (PLAIN.replace("Trainer(1)", "wrap(Trainer(1))"), "without assigning it to a variable"),
    "replaced": (PLAIN.replace("trainer.train", "trainer = 1\ntrainer.train"), "assigned more than once"),
    "trained elsewhere": (
        PLAIN.replace("trainer.train()", "run(trainer)"),
        "the same scope does not call trainer.train() after it",
    ),
    "trained before": (
        PLAIN.replace("trainer = ", "trainer.train()\ntrainer = ", 1)[: -len("trainer.train()\n")],
        "not",
    ),
    "two in a line": (PLAIN.replace("import Trainer", "import Trainer; import os"), "script.py:1 has several"),
    "an if in a line": (PLAIN.replace("trainer = ", "if 1: trainer = "), "script.py:3 has several statements"),
    "imported twice": (
        "try:\n    from trl import X\nexcept ImportError:\n    from transformers import Trainer\n" + PLAIN,
        "4 and 5",
    ),
    "another library": (PLAIN.replace("transformers", "mine"), "creates no trainer of transformers or trl"),
    "of its own folder": (PLAIN.replace("transformers", ".transformers"), "creates no trainer of transformers or trl"),
    "a loop": ("out = model()\nout.loss.backward()\n", "engine.backward(out.loss) in line 2"),
    "there already": (
        PLAIN.replace("\n\n", "\nimport sparsebp_cli as sbp\n"),
        "script.py:2 imports sparsebp_cli already",
    ),
    "no Python": ("for\n", "no script that Python can parse"),
}


def write(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    file = folder / "script.py"
    file.write_bytes(text.encode(encoding))
    return file


@pytest.mark.parametrize("name", PLACES)
def test_two_lines_are_added_and_every_other_byte_stays(tmp_path: Path, name: str) -> None:
    text, numbers = PLACES[name]
    change = find_change(write(tmp_path, text))
    before, after = (content.decode().split("\n") for content in (change.before, change.after))
    added = [after[number - 1] for number in numbers]
    assert [line.strip() for line in added] == ["import sparsebp_cli as sbp", LINE]
    assert [line for number, line in enumerate(after, 1) if number not in numbers] == before
    # Each has the indentation and the end of the line of what it follows.
    neighbours = [after[numbers[0] - 2], next(line for line in reversed(after[: numbers[1] - 1]) if "trainer" in line)]
    for line, neighbour in zip(added, neighbours, strict=True):
        assert line.endswith("\r") == neighbour.endswith("\r")
    ast.parse(change.after)
    with pytest.raises(UnsupportedError, match="imports sparsebp_cli already"):  # never twice
        find_change(write(tmp_path, change.after.decode()))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_without_one_place_is_refused_with_the_line(tmp_path: Path, name: str) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(UnsupportedError) as refusal:
        find_change(write(tmp_path, text))
    said = str(refusal.value)
    assert reason in said
    assert "\n" not in said
    assert name == "there already" or 'sbp.PolicyCallback("lossless").join(trainer)' in said


def test_a_script_that_uses_the_short_name_gets_the_long_one(tmp_path: Path) -> None:
    change = find_change(write(tmp_path, PLAIN + "sbp = 3\n"))
    lines = change.after.decode().splitlines()
    assert (lines[1], lines[4]) == ("import sparsebp_cli", f"sparsebp_cli{LINE.removeprefix('sbp')}")


def test_a_script_in_another_encoding_keeps_it(tmp_path: Path) -> None:
    text = f"# -*- coding: latin-1 -*-\nname = 'é'; more = 1\n{PLAIN}"
    change = find_change(write(tmp_path, text, "latin-1"))
    assert b"'\xe9'" in change.after
    assert change.after.count(b"\n") == change.before.count(b"\n") + 2


def test_the_old_script_stays_beside_the_new_one_and_is_never_lost(tmp_path: Path) -> None:
    file = write(tmp_path, PLAIN)
    file.chmod(0o755)
    change = find_change(file)
    assert change.diff().count("\n+") == 1 + 2  # and the heading
    kept = change.write()
    assert (kept.name, kept.read_text(), file.read_bytes()) == ("script.py.orig", PLAIN, change.after)
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    other = find_change(write(tmp_path, PLAIN + "# changed\n"))
    with pytest.raises(UsageError, match=r"script\.py\.orig, but this file exists already"):
        other.write()
    assert (kept.read_text(), file.read_bytes()) == (PLAIN, other.before)


def test_a_script_of_an_installed_package_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    with pytest.raises(UnsupportedError, match="installed package"):
        find_change(write(folder, PLAIN))


class Report:
    """What is read of the report of an audit."""

    threshold = 0.005

    def __init__(self, *, advice: str = "", note: str = "", seconds: tuple[float, float] | None = None) -> None:
        self.findings: list[Any] = [type("Finding", (), {"advice": advice})]
        self.notes = ["a note", note]
        times = [StepTimes(20, s, s, s) for s in seconds or ()]
        self.applied = Applied(plain=times[0], lossless=times[1]) if times else None


def test_the_line_is_written_only_where_the_audit_says_that_it_is_worth_it() -> None:
    def object_to(**found: Any) -> str:
        report: Any = Report(**found)
        return find_objection(report)

    advice = f"pack{LOSSLESS_ADVICE}"
    assert object_to(advice=advice) == object_to(advice=advice, seconds=(2.0, 1.0)) == ""
    assert "were not faster" in object_to(advice=advice, seconds=(1.0, 1.0))
    assert object_to(note=f"{LOSSLESS_REFUSED}dropout") == f"{LOSSLESS_REFUSED}dropout"
    assert object_to(advice="pack") == "lossless would save less than 0.5% of a step"


NUMBERS = ("flops", "flops_share", "saved_bytes", "bytes_share", "seconds", "seconds_share")
FOUND = dict.fromkeys(NUMBERS, 0.5) | {
    "kind": "padding",
    "title": "padding",
    "detail": "",
    "exact": True,
    "modules": [],
}


@pytest.mark.parametrize(
    ("text", "advice", "code", "said"),
    [
        (PLAIN, LOSSLESS_ADVICE, 0, "written: {}; the old file: {}.orig"),
        (PLAIN, "", 1, "not written: lossless would save less than 100.0% of a step"),
        (PLAIN * 2, LOSSLESS_ADVICE, 1, "not written: script.py creates 2 trainers, in lines 3, 7: write by hand"),
        (PLAIN, LOSSLESS_ADVICE, 7, "not written: the command ended with exit code 7"),
        ("", LOSSLESS_ADVICE, 1, "not written: the command ran no Python file"),
    ],
)
@pytest.mark.parametrize("output", ["table", "json"])
def test_the_verb_writes_the_line_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, advice: str, code: int, said: str, output: str
) -> None:
    file = write(tmp_path, text) if text else None

    def run_audited(*arguments: Any, **_: Any) -> AuditedCommand:
        report = AuditReport.from_dict(AUDIT | {"findings": [FOUND | {"advice": f"pack{advice}"}]})
        arguments[-1](report)
        return AuditedCommand(7 if code == 7 else 0, report, script=file)

    monkeypatch.setattr(audit_process, "run_audited", run_audited)
    done = CliRunner().invoke(app, ["audit", "--write", "-o", output, "--", "python", "script.py"])
    assert done.exit_code == code, done.output
    assert said.format(file, file) in done.stderr
    shown = done.stderr if output == "json" else done.stdout
    assert (f"\n+{LINE}" in shown) == (code == 0)
    assert (file is not None and LINE in file.read_text()) == (code == 0)
    if output == "json":
        assert json.loads(done.stdout)["findings"]


def test_a_recipe_is_no_script(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["audit", "--write", str(tmp_path / "fake.yaml")])
    assert str(done.exception) == "--write works only with a script; in a recipe, write 'policy: lossless' instead"
