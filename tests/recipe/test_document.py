"""YAML is read strictly, and every refusal has its place."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe.document import DEEPEST, read_document
from sparsebp_cli.recipe.loader import LARGEST_BYTES
from tests.recipe.conftest import SMALL

Refuse = Callable[..., str]

BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2", "r.yaml:2:1: seed: duplicate key, first on line 1"),
        ("a:\n  b: 1\n  b: 2", "r.yaml:3:3: a.b: duplicate key, first on line 2"),
        ("a: [{b: 1}, {c: 1, c: 2}]", "r.yaml:1:20: a.1.c: duplicate key, first on line 1"),
        ("a: *b", "r.yaml:1:4: a: an alias (*b) is not allowed in a recipe; repeat the value"),
        ("a: &b 1", "r.yaml:1:4: a: an anchor (&b) is not allowed in a recipe; repeat the value"),
        ("a: &b [*b]", "r.yaml:1:4: a: an anchor (&b) is not allowed in a recipe; repeat the value"),
        (BOMB, "r.yaml:1:4: a: an anchor (&a) is not allowed in a recipe; repeat the value"),
        ("a: !!str b", "a tag (tag:yaml.org,2002:str) is not allowed in a recipe; write the plain value"),
        ("a: !x b", "r.yaml:1:4: a: a tag (!x) is not allowed in a recipe; write the plain value"),
        ("a: ! b", "r.yaml:1:4: a: a tag (!) is not allowed in a recipe; write the plain value"),
        ("<<: {a: 1}", "r.yaml:1:1: a merge key (<<) is not allowed in a recipe; use base:, or repeat the values"),
        ("a: 1\n---\nb: 1", "r.yaml:2:1: a recipe must be one YAML document, but a second one begins here ('---')"),
        ("1: a", "r.yaml:1:1: a key must be text, got 1 (a number); put it in quotes"),
        ("a: {true: b}", "r.yaml:1:5: a: a key must be text, got true; put it in quotes"),
        ("? [a]\n: b", "r.yaml:1:3: a key must be text, got a mapping or a list"),
        ('"a\\nb": 1', "r.yaml:1:1: a key must be printable and at most 200 characters long, got 'a\\nb'"),
        ("a: b\x07", "r.yaml:1:5: a control character (U+0007) is not allowed in a recipe"),
        ("a: 1\nb: \u2028x", "r.yaml:2:4: a control character (U+2028) is not allowed in a recipe"),
        ('a: "\\e[2J"', "r.yaml:1:4: a: a control character is not allowed in a value, got '\\x1b[2J'"),
        ('a: "\\uD800"', "r.yaml:1:4: a: a control character is not allowed in a value, got '\\ud800'"),
        ('a: "\\UFFFFFFFF"', "r.yaml:1:7: not YAML: an escaped character (\\U...) or a number is out of range"),
        ("", "r.yaml:1:1: the file is empty, but a recipe needs at least the keys version, model and dataset"),
        (
            "# only words\n",
            "r.yaml:1:1: the file is empty, but a recipe needs at least the keys version, model and dataset",
        ),
        ("- a", "r.yaml:1:1: a recipe must be a mapping, got a list"),
        ("abc", "r.yaml:1:1: a recipe must be a mapping, got text"),
        ("training:\n\tmax_steps: 5", "r.yaml:2:1: indented with a tab; use spaces"),
        ("a:\n  b: 1\n c: 2", "r.yaml:3:2: wrong indentation: this line is not aligned with the lines above"),
        ("  a: 1\nb: 2", "r.yaml:2:1: wrong indentation: the keys of a recipe start at the same column"),
        ("a: b: c", "r.yaml:1:5: a ':' is not allowed here: correct the indentation, or quote the text"),
        ("a: 1\nbc\nd: 2", "r.yaml:2:1: a key without ':', or wrong indentation"),
        ("a: 1\nb: 'x\n\n", "r.yaml:2:4: a quote is not closed"),
        ("a: [1, 2\nb: 3", "r.yaml:2:2: a bracket is not closed, or a comma is missing"),
        ("a: @b", "r.yaml:1:4: a text that starts with this character needs quotes"),
        ("a: 'b' c", "r.yaml:1:8: text after a closing quote: put the whole value in quotes"),
        ("a: - b", "r.yaml:1:4: a '-' is not allowed here: each item of a list starts its own line"),
        ('a: "C:\\q"', "r.yaml:1:8: a backslash between double quotes must be doubled; or use single quotes"),
        ("a: " + "[" * 9999, f"r.yaml:1:{DEEPEST + 3}: nested too deeply: at most {DEEPEST} levels are allowed"),
        ("- " * 9999, f"r.yaml:1:{2 * DEEPEST + 1}: nested too deeply: at most {DEEPEST} levels are allowed"),
        ("a: .nan", "r.yaml:1:4: a: must be a finite number, got .nan; if it is meant as text, put it in quotes"),
        ("a: -.inf", "r.yaml:1:4: a: must be a finite number, got -.inf; if it is meant as text, put it in quotes"),
        ("a: 1e999", "r.yaml:1:4: a: is too large for a number, got 1e999; if it is meant as text, put it in quotes"),
    ],
)
def test_what_a_recipe_may_not_hold_is_refused_at_its_place(refuse: Refuse, text: str, expected: str) -> None:
    assert refuse(text).endswith(expected)


@pytest.mark.parametrize("number", ["9" * 30, "9" * 9999, "-" + "9" * 5000, "0x" + "f" * 9999, "0o" + "7" * 50])
def test_a_whole_number_too_large_to_be_carried_is_refused(refuse: Refuse, number: str) -> None:
    line = refuse(f"a: {number}")
    assert line.startswith("r.yaml:1:4: a: ")
    assert len(line) < 250


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e+2", -150.0),
        ("+7", 7),
        ("010", 10),
        ("0o10", 8),
        ("0xff", 255),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("Null", None),
        ("2024-01-02", "2024-01-02"),
        ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05Z"),
        ("'3e-4'", "3e-4"),
        ('"8"', "8"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("infinity", "infinity"),
        ("nan", "nan"),
        ("١٢", "١٢"),
        ("|\n  x\n  y", "x\ny"),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    node = read_document(f"a: {text}", "r.yaml")
    assert node is not None
    assert node.plain == {"a": value}
    assert type(node.plain["a"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        SMALL.replace("\n", "\r\n"),
        "\ufeff" + SMALL,
        "---\n" + SMALL + "...\n",
        "%YAML 1.2\n---\n" + SMALL,
        SMALL.rstrip(),
    ],
)
def test_line_endings_byte_order_marks_and_document_marks_do_not_matter(read: Callable[..., object], text: str) -> None:
    assert read(text) == read(SMALL)


def test_positions_are_right_after_a_byte_order_mark_and_windows_line_endings(refuse: Refuse) -> None:
    assert refuse("\ufeffversion: 2\r\n").startswith("r.yaml:1:10: version: ")
    assert refuse((SMALL + "training: {max_steps: x}\n").replace("\n", "\r\n")).startswith(
        "r.yaml:5:23: training.max_steps: "
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: 1\nb: \xff", "r.yaml:2:4: the file must be UTF-8 text, got the byte 0xff"),
        ("a: é".encode() + b"\xe9", "r.yaml:1:5: the file must be UTF-8 text, got the byte 0xe9"),
        ("a: 1".encode("utf-16"), "r.yaml:1:1: the file must be UTF-8 text, got the byte 0xff"),
        (b"a: " + b"x" * LARGEST_BYTES, "r.yaml: the file is too large for a recipe, at most 64 KiB are allowed"),
    ],
)
def test_files_that_are_not_small_utf8_text_are_refused(refuse: Refuse, content: bytes, expected: str) -> None:
    assert refuse(content) == expected


@pytest.mark.slow
def test_the_largest_file_stays_far_below_256_megabytes() -> None:
    unit = "[[[[[]]]]],"
    text = "a: [" + unit * ((LARGEST_BYTES - 8) // len(unit)) + "]"
    tracemalloc.start()
    node = read_document(text, "r.yaml")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert node is not None
    assert len(node.plain["a"]) == (LARGEST_BYTES - 8) // len(unit)
    assert peak < 64 * 2**20


def test_the_file_of_an_error_is_shown_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read_document("a: *b", str(tmp_path / "new\nline\x1b.yaml"))
    assert str(caught.value).isprintable()
    assert "new\\nline\\x1b.yaml:1:4" in str(caught.value)
