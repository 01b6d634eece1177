"""Runs in which a policy chooses the examples of each epoch: equal to a loop by hand, killed and resumed, refused."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import get_scheduler

import sparsebp_cli as sbp
from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.policy import Epoch, EpochSelector, Step, Visits
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.worker.batch import BatchOrder, collate, micro_batch_loss
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.example_loss import weighted_loss
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_shelf.policies.infobatch import InfoBatch
from tests.chaos.kill import resume_killed
from tests.infobatch import obvious
from tests.promise import Nothing
from tests.worker.conftest import work
from tests.worker.test_grouping import make_examples, names
from tests.worker.test_processes import weights_of

CPU = torch.device("cpu")
SMALL = {"max_train_examples": 10}  # not a multiple of a step's 8: epochs begin within steps
TRAINING = {"max_steps": 14, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "seed": 3}
POLICY = {"name": "infobatch", "keep": 0.5}


def history(run: RunFolder) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


class InfoBatchByHand:
    """Half of the well-learnt examples, weighing double, until seven eighths of the visits are over."""

    def __init__(self, num_examples: int, num_visits: int) -> None:
        self.losses, self.last = [float("nan")] * num_examples, 0.875 * num_visits

    def weights(self, visited: int, generator: torch.Generator) -> list[float]:
        found = obvious(
            self.losses, 0.5, lambda well: [well[i] for i in torch.randperm(len(well), generator=generator)]
        )
        return [1.0] * len(found) if visited + len(found) - found.count(0.0) > self.last else found

    def see(self, rows: list[int], losses: list[float]) -> None:
        for row, loss in zip(rows, losses, strict=True):
            self.losses[row] = loss


def by_hand(recipe: Recipe) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train as anybody would write it: an epoch is a list of rows with weights, and each example has a forward of its
    own. Return the parameters, and the weights of all examples in each epoch."""
    training = recipe.training
    torch.manual_seed(training.seed)
    tokenizer = build_tokenizer(recipe.model)
    examples = build_data(recipe.dataset, tokenizer).train
    torch.manual_seed(training.seed)
    model = build_model(recipe.model, tokenizer, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    schedule = get_scheduler("linear", optimizer, training.warmup_steps, training.max_steps)
    size = training.per_device_train_batch_size * training.gradient_accumulation_steps
    rule = InfoBatchByHand(len(examples), size * training.max_steps)
    epochs, queue, visited = list[list[float]](), list[tuple[int, float]](), 0
    for index in range(training.max_steps):
        while len(queue) < size:
            number, (batch, accumulation) = len(epochs), (training.per_device_train_batch_size, 2)
            step = Step(visited // size, visited // batch % accumulation, seed=training.seed)
            generator = step.generator(Epoch(number, torch.empty(0), 0, 1))
            weights = rule.weights(visited, generator)
            shuffle = torch.Generator().manual_seed(training.seed * 1_000_003 + number)
            order = torch.randperm(len(examples), generator=shuffle).tolist()
            queue += [(row, weights[row]) for row in order if weights[row]]
            visited += len(weights) - weights.count(0.0)
            epochs.append(weights)
        assert visited - len(queue) == index * size
        step_rows, queue = queue[:size], queue[size:]
        targets, total, losses = 0, torch.zeros(()), list[float]()
        for row, weight in step_rows:
            ids = torch.from_numpy(examples[row].input_ids)
            loss = functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            total, targets = total + weight * loss, targets + len(ids) - 1
            losses.append(float(loss.detach()) / (len(ids) - 1))
        for first in range(0, size, training.per_device_train_batch_size):
            part = slice(first, first + training.per_device_train_batch_size)
            rule.see([row for row, _ in step_rows[part]], losses[part])
        (total / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), epochs


def test_a_run_is_the_loop_by_hand(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(training=TRAINING, dataset=SMALL, policy=[POLICY])
    run = prepared(recipe)
    told = history(run)
    expected, epochs = by_hand(recipe)
    assert sum(0.0 in weights for weights in epochs) >= 4
    assert epochs[-1] == [1.0] * 10
    found = weights_of(run)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)
    number, share = told.series("train/epoch"), told.series("policy/visited_share")
    assert list(number.values())[-1] == len(epochs) - 1
    assert all(share[step] == 1.0 - epochs[int(number[step])].count(0.0) / 10 for step in share)


def test_keeping_everything_is_dense_to_the_last_bit(tiny_recipe, prepared) -> None:
    dense, whole, some = (
        prepared(tiny_recipe(training=TRAINING, dataset=SMALL, policy=[policy]))
        for policy in ({"name": "dense"}, POLICY | {"keep": 1.0}, POLICY)
    )
    expected, found, other = history(dense), history(whole), history(some)
    theirs, ours = weights_of(dense), weights_of(whole)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert found.series(name) == expected.series(name)
        assert other.series(name) != expected.series(name)
    assert set(found.series("policy/visited_share").values()) == {1.0}
    assert "train/epoch" not in expected.metrics


@pytest.mark.parametrize("policy", [[POLICY], [POLICY, {"name": "topk", "keep": 0.5}]], ids=["alone", "with-topk"])
def test_a_killed_run_resumes_to_the_same_bits(tiny_recipe, prepared, policy: list[Any]) -> None:
    recipe = tiny_recipe(
        training=TRAINING | {"max_steps": 30},
        dataset=SMALL,
        policy=policy,
        checkpoint={"every": 3},
        measure={"probe_every": 7, "fidelity_every": 5},
    )
    resume_killed(recipe, prepared, after=(5, 13))


def test_measuring_changes_no_weight(tiny_recipe, prepared) -> None:
    often = {"probe_every": 1, "fidelity_every": 1}
    runs = [
        prepared(tiny_recipe(training=TRAINING, dataset=SMALL, policy=[POLICY], measure=measure))
        for measure in (often, {})
    ]
    told, plain = (history(run) for run in runs)
    assert told.series("train/loss") == plain.series("train/loss")
    assert set(told.series("fidelity/relative_error").values()) == {0.0}  # the weights are in the dense pass, too
    theirs, ours = (weights_of(run) for run in runs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_classification_weighs_its_examples_as_well(tiny_recipe, prepared, tiny_folder) -> None:
    rows = [{"text": f"the {'quick' if n % 2 else 'lazy'} fox {n}", "label": n % 2} for n in range(40)]
    file = tiny_folder / "epochs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": str(file), "format": "classification", "eval_fraction": 0.2}
    told = history(prepared(tiny_recipe(training={"max_steps": 40}, dataset=dataset, policy=[POLICY])))
    assert min(told.series("policy/visited_share").values()) < 1.0
    assert list(told.series("policy/visited_share").values())[-1] == 1.0


class Given(Nothing, EpochSelector):
    """Every second row in odd epochs, with its number of the epoch as the weight."""

    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        if epoch.number % 2 == 0:
            return None
        index_K = torch.arange(0, len(epoch.loss_N), 2)
        return Visits(index_K, torch.full((len(index_K),), float(epoch.number)))


def _order(group_by: Any = None, micro_batches: int = 1) -> BatchOrder:
    order = BatchOrder(make_examples(10), 4, seed=1, pad_token_id=0, group_by=group_by)
    order.choose_epochs(Given(), num_steps=100, micro_batches=micro_batches)
    return order


@pytest.mark.parametrize("group_by", [None, "length", "prefix"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_epoch_of_fewer_examples_is_over_sooner_and_none_is_missed(group_by: Any, micro_batches: int) -> None:
    order = _order(group_by, micro_batches)
    visits = [pair for n in range(15) for pair in zip(names(order[n]), order.weights(n) or (), strict=True)]
    assert len(visits) == 60  # four times 10 + 5
    for number in range(8):
        first = number // 2 * 15 + number % 2 * 10
        epoch = visits[first : first + (5 if number % 2 else 10)]
        assert sorted(name for name, _ in epoch) == list(range(0, 10, 1 + number % 2))
        assert {weight for _, weight in epoch} == {float(number) if number % 2 else 1.0}


def test_an_order_without_gaps_is_that_of_dense() -> None:
    dense, chosen = (BatchOrder(make_examples(10), 4, seed=1, pad_token_id=0) for _ in range(2))
    chosen.choose_epochs(InfoBatch(keep=1.0), num_steps=100, micro_batches=1)
    assert [names(chosen[n]) for n in range(20)] == [names(dense[n]) for n in range(20)]


def test_a_step_may_be_read_again_and_hold_several_epochs() -> None:
    order = BatchOrder(make_examples(2), 8, seed=1, pad_token_id=0)
    order.choose_epochs(Given(), num_steps=100, micro_batches=2)
    for step in range(4):
        read = [names(order[number]) for number in (2 * step, 2 * step + 1)]
        assert read == [names(order[number]) for number in (2 * step, 2 * step + 1)]


def test_what_is_saved_is_what_a_resumed_order_needs() -> None:
    order, told = _order(), list[list[int]]()
    for number in range(12):
        state = order.state_dict() if number else {}
        resumed = _order()
        if number:
            resumed.load_state_dict(state)
        assert names(resumed[number]) == names(order[number])
        assert resumed.weights(number) == order.weights(number)
        order.see(number, torch.arange(4.0))
        told.append(names(order[number]))
    losses = order.state_dict()["loss_N"]
    last = {name: float(place) for batch in told for place, name in enumerate(batch)}
    assert losses.tolist() == [last[row] for row in range(10)]


def test_a_state_of_other_data_or_another_policy_is_refused() -> None:
    order = _order()
    names(order[0])
    state = order.state_dict()
    other = BatchOrder(make_examples(9), 4, seed=1, pad_token_id=0)
    with pytest.raises(ValueError, match="and the plan has none"):
        other.load_state_dict(state)
    other.choose_epochs(Given(), num_steps=100, micro_batches=1)
    with pytest.raises(ValueError, match="written for 10 training examples, but the training split has 9"):
        other.load_state_dict(state)
    with pytest.raises(LookupError):
        other.load_state_dict({})
    with pytest.raises(ValueError, match="its steps have 4 examples, and steps of the plan have 8"):
        _order(micro_batches=2).load_state_dict(state)


def test_losses_are_those_of_the_epoch_before_when_one_begins() -> None:
    seen = list[list[float]]()

    class Spy(Nothing, EpochSelector):
        def choose(self, epoch: Epoch, step: Step) -> Visits | None:
            seen.append(epoch.loss_N.tolist())
            assert (epoch.num_before, epoch.num_in_all) == (10 * epoch.number, 400)
            assert (step.index, step.micro_batch) == divmod(10 * epoch.number // 2, 2)
            return None

    order = BatchOrder(make_examples(10), 2, seed=1, pad_token_id=0)
    order.choose_epochs(Spy(), num_steps=100, micro_batches=2)
    counts: Counter[int] = Counter()
    for step in range(5):  # 4 examples each: two epochs
        numbers = (2 * step, 2 * step + 1)
        batches = [names(order[number]) for number in numbers]
        for number, batch in zip(numbers, batches, strict=True):
            counts.update(batch)
            order.see(number, torch.tensor([float(counts[name]) for name in batch]))
    assert len(seen) == 2
    assert torch.tensor(seen[0]).isnan().all()
    # The last two of the first epoch share a step with the first two of the second.
    assert sorted(str(loss) for loss in seen[1]) == ["1.0"] * 8 + ["nan"] * 2


@pytest.fixture
def model(tiny_recipe) -> nn.Module:
    recipe = tiny_recipe()
    torch.manual_seed(0)
    return build_model(recipe.model, build_tokenizer(recipe.model), None)


def _batch() -> dict[str, Tensor]:
    examples = make_examples(4, prompt_length=3)
    for example in examples:
        example.input_ids[:3] = example.labels[:3] = 7
        example.labels[:2] = -100
    return collate([e for e in examples if len(e.input_ids) < 60], 0)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_loss_is_the_weighted_sum_over_all_targets_of_the_step(model: nn.Module) -> None:
    batch = _batch()
    weights = [2.0, 0.5, 1.0, 1.75][: len(batch["labels"])]
    loss, loss_B = weighted_loss(model, batch, 200, CPU, weights)
    found = _gradients(model, loss)
    total = torch.zeros(())
    for row, weight in enumerate(weights):
        logits = model(
            input_ids=batch["input_ids"][row : row + 1], attention_mask=batch["attention_mask"][row : row + 1]
        )
        each = functional.cross_entropy(logits.logits[0, :-1], batch["labels"][row, 1:], reduction="none")
        torch.testing.assert_close(loss_B[row], (each.sum() / (each != 0).sum()).detach())
        total = total + weight * each.sum() / 200
    torch.testing.assert_close(loss, total)
    for name, gradient in _gradients(model, total).items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_with_weights_of_one_the_loss_is_the_models_own_to_the_last_bit(model: nn.Module) -> None:
    batch = _batch()
    own = micro_batch_loss(model, batch, 200, CPU)
    expected = _gradients(model, own)
    loss, loss_B = weighted_loss(model, batch, 200, CPU, [1.0] * len(batch["labels"]))
    assert torch.equal(loss, own)
    assert not loss_B.requires_grad
    assert all(torch.equal(gradient, expected[name]) for name, gradient in _gradients(model, loss).items())


def test_a_loss_that_is_no_cross_entropy_of_its_logits_is_refused(model: nn.Module) -> None:
    inner = model.forward
    model.forward = lambda **kwargs: SimpleNamespace(loss=2 * inner(**kwargs).loss, logits=inner(**kwargs).logits)
    with pytest.raises(UnsupportedError, match="examples cannot be weighted, because the model's loss is not"):
        weighted_loss(model, _batch(), 200, CPU, [1.0] * 4)
    model.forward = lambda **kwargs: SimpleNamespace(loss=inner(**kwargs).loss)
    with pytest.raises(UnsupportedError, match="but the model returns none"):
        weighted_loss(model, _batch(), 200, CPU, [1.0] * 4)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("target: {processes: 2}\n", "'infobatch' works in one process, got target.processes: 2"),
        ("backward: {segments: 2}\n", "'infobatch' with backward.segments: 2 is not supported"),
    ],
)
def test_a_recipe_with_what_is_not_built_is_refused(tmp_path, more: str, text: str) -> None:
    _refuse(tmp_path, "policy: [infobatch]\n" + more, text)


@pytest.mark.parametrize("other", ["lossless", "uniform", "{name: tokens, score: random, keep: 0.5}", "infobatch"])
def test_policies_that_leave_out_positions_or_examples_are_refused_beside_it(tmp_path, other: str) -> None:
    text = "make the same decision" if other == "infobatch" else "in one training is not supported: give one of them"
    _refuse(tmp_path, f"policy: [infobatch, {other}]\n", text)


def _refuse(folder: Any, sections: str, text: str) -> None:
    file = folder / "recipe.yaml"
    file.write_text(
        "version: 1\nmodel: {config: {model_type: llama}, tokenizer: none}\ndataset: {name: austen}\n"
        "training: {max_steps: 1}\n" + sections
    )
    with pytest.raises(RecipeError) as told:
        load_recipe(file)
    assert text in str(told.value)


def test_a_loop_of_ones_own_is_refused_by_name() -> None:
    text = r"InfoBatch chooses the examples of an epoch, which works only in a recipe \(sparsebp run\)"
    with pytest.raises(UnsupportedError, match=text):
        sbp.attach(nn.Linear(2, 2), "infobatch")


BESIDE: dict[str, dict[str, Any]] = {
    "max-child": {"policy": [POLICY, {"name": "max-child"}], "backward": {"sites": "nodes"}},
    "dropbp": {"policy": [POLICY, {"name": "dropbp", "keep": 0.5}]},
    "wta-crs": {"policy": [POLICY, {"name": "wta-crs", "keep": 0.5}]},
    "frozen": {"policy": [POLICY, {"name": "frozen", "freeze": ["*.layers.0.*"]}]},
    "topk": {"policy": [POLICY, {"name": "topk", "keep": 0.5, "along": "rows"}]},
    "bf16": {"training": TRAINING | {"mixed_precision": "bf16"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora": {"model": {"lora": {"r": 2}}},
    "group_by": {"training": TRAINING | {"group_by": "length"}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_it_trains_several_epochs_beside(name: str, tiny_recipe, prepared) -> None:
    sections = {"training": TRAINING, "dataset": SMALL, "policy": [POLICY]} | BESIDE[name]
    told = history(prepared(tiny_recipe(**sections)))
    assert min(told.series("policy/visited_share").values()) < 1.0
    assert all(loss < 20.0 for loss in told.series("train/loss").values())


@pytest.mark.parametrize("backward", [{"checkpointing": "full"}, {"update": "eager"}], ids=str)
def test_another_way_to_run_the_backward_gives_the_same_weights(backward: Any, tiny_recipe, prepared) -> None:
    training = TRAINING | {"max_grad_norm": None, "gradient_accumulation_steps": 1, "max_steps": 24}
    sections = {"training": training, "dataset": SMALL, "policy": [POLICY]}
    plain, other = prepared(tiny_recipe(**sections)), prepared(tiny_recipe(**sections, backward=backward))
    assert history(plain).series("policy/visited_share") == history(other).series("policy/visited_share")
    theirs, ours = weights_of(plain), weights_of(other)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
