"""A user's Phi, of which only the first end-of-sequence tokens are trained: a script, and the two lines that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from sparsebp_cli.errors import UsageError

from . import case
from .conftest import CHECKPOINTING, differing, is_free, weights

pytestmark = pytest.mark.xdist_group("case")  # fixtures of this file take long: one process makes them

SIZE = {"vocabulary": 512, "hidden": 64, "layers": 2, "steps": 4}
QUIET = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
LOSS = ("loss", "grad_norm")
FORWARD, BACKWARD = "flops/forward", "flops/backward_executed"
DENSE = "flops/backward_dense"


class Listener(TrainerCallback):
    """Takes copies of the gradients before each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def train(script: Any, folder: Path, **options: Any) -> Any:
    trainer = script.make_trainer(folder, **(SIZE | QUIET | options))
    listener = Listener()
    trainer.add_callback(listener)
    trainer.train()
    trainer.gradients = listener.gradients
    return trainer


def relative(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The distance of two gradients over the length of the second."""
    difference = sum((one[name] - two[name]).double().square().sum().item() for name in two)
    return (difference / sum(value.double().square().sum().item() for value in two.values())) ** 0.5


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(case.before(), tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine without tokens, for its count of FLOPs."""
    text = case.changed(case.BEFORE, case.TWO_LINES)
    begin = text.index("policies=[")
    text = text[:begin] + 'policies=["dense"],\n' + text[text.index("\n", begin) + 1 :]
    return train(case.load(text), tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {mode: train(case.after(mode), tmp_path_factory.mktemp(mode)) for mode in ("exact", "detach")}


def test_two_lines_change_and_nothing_else() -> None:
    lines, now = case.BEFORE.splitlines(), case.changed(case.BEFORE, case.TWO_LINES).splitlines()
    assert len(lines) == len(now)
    assert sum(line != other for line, other in zip(lines, now, strict=True)) == 2
    with pytest.raises(ValueError, match="is not one line of the script"):
        case.changed(case.BEFORE, "-no such line\n+x\n")


def test_the_guide_shows_these_two_lines() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "trainer.md").read_text(encoding="utf-8")
    assert f"```diff\n{case.TWO_LINES}```" in guide


def test_the_script_trains_as_before_with_a_dense_engine(before: Any, dense: Any) -> None:
    assert differing(weights(before.model), weights(dense.model)) == []


def test_exact_has_the_gradient_of_the_users_own_loss(before: Any, after: dict[str, Any]) -> None:
    exact = after["exact"]
    assert len(exact.gradients) == 4
    assert relative(exact.gradients[0], before.gradients[0]) < 1e-5
    for log, other in zip(exact.state.log_history[:4], before.state.log_history, strict=False):
        assert [log[name] for name in LOSS] == pytest.approx([other[name] for name in LOSS], rel=1e-4)
    assert is_free(exact)


def test_detach_has_the_gradient_of_its_reference(after: dict[str, Any], before: Any, tmp_path: Path) -> None:
    text = case.changed(case.BEFORE, case.TWO_LINES).replace(
        '"detach"}]', '"detach"}], backward={"execution": "reference"}'
    )
    reference = train(case.load(text), tmp_path)
    detach = after["detach"]
    assert relative(detach.gradients[0], reference.gradients[0]) < 1e-5
    assert detach.state.log_history[0]["loss"] == pytest.approx(before.state.log_history[0]["loss"], rel=1e-5)
    assert relative(detach.gradients[0], before.gradients[0]) > 0.05  # biased, as it says
    assert [log["loss"] for log in detach.state.log_history[:4]] == pytest.approx(
        [log["loss"] for log in reference.state.log_history[:4]], rel=1e-4
    )


def test_executed_flops_fall_where_the_trainers_own_estimate_does_not_move(
    before: Any, dense: Any, after: dict[str, Any]
) -> None:
    logs = {"dense": dense.state.log_history} | {mode: t.state.log_history for mode, t in after.items()}
    work = {name: log[0][FORWARD] + log[0][BACKWARD] for name, log in logs.items()}
    assert {log[-1]["total_flos"] for log in [*logs.values(), before.state.log_history]} == {
        before.state.log_history[-1]["total_flos"]
    }
    assert work["detach"] < 0.5 * work["exact"] < 0.5 * work["dense"]
    assert logs["detach"][0][BACKWARD] < 0.05 * logs["dense"][0][BACKWARD]
    share = 4 / 1022  # two of 511 in each example
    assert [log["policy/trained_share"] for log in logs["detach"]] == pytest.approx([share] * 5)
    assert all(0 < log["policy/kept_share"] < 0.02 for log in logs["detach"])  # of the sites' gradients
    assert {log[DENSE] for log in (logs["detach"][0], logs["exact"][0])} == {logs["dense"][0][BACKWARD]}
    assert all(0 < log["policy/carried_share"] < 0.01 for log in logs["detach"])
    assert not any("time/scoring_seconds" in log for log in logs["detach"])  # the data says it


@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.long), "detach"])
def test_accumulation_bf16_and_a_second_training_work_in_the_script(mode: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "bf16": True, "steps": 2, "warmup_steps": 1}
    plain = case.before().make_trainer(tmp_path / "before", **(SIZE | QUIET | options))
    trainer = case.after(mode).make_trainer(tmp_path / "after", **(SIZE | QUIET | options))
    for one in (plain, trainer):
        one.train()
        one.train()
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (plain, trainer)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    one_batch = case.before().collate(case.before().make_texts(2, 512))
    loss_mask, labels = one_batch.pop("loss_mask"), one_batch.pop("labels")
    evaluated = []
    for one in (plain, trainer):  # what accelerate left around the forward is there in both
        with torch.no_grad():
            evaluated.append(one.model.eval()(**one_batch).logits.dtype)
        assert "forward" in vars(one.model)
    assert evaluated == [torch.float32] * 2
    assert (loss_mask.shape, labels.shape) == ((2, 512), (2, 512))


@pytest.mark.parametrize(
    "options", [{CHECKPOINTING: True}, {"neftune_noise_alpha": 5.0}], ids=["checkpointing", "noise"]
)
def test_exact_goes_with_what_the_trainer_does_to_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for script in (case.before(), case.after("exact")):
        trainer = script.make_trainer(tmp_path, **(SIZE | QUIET | {"steps": 2} | options))
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history[:2]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_lora_works_in_the_script(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for script in (case.before(), case.after("exact")):
        make = script.PhiForCausalLM

        def wrapped(config: Any, make: Any = make) -> Any:
            torch.manual_seed(3)
            return get_peft_model(make(config), LoraConfig(r=4, target_modules=["q_proj", "fc2"]))

        script.PhiForCausalLM = wrapped
        trainer = script.make_trainer(tmp_path, **(SIZE | QUIET | {"steps": 2}))
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history[:2]])
        assert [n for n, module in trainer.model.named_modules() if "forward" in vars(module)] == []
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class Evaluating(TrainerCallback):
    """Evaluates before the first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.metrics = self.trainer.evaluate(self.texts)

    trainer: Any = None
    texts: Any = None
    metrics: Any = None


def test_evaluation_in_the_middle_is_that_of_the_script_as_it_was(tmp_path: Path) -> None:
    found = []
    for script in (case.before(), case.after("detach")):
        trainer = script.make_trainer(tmp_path, **(SIZE | QUIET | {"steps": 2}))
        callback = Evaluating()
        callback.trainer, callback.texts = trainer, script.make_texts(3, 512)
        trainer.add_callback(callback)
        trainer.train()
        found.append(callback.metrics["eval_loss"])
    assert found[0] == found[1]


def test_a_column_that_is_not_in_the_batch_is_named(tmp_path: Path) -> None:
    text = case.changed(case.BEFORE, case.TWO_LINES).replace('"mask_column": "loss_mask"', '"mask_column": "los_mask"')
    trainer = case.load(text).make_trainer(tmp_path, **(SIZE | QUIET))
    with pytest.raises(UsageError, match="reads the column 'los_mask', but the batch has only"):
        trainer.train()
    assert is_free(trainer)


def test_a_policy_that_chooses_by_itself_needs_the_models_own_loss(tmp_path: Path) -> None:
    text = case.changed(case.BEFORE, case.TWO_LINES).replace('"score": "mask"', '"score": "random", "keep": 0.5')
    trainer = case.load(text).make_trainer(tmp_path, **(SIZE | QUIET))
    with pytest.raises(UsageError, match="pass labels"):
        trainer.train()
