"""The report as a page and as a table: everything is said, nothing is loaded, nothing is too wide."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from sparsebp_audit.report import KINDS, AuditReport, Finding, ModuleWork, render_page
from sparsebp_audit.verb.audit_table import print_audit
from tests.compare.test_hostile import OBEYED, Elements

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0"]
PROBE = """<script>addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  document.title = `${wide}|${getComputedStyle(document.body).backgroundColor}`; });</script>"""


def _report(findings: int = len(KINDS)) -> AuditReport:
    found = tuple(
        Finding(
            kind=kind,
            title=known.title,
            detail=f"in <b>{place}</b> & more",
            advice=known.advice,
            exact=known.exact,
            modules=("model.layers.0.mlp.down_proj", "lm_head", ""),
            flops=1e9 / (place + 1),
            flops_share=0.4 / (place + 1),
            saved_bytes=5e6,
            bytes_share=0.1,
            seconds=0.25 if kind == "scanning-hooks" else 0.0,
            seconds_share=0.2 if kind == "scanning-hooks" else 0.0,
        )
        for place, (kind, known) in enumerate(KINDS.items())
    )[:findings]
    modules = [
        ModuleWork(f"model.layers.{n}.self_attn.very_long_projection_name", 1e9, 1e9, 1e9, 0, 0, 4e6, 1e8, 4e5)
        for n in range(4)
    ]
    return AuditReport(
        steps=3,
        wanted_steps=3,
        backwards=3,
        forward_flops=1e9,
        backward_flops=2e9,
        recomputed_flops=0.0,
        ungraded_flops=0.0,
        saved_bytes=1e6,
        parameter_bytes=10**6,
        gradient_bytes=10**6,
        optimizer_bytes=2 * 10**6,
        step_seconds=0.5,
        threshold=0.005,
        wasted_flops_share=0.4 if findings else 0.0,
        wasted_bytes_share=0.1 if findings else 0.0,
        num_below=2,
        findings=found,
        notes=("a note <i>",),
        modules=(*modules, ModuleWork("", saved_bytes=8.0)),
    )


def test_the_page_says_everything_and_escapes_it_and_loads_nothing() -> None:
    page = render_page(_report(), "python train.py --name '<x>'")
    for known in KINDS.values():
        assert known.title in unescape(page)
        assert known.advice in unescape(page)
    assert "<b>0</b>" not in page
    assert "a note &lt;i&gt;" in page
    assert "2 more below 0.5 % of a step" in page
    assert "*.self_attn.very_long_projection_name" in page
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)
    assert page.count("<article>") == len(KINDS)
    assert ">again<" not in page  # nothing ran again


def test_a_clean_report_has_no_findings_and_says_so() -> None:
    page = render_page(_report(0))
    assert "<h1>no waste found above 0.5 % of a step</h1>" in page
    assert "What is wasted" not in page


def test_an_audit_fits_one_screen_and_begins_with_the_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_audit(_report())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert (
        " ".join(" ".join(lines[:2]).split())
        == "16 findings: at most 40.0% of the FLOPs of a step and 10.0% of the bytes could be skipped without "
        "changing results"
    )
    assert lines[-1].endswith("more: --html FILE or -o json (every finding and module)")
    for place in range(16):  # one finding alone has room for its advice
        report = _report()
        print_audit(replace(report, findings=report.findings[place : place + 1]))
        text = " ".join(capsys.readouterr().out.split())
        assert f"to do: {report.findings[place].advice}" in text
        assert ("(without this work, results would change)" in text) is not report.findings[place].exact


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_no_screen_is_too_narrow_for_the_page(tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "audit.html"
    text = render_page(_report()).replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    file.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *FLAGS, scheme, f"--window-size={width},900", "--dump-dom", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search(r"<title>(-?\d+)\|(rgb.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    assert int(title[1]) <= 0
    assert title[2] == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
    assert "CONSOLE" not in done.stderr


def test_hostile_names_of_modules_and_findings_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "</td><script>boom()</script><img src=x onerror=boom()>\x1b[2J\x9b31m\u202e"
    report = _report()
    findings = tuple(
        replace(found, title=evil, detail=evil, modules=(evil, "x" * 100_000)) for found in report.findings
    )
    modules = tuple(replace(row, module=f"{evil}.{number}") for number, row in enumerate(report.modules))
    hostile = replace(report, findings=findings, modules=modules, notes=(evil,))
    page = Elements()
    page.feed(text := render_page(hostile, evil))
    assert page.dangerous == []
    assert page.scripts == 0
    assert OBEYED.findall(text) == []
    print_audit(hostile)
    printed = capsys.readouterr().out
    assert "boom()" in printed
    assert OBEYED.findall(printed) == []
