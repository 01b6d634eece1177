"""Every two choices of a recipe: what `validate` passes the worker carries out, and what it refuses nobody does."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.composition import find_rules
from sparsebp_cli.recipe import Recipe, load_stored, refuse_unsupported
from sparsebp_cli.recipe.composition import PLACES, find_unsupported
from sparsebp_cli.run import JournalWriter, create_run
from sparsebp_cli.worker import build
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.training import Training
from tests.worker.conftest import LLAMA, tiny_folder

from .choice import CHOICES, Choice, combine, find_pairs

__all__ = ["tiny_folder"]
WORDS = ["the", "quick", "brown", "fox", "jumps"]
PAIRS = [*find_pairs()]
ALONE = [pair for pair in PAIRS if not any(choice.group == "processes" for choice in pair)]
LIGHT = [pair for pair in ALONE if not any(choice.is_heavy for choice in pair)]
HEAVY = [pair for pair in ALONE if any(choice.is_heavy for choice in pair)]


@pytest.fixture(scope="session")
def base(tiny_folder: Path) -> dict[str, Any]:
    """A recipe on a random llama, with every column that a format reads."""
    rows = [
        {"text": f"{' '.join(WORDS)} {n}", "prompt": WORDS[n % 5], "completion": f"{n} over the dog", "label": n % 2}
        for n in range(40)
    ]
    data = tiny_folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "version": 1,
        "name": "pair",
        "model": {"config": LLAMA, "tokenizer": str(tiny_folder / "tokenizer")},
        "dataset": {"name": str(data), "max_seq_length": 16},
        "training": {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4},
        "target": {"threads": 1, "device": "cpu"},
    }


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer and data are read once for all pairs."""
    monkeypatch.setattr(build, "build_tokenizer", lambda section: _tokenizer(section.model_dump_json()))
    monkeypatch.setattr(build, "build_data", _data)


@functools.cache
def _tokenizer(section: str) -> Any:
    from sparsebp_cli.recipe.schema import ModelSection
    from sparsebp_cli.worker.model import build_tokenizer

    return build_tokenizer(ModelSection.model_validate_json(section))


_DATA: dict[str, Any] = {}


def _data(section: Any, tokenizer: Any, columns: Any = (), architecture: Any = None, **_: Any) -> Any:
    from sparsebp_cli.worker.data import build_data

    key = f"{section.model_dump_json()} {sorted(columns)}"
    if key not in _DATA:
        _DATA[key] = build_data(section, tokenizer, columns)
    return _DATA[key]


def load(base: dict[str, Any], pair: Sequence[Choice]) -> Recipe | None:
    """Return the recipe as `validate` has it; None: it is refused."""
    try:
        return load_stored(combine(base, tuple(pair)), "pair").recipe
    except RecipeError:
        return None


def work(recipe: Recipe) -> None:
    """Build a training with the worker's own code, in this process, and make its first step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    with JournalWriter(run.path) as journal:
        training = Training.build(plan, run, journal, StopRequest(), Ranks())
        assert math.isfinite(training._train_step()["train/loss"] or math.nan)
        training.engine.detach()
    shutil.rmtree(run.path)


def check(base: dict[str, Any], pairs: Sequence[tuple[Choice, Choice]]) -> tuple[list[str], int]:
    """Return where the worker does not do what `validate` says, and how many pairs it carried out."""
    wrong, done = [], 0
    for pair in pairs:
        recipe = load(base, pair)
        if recipe is None:
            continue
        done += 1
        try:
            work(recipe)
        except Exception as error:
            wrong.append(f"{pair[0].label} + {pair[1].label}: {type(error).__name__}: {error}")
    return wrong, done


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
def test_the_worker_carries_out_every_pair_that_validate_passes(base: dict[str, Any], kept: None) -> None:
    wrong, done = check(base, LIGHT)
    assert not wrong
    assert done > 100


@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
def test_the_worker_carries_out_the_other_pairs_too(base: dict[str, Any], kept: None) -> None:
    wrong, done = check(base, HEAVY)
    assert not wrong
    assert done > 100


def test_what_validate_refuses_the_worker_refuses_in_the_same_words(base: dict[str, Any]) -> None:
    refused = [pair for pair in PAIRS if load(base, pair) is None]
    for pair in refused:
        with pytest.raises(RecipeError) as told:
            load_stored(combine(base, pair), "pair")
        recipe = Recipe.model_validate(combine(base, pair))
        sentences = [f"{found.key}: {found.text}" for found in find_unsupported(recipe)]
        assert f"{told.value.key}: {told.value.text}" in sentences, pair  # the first by its line
        with pytest.raises(UnsupportedError, match=re.escape(sentences[0])):
            refuse_unsupported(recipe)
    assert len(refused) > 30


def test_attach_refuses_by_the_same_rows(base: dict[str, Any], kept: None) -> None:
    """What a model can be told of at all: `attach` is asked without the worker's look at the recipe."""
    told = 0
    for pair in LIGHT:
        if load(base, pair) is None and "format: classification" not in {choice.label for choice in pair}:
            with pytest.raises(UnsupportedError):
                work(Recipe.model_validate(combine(base, pair)))
            told += 1
    assert told > 15


def test_every_option_that_the_table_speaks_of_is_among_the_choices() -> None:
    """Else a row could be wrong without a pair that shows it."""
    said = {name for choice in CHOICES for part in choice.sections.values() for name in part}
    spoken = {name for row in find_rules() for name in row.options if name in PLACES}
    # A quantised base is a model by its name, not the config that is here: see tests/worker/test_quantized.py.
    assert spoken - {"quantization", "peft"} <= said
