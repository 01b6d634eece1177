"""training.compile: the training steps run the model compiled, and a run trains and resumes as it would eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparsebp_cli.errors import DataError, UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import content_hash, group_content
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.worker import compiled
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.training import Training
from tests.worker.conftest import work

ROWS = [{"name": "topk", "keep": 0.5, "along": "rows"}]


def _run(recipe: Recipe, prepared: Callable[[Recipe], RunFolder], run: RunFolder | None = None) -> RunFolder:
    """Run the worker in this process, where the backend can be chosen."""
    run = run or prepared(recipe)
    with JournalWriter(run.path, durable=False) as journal:
        Training.build(Plan.load(run.plan_file), run, journal, StopRequest(), Ranks()).run_to_end()
    return run


def _losses(run: RunFolder) -> dict[int, float]:
    return History.load(run.path).series("train/loss")


@pytest.mark.compiles
def test_a_compiled_run_is_one_graph_and_resumes_with_the_losses_of_an_eager_one(
    tiny_recipe: Callable[..., Recipe], prepared: Callable[[Recipe], RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    training = {"max_steps": 4, "compile": True}
    recipe = tiny_recipe(training=training, checkpoint={"every": 2, "stop_at": 2}, policy=ROWS)
    run = _run(recipe, prepared)
    notes = [text for _, _, text in History.load(run.path).notes]
    assert "training.compile: torch.compile compiled the model into one graph" in notes
    torch._dynamo.reset()  # as in another process
    whole = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"stop_at": None})})
    run.plan_file.write_text(Plan.load(run.plan_file).model_copy(update={"recipe": whole}).model_dump_json())
    _run(whole, prepared, run)
    eager = _run(tiny_recipe(training={"max_steps": 4}, checkpoint={"every": 2}, policy=ROWS), prepared)
    assert list(_losses(run)) == [1, 2, 3, 4]
    assert _losses(run) == pytest.approx(_losses(eager), rel=1e-5)


@pytest.mark.long
def test_the_worker_compiles_with_inductor(
    tiny_recipe: Callable[..., Recipe], prepared: Callable[[Recipe], RunFolder]
) -> None:
    runs = []
    for is_compiled in (True, False):
        training = {"max_steps": 4, "compile": is_compiled}
        runs.append(run := prepared(tiny_recipe(training=training, measure={"probe_every": 2}, policy=ROWS)))
        assert work(run) == 0
    ours, eager = map(_losses, runs)
    assert ours == pytest.approx(eager, rel=1e-4)


def test_a_machine_without_a_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DataError, match=r"'training.compile: true' needs a C\+\+ compiler \(no-such-compiler"):
        compiled.compile_model(torch.nn.Linear(2, 2), torch.device("cpu"))


def test_compilation_is_part_of_what_makes_two_runs_the_same(tiny_recipe: Callable[..., Recipe]) -> None:
    groups = {content_hash(group_content(tiny_recipe(training={"compile": each}))) for each in (True, False)}
    assert len(groups) == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"policy": [{"name": "tokens", "keep": 0.5, "score": "random"}]},
            "'tokens' is not supported with training.compile: true",
        ),
        ({"policy": [{"name": "dropbp", "keep": 0.5}]}, "'dropbp' is not supported with torch.compile"),
        ({"backward": {"sites": "nodes"}}, "training.compile: true is not supported at backward.sites: nodes"),
        ({"backward": {"update": "eager"}}, "true is not supported with backward.update: eager"),
        ({"target": {"processes": 2}}, "training.compile: true works in one process, got target.processes: 2"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    tiny_recipe: Callable[..., Recipe], sections: dict[str, Any], message: str
) -> None:
    training = {"compile": True} | ({"max_grad_norm": None} if "eager" in message else {})
    with pytest.raises(UnsupportedError) as raised:
        refuse_unsupported(tiny_recipe(training=training, **sections))
    assert message in str(raised.value)
