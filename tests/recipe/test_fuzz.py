"""Whatever is written in a recipe: it loads, or one line says why not; nothing else happens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.recipe import Recipe, load_recipe, recipe_schema
from sparsebp_cli.source import inspect_sources
from tests.recipe.conftest import SMALL
from tests.recipe.nasty import BOMB, KEYS, VALUES

FULL = """\
# A recipe with every section.
version: 1
name: full
base: base.yaml
model:
  name: austen-llama
  dtype: bfloat16
  lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, "v_proj"]}
dataset:
  name: 'python-docs'
  format: completion
  max_seq_length: 64
  eval_fraction: 0.1
policy:
  - name: topk
    keep: 0.25
    along: columns
backward: {execution: reference, sites: linears, exclude: [lm_head]}
training:
  max_steps: 20
  learning_rate: 3e-4
  optim: sgd
  optim_args: {momentum: 0.9, betas: [0.9, 0.99]}
  max_grad_norm: null
measure: {eval_every: 5, probe_every: null}
checkpoint: {every: 5}
target: local
tracking: {experiment: demo}
"""
CONFIG = """\
version: 1
model:
  config: {model_type: llama, hidden_size: 64, rope_parameters: {rope_type: default}}
  tokenizer: gpt2
dataset: {name: text.jsonl}
policy: dense
training: {seed: 3}
"""


def flip_bytes(draw: random.Random, text: str) -> bytes:
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.randint(1, 5)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def insert_character(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text))
    return text[:at] + draw.choice("\t\r\n\x00\x07\x1b \u2028\ufeff{}[],:#&*!|>'\"%@`-?~é\x85") + text[at:]


def change_lines(draw: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.randrange(6)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(other, lines[at])
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines[at] = draw.choice([" ", "  ", "\t", "    "]) + lines[at]
    elif how == 4:
        lines[at] = lines[at].lstrip()
    else:
        lines = lines[:at]
    return "".join(lines)


def swap_tokens(draw: random.Random, text: str) -> str:
    tokens = re.split(r"(\W)", text)
    words = [i for i, token in enumerate(tokens) if token.strip()]
    a, b = draw.choice(words), draw.choice(words)
    tokens[a], tokens[b] = tokens[b], tokens[a]
    return "".join(tokens)


def replace_value(draw: random.Random, text: str) -> str:
    places = list(re.finditer(r"(?<=: )[^\n,{}\[\]]+|(?<=- )[^\n]+", text))
    place = draw.choice(places)
    return text[: place.start()] + draw.choice(VALUES) + text[place.end() :]


def replace_section(draw: random.Random, text: str) -> str:
    starts = [match.start() for match in re.finditer(r"^\w+:", text, re.MULTILINE)] + [len(text)]
    at = draw.randrange(len(starts) - 1)
    key = text[starts[at] : starts[at + 1]].partition(":")[0]
    return text[: starts[at]] + f"{key}: {draw.choice(VALUES)}\n" + text[starts[at + 1] :]


def remove_section(draw: random.Random, text: str) -> str:
    sections = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    needed = ("version", "model", "dataset")
    spare = [i for i, section in enumerate(sections) if not section.startswith(needed)]
    del sections[draw.choice(spare)]
    return "".join(sections)


def change_key(draw: random.Random, text: str) -> str:
    place = draw.choice(list(re.finditer(r"\w+(?=:)", text)))
    key = place.group()
    at = draw.randrange(len(key))
    typo = draw.choice([key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key.upper(), draw.choice(KEYS)])
    return text[: place.start()] + typo + text[place.end() :]


def add_attack(draw: random.Random, text: str) -> str:
    attack = draw.choice(
        [
            BOMB,
            "a: &a\n  b: *a\n",
            f"x: {draw.choice(VALUES)}\n",
            "---\n" + text,
            "base: ../../etc/passwd\n",
            "\t",
            "\r",
        ]
    )
    return draw.choice([attack + text, text + attack])


MUTATIONS: list[Callable[[random.Random, str], str | bytes]] = [
    flip_bytes,
    insert_character,
    change_lines,
    swap_tokens,
    replace_value,
    replace_section,
    remove_section,
    change_key,
    add_attack,
]


def mutate(draw: random.Random) -> bytes:
    text: str | bytes = draw.choice([SMALL, FULL, CONFIG])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if isinstance(text, bytes) or len(text) < 10 or not re.search(r"^\w+: \S", text, re.MULTILINE):
            break
        text = draw.choice(MUTATIONS)(draw, text)
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def make_change(draw: random.Random) -> str:
    keys = re.findall(r"(\w+):", FULL)
    path = ".".join(
        draw.choice([*keys, *KEYS, "0", "1", "-1", "policy.0", "training"]) for _ in range(draw.randint(1, 4))
    )
    return draw.choice([f"{path}={draw.choice(VALUES)}", f"~{path}", path, f"{path}=1"])


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_mutants(folder: Path, seed: int, count: int) -> tuple[int, int]:
    """Load so many broken recipes and changes; return how many loaded and how many were refused."""
    draw = random.Random(seed)
    file = folder / "r.yaml"
    num_loaded = num_refused = 0
    for index in range(count):
        content = mutate(draw)
        changes = [make_change(draw)] if index % 4 == 0 else []
        if changes and draw.random() < 0.7:
            content = draw.choice([SMALL, FULL, CONFIG]).encode()
        file.write_bytes(content)
        try:
            recipe = load_recipe(file, changes)
        except UsageError as error:
            check_error(error, folder, (content, changes))
            num_refused += 1
        else:
            assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
            for found in inspect_sources(recipe, [folder], is_here=True):
                assert found.text.isprintable(), (found, content, changes)
            num_loaded += 1
    return num_loaded, num_refused


def check_error(error: UsageError, folder: Path, case: object) -> None:
    line = str(error)
    assert isinstance(error, RecipeError), case
    assert line.isprintable(), (line, case)
    assert len(line) < 1000, (line, case)
    assert line.startswith((str(folder), "/etc/passwd", "--set ")), (line, case)
    if error.line:
        assert line.startswith(f"{error.file}:{error.line}:{error.column}: "), (line, case)
    assert error.text, case


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "base.yaml").write_text(SMALL + "training: {seed: 1}\n")
    (tmp_path / "base.yaml").write_text(SMALL)
    recipe_schema()  # imports are done before files are counted
    return tmp_path / "work"


def check_mutants(folder: Path, seed: int, count: int) -> None:
    before = list_files(folder.parent)
    num_loaded, num_refused = load_mutants(folder, seed, count)
    (folder / "r.yaml").unlink()
    assert list_files(folder.parent) == before
    assert num_loaded > count // 20, "the mutations are too wild to reach the schema"
    assert num_refused > count // 2


@pytest.mark.always("0")
@pytest.mark.slow
@pytest.mark.promise("R11")
@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_mutated_recipes_load_or_give_one_line(folder: Path, seed: int, record_property) -> None:
    record_property("trials", 500)
    check_mutants(folder, seed, 500)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.promise("R11")
def test_ten_thousand_mutated_recipes_load_or_give_one_line(folder: Path, seed: int, record_property) -> None:
    record_property("trials", 1000)
    check_mutants(folder, seed, 1000)
