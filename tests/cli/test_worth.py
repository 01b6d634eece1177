"""The table of ``sparsebp worth``, at the widths that terminals have."""

from __future__ import annotations

import pytest

from sparsebp_lab.answer.worth_record import WorthAnswer
from sparsebp_lab.verb.worth import print_worth

from .test_programs import POLICY, WORTH


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.06, "high": value + 0.06}


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_number_is_folded_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    numbers = {"price": 0.52, "noise": 12.61, "noise_curved": 0.32, "bias": 0.42, "product": 0.82, "rate": 0.78}
    name = {"name": "selective-backprop keep=0.5", "verdict": "cannot beat a smaller batch"}
    policy = POLICY | {key: interval(value) for key, value in numbers.items()} | name
    print_worth(
        WorthAnswer.read({key: value for key, value in WORTH.items() if key != "format"} | {"policies": [policy]})
    )
    printed = capsys.readouterr().out
    assert all(len(line) <= width for line in printed.splitlines())
    assert len(printed.splitlines()) <= 24 or width < 80
    for number in ("0.52", "0.46-0.58", "0.42", "0.36-0.48", "0.82", "0.76-0.88"):
        assert number in printed.split()
    assert ("12.5-12.7" in printed.split()) is (width >= 98)
    assert ("rate 0.78" in printed) is (width >= 98)
    assert "tune the learning rate before you judge a policy" in " ".join(printed.split())
    assert ("The terminal is too narrow for noise, by curvature" in printed) is (width < 98)


@pytest.mark.parametrize("num_policies", [2, 8])
def test_several_policies_are_answered_on_one_screen(
    num_policies: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = {"price": 0.52, "noise": 12.61, "noise_curved": 0.32, "bias": 0.42, "product": 0.82, "rate": 0.78}
    policies = [
        POLICY
        | {key: interval(value + number / 100) for key, value in numbers.items()}
        | {"name": f"largest-rows-{number} keep=0.5", "verdict": "cannot beat a smaller batch", "as_at_step": number}
        for number in range(num_policies)
    ]
    found = WorthAnswer.read({key: value for key, value in WORTH.items() if key != "format"} | {"policies": policies})
    print_worth(found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert sum("largest-rows" in line and "keep=0.5" in line and "cannot" in line for line in lines) == num_policies
    print_worth(found, everything=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"largest-rows-{num_policies - 1} keep=0.5: skips no work in early steps" in printed
