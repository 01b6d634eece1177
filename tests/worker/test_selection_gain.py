"""Whether choosing can pay: norms with known answers, figures that were derived by hand, and what a run says of it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import nn

from sparsebp_cli.plan.selection_gain import SelectionGain, effective_share, max_gain
from sparsebp_cli.run import History
from sparsebp_cli.worker.selection_gain import NormSums, RowNorms, head_ess, head_norms
from tests.worker.conftest import FORKS, work


@pytest.mark.parametrize(("wrong", "number"), [(1, 8), (4, 8), (8, 8)])
def test_the_effective_size_leaves_out_targets_that_are_certain(wrong: int, number: int) -> None:
    """A certain and right prediction has no gradient, a certain and wrong one sqrt(2)."""
    labels_BT = torch.zeros(1, number + 1, dtype=torch.int64)
    logits_BTV = torch.zeros(1, number + 1, 5)
    logits_BTV[0, :, 0] = 1e4
    logits_BTV[0, :wrong] = torch.tensor([0.0, 1e4, 0.0, 0.0, 0.0])
    (norms,) = head_norms(logits_BTV, labels_BT)
    assert norms.tolist() == pytest.approx([2**0.5] * wrong + [0.0] * (number - wrong))
    assert head_ess(logits_BTV, labels_BT)["targets"] == pytest.approx(wrong / number)


def test_norms_at_the_head_are_those_of_the_gradient_that_autograd_takes() -> None:
    torch.manual_seed(0)
    logits_BTV, labels_BT = torch.randn(3, 6, 11), torch.randint(0, 11, (3, 6))
    labels_BT[1, :4] = -100
    found = list(head_norms(logits_BTV, labels_BT))
    squares = []
    for example in range(3):
        kept = [(t, int(labels_BT[example, t + 1])) for t in range(5) if labels_BT[example, t + 1] != -100]
        slow = []
        for position, label in kept:
            logits = logits_BTV[example, position].clone().requires_grad_()
            nn.functional.cross_entropy(logits, torch.tensor(label)).backward()
            assert logits.grad is not None
            slow.append(float(logits.grad.norm()))
        assert found[example].tolist() == pytest.approx(slow, rel=1e-4)
        squares.append(sum(norm**2 for norm in slow))
    every = torch.cat(found).double()
    ess = head_ess(logits_BTV, labels_BT)
    assert ess["targets"] == pytest.approx(float(every.sum() ** 2 / (len(every) * every.square().sum())))
    of_examples = torch.tensor(squares).double().sqrt()
    assert ess["examples"] == pytest.approx(float(of_examples.sum() ** 2 / (3 * of_examples.square().sum())), rel=1e-4)


def test_a_classification_has_one_target_an_example() -> None:
    ess = head_ess(torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]))
    assert ess["targets"] == pytest.approx(ess["examples"])


def test_rows_at_a_linear_weigh_what_they_add_to_the_gradient_of_its_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x_N = torch.randn(7, 4)
    rows = RowNorms()
    with rows.of(model, ["0", "2"]):
        model(x_N).square().sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    for name, layer in (("0", model[0]), ("2", model[2])):
        slow = NormSums()
        for n in range(7):  # rows do not meet in this model, so each has the gradient that it has alone
            model.zero_grad()
            model(x_N[n : n + 1]).square().sum().backward()
            slow.add(layer.weight.grad.norm())
        assert rows.sums[name].effective == pytest.approx(slow.effective, rel=1e-5)
    assert rows.effective == pytest.approx((rows.sums["0"].effective + rows.sums["2"].effective) / 2)


@pytest.mark.parametrize(
    ("effective", "gain"), [(1.0, 1.0), (0.87, 1.09), (0.84, 1.12), (0.58, 1.39), (0.25, 2.0), (1e-9, 3.0)]
)
def test_the_most_that_choosing_gains_is_what_was_derived(effective: float, gain: float) -> None:
    assert max_gain(effective) == pytest.approx(gain, abs=0.005)


@pytest.mark.parametrize(("keep", "worth", "highest"), [(0.5, 4 / 3, 0.75), (0.25, 2.0, 0.5), (0.1, 4.0, 0.25)])
def test_what_a_kept_token_must_be_worth_and_where_choosing_can_pay(keep: float, worth: float, highest: float) -> None:
    ratio = (1 + 2 * keep) / 3
    for effective in (highest - 0.01, highest + 0.01):
        found = SelectionGain(ratio, ratio, keep, "targets", {"targets": effective})
        assert found.unit_worth == pytest.approx(worth)
        assert found.can_pay is (effective < highest)
        cost, choice = found.lines()
        assert f"the first step take {ratio:.2f} of the FLOPs of a dense step" in cost
        assert "`sparsebp worth RECIPE`" in cost
        assert f"only below {highest:.2f}, so it {'can' if found.can_pay else 'cannot'} pay" in choice
        assert "an upper bound: it assumes that the sizes are known at no cost" in choice
    assert (
        SelectionGain(ratio, ratio, keep, "targets", {"targets": 1.0}).can_pay is False
    )  # equal norms: as if drawn uniformly


def test_nothing_is_said_of_a_choice_that_is_not_made() -> None:
    assert effective_share(0.0, 0.0, 4) is None
    dense = SelectionGain(1.0, 1.1, None, None, {"targets": 0.87})
    assert (dense.unit_worth, dense.can_pay) == (None, None)
    (line,) = dense.lines()
    assert "times its cost in dense training: targets 1.09 times (0.87)" in line
    assert "norm" not in line  # words for somebody outside of the project
    entries = SelectionGain(0.6, 0.7, 0.25, "entries", {"targets": 0.87, "rows": 0.5})
    assert entries.can_pay is None
    (line,) = entries.lines()
    assert entries.unit_worth == pytest.approx(2.4)
    assert "keeps 25% of the entries. `sparsebp worth RECIPE` estimates whether it can beat" in line


@pytest.mark.parametrize(
    ("policy", "unit"),
    [
        ({"name": "tokens", "score": "random", "keep": 0.25, "mode": "detach"}, "targets"),
        ({"name": "uniform", "keep": 0.25, "start": 0.0, "end": 1.0, "interrupt": 0}, "examples"),
        ({"name": "topk", "keep": 0.25, "along": "rows"}, "rows"),
        ({"name": "topk", "keep": 0.25, "along": "columns"}, "entries"),
        ({"name": "dense"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_a_run_says_before_its_first_step_what_a_kept_unit_must_be_worth(
    tiny_recipe: Any, prepared: Any, policy: dict[str, Any], unit: str
) -> None:
    measure = {"probe_every": 9, "fidelity_every": None, "warmup_steps": 0, "eval_every": 9}
    run = prepared(tiny_recipe(policy=[policy], measure=measure, training={"max_steps": 1}))
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    notes = [text for _, level, text in history.notes if level == "info" and "of the first step take" in text]
    details = [text for _, level, text in history.notes if level == "detail"]  # for show alone
    for name in ("choice/ess", "choice/example_ess", "choice/row_ess"):
        assert list(history.series(name)) == [0]
        assert 0 < history.last(name) <= 1
    ratio, share = history.last("choice/cost_ratio"), history.last("choice/share")
    if unit:
        assert share == pytest.approx(0.25, abs=0.02)
        assert share - 1e-9 <= ratio < 1
        assert history.last("choice/worth") == pytest.approx(ratio / share)
        assert f"keeps {share:.0%} of the {unit}" in notes[0]
        assert (len(notes), len(details)) == (1, 0 if unit == "entries" else 1)
    else:
        assert ratio == 1.0
        assert share is None
        assert notes == []
        assert [text.partition(" at most")[0] for text in details] == ["choosing by gradient size could replace"]


def _preview(plan_file: Any) -> None:
    from sparsebp_cli.worker.answer import answer
    from sparsebp_cli.worker.preview import measure_first_batch

    out = os.open(plan_file.parent / "out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    answer(lambda: measure_first_batch(plan_file))


def test_a_preview_tells_the_same_as_the_run_and_trains_nothing(tiny_recipe: Any, prepared: Any) -> None:
    policy = [{"name": "tokens", "score": "loss", "keep": 0.25, "mode": "detach"}]
    recipe = tiny_recipe(policy=policy, measure={"probe_every": 9, "fidelity_every": None}, training={"max_steps": 1})
    run, looked = prepared(recipe), prepared(recipe)
    assert work(run) == 0, run.log_file.read_text()
    process = FORKS.Process(target=_preview, args=(looked.plan_file,))
    process.start()
    process.join()
    told = json.loads((looked.path / "out").read_text().splitlines()[-1])
    history = History.load(run.path)
    for name, value in told["values"].items():
        if name != "choice/seconds_ratio" and value is not None:
            assert value == pytest.approx(history.last(name), rel=1e-6), name
    assert [line.partition(" ")[0] for line in told["lines"]] == ["forward", "choosing"]
    assert not History.load(looked.path).metrics
    assert not (looked.path / "model").exists()
