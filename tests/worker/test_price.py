"""The price of a step is what PyTorch counts in the step itself, for every kind of policy and optimizer."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM

from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.price import CountedPass, StepPrice
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.step_kind import CountedSteps, StepKind
from sparsebp_cli.worker.training import Training
from tests.guess import of_every_policy, sites_of
from tests.plugin import find_ours
from tests.worker.conftest import LLAMA

# Trained by each run of the tests; the others, and dear options, by the long ones.
OFTEN = {"dense", "uniform", "lossless", "tokens", "layerdrop", "grades", "importance"}
WHOLE = {"start": 0.0, "end": 1.0, "interrupt": 0}
# Policies as they are ordinarily set, and with the options that make them dear; of all others, those that are required.
NAMED: dict[str, list[dict[str, Any]]] = {
    "compact": [{}, {"interval": 5}],
    "crs": [{"keep": 0.25}],
    "frozen": [
        {"turn": "layers", "every": 3},
        {"freeze": ["*layers.0*"]},
        {"freeze": ["*embed_tokens*", "*layers.0*"]},
        {"turn": "layers", "order": "independent", "at_once": 1, "every": 2},
    ],
    "gact": [{"bits": 4}],
    "grades": [{"threshold": 0.9, "relative": True, "grace": 0.3}],
    "importance": [{}, {"threshold": 0.0}, {"every": 7}],
    "lossless": [{"verify": "never"}, {"verify": "never", "prefixes": "separate"}],
    "max-child": [{}, {"lookahead": True}],
    "random": [{"keep": 0.25}],
    "rho": [{"keep": 0.25}, {"keep": 0.25, "reference_scores": "fly"}],
    "selective-backprop": [{"keep": 0.5, **WHOLE}, {}],
    "sketch": [{"keep": 0.2}],
    "subnet": [{"by": "random"}, {"by": "gradient", "batches": 2}],
    "tokens": [
        {"score": "random", "keep": 0.25, "mode": "detach"},
        {"score": "loss", "keep": 0.25},
        {"score": "entropy", "keep": 0.5},
        {"score": "gradient_norm", "keep": 0.25},
    ],
    "topk": [{"keep": 0.25}, {"keep": 0.25, "along": "columns"}],
    "uniform": [{"keep": 0.5, **WHOLE}, {"keep": 0.5, "start": 0.25, "end": 0.75, "interrupt": 2}],
    "vcas": [{"every": 4}, {}],
    "velora": [{"group": 4}],
    "wta-crs": [{"keep": 0.3}],
}
SETTINGS = of_every_policy(NAMED, lambda _, options, __: [options])
OBSERVING = {"grades"}  # takes the norm of each gradient at each step: 2 FLOPs an entry
# PyTorch's counter leaves attention on a CPU out; its own formulas for that on a GPU are the oracle.
ATEN = torch.ops.aten
ON_CPU = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
}


def needs(name: str) -> dict[str, dict[str, object]]:
    """Return what a recipe with a policy must say besides."""
    sites = sites_of(find_ours()[name])
    return {"backward": {"sites": sites, "exclude": []}} if sites == "nodes" else {}


def _cases() -> list[Any]:
    return [
        pytest.param(name, options, id=f"{name}-{n}", marks=[pytest.mark.long] if name not in OFTEN or n else [])
        for name, settings in SETTINGS.items()
        for n, options in enumerate(settings)
    ]


@pytest.fixture
def uneven(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe of 16 steps over short texts of unlike length, padded, with a limit that is never reached."""
    draw, words = random.Random(0), ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    lines = [
        {"prompt": " ".join(draw.choices(words, k=draw.randint(1, 6))), "completion": draw.choice(words)}
        for _ in range(200)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))

    def make(**sections: Any) -> Recipe:
        given = {"max_steps": 16, "max_flops": 1e30, "per_device_train_batch_size": 4, **sections.pop("training", {})}
        dataset = {"name": str(file), "format": "completion", "max_seq_length": 64, **sections.pop("dataset", {})}
        attention = sections.pop("model", {}).get("attention", "eager")  # whose products PyTorch counts on a CPU
        recipe = tiny_recipe(
            dataset=dataset,
            training=given,
            measure={"probe_every": 8, "fidelity_every": None, "eval_every": 16},
            **sections,
        )
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": attention})})

    return make


@dataclass(frozen=True)
class Spent:
    """FLOPs of a run: of all passes, and of clipping and updates."""

    passes: float
    update: float

    @property
    def total(self) -> float:
        return self.passes + self.update


def spend(
    recipe: Recipe, prepared: Callable[[Recipe], Any], monkeypatch: pytest.MonkeyPatch, by_entry: int = 17
) -> tuple[Spent, Spent]:
    """Train; return the FLOPs that were charged, and those counted in the steps themselves: PyTorch's count of passes,
    and ``by_entry`` for each entry that the optimizer was given a gradient of: 3 to clip (a square, a sum, a product)
    and 14 of AdamW with weight decay, by its equations."""
    AcceleratorState._reset_state(reset_partial_state=True)
    run, counted, entries = prepared(recipe), 0.0, 0
    with JournalWriter(run.path) as journal:
        training = Training.build(Plan.load(run.plan_file), run, journal, StopRequest(), Ranks())
        inner = training._train_step

        def step() -> dict[str, float | None]:
            nonlocal counted
            with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
                values = inner()
            counted += counter.get_total_flops()
            return values

        def count_entries(optimizer: torch.optim.Optimizer, *_: object) -> None:
            nonlocal entries
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            entries += sum(parameter.numel() for parameter in parameters if parameter.grad is not None)

        training.optimizer.optimizer.register_step_pre_hook(count_entries)
        monkeypatch.setattr(training, "_train_step", step)
        training.run_to_end()
    history = History.load(run.path)
    whole, update = (sum(history.series(name).values()) for name in ("flops/step", "flops/update"))
    return Spent(whole - update, update), Spent(counted, float(by_entry * entries))


@pytest.mark.parametrize(("name", "options"), _cases())
def test_a_policy_is_charged_what_it_computes(name, options, uneven, prepared, tiny_folder, monkeypatch) -> None:
    if name == "rho":
        options = options | {"reference": save_reference(tiny_folder)}
    recipe = uneven(policy=[{"name": name, **options}], **needs(name))
    charged, counted = spend(recipe, prepared, monkeypatch, 17 + 2 * (name in OBSERVING))
    # The policy begins in the middle, and its first step is charged by counts of steps without it.
    begins_late = name == "selective-backprop" and not options
    assert charged.passes == pytest.approx(counted.passes, rel=0.02 if begins_late else 0.01), (name, options)
    assert charged.update == pytest.approx(counted.update, rel=0.01), (name, options)
    assert counted.update > 0


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_policy_that_begins_later_is_counted_soon_under_a_limit(noise: float) -> None:
    price, begun, draw = StepPrice(), StepKind(scored=True, shares=(0.5,)), random.Random(0)
    for step in range(1, 800):
        if step == 1 or price.is_due(step, is_limited=True):
            cost = 300.0 * (1 + noise * draw.gauss(0.0, 1.0))
            price.count(CountedPass(cost, 300.0, 0.0, 4.0, 8.0), StepKind(shares=(1.0,)), step)
    price.due = max(price.due, 802)
    assert price.price(800, begun, [(4.0, 8.0)], 0, 0)["flops/step"] > 250.0
    assert price.is_due(801, is_limited=True)
    price.count(CountedPass(200.0, 300.0, 0.0, 4.0, 8.0), begun, 801)
    assert price.price(802, begun, [(4.0, 8.0)], 0, 0)["flops/step"] == 200.0


def test_kinds_that_stay_unknown_do_not_make_every_step_count() -> None:
    price, number = StepPrice(), 0
    for step in range(1, 201):
        if price.is_due(step, is_limited=True) or step == 1:
            number += 1
            price.count(CountedPass(300.0, 300.0, 0.0, 4.0, 8.0), StepKind(shares=(1.0,)), step)
        price.price(step, StepKind(shares=(step / 400,)), [(4.0, 8.0)], 0, 0)
    assert number <= 8 + 4 + 200 // 32


def save_reference(folder: Path) -> str:
    """Save a random model of the tests' tokenizer, once, and return its folder."""
    reference = folder / "reference"
    if not reference.exists():
        config = AutoConfig.for_model(**LLAMA, vocab_size=300)
        AutoModelForCausalLM.from_config(config).save_pretrained(reference)
        shutil.copytree(folder / "tokenizer", reference, dirs_exist_ok=True)
    return str(reference)


def test_batches_by_length_are_charged_for_their_own_length(uneven, prepared, monkeypatch) -> None:
    alike, plain = (spend(uneven(training={"group_by": by}), prepared, monkeypatch) for by in ("length", None))
    assert alike[0].passes == pytest.approx(alike[1].passes, rel=1e-6)
    assert alike[0].passes < 0.95 * plain[0].passes


@pytest.mark.slow
def test_a_step_whose_micro_batches_share_prefixes_is_charged_as_a_whole(uneven, prepared, monkeypatch) -> None:
    policy = {"name": "lossless", "prefixes": "update", "verify": "never"}
    training = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    charged, counted = spend(uneven(policy=[policy], training=training), prepared, monkeypatch)
    assert charged.passes == pytest.approx(counted.passes, rel=0.01)


def test_the_work_of_a_dense_pass_follows_from_its_shape() -> None:
    """Products with weights: 8 by position; attention: 3 by pair of positions, of 4 texts of 16."""
    work = lambda examples, length: examples * (8.0 * length + 3.0 * length**2)  # noqa: E731
    counted = CountedPass(1.0, work(4, 16), 3.0 * 4 * 16**2, 4, 16)
    for shape in ((4, 16), (2, 16), (4, 24), (7, 8)):
        assert counted.scale(shape) == pytest.approx(work(*shape) / work(4, 16))


@pytest.mark.parametrize(
    ("optimizer", "options", "by_entry"),
    [
        ("SGD", {}, 2),
        ("SGD", {"momentum": 0.9}, 4),
        ("AdamW", {}, 14),
        ("AdamW", {"weight_decay": 0.0}, 13),
        ("Adam", {}, 13),
    ],
)
def test_an_update_costs_the_same_as_a_loop_batched_and_fused(optimizer, options, by_entry) -> None:
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        parameter = torch.nn.Parameter(torch.randn(64, 64))
        made = getattr(torch.optim, optimizer)([parameter], lr=0.1, **options, **form)
        for _ in range(2):
            parameter.grad = torch.randn(64, 64)
            with UpdateFlops() as counting:
                made.step()
        assert counting.flops == pytest.approx(by_entry * 64 * 64, rel=1e-3), form


def test_a_counted_update_is_the_update_to_the_bit() -> None:
    ends = []
    for counts in (False, True):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(33, 17))
        made = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = parameter.detach().sin()
            if counts:
                with UpdateFlops():
                    made.step()
            else:
                made.step()
        ends.append(parameter.detach().clone())
    assert torch.equal(*ends)


# Policies whose steps cost unlike amounts: they alternate, freeze for good, draw blocks, or follow what a batch holds.
UNEVEN = {
    "uniform": {"keep": 0.25},
    "layerdrop": {},
    "lossless": {"verify": "never"},
    "grades": {"threshold": 0.9, "relative": True, "grace": 0.3},
    "importance": {},
    "dropbp": {"keep": 0.5},
    "selective-backprop": {},
    "tokens": {"score": "random", "keep": 0.25, "mode": "detach"},
}
ALWAYS = {"uniform", "lossless", "grades"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.long]) for name in UNEVEN]
)
def test_without_a_limit_uneven_steps_are_charged_what_they_compute(name, uneven, prepared, monkeypatch) -> None:
    """Few of them are counted, none by the kind of step that a probe happened to fall on."""
    recipe = uneven(policy=[{"name": name, **UNEVEN[name]}], training={"max_flops": None, "max_steps": 96})
    charged, counted = spend(recipe, prepared, monkeypatch)
    assert charged.passes == pytest.approx(counted.passes, rel=0.03)


def test_a_policy_that_alternates_is_charged_for_each_kind_of_step(uneven, prepared) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    policy = [{"name": "uniform", "keep": 0.25, "start": 0.0, "end": 1.0, "interrupt": 2}]
    run = prepared(uneven(policy=policy, training={"max_flops": None, "max_steps": 40}))
    with JournalWriter(run.path) as journal:
        Training.build(Plan.load(run.plan_file), run, journal, StopRequest(), Ranks()).run_to_end()
    history = History.load(run.path)
    columns = ("flops/step", "flops/update", "flops/step_dense", "flops/update_dense")
    series = zip(*(history.series(name).values() for name in columns), strict=True)
    shares = [(step - update) / (dense - dense_update) for step, update, dense, dense_update in series]
    assert sorted({round(share, 6) for share in shares}) == [0.25, 1.0]
    assert {one != other for one, other in pairwise(shares)} == {True}


def test_counts_tell_of_steps_of_their_kind() -> None:
    known = CountedSteps()
    cost = lambda rows, blocks: 0.1 + 0.6 * rows + 0.3 * blocks  # noqa: E731
    for rows, blocks in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.25, 0.25)):
        known.add(StepKind(scored=False, shares=(rows, blocks, 1.0)), cost(rows, blocks))
    for rows, blocks in ((0.7, 0.6), (0.3, 0.9)):
        kind = StepKind(scored=False, shares=(rows, blocks, 1.0))
        assert known.knows(kind)
        assert known.predict(kind) == pytest.approx(cost(rows, blocks), abs=1e-9)
    assert known.error == pytest.approx(0.0, abs=1e-9)
    assert not known.knows(StepKind(scored=True, shares=(0.7, 0.6, 1.0)))
    assert not known.knows(StepKind(scored=False, shares=(0.1, 0.6, 1.0)))
    # Of steps beyond all that were counted, nothing but those is known.
    assert known.predict(StepKind(scored=False, shares=(0.0, 0.0, 1.0))) == pytest.approx(cost(0.25, 0.25))
    drawn = CountedSteps()
    for share in (0.4, 0.6) * 8:  # for no reason that a step says
        drawn.add(StepKind(shares=(1.0,)), share)
    assert drawn.predict(StepKind(shares=(1.0,))) == pytest.approx(0.5)
    assert drawn.error == pytest.approx(0.1 / 15**0.5 / 0.5)


def test_few_steps_are_counted_without_a_limit() -> None:
    def count(kind_of: Callable[[int], StepKind], share_of: Callable[[int], float]) -> list[int]:
        price, made = StepPrice(), []
        price.see_probe(CountedPass(share_of(1), 1.0, 0.0, 1, 1), kind_of(1))
        for step in range(1, 1001):
            if price.is_due(step, is_limited=False):
                price.count(CountedPass(share_of(step), 1.0, 0.0, 1, 1), kind_of(step), step)
                made.append(step)
            price.price(step, kind_of(step), [(1, 1)], 1, 1)
        return made

    plain = StepKind(shares=(1.0,))
    assert count(lambda _: plain, lambda _: 0.5) == list(range(1, 9))
    late = count(lambda step: StepKind(shares=(1.0 if step < 500 else 0.5,)), lambda step: 1.0 if step < 500 else 0.5)
    assert late[:8] == list(range(1, 9))
    assert len(late) in {9, 10}
    assert 500 <= late[-1] < 520
    random_ones = count(lambda _: plain, lambda step: random.Random(step).random())
    assert 8 < len(random_ones) <= 8 + 1000 // 16
    new_each_time = count(lambda step: StepKind(shares=(random.Random(step).random(),)), lambda _: 0.5)
    assert len(new_each_time) < 40


def test_a_price_goes_on_from_a_checkpoint() -> None:
    price, kind = StepPrice(), StepKind(scored=False, shares=(0.5, 1.0))
    price.see_probe(CountedPass(5.0, 10.0, 1.0, 2, 8), kind)
    for step, policy in enumerate((5.0, 6.0, 5.5), 1):
        price.count(CountedPass(policy, 10.0, 1.0, 2, 8), kind, step)
    price.per_entry = 14.0
    price.see((True, False), 3)
    price.price(3, StepKind(scored=True, shares=(0.1, 1.0)), [(2, 8)], 3, 5)
    assert price.unknown is not None
    resumed = StepPrice()
    resumed.load_state_dict(json.loads(json.dumps(price.state_dict())))
    assert resumed == price
    assert resumed.price(3, kind, [(2, 8)], 3, 5, 2.0) == {
        "flops/step": 5.5 + 14.0 * 3 + 2.0,
        "flops/step_dense": 10.0 + 14.0 * 5,
        "flops/update": 42.0,
        "flops/update_dense": 70.0,
    }
    assert resumed.price(4, kind, [(2, 8)], 0, 5)["flops/step"] == pytest.approx((5.0 + 5.0 + 6.0 + 5.5) / 4)
    older = StepPrice()
    older.load_state_dict({})
    assert older == StepPrice()
    older.load_state_dict({"counted": [5.0, 10.0, 1.0, 2, 8], "per_entry": 14.0})  # of a version that knew no kinds
    assert older.price(4, kind, [(2, 8)], 0, 5)["flops/step"] == 5.0


def test_counts_that_vary_are_made_more_often() -> None:
    def next_after(shares: list[float]) -> int:
        price = StepPrice()
        for step, share in enumerate(shares, 1):
            price.count(CountedPass(share, 1.0, 0.0, 1, 1), StepKind(), step)
        return price.due - len(shares)

    assert next_after([0.5] * 8) == 32
    assert next_after([0.9, *[0.5] * 60]) == 1  # dearer once in many steps
    assert next_after([*[0.9] * 8, *[0.5] * 2000]) == 32  # long ago
    assert next_after([0.5, 0.9] * 4) == 1
    assert next_after([0.5, 0.501] * 500) == 32


def test_a_limit_of_work_says_what_comparisons_it_leaves_out(uneven, prepared) -> None:
    def end_of(verify: str) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        policy = [{"name": "lossless", "verify": verify}]
        run = prepared(uneven(policy=policy, training={"max_flops": 1e7}))
        with JournalWriter(run.path) as journal:
            Training.build(Plan.load(run.plan_file), run, journal, StopRequest(), Ranks()).run_to_end()
        (text,) = [text for _, _, text in History.load(run.path).notes if "max_flops" in text]
        return text

    found = re.search(
        r"\(not counted: (\d+) comparisons .* cost about ([\d.]+) dense steps\); the run ends", end_of("first")
    )
    assert found is not None
    number, cost = int(found[1]), float(found[2])
    assert number < cost < 2 * number  # a plain pass and a packed one, which leaves padding out
    assert "comparisons" not in end_of("never")
