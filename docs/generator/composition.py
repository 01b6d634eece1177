"""The composition page: the table of refused combinations, and the matrices that the tests check."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from generator.markdown import code, head, table
from generator.policy import KINDS
from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.composition import Rule, make_rules
from sparsebp_cli.policy.known_kind import KnownKinds
from sparsebp_cli.policy.rule import AllBut, Conditions, Match
from sparsebp_cli.recipe import load_stored

TEXT = """The tables show every policy at every site in every way of training. Each cell is a test: ✓ means that a
training of two steps gives, parameter by parameter, the gradients of its reference (`execution: reference`, which masks
and multiplies all; for `dense` PyTorch's own backward, to the last bit; for DDP the mean of the gradients of each
process). A letter means that SparseBP refuses the combination, with the line under the table, before it differentiates
anything; if a recipe can ask for it, `sparsebp validate` already refuses it.

Gradients are equal up to the order of sums: to a relative 1e-11 in double precision; under autocast to 0.05, with the
decisions of the reference repeated, because rounding to bfloat16 turns near ties. At `nodes` the reference is a walk
over the graph in Python, under DDP the hooks in each process alone; `random` keeps more there, because otherwise
drawing at every node in turn would leave nothing.

`attach` takes a model before or after it is wrapped by DDP or `torch.compile`; names of sites and patterns of
`exclude` are those of the model inside. Checkpoints of a wrapped model carry the wrapper's prefix (`module.`,
`_orig_mod.`): save the model inside. At `linears`, policies that decide in the backward leave a model one graph, with
`fullgraph=True` too; savers of inputs split it at each linear that they save at."""

WHOLE_STEP = """The table shows policies that do not act at sites, and ways to execute a step. Each cell is a test:
weights after two steps of SGD with momentum equal those of a training by hand, without an engine, to 1e-12 of the
largest change; for `tokens` those of its reference, which computes all positions, to 1e-6, because the loss is a mean
in float32. Adapters (LoRA) have no dropout here, because leaving rows out would change the random draws. Clipping
under `update: eager` is `max_grad_norm` with `eager_clip: exact`; its accumulation is `engine.backward(loss,
is_last=False)` for all but the last micro-batch."""
PAIRS = """The table shows two of them in one training, tested in the same way. A gradient policy at `linears` works
with each of them, too; with `tokens` and examples it chooses among the rows that are computed."""
TABLE = """The table lists combinations that SparseBP refuses although each part is valid by itself. `sparsebp
validate`, `run` and `export`, `attach`, `PolicyTrainer` and the worker read this one table, and print the same
sentence, with options as in a recipe (`backward.sites: nodes`) or as in a call (`sites='nodes'`). Combinations that no
rule refuses work. The table identifies a policy by its kind and by what it declares, never by its name."""
CHOICES = """The table shows every two of these choices in one recipe. It lists the choices that are refused together;
a choice works with all others, and the number says with how many. For one process, a test builds each pair that works
with the worker's own code on a small llama and makes its first step; with two processes the refusals are tested for
every pair, training for some."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LETTERS = [*ALPHABET, *(first + second for first in ALPHABET for second in ALPHABET)]
LOOPS = {"worker": "a recipe", "own": "your own loop", "trainer": "a `transformers.Trainer`"}


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    matrix, ways = _load("matrix"), _load("way")
    rules = make_rules(KnownKinds(KINDS))
    refused = table(("what", "with", "where", "sentence", "why"), sorted(map(_describe_row, rules)))
    parts = [head("Supported combinations"), f"## What is refused\n\n{TABLE}\n", refused]
    parts += [*_choices(_load("choice")), f"## Ways of training\n\n{TEXT}\n"]
    numbered = [(str(number), *pair) for number, pair in enumerate(matrix.COMPOSITIONS.items(), start=1)]
    parts.append(table(("", "way of training", "meaning"), numbered))
    for site in matrix.SITES:
        parts += _site(matrix, site)
    parts += [*_ways(matrix, ways), *_pairs(ways)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _describe_row(rule: Rule) -> tuple[str, ...]:
    """Return a rule's cells."""
    loop = rule.options.get("loop", ())
    where = LOOPS[str(loop[0])] if isinstance(loop, tuple) and loop else ""
    options = {name: wanted for name, wanted in rule.options.items() if name != "loop"}
    policy, other = (_describe_conditions(conditions) for conditions in (rule.policy, rule.other))
    sentence = re.sub(r", got \{\w+:=\}", "", rule.text)
    sentence = re.sub(r"\{(\w+):([^}]*)\}", r"\1: \2", sentence)
    parts = [part for part in (other, _describe_conditions(options)) if part]
    what = policy or parts.pop(0)
    return what, "; ".join(parts), where, re.sub(r"\{(\w+)\}", r"\1", sentence), rule.why


def _describe_conditions(conditions: Conditions) -> str:
    parts = []
    for name, wanted in conditions.items():
        assert not isinstance(wanted, AllBut), "resolved by make_rules"
        values = [wanted.value] if isinstance(wanted, Match) else [str(value) or "any other" for value in wanted]
        parts.append(f"{code(name)}: {' or '.join(values)}")
    return ", ".join(parts)


BASE = {
    "version": 1,
    "name": "pair",
    "model": {"config": {"model_type": "llama"}, "tokenizer": "austen-llama"},
    "dataset": {"name": "austen"},
}


def _choices(choices: ModuleType) -> Iterator[str]:
    letters: dict[str, str] = {}
    refused: dict[str, list[str]] = {choice.label: [] for choice in choices.CHOICES}
    worked = dict.fromkeys(refused, 0)
    for pair in choices.find_pairs():
        try:
            load_stored(choices.combine(BASE, pair), "pair")
        except RecipeError as error:
            letter = letters.setdefault(f"{error.key}: {error.text}", str(len(letters) + 1))
            for choice, other in (pair, pair[::-1]):
                refused[choice.label].append(f"{code(other.label)} ({letter})")
        else:
            for choice in pair:
                worked[choice.label] += 1
    rows = [(code(label), str(worked[label]), "; ".join(found) or "nothing") for label, found in refused.items()]
    lines = "".join(f"{number}. {code(text)}\n" for text, number in letters.items())
    yield f"## Two choices of a recipe\n\n{CHOICES}\n"
    yield table(("choice", "works with", "refused with"), rows)
    yield lines


def _site(matrix: ModuleType, site: str) -> list[str]:
    letters: dict[str, str] = {}
    rows = []
    for entry in matrix.ENTRIES:
        cells = []
        for composition in matrix.COMPOSITIONS:
            refusal = matrix.find_refusal(entry, site, composition)
            if refusal is None:
                cells.append("✓")
            else:
                cells.append(letters.setdefault(refusal.message, LETTERS[len(letters)]))
        rows.append((code(entry.label), *cells))
    lines = [f"- {letter}: {code(message)}" for message, letter in letters.items()]
    columns = ("policy", *(str(number) for number in range(1, len(matrix.COMPOSITIONS) + 1)))
    reasons = ["\n".join(lines) + "\n"] if lines else []
    return [f"## {site}\n", table(columns, rows), *reasons]


def _ways(matrix: ModuleType, ways: ModuleType) -> list[str]:
    letters: dict[str, str] = {}
    rows = []
    for way in ways.WAYS:
        cells = []
        for composition in matrix.COMPOSITIONS:
            after, before = (ways.find_refusal(way, composition, wrapped) for wrapped in ("after", "before"))
            letter = letters.setdefault(after or before, LETTERS[len(letters)]) if after or before else ""
            cells.append(letter if after else f"✓ {letter}".strip())
        rows.append((code(way.label), *cells))
    lines = [f"- {letter}: {code(message)}" for message, letter in letters.items()]
    columns = ("", *(str(number) for number in range(1, len(matrix.COMPOSITIONS) + 1)))
    return ["## The whole step\n", f"{WHOLE_STEP}\n", table(columns, rows), "\n".join(lines) + "\n"]


def _pairs(ways: ModuleType) -> list[str]:
    letters: dict[str, str] = {}
    rows = []
    for number, way in enumerate(ways.WAYS):
        cells = []
        for other in ways.WAYS[: number + 1]:
            refusal = ways.find_pair_refusal(other, way)
            cells.append(letters.setdefault(refusal, LETTERS[len(letters)]) if refusal else "✓")
            if other.question == way.question:
                cells[-1] = ""
        cells += [""] * (len(ways.WAYS) - len(cells))
        rows.append((str(number + 1), code(way.label), *cells))
    lines = [f"- {letter}: {code(message)}" for message, letter in letters.items()]
    columns = ("", "", *(str(number + 1) for number in range(len(ways.WAYS))))
    return ["## Two at once\n", f"{PAIRS}\n", table(columns, rows), "\n".join(lines) + "\n"]


def _load(name: str) -> ModuleType:
    """Import a module of the tests, which are no package of the documentation."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"tests.composition.{name}")
