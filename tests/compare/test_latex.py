"""The table for a paper: rows of the leaderboard, escaped, with what is shown to be a gain in bold."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.compare import Question, compare_runs, picture, render
from sparsebp_cli.compare.latex import escape
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]


def test_the_table_has_a_row_a_group_with_intervals_and_no_bold_without_a_gain(two_groups: list[RunFolder]) -> None:
    comparison = compare_runs(two_groups, Question(margin=0.2))
    text = render(comparison, "latex")
    heading, dense, topk = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in (heading, dense, topk)} == {heading.count(" & ")}
    assert re.search(r"^dense & 3\.004 \$\\pm\$ 0\.032 \(5\) & ", dense)
    assert re.search(r"& \$\+\$0\.104 \{\[\}\$\+\$0\.\d+, \$\+\$0\.\d+\]", topk)  # worse: not in bold
    lines = text.splitlines()
    rules = [lines.index(f"\\{name}") for name in ("toprule", "midrule", "bottomrule")]
    assert rules == sorted(rules)
    assert all(f"% {group.label}: {group.verdict}" in lines for group in comparison.groups)


def test_what_is_shown_to_be_faster_is_bold_and_nothing_else_is(make_run: MakeRun) -> None:
    for seconds, seeds, is_bold in ((0.1, 3, True), (0.3, 3, False), (0.1, 2, False)):
        runs = [make_run("dense", seed) for seed in range(seeds)]
        other = {"policy": [{"name": "topk", "keep": 0.5}], "exact": False, "claimed": 0.1}
        runs += [make_run("other", seed, seconds=seconds, **other) for seed in range(seeds)]
        text = render(compare_runs(runs), "latex")
        heading = next(line for line in text.splitlines() if line.startswith(" & "))
        place = heading.removesuffix(r" \\").split(" & ").index("step time")
        row = next(line for line in text.splitlines() if line.startswith("other & "))
        assert row.removesuffix(r" \\").split(" & ")[place].startswith(r"\textbf{") is is_bold


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b & 5%", r"a\_b \& 5\%"),
        ("\\input{x}", r"\textbackslash{}input\{x\}"),
        ("#1 $x^2$ ~", r"\#1 \$x\textasciicircum{}2\$ \textasciitilde{}"),
    ],
)
def test_a_name_cannot_steer_latex(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_line_break_in_a_name_cannot_leave_a_comment(make_run: MakeRun) -> None:
    text = render(compare_runs([make_run("dense"), make_run("b", policy=[{"name": "topk", "keep": 0.5}])]), "latex")
    kinds = ("%", "\\", "dense & ", "b & ", " & ")
    assert all(line.startswith(kinds) for line in text.splitlines())


PAPER = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs,graphicx}
\begin{document}
\begin{table*}\input{table}\caption{CAPTION}\end{table*}
\includegraphics[width=\columnwidth]{curves.pdf}
\end{document}
"""


@pytest.mark.latex
def test_a_paper_with_table_and_picture_compiles_and_embeds_no_type_3_font(
    make_run: MakeRun, two_groups: list[RunFolder], tmp_path: Path
) -> None:
    other = make_run("under_score", policy=[{"name": "topk", "keep": 0.5}], exact=False)
    comparison = compare_runs([*two_groups, other], Question(margin=0.2, curves=("eval/loss",)))
    (tmp_path / "table.tex").write_text(render(comparison, "latex"), encoding="utf-8")
    picture(comparison, tmp_path / "curves.pdf")
    hostile = "50% of {rows} & \\input{x} #1 x^2 ~ < >"  # a dollar sign is a bitmap without the fonts of cm-super
    (tmp_path / "paper.tex").write_text(PAPER.replace("CAPTION", escape(hostile)), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=60
    )
    assert done.returncode == 0, done.stdout[-2000:]
    fonts, text = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for command in (["pdffonts", "paper.pdf"], ["pdftotext", "-layout", "paper.pdf", "-"])
    )
    rows = fonts.splitlines()[2:]
    assert any("TrueType" in row for row in rows)  # of the picture
    assert any("Type 1" in row for row in rows)  # of the text
    assert "Type 3" not in fonts
    assert "under_score" in text
    assert hostile.partition(" x^2")[0] in text
