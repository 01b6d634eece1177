"""Every cell of the table is what the table says: equal to its reference, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsebp_cli as sbp
from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.policy import GradientSelector
from sparsebp_cli.recipe import load_recipe
from tests.plugin import find_ours

from .matrix import AT_SITES, COMPOSITIONS, ENTRIES, SITES, Entry, find_forms, find_refusal
from .replay import Decisions, repeat
from .training import batch, build, compile_parts, largest_difference, train
from .way import WAYS
from .way import find_refusal as find_way_refusal

ROOT = Path(__file__).resolve().parents[2]
LABELS = [entry.label for entry in ENTRIES]
# In double precision what remains is the order of sums; bfloat16 has 8 bits.
TOLERANCE = {"autocast": 0.05, "QLoRA": 2e-4}


def test_the_table_has_every_policy_in_every_kind_of_selection() -> None:
    own = {found.name: found.kind for found in find_ours().values() if found.kind in AT_SITES}
    assert {entry.policy: entry.kind for entry in ENTRIES} == own
    assert len(set(LABELS)) == len(LABELS)
    for name in own:
        forms = find_forms(find_ours()[name]) or [None]
        assert {dict(entry.options).get("along") for entry in ENTRIES if entry.policy == name} == set(forms)


def _way(composition: str, entry: Entry) -> str:
    """Compiling takes seconds: half of the policies are attached afterwards, the others before."""
    return "never" if composition != "compile" else ("before", "after")[entry.policy == "random"]


# Compiling takes 4 to 15 seconds a cell; these show each way of it, `make test-long` the others.
COMPILED = {("linears", "topk (along: rows)"), ("linears", "random (along: columns, weighted: true)")}


def _cells() -> list[Any]:
    cells = []
    for composition, site, (label, entry) in product(COMPOSITIONS, SITES, zip(LABELS, ENTRIES, strict=True)):
        if composition == "DDP":
            continue
        refused = find_refusal(entry, site, composition) is not None
        is_short = composition != "compile" or refused or (site, label) in COMPILED
        marks = () if is_short else pytest.mark.long
        cells.append(pytest.param(composition, site, entry, id=f"{composition}-{site}-{label}", marks=marks))
    return cells


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.compiles
@pytest.mark.parametrize(("composition", "site", "entry"), _cells())
def test_a_cell_is_what_the_table_says(composition: str, site: str, entry: Entry) -> None:
    refusal = find_refusal(entry, site, composition)
    compiled = _way(composition, entry)
    if compiled != "never":
        torch._dynamo.reset()
    if refusal is not None:
        with pytest.raises(UnsupportedError) as raised:
            train(composition, entry, site, compiled=compiled)
        assert str(raised.value) == refusal.message
        return
    reference, options = _reference(composition, entry, site)
    tolerance = TOLERANCE.get(composition, 1e-11) if entry.policy != "dense" else 0.0
    torch._dynamo.utils.counters.clear()
    ours = train(composition, entry, site, compiled=compiled, **options)
    assert largest_difference(ours, reference) <= tolerance
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (compiled != "never")


def _reference(composition: str, entry: Entry, site: str) -> tuple[Any, dict[str, Any]]:
    """Return its gradients, and with which options the other form is to be run."""
    if entry.policy == "dense":
        return train(composition, None, site, plain=True), {}
    if composition == "resume":  # one that was never stopped
        return train("nothing", entry, site, execution="reference"), {}
    if composition == "autocast" and site != "nodes":
        decisions: Decisions = {}
        inner = sbp.make_policy(entry.policy, **entry.options_at(site))
        assert isinstance(inner, GradientSelector)
        recorder, replayer = repeat(inner, decisions)
        return train(composition, entry, site, execution="reference", instead=[recorder]), {"instead": [replayer]}
    return train(composition, entry, site, execution="reference"), {}


@pytest.mark.compiles
def test_what_is_refused_leaves_no_gradient() -> None:
    """Before the first backward: nothing has been added up that a caught error would leave."""
    for composition, prepare in (("reentrant checkpointing", lambda _: None), ("compile", compile_parts)):
        model = build(composition)
        prepare(model)
        ids = batch(0)
        with sbp.attach(model, [sbp.make_policy("topk", keep=0.3)], sites="nodes") as engine:
            loss = model(input_ids=ids, labels=ids).loss
            with pytest.raises(UnsupportedError, match="cannot see into"):
                engine.backward(loss)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.long
def test_ddp_is_what_the_table_says_wrapped_before_and_after_attaching(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "tests.composition.two_ranks", str(result)]
    done = subprocess.run(
        [*command, *script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(result.read_text())
    assert len(cells) == len(ENTRIES) * len(SITES) * 2 + len(WAYS) * 2
    entries, ways = dict(zip(LABELS, ENTRIES, strict=True)), {way.label: way for way in WAYS}
    wrong = []
    for label, site, wrapped, outcome in cells:
        refusal = find_refusal(entries[label], site, "DDP") if site else None
        message = refusal.message if refusal else "" if site else find_way_refusal(ways[label], "DDP", wrapped)
        # transformers means the loss in float32: where rows are left out, its sum has another order
        most = 1e-6 if label.startswith("tokens") else 1e-11
        if (outcome != message) if message or isinstance(outcome, str) else outcome > most:
            wrong.append((label, site, wrapped, outcome, message))
    assert not wrong


RECIPE = """
version: 1
model: {config: {model_type: llama}, tokenizer: none}
dataset: {name: austen}
training: {max_steps: 1}
"""


@pytest.mark.parametrize("entry", ENTRIES, ids=LABELS)
@pytest.mark.parametrize("site", SITES)
def test_a_recipe_is_accepted_or_refused_as_the_table_says(tmp_path: Path, site: str, entry: Entry) -> None:
    """What a recipe can ask for: the other refusals need a model that is wrapped by hand."""
    refusal = find_refusal(entry, site, "accumulation")
    options = json.dumps({"name": entry.policy, **entry.options_at(site)})
    file = tmp_path / "cell.yaml"
    file.write_text(f"{RECIPE}policy: [{options}]\nbackward: {{sites: {site}, checkpointing: full}}\n")
    if refusal is None:
        assert load_recipe(file).policy[0].name == entry.policy
        return
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    assert refusal.recipe in str(raised.value)
    assert refusal.recipe


@pytest.mark.slow
@pytest.mark.compiles
def test_a_model_that_is_compiled_whole_is_its_reference() -> None:
    entry = Entry("topk", (("keep", 0.3), ("along", "rows")))
    policy, ids = sbp.make_policy("topk", keep=0.3, along="rows"), batch(0)
    model = build("compile")
    called: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with sbp.attach(called, [policy], seed=3) as engine:
        engine.backward(called(input_ids=ids, labels=ids).loss)
        assert all("_orig_mod" not in each.name for each in engine.report().sites)
    reference = train("compile", entry, "linears", execution="reference")[:1]
    ours = [{name: parameter.grad for name, parameter in model.named_parameters()}]
    assert largest_difference(ours, reference) <= 1e-11
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
