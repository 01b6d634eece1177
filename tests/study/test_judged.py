"""A study chooses by the metric that its base says decides."""

from __future__ import annotations

import pytest

from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.recipe.evaluation import without_generation
from sparsebp_lab.study.course import Tuned, choose_best
from sparsebp_lab.study.decisive import find_decisive
from sparsebp_lab.study.halving import find_rungs
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.study.trial import rehearse

from .conftest import STUDY, Write


def judge(write_study: Write, metric: str, every: str = "10") -> LoadedStudy:
    file = write_study(STUDY)
    base = file.parent / "base.yaml"
    text = base.read_text().replace("dataset: {name: none", "dataset: {format: completion, name: none")
    generate = f"{{metrics: [exact_match, cer], every: {every}}}"
    base.write_text(text + f"measure: {{metric: {metric}, generate: {generate}, eval_every: 5}}\n")
    return load_study(file)


@pytest.mark.parametrize(("metric", "chosen"), [("eval/exact_match", "0.001"), ("eval/cer", "0.0005")])
def test_the_best_is_that_of_the_metric_in_its_own_direction(write_study: Write, metric: str, chosen: str) -> None:
    loaded = judge(write_study, metric)
    assert find_decisive(loaded.variants[0].recipe).name == metric
    best = choose_best([Tuned(variant, 0.1 + number % 2) for number, variant in enumerate(loaded.variants)])
    assert {variant.label for variant in best.values()} == {f"learning_rate={chosen}"}


def test_halving_ranks_where_the_deciding_metric_is_measured(write_study: Write) -> None:
    recipe = judge(write_study, "eval/cer").variants[0].recipe
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_steps": 100})})
    assert find_rungs(longer, 4, 3) == [30]  # not 33: it generates every ten steps
    never = judge(write_study, "eval/cer", "null").variants[0].recipe
    with pytest.raises(UsageError, match=r"measure\.generate\.every is null"):
        find_rungs(never, 4, 3)


def test_a_metric_that_no_run_measures_is_refused(write_study: Write) -> None:
    with pytest.raises(RecipeError, match=r"metric: eval/bleu is not a validation metric .*allowed: eval/loss"):
        judge(write_study, "eval/bleu")


def test_a_rehearsal_generates_nothing(write_study: Write) -> None:
    recipe = judge(write_study, "eval/cer").variants[0].recipe
    short = rehearse(recipe, recipe)
    assert (short.measure.generate, short.measure.metric, short.checkpoint.keep_best) == (None, None, None)
    assert without_generation(short) == short
