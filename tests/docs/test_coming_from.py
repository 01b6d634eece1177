"""Tables of names of other tools: they have theirs, a recipe has ours, and errors say the same."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from pydantic import BaseModel

from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.foreign_key import ANSWERS, NOT_NEEDED
from tests.docs.block import ROOT

PAGE = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| [^|]*\|$", re.MULTILINE)


def table(head: str) -> dict[str, str]:
    """The rows of the table whose first column has this head: their name, and what a recipe writes."""
    return dict(ROW.findall(PAGE.partition(f"| {head} | in a recipe | |\n")[2].partition("\n\n")[0]))


TABLES = {head: table(head) for head in ("`TrainingArguments`", "`SFTConfig`", "axolotl")}
ROWS = [(name, ours) for rows in TABLES.values() for name, ours in rows.items()]


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_names_of_the_trainer_are_fields_of_the_installed_one() -> None:
    from transformers import EarlyStoppingCallback, TrainingArguments

    # The patience is an argument of its callback.
    assert set(TABLES["`TrainingArguments`"]) - {"early_stopping_patience"} <= fields(TrainingArguments)
    assert "early_stopping_patience" in inspect.signature(EarlyStoppingCallback).parameters
    assert len(TABLES["`TrainingArguments`"]) >= 40


@pytest.mark.filterwarnings("ignore::FutureWarning")  # trl on a transformers that renamed arguments
def test_names_of_trl_are_fields_that_it_adds() -> None:
    from transformers import TrainingArguments
    from trl import SFTConfig

    assert set(TABLES["`SFTConfig`"]) <= fields(SFTConfig) - fields(TrainingArguments)


def find_field(path: str) -> object:
    """Return the field of a dotted key of a recipe; raise KeyError where there is none."""
    model: type[BaseModel] = Recipe
    *sections, last = path.split(".")
    for section in sections:
        if (model.__name__, section) == ("Recipe", "target"):  # its options are those of a kind
            return True
        annotation = model.model_fields[section].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model.model_fields[last]


@pytest.mark.parametrize(("name", "ours"), ROWS, ids=[name for name, _ in ROWS])
def test_what_a_recipe_writes_is_a_key_that_it_has(name: str, ours: str) -> None:
    written = re.fullmatch(r"`([\w.]+)(?:: .*)?`", ours)
    if written is None:
        assert ours in {"none", "nothing", "`sparsebp resume RUN`"}
    else:
        assert find_field(written[1])
    if ours == "nothing":
        assert name in NOT_NEEDED
        return
    if name not in ANSWERS:  # a recipe has this very key
        assert written is not None
        assert written[1].split(".")[-1] == name
        return
    said = ANSWERS[name]
    if ours == "none":
        assert said is None
    else:
        assert ours.strip("`").partition(":")[0] in str(said)


def test_a_key_that_a_recipe_lacks_would_be_found() -> None:
    with pytest.raises(KeyError):
        find_field("training.neftune_noise_alpha")
