"""Optimizers by name: what they compute, how they are made, and that eager update drives each."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    SchedulerType,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from sparsebp_cli.backward.patch.rewind import capture_rng
from sparsebp_cli.errors import DataError, UnsupportedError
from sparsebp_cli.optimizers.apollo import Apollo
from sparsebp_cli.policy.composition import find_optimizer, list_optimizers
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import SCHEDULE_ARGUMENTS, TrainingSection
from sparsebp_cli.run import History
from sparsebp_cli.worker.checkpoint import CheckpointFolder, RankState, Snapshot
from sparsebp_cli.worker.optimizer import build_optimizer, build_schedule, load_class
from sparsebp_cli.worker.sharding import load_optimizer
from tests.backward.eager_case import MODELS, assert_equal, train
from tests.worker.conftest import work

# Two are for a model with adapters, or a policy, and have tests of their own.
DENSE = [name for name in list_optimizers() if name not in ("lora-fa", "compact")]
SMALL: dict[str, dict[str, Any]] = {
    "apollo": {"rank": 4, "update_proj_gap": 3},
    "apollo-mini": {"update_proj_gap": 3},
    "fira": {"rank": 4, "update_proj_gap": 3},
    "galore": {"rank": 4, "update_proj_gap": 3},
}


def make(name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    section = TrainingSection(optim=name, optim_args=SMALL.get(name, {}) | options, learning_rate=1e-2)
    return build_optimizer(section, parameters)


def test_every_optimizer_of_torch_that_steps_by_dense_gradients_can_be_named() -> None:
    ours = {name.lower() for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    others = {"optimizer", "lbfgs", "muon", "sparseadam"}
    assert ours - others <= set(list_optimizers())
    assert not others & set(list_optimizers())


FOR_MODELS = {
    "lora-fa": {"model": {"lora": {"r": 2}}, "policy": [{"name": "frozen", "freeze": ["*lora_A*"]}]},
    "compact": {"policy": [{"name": "compact", "keep": 0.5, "interval": 2}]},
}


@pytest.mark.parametrize("name", list_optimizers())
def test_every_name_that_a_recipe_may_give_trains_a_transformer(name: str, tiny_recipe: Any, prepared: Any) -> None:
    options = {"optim": name, "max_steps": 2, "optim_args": SMALL.get(name, {})}
    recipe = tiny_recipe(training=options, measure={"eval_every": 2}, **FOR_MODELS.get(name, {}))
    refuse_unsupported(recipe)
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    losses = list(History.load(run.path).series("train/loss").values())
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", list_optimizers())
def test_the_arguments_in_the_table_are_those_of_the_class(name: str) -> None:
    found, implied = load_class(name)
    arguments = inspect.signature(found).parameters.keys() - {"params", "model", "lr"}
    assert set(find_optimizer(name).arguments) == arguments
    assert implied.keys() <= arguments


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied", "recurrent", "branches-reentrant"])
def test_every_optimizer_gives_the_same_weights_when_it_is_driven_eagerly(name: str, model: str) -> None:
    steps = 12 if name in ("adamw", "apollo-mini") else 4
    expected, _ = train(MODELS[model], lambda p: make(name, p), steps=steps, eager=False)
    found, engine = train(MODELS[model], lambda p: make(name, p), steps=steps, eager=True)
    assert_equal(found, expected)
    assert engine.eager.report.num_early > 0


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_goes_on_from_a_checkpoint_bit_by_bit(name: str, tmp_path: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(number).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = MODELS["branches"]().to(torch.bfloat16)
    first.run = lambda function, x: function(x.to(torch.bfloat16))
    optimizer = make(name, first.parameters())
    for number in range(4):
        step(first, optimizer, number)
    folder = CheckpointFolder(tmp_path, 1)
    folder.save(Snapshot(4, dict(first.named_parameters()), optimizer.state_dict(), {}, [RankState({}, capture_rng())]))
    snapshot, damaged = folder.load_newest_good()
    assert snapshot is not None
    assert not damaged
    second = MODELS["branches"]().to(torch.bfloat16)
    second.run = first.run
    resumed = make(name, second.parameters())
    second.load_state_dict(snapshot.weights)
    load_optimizer(resumed, snapshot.optimizer)
    for number in range(4, 8):
        step(first, optimizer, number)
        step(second, resumed, number)
    assert_equal(dict(second.named_parameters()), dict(first.named_parameters()))


def apollo_by_hand(weight: Tensor, gradients: list[Tensor], projection: Tensor, options: dict[str, Any]) -> Tensor:
    """Algorithm 1 of the paper for a matrix that is no higher than wide, in double precision."""
    weight, mean, square, before = weight.double(), 0.0, 0.0, None
    for number, single in enumerate(gradients, 1):
        gradient = single.double()
        projected = projection.double() @ gradient
        mean = 0.9 * mean + 0.1 * projected
        square = 0.999 * square + 0.001 * projected**2
        moved = mean / (1 - 0.9**number) / ((square / (1 - 0.999**number)).sqrt() + 1e-6)
        if options["scale_type"] == "channel":
            factor = moved.norm(dim=0) / projected.norm(dim=0)
        else:
            factor = moved.norm() / projected.norm()
        step = gradient * factor
        if before is not None and step.norm() > 1.01 * before:
            step = step / step.norm() * 1.01 * before
        before = step.norm()
        weight = weight - 0.01 * math.sqrt(options["scale"]) * step - 0.01 * options["weight_decay"] * weight
    return weight.float()


@pytest.mark.parametrize(("kind", "rank", "scale"), [("channel", 4, 1.0), ("tensor", 1, 128.0)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_apollo_is_the_papers_algorithm(kind: str, rank: int, scale: float, is_turned: bool) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 10), [torch.randn(6, 10) * 2.0**n for n in range(5)]
    options = {"rank": rank, "scale": scale, "scale_type": kind, "weight_decay": 0.1}
    weight = nn.Parameter(start.t().contiguous() if is_turned else start.clone())
    optimizer = Apollo([weight], lr=0.01, **options)
    for gradient in gradients:
        weight.grad = gradient.t().contiguous() if is_turned else gradient.clone()
        optimizer.step()
    projection = optimizer._draw(weight, 6, 1, optimizer.param_groups[0])
    assert projection.shape == (rank, 6)
    expected = apollo_by_hand(start, gradients, projection, options)
    torch.testing.assert_close(weight.t() if is_turned else weight, expected.detach(), rtol=1e-4, atol=1e-5)


def test_apollo_trains_a_parameter_that_was_put_in_the_place_of_another() -> None:
    first, second = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer = Apollo([first, second], rank=2)
    (group,) = optimizer.param_groups
    expected = optimizer._draw(second, 8, 1, group)
    group["params"][1] = part = nn.Parameter(torch.ones(3, 8))
    part.grad = torch.ones(3, 8)
    optimizer.step()
    assert bool((part != 1.0).all())
    assert torch.equal(optimizer._draw(part, 8, 1, group), expected)


def test_apollo_draws_projections_anew_after_the_gap_and_for_each_parameter() -> None:
    first, second = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = Apollo([first, second], rank=32, update_proj_gap=2)
    (group,) = optimizer.param_groups
    state = torch.get_rng_state()
    drawn = [optimizer._draw(first, 64, step, group) for step in (1, 2, 3)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], optimizer._draw(second, 64, 1, group))
    assert float(drawn[0].var()) == pytest.approx(1 / 32, rel=0.15)


def plain_fira(rank: int, *, shape: tuple[int, int]) -> tuple[nn.Parameter, torch.optim.Optimizer, float]:
    """Return a matrix, a Fira in which psi(R) is R, and how far it goes along an update."""
    beta = 1.0 - 1e-12  # with no second moment to speak of and eps 1, Adam's step is the gradient itself
    weight = nn.Parameter(torch.zeros(shape))
    options = {"betas": [0.0, beta], "eps": 1.0, "rank": rank, "scale": 1.0, "update_proj_gap": 100}
    return weight, make("fira", [weight], **options), 1e-2 * math.sqrt(1.0 - beta)


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (8, 8)])
def test_fira_moves_by_the_gradient_itself_where_adam_does(rank: int, shape: tuple[int, int]) -> None:
    """scale P R + s (G - scale P R) with s = 1 and scale = 1 is G, whatever the subspace."""
    weight, optimizer, length = plain_fira(rank, shape=shape)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(-weight.detach() / length, gradient, rtol=1e-3, atol=1e-4)


def test_the_part_outside_of_firas_subspace_grows_by_a_hundredth_a_step_at_most() -> None:
    weight, optimizer, length = plain_fira(2, shape=(12, 8))
    gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    right = torch.linalg.svd(gradient, full_matrices=False).Vh[:2]
    inside = gradient @ right.T @ right
    outside, before = gradient - inside, torch.zeros(12, 8)
    for number, growth in enumerate((1.0, 10.0, 10.0)):
        weight.grad = growth * gradient
        optimizer.step()
        update = (before - weight.detach()) / (length * math.sqrt(number + 1.0))
        torch.testing.assert_close(update, growth * inside + 1.01**number * outside, rtol=1e-2, atol=1e-2)
        before = weight.detach().clone()


@pytest.mark.parametrize("name", ["apollo", "apollo-mini", "fira", "galore", "adalomo"])
def test_state_of_low_rank_optimizers_is_smaller_than_the_weights(name: str) -> None:
    weight = nn.Parameter(torch.randn(256, 128))
    optimizer = make(name, [weight], **({} if name in ("apollo-mini", "adalomo") else {"rank": 4}))
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    size = sum(value.nbytes for value in optimizer.state[weight].values() if isinstance(value, Tensor))
    expected = {
        "apollo": 4 * (2 * 4 * 256 + 1),
        "apollo-mini": 4 * (2 * 256 + 1),
        "fira": 4 * (2 * 4 * 256 + 4 * 128 + 1),
        "galore": 4 * (2 * 4 * 256 + 4 * 128),
        "adalomo": 4 * (256 + 128),
    }
    assert size == expected[name]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "apollo",
            {"rnak": 3},
            "training.optim_args.rnak: not an argument of apollo; allowed: betas, .*did you mean rank",
        ),
        ("apollo", {"rank": 0}, "training.optim_args: apollo: rank must be a whole number of 1 or more, got 0"),
        ("apollo", {"weight_decay": -0.1}, "apollo: weight_decay must be a number of 0 or more, got -0.1"),
        ("apollo", {"betas": [0.9]}, r"apollo: betas must be two numbers in \[0, 1\)"),
        ("apollo-mini", {"scale_type": "row"}, "scale_type must be channel or tensor, got 'row'"),
        ("adalomo", {"clip_threshold": -1.0}, "training.optim_args: adalomo: .*clip_threshold"),
        ("sgd", {"momentum": -1.0}, "training.optim_args: sgd: Invalid momentum"),
    ],
)
def test_arguments_that_an_optimizer_refuses_are_told_by_name(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(name, [nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize("name", ["fira", "galore", "adalomo"])
def test_a_missing_extra_is_one_line_with_the_command_that_brings_it(name: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.delitem(sys.modules, find_optimizer(name).place.partition(":")[0], raising=False)
    with pytest.raises(DataError, match=rf"{name} needs the package pytorch-optimizer .*pip install 'sparsebp\[opt"):
        load_class(name)


OURS = ("apollo", "apollo-mini", "fira", "galore", "adalomo")


def _fit(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3, *, by_closure: bool = False) -> None:
    def differentiate() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1.0, 1.0, 24, dtype=next(model.parameters()).dtype).view(4, 6)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if by_closure:
            assert optimizer.step(differentiate).requires_grad
        else:
            differentiate()
            optimizer.step()


@pytest.mark.parametrize("name", OURS)
def test_a_step_runs_its_closure(name: str) -> None:
    models = []
    for by_closure in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
        _fit(make(name, models[-1].parameters()), models[-1], by_closure=by_closure)
    for plain, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain, found)


@pytest.mark.parametrize("name", ["apollo", "apollo-mini", "adalomo"])
def test_a_model_of_double_precision_and_of_single_numbers_is_trained(name: str) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4, dtype=torch.float64)
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    torch.manual_seed(0)
    model = Scaled()
    before = [p.detach().clone() for p in model.parameters()]
    _fit(make(name, model.parameters()), model)
    assert all(
        not torch.equal(p, old) and p.isfinite().all() for p, old in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("name", ["apollo", "apollo-mini", "adalomo"])
def test_a_copy_of_a_model_and_its_optimizer_goes_on_as_the_original(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = make(name, model.parameters())
    _fit(optimizer, model)
    other, its = copy.deepcopy((model, optimizer))
    _fit(optimizer, model)
    _fit(its, other)
    for plain, found in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(plain, found)


@pytest.mark.parametrize("name", ["apollo", "apollo-mini", "adalomo"])
def test_numbers_and_gradients_that_an_optimizer_would_get_wrong_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"supports only real parameters, got torch.complex64"):
        make(name, [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    words = nn.Embedding(5, 3, sparse=True)
    words(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match="does not support sparse gradients"):
        make(name, words.parameters()).step()


def test_adalomo_refuses_what_is_larger_than_a_matrix() -> None:
    with pytest.raises(DataError, match=r"at most two dimensions, got the shape \(2, 3, 4\)"):
        make("adalomo", [nn.Parameter(torch.ones(2, 3, 4))])


SMALL_MODEL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
WITH_HEADS = SMALL_MODEL | {"num_attention_heads": 2, "intermediate_size": 32}
# A vector of Mamba that is no norm, a norm with an unusual name, and biases that are matrices.
DECAYED: dict[str, Callable[[], nn.Module]] = {
    "llama": MODELS["llama"],
    "gpt2-tied": MODELS["gpt2-tied"],
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL_MODEL, state_size=4)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2)),
    "xlnet": lambda: XLNetLMHeadModel(XLNetConfig(vocab_size=32, d_model=16, n_layer=2, n_head=2, d_inner=32)),
    "dora": lambda: get_peft_model(
        LlamaForCausalLM(LlamaConfig(**WITH_HEADS)), LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    ),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft on a newer transformers
@pytest.mark.parametrize("name", DECAYED)
def test_decay_of_matrices_leaves_out_what_the_trainer_leaves_out(name: str) -> None:
    model = DECAYED[name]()
    optimizer = build_optimizer(TrainingSection(weight_decay=0.1, weight_decay_of="matrices"), model)
    names = {id(p): key for key, p in model.named_parameters() if p.requires_grad}
    decays = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    expected = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert decays == expected & set(names.values())  # a tied weight has a second name
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert {group["weight_decay"] for group in optimizer.param_groups} == ({0.1} if name == "dora" else {0.1, 0.0})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optim": "lora-fa"}, "lora-fa decides itself which weights decay"),
        ({"optim": "rprop"}, "rprop has no weight decay"),
    ],
)
def test_decay_of_matrices_is_refused_where_it_would_do_nothing(options: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        build_optimizer(TrainingSection(weight_decay_of="matrices", **options), MODELS["llama"]())


def test_the_arguments_of_schedules_are_those_of_transformers() -> None:
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    names = typing.get_args(TrainingSection.model_fields["lr_scheduler_type"].annotation)
    for name in names:
        function = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
        assert set(inspect.signature(function).parameters) - ours == set(SCHEDULE_ARGUMENTS.get(name, ())), name


def test_a_cosine_ends_at_its_lowest_rate() -> None:
    given = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    section = TrainingSection(max_steps=10, warmup_steps=2, learning_rate=1e-3, optim="sgd", **given)
    optimizer = build_optimizer(section, nn.Linear(2, 2))
    schedule = build_schedule(section, optimizer)
    rates = []
    for _ in range(10):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates[1] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-4)
    assert min(rates[1:]) == rates[-1]


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        ("cosine", {"min_lr": 0.1}, "not an argument of cosine; allowed: num_cycles"),
        ("linear", {"power": 1.0}, "not an argument of linear; allowed: none"),
        ("polynomial", {"lr_ends": 0.0}, "did you mean lr_end"),
        ("cosine_with_min_lr", {}, "needs exactly one of min_lr and min_lr_rate in lr_scheduler_kwargs"),
        ("cosine_with_min_lr", {"min_lr": 1.0}, "at least 0 and below 0.0003, got 1"),
        ("cosine_with_min_lr", {"min_lr_rate": 1.0}, "at least 0 and below 1, got 1"),
    ],
)
def test_wrong_arguments_of_a_schedule_are_named(kind: str, given: dict[str, float], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        TrainingSection(lr_scheduler_type=kind, lr_scheduler_kwargs=given)  # type: ignore[arg-type]
