"""What policies are worth before they train: the measurement against enumeration, and what it leaves as it was."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebp_cli.errors import DataError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.training import Training
from sparsebp_cli.worker.trial_step import TrialStep
from sparsebp_lab.exchange import RateInterval
from sparsebp_lab.worth import measure as module
from sparsebp_lab.worth.candidate import Candidate, find_candidates
from sparsebp_lab.worth.curvature import Curvature
from sparsebp_lab.worth.dense_run import DenseRun
from sparsebp_lab.worth.measure import measure
from sparsebp_lab.worth.squares import WorthMetric, square_between, square_errors
from sparsebp_lab.worth.step_length import TIMES, StepLength, StepShare, share_of_batch

MakeRecipe = Callable[..., Recipe]
Prepare = Callable[[Recipe], RunFolder]
SPELLING = Path(__file__).parents[2] / "docs" / "results" / "exchange" / "spelling.yaml"
QUIET = {"eval_every": 5, "eval_examples": 8, "probe_every": None, "fidelity_every": None}


@pytest.fixture
def build(prepared: Prepare) -> Iterator[Callable[[Recipe], Training]]:
    """Build the training of a recipe in this process."""
    with ExitStack() as stack:

        def make(recipe: Recipe) -> Training:
            run = prepared(recipe)
            journal = stack.enter_context(JournalWriter(run.path, durable=False))
            return Training.build(Plan.load(run.plan_file), run, journal, StopRequest())

        yield make


@pytest.fixture
def found(tiny_recipe: MakeRecipe, build: Callable[[Recipe], Training]) -> Callable[..., dict[str, Any]]:
    """Measure policies, by name in the result."""

    def run(*policies: dict[str, Any], pairs: int = 4, **sections: Any) -> dict[str, Any]:
        results = {}
        for policy in policies:
            recipe = tiny_recipe(policy=[policy], measure=QUIET, **sections)
            answer = measure(build(recipe), all_policies=False, report=lambda *_: None, pairs=pairs)
            json.dumps(answer)
            assert answer["left_out"] == []
            (results[policy["name"]],) = answer["policies"]
        return results

    return run


def test_uniform_examples_are_worth_exactly_their_price(found: Callable[..., dict[str, Any]]) -> None:
    """The null of the law: dense with half of the batch is the same thing."""
    one = found({"name": "uniform", "keep": 0.5, "start": 0, "end": 1, "interrupt": 0}, pairs=24)["uniform"]
    assert one["product"]["low"] < 1.0 < one["product"]["high"]
    assert one["product"]["value"] == pytest.approx(1.0, abs=0.15)
    assert one["noise"]["value"] == pytest.approx(1.0, abs=0.3)
    assert one["noise_plain"]["value"] == pytest.approx(1.0, abs=0.3)
    assert one["verdict"] == "decide by training"


def test_dense_and_exact_policies_have_no_noise(found: Callable[..., dict[str, Any]]) -> None:
    both = found({"name": "dense"}, {"name": "lossless"})
    for one in both.values():
        nothing = {"value": 0.0, "low": 0.0, "high": 0.0}
        assert one["noise"] == one["noise_curved"] == one["bias"] == nothing
        assert one["dense_batch"] == one["dense_batch_curved"] == 4
    assert both["dense"]["price"]["value"] == pytest.approx(1.0, rel=1e-6)
    assert both["dense"]["verdict"] == "dense"


def test_a_largest_first_choice_has_bias_and_no_noise(found: Callable[..., dict[str, Any]]) -> None:
    one = found({"name": "topk", "keep": 0.25})["topk"]
    assert one["noise"]["value"] == 0.0
    assert one["bias"]["low"] > 0.0
    assert one["price"]["value"] < 1.0
    assert one["verdict"] == "decide by training"
    assert set(one["by_part"]) >= {"model.layers.0", "model.layers.1", "model.embed_tokens"}


def test_a_policy_with_a_schedule_is_measured_where_it_acts(found: Callable[..., dict[str, Any]]) -> None:
    one = found({"name": "uniform", "keep": 0.5, "start": 0.5}, pairs=2, training={"max_steps": 100})["uniform"]
    assert 50 < one["as_at_step"] < 90
    assert one["noise"]["value"] > 0.0


def test_what_asks_for_no_random_numbers_is_drawn_once_on_a_batch(
    found: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of three points two draws on the first batch of each of two pairs, or one."""
    drawn: list[int] = []
    run = TrialStep.run

    def watch(self: TrialStep, mode: Any, draw: int = 1, **options: Any) -> Any:
        drawn.extend([draw] * (mode == "policy"))
        return run(self, mode, draw, **options)

    monkeypatch.setattr(TrialStep, "run", watch)
    found({"name": "topk", "keep": 0.25}, pairs=2)
    assert len(drawn) == len(set(drawn)) == 6  # each batch has numbers of its own
    drawn.clear()
    found({"name": "crs", "keep": 0.5}, pairs=2)
    assert len(drawn) == len(set(drawn)) == 12
    firsts = [*drawn]
    drawn.clear()
    found({"name": "crs", "keep": 0.5}, pairs=2, training={"learning_rate": 2e-2})
    assert drawn == firsts  # of the examples alone
    drawn.clear()
    found({"name": "crs", "keep": 0.5}, pairs=2, dataset={"max_seq_length": 15})
    assert not set(drawn) & set(firsts)  # another task, other draws


def test_positions_that_are_padding_in_all_examples_change_no_dense_gradient(
    tiny_recipe: MakeRecipe, build: Callable[[Recipe], Training], tmp_path: Path
) -> None:
    rows = [{"prompt": "Line 1: the" + " fox" * (number % 16), "completion": " jumps"} for number in range(64)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": str(tmp_path / "lines.jsonl"), "format": "completion", "max_seq_length": 64}
    training = build(tiny_recipe(dataset=data, measure=QUIET, training={"per_device_train_batch_size": 16}))
    run, lengths, gradients = DenseRun(training, lambda *_: None, 0), [], []
    training.bare.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with run.paused(), run.attached([make_policy("dense")]) as engine:
        for trims in (False, True):
            with run.trial(engine, 0, 2, trims=trims) as trial:
                gradients.append(trial.run("dense").gradients)
    assert lengths[1] < lengths[0]
    assert all(torch.allclose(gradients[1][name], g, atol=1e-6) for name, g in gradients[0].items() if g is not None)


def test_trial_passes_are_in_the_price(found: Callable[..., dict[str, Any]]) -> None:
    one = found({"name": "vcas", "every": 5})["vcas"]
    assert one["remembers"]
    assert one["price"]["value"] > 1.0  # its trial passes alone, since it begins with keeping everything


@pytest.mark.always("adamw")
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_the_dense_training_is_that_of_a_run(
    tiny_recipe: MakeRecipe, build: Callable[[Recipe], Training], optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring changes nothing: the weights after the last point are those of a training without it."""
    monkeypatch.setattr(module, "MOST_STEPS", 6)
    weights = []
    for policies in (["topk", "uniform"], []):
        entries = [[{"name": name, "keep": 0.5}] for name in policies] or [[{"name": "dense"}]]
        recipe = tiny_recipe(policy=entries[0], measure=QUIET, training={"optim": optim, "max_steps": 6})
        training = build(recipe)
        if policies:
            answer = measure(training, all_policies=True, report=lambda *_: None)
            assert answer["metric"] == ("plain" if optim == "sgd" else "adam")
            assert len(answer["policies"]) > 15
        else:
            training.run_to_end()
        weights.append({name: p.detach().clone() for name, p in training.bare.named_parameters()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_every_installed_policy_is_measured_or_named_with_a_reason(tiny_recipe: MakeRecipe) -> None:
    from sparsebp_cli.policy import find_policies

    candidates, left_out = find_candidates(tiny_recipe(), all_policies=True)
    names = {one.name.split()[0] for one in candidates} | {one["name"] for one in left_out}
    assert names == set(find_policies())
    reasons = {one["name"]: one["why"] for one in left_out}
    assert reasons["grades"] == "needs threshold: write this policy with its options into the recipe"
    assert "needs a reference model" in reasons["rho"]


def test_what_micro_batches_share_is_named_as_not_measured(
    tiny_recipe: MakeRecipe,
) -> None:
    policy = [{"name": "lossless", "prefixes": "update"}]
    for steps, number in ((1, 1), (2, 0)):
        recipe = tiny_recipe(policy=policy, training={"gradient_accumulation_steps": steps})
        candidates, left_out = find_candidates(recipe, all_policies=False)
        assert len(candidates) == number
        assert all("shares work between micro-batches" in one["why"] for one in left_out)
        assert len(left_out) == 1 - number


def test_equal_batches_and_eager_updates_are_refused_in_one_line(
    tiny_recipe: MakeRecipe, build: Callable[[Recipe], Training], tmp_path: Path
) -> None:
    rows = [{"prompt": "Line 1: the", "completion": " fox"}] * 40
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": str(tmp_path / "same.jsonl"), "format": "completion", "max_seq_length": 40}
    training = build(tiny_recipe(dataset=data, measure=QUIET))
    with pytest.raises(DataError, match="two batches have the same gradient"):
        measure(training, all_policies=False, report=lambda *_: None)
    training = build(tiny_recipe(backward={"update": "eager", "eager_clip": "parameter"}, measure=QUIET))
    with pytest.raises(UsageError, match=r"--set backward\.update=deferred"):
        measure(training, all_policies=False, report=lambda *_: None)


def _gradients(weight: Tensor, x_BD: Tensor, y_B: Tensor) -> list[dict[str, Tensor | None]]:
    found: list[dict[str, Tensor | None]] = []
    for x_D, y in zip(x_BD, y_B, strict=True):
        (grad,) = torch.autograd.grad((x_D @ weight - y).square(), weight)
        found.append({"weight": grad})
    return found


def test_squares_of_draws_have_the_mean_that_enumeration_gives() -> None:
    """Two of four examples, all pairs of choices: noise is the variance over the six, bias nothing."""
    torch.manual_seed(0)
    weight = torch.randn(5, requires_grad=True)
    each = torch.stack([g["weight"] for g in _gradients(weight, torch.randn(4, 5), torch.randn(4))])  # type: ignore[arg-type]
    dense: dict[str, Tensor | None] = {"weight": each.mean(0)}
    choices = [each[list(two)].mean(0) for two in itertools.combinations(range(4), 2)]
    metric = WorthMetric(torch.optim.SGD([weight]), {"weight": weight})
    noise = bias = 0.0
    for one, other in itertools.product(choices, choices):
        squares = square_errors(dense, ({"weight": one}, {"weight": other}), metric, lambda _: "all")
        noise, bias = noise + squares[0].sums["plain"]["all"], bias + squares[1].sums["plain"]["all"]
    expected = torch.stack(choices).sub(each.mean(0)).square().sum(1).mean()
    assert noise / 36 == pytest.approx(float(expected), rel=1e-5)
    assert bias / 36 == pytest.approx(0.0, abs=1e-6)


def test_the_metric_is_the_second_moment_that_the_optimizer_has() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(3):
        linear.weight.grad = torch.randn(2, 3)
        linear.weight.grad[0, 0] = 0.0
        optimizer.step()
    metric = WorthMetric(optimizer, {"weight": linear.weight})
    gradient, moment = torch.randn(2, 3), optimizer.state[linear.weight]["exp_avg_sq"]
    scaled = metric.scale("weight", gradient)
    assert scaled is not None
    assert scaled.square() == pytest.approx(gradient.square() / (moment + 0.01 * moment.mean()), rel=1e-5)
    between = square_between({"weight": gradient}, {"weight": -gradient}, metric, lambda _: "all").sums
    assert between["adam"]["all"] == pytest.approx(2 * float(scaled.square().sum()), rel=1e-5)
    assert metric.scale("other", gradient) is None


class Loss(nn.Module):
    """A small loss whose Hessian is known by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.x, self.y = torch.randn(32, 6), torch.randn(32, 1)

    def forward(self) -> Tensor:
        return (self.second(torch.tanh(self.first(self.x))) - self.y).square().mean()


@pytest.mark.parametrize("with_moments", [False, True])
def test_the_curvature_along_an_error_is_that_of_the_hessian(with_moments: bool) -> None:
    """Against a Hessian-vector product of autograd, in the metric of the optimizer; weights stay bit for bit."""
    torch.manual_seed(0)
    loss = Loss()
    names = dict(loss.named_parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(names.values(), lr=0.01)
    if with_moments:
        optimizer = torch.optim.AdamW(names.values(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    metric = WorthMetric(optimizer, names)

    def gradients() -> dict[str, Tensor | None]:
        return dict(zip(names, torch.autograd.grad(loss(), list(names.values())), strict=True))

    curvature = Curvature(names, metric, gradients())
    error: dict[str, Tensor | None] = {name: torch.randn_like(p) for name, p in names.items()}
    error["second.bias"] = None
    before = {name: p.detach().clone() for name, p in names.items()}
    found = curvature.square(error, gradients)
    scaled = {name: metric.scale(name, e) if with_moments else e for name, e in error.items() if e is not None}
    weights = [names[name] for name in scaled]
    grads = torch.autograd.grad(loss(), weights, create_graph=True)
    along = sum((g * d).sum() for g, d in zip(grads, scaled.values(), strict=True))
    products = torch.autograd.grad(along, weights)
    expected = sum(float((h * d).sum()) for h, d in zip(products, scaled.values(), strict=True))
    assert found == pytest.approx(expected, rel=2e-2)
    assert all(torch.equal(p, before[name]) for name, p in names.items())


@pytest.mark.slow
def test_noise_where_the_loss_is_flat_costs_nothing(
    build: Callable[[Recipe], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of activations is spread over all directions, of which few are curved; a smaller batch is not."""
    from sparsebp_cli.recipe import load_recipe

    monkeypatch.setattr(module, "MOST_STEPS", 4)
    monkeypatch.setattr(module, "POINTS", (1.0,))
    found = {}
    for policy in ({"name": "gact", "bits": 2}, {"name": "uniform", "keep": 0.5, "start": 0, "end": 1, "interrupt": 0}):
        recipe = load_recipe(SPELLING, [f"policy={json.dumps(policy)}"])
        answer = measure(build(recipe), all_policies=False, report=lambda *_: None, pairs=4)
        (found[policy["name"]],) = answer["policies"]  # type: ignore[misc]
    rounded, fewer = found["gact"], found["uniform"]
    assert rounded["noise"]["value"] > 3.0
    assert rounded["noise_curved"]["value"] < 0.1
    assert rounded["dense_batch"] < 4
    assert rounded["dense_batch_curved"] > 14
    assert 0.3 < fewer["noise_curved"]["value"] < 3.0
    # Adam's step is shorter by rounding, and a smaller batch trains at its own rate.
    assert rounded["rate"]["high"] < 0.95
    assert fewer["rate"]["low"] < 1.0 < fewer["rate"]["high"]


def test_weights_of_16_bits_have_no_curvature_and_are_measured(found: Callable[..., dict[str, Any]]) -> None:
    one = found({"name": "crs", "keep": 0.5}, pairs=2, training={"mixed_precision": "bf16"})["crs"]
    assert one["noise_curved"] is one["dense_batch_curved"] is None
    assert one["verdict"] in ("cannot beat a smaller batch", "could", "decide by training")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("first_try", ["adapters", "small batches", "classes", "few examples"])
def test_recipes_of_all_shapes_are_measured(
    first_try: str, tiny_recipe: MakeRecipe, build: Callable[[Recipe], Training], tmp_path: Path
) -> None:
    rows = [{"text": "the fox " * (1 + number % 5), "label": number % 2} for number in range(60)]
    (tmp_path / "classes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"prompt": f"Line {number}: the", "completion": " fox" * (1 + number % 3)} for number in range(9)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sections: dict[str, dict[str, Any]] = {
        "adapters": {"model": {"lora": {"r": 2}}},
        "small batches": {"training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}},
        "classes": {"dataset": {"name": str(tmp_path / "classes.jsonl"), "format": "classification"}},
        "few examples": {"dataset": {"name": str(tmp_path / "few.jsonl"), "format": "completion"}},
    }
    recipe = tiny_recipe(policy=[{"name": "crs", "keep": 0.5}], measure=QUIET, **sections[first_try])
    answer = measure(build(recipe), all_policies=False, report=lambda *_: None, pairs=2)
    (one,) = answer["policies"]  # type: ignore[misc]
    assert answer["examples"] == (2 if first_try == "small batches" else 4)
    assert answer["batch"] == 4
    assert one["noise"]["value"] > 0.0
    assert one["price"]["value"] < 1.0


def _adam_goes(signal: Tensor, scatter: Tensor, noise: Tensor, steps: int) -> float:
    """How far Adam goes downhill in so many steps on a loss that is a plane, whose gradients scatter."""
    weight = torch.zeros_like(signal, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.999))
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch, own = (torch.randn(signal.shape, generator=draw) for _ in range(2))
        weight.grad = signal + scatter * batch + noise * own
        optimizer.step()
    return -float((weight.detach() * signal).sum())


def test_the_step_that_is_left_beside_noise_is_the_one_that_adam_goes() -> None:
    """Against torch's Adam, with noise that differs by entry; and a smaller batch has the noise of batches."""
    torch.manual_seed(0)
    signal, scatter = torch.randn(2000), 0.5 + torch.rand(2000)
    noise = 3 * torch.rand(2000) ** 2
    weight = torch.zeros(2000, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=(0.9, 0.999))
    for _ in range(400):
        weight.grad = signal + scatter * torch.randn(2000)
        optimizer.step()
    metric = WorthMetric(optimizer, {"weight": weight})
    dense = [{"weight": signal + 2 * scatter * torch.randn(2000)} for _ in range(40)]  # a fourth of a step's examples
    length = StepLength(dense, metric, 0.25)
    for own, tolerance in ((noise, 0.02), (scatter, 0.02)):
        pairs = [{"weight": (2 * own * torch.randn(2000)).square()} for _ in range(20)]
        share = length.share_with(pairs)
        expected = _adam_goes(signal, scatter, own, 400) / _adam_goes(signal, scatter, 0 * own, 400)
        assert share.value == pytest.approx(expected, rel=tolerance)
        assert share.variance < 1e-4
    half = share_of_batch(length.shares_of_dense(), 1.0)
    assert half.value == pytest.approx(share.value, rel=0.02)  # batches of half the size have twice the variance
    assert share_of_batch(length.shares_of_dense(), 0.0).value == pytest.approx(1.0, abs=1e-3)
    assert length.share_with([{}, {}]).value == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, -0.2])
def test_no_rate_is_told_where_batches_do_not_tell_which_way_is_downhill(value: float) -> None:
    dense = [StepShare(1.0, 0.0), *(StepShare(value, 0.1) for _ in TIMES[1:])]
    candidate = Candidate("noisy", [], lengths=[(StepShare(0.5, 0.01), dense)])
    assert module._find_rate(candidate, RateInterval(1.0, 0.9, 1.1), 6) is None
    known = Candidate("known", [], lengths=[(StepShare(0.5, 0.0), [StepShare(1.0, 0.0) for _ in TIMES])])
    assert module._find_rate(known, RateInterval(1.0, 0.9, 1.1), 6) == {"value": 0.5, "low": 0.5, "high": 0.5}
