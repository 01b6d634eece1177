"""How near gradients are: held against plain arithmetic on whole tensors in double precision."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor

import sparsebp_cli as sbp
from sparsebp_cli.backward import GradientComparison, compare_gradients
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.policy import Step

from .conftest import tiny_model, tokens

SHAPES = {"layers.0.weight": (7, 5), "layers.0.bias": (7,), "layers.1.weight": (3, 7), "head.weight": (4, 3)}


def _part_of(name: str) -> str:
    return name.rpartition(".")[0]


def _gradients(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _flat(gradients: dict[str, Tensor | None], part: str = "") -> Tensor:
    some = [(n, g) for n, g in gradients.items() if not part or _part_of(n) == part]
    return torch.cat(
        [torch.zeros(SHAPES[n]).double().flatten() if g is None else g.double().flatten() for n, g in some]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_part_and_all_together_are_compared_as_one_vector_each(dtype: torch.dtype) -> None:
    dense, ours = _gradients(0, dtype), _gradients(1, dtype)
    dense["layers.0.bias"] = None
    ours["head.weight"] = None
    ours["layers.1.weight"][0, :2] = 0.0  # type: ignore[index]
    comparison = GradientComparison(dense, _part_of)
    comparison.add_draw(ours)
    assert list(comparison.by_part()) == ["layers.0", "layers.1", "head"]
    for part, found in {"": comparison.overall(), **comparison.by_part()}.items():
        a, b = _flat(ours, part), _flat(dense, part)
        expected = float(a @ b / a.norm() / b.norm()) if a.norm() else None
        assert found.cosine == (None if expected is None else pytest.approx(expected, rel=1e-12))
        assert found.relative_error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
        signs = (a.sign() == b.sign())[b != 0].double().mean()
        assert found.sign_agreement == pytest.approx(float(signs), rel=1e-12)
        assert (found.bias, found.bias_standard_error, found.variance) == (None, None, None)
    assert comparison.by_part()["head"].cosine is None
    assert comparison.by_part()["head"].sign_agreement == 0.0


def test_a_gradient_that_is_zero_or_missing_everywhere_has_no_cosine() -> None:
    for dense in ([None], [torch.zeros(3)]):
        found = compare_gradients([torch.ones(3)], dense)
        assert (found.cosine, found.relative_error, found.sign_agreement) == (None, None, None)
    found = compare_gradients([None], [None])
    assert (found.cosine, found.relative_error, found.sign_agreement) == (None, None, None)
    found = compare_gradients([torch.zeros(3)], [torch.ones(3)])
    assert (found.cosine, found.relative_error, found.sign_agreement) == (None, 1.0, 0.0)


def test_what_is_not_a_number_stays_none() -> None:
    found = compare_gradients([torch.tensor([math.nan, 1.0])], [torch.ones(2)])
    assert found.cosine is not None
    assert math.isnan(found.cosine)


def test_tensors_of_many_pieces_and_odd_layouts_are_compared_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(1031, 2053, generator=generator)
    ours = (dense + torch.randn(2053, 1031, generator=generator).t() / 10).t().contiguous().t()
    assert not ours.is_contiguous()
    found = compare_gradients([ours], [dense])
    a, b = ours.double(), dense.double()
    assert found.relative_error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), rel=1e-12)


@pytest.mark.parametrize("num_draws", [2, 7])
def test_bias_and_variance_are_those_of_the_draws(num_draws: int) -> None:
    dense, draws = _gradients(0), [_gradients(seed) for seed in range(1, num_draws + 1)]
    draws[0]["layers.1.weight"] = None
    comparison = GradientComparison(dense, _part_of, num_draws=num_draws)
    for draw in draws:
        comparison.add_draw(draw)
    assert comparison.is_random
    for part, found in {"": comparison.overall(), **comparison.by_part()}.items():
        truth, stack = _flat(dense, part), torch.stack([_flat(draw, part) for draw in draws])
        variance = float(stack.var(0).sum())
        norm = float(truth.norm())
        assert found.bias == pytest.approx(float((stack.mean(0) - truth).norm()) / norm, rel=1e-6)
        assert found.variance == pytest.approx(variance / norm**2, rel=1e-6)
        assert found.bias_standard_error == pytest.approx(math.sqrt(variance / num_draws) / norm, rel=1e-6)
        errors = [float((row - truth).norm()) / norm for row in stack]
        assert found.relative_error == pytest.approx(sum(errors) / num_draws, rel=1e-9)


def test_draws_that_do_not_differ_have_neither() -> None:
    dense, ours = _gradients(0), _gradients(1)
    comparison = GradientComparison(dense, num_draws=3)
    for _ in range(3):
        comparison.add_draw(ours)
    assert not comparison.is_random
    found = comparison.overall()
    assert (found.bias, found.bias_standard_error, found.variance) == (None, None, None)


def test_a_small_variance_beside_a_large_gradient_is_not_lost() -> None:
    """The sums are those of the errors: those of the gradients themselves would cancel."""
    generator = torch.Generator().manual_seed(0)
    dense = {"w": 1000 * torch.randn(400, 50, generator=generator)}
    draws = [{"w": dense["w"] + 1e-2 * torch.randn(400, 50, generator=generator)} for _ in range(4)]
    comparison = GradientComparison(dense, num_draws=4)
    for draw in draws:
        comparison.add_draw(draw)
    stack = torch.stack([draw["w"].double().flatten() for draw in draws])
    expected = float(stack.var(0).sum() / dense["w"].double().square().sum())
    assert comparison.overall().variance == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "unbiased"),
    [
        ({"along": "columns", "weighted": True}, True),
        ({"along": "columns", "weighted": False}, False),
        ({"along": "rows", "weighted": True}, True),
    ],
    ids=["columns", "columns-unweighted", "rows"],
)
def test_bias_is_within_chance_for_an_unbiased_policy_and_beyond_for_a_biased_one(
    options: dict[str, object], unbiased: bool
) -> None:
    """One linear: what is unbiased at a site is unbiased in its weight's gradient."""
    policy = sbp.make_policy("random", keep=0.5, **options)
    assert policy.unbiased is unbiased
    generator, num_draws = torch.Generator().manual_seed(1), 60
    model = torch.nn.Linear(12, 128)
    x, wanted = (torch.randn(40, width, generator=generator) for width in (12, 128))

    def gradients(engine: object = None, draw: int = 0) -> dict[str, Tensor | None]:
        model.zero_grad()
        loss = (model(x) * wanted).sum()
        if engine is None:
            loss.backward()
        else:
            with engine.probing(draw):  # type: ignore[attr-defined]
                engine.backward(loss)  # type: ignore[attr-defined]
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    dense = gradients()
    comparison = GradientComparison(dense, num_draws=num_draws)
    with sbp.attach(model, [policy]) as engine:
        for draw in range(1, num_draws + 1):
            comparison.add_draw(gradients(engine, draw))
    found = comparison.overall()
    assert found.bias is not None
    assert found.bias_standard_error is not None
    ratio = found.bias / found.bias_standard_error
    assert (0.8 < ratio < 1.25) if unbiased else ratio > 4
    if not unbiased:  # half of the columns, unweighted: the mean is half of the gradient
        assert found.bias == pytest.approx(0.5, abs=0.1)


@pytest.mark.model
def test_parts_are_layers_and_the_modules_outside_of_them() -> None:
    model = tiny_model("llama")
    layers = LayerNumbers(model)
    parts = list(dict.fromkeys(layers.part_of(name) for name, _ in model.named_parameters()))
    assert parts == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert layers.part_of("model.layers.1.mlp.MulBackward0.0") == "model.layers.1"
    assert layers.part_of("lm_head.MmBackward0.3") == "lm_head"
    assert layers.part_of("MeanBackward0.0") == ""


@pytest.mark.model
def test_exact_policies_have_no_error_at_all() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    model(input_ids=ids, labels=ids).loss.backward()
    dense = [p.grad for p in model.parameters()]
    model.zero_grad()
    with sbp.attach(model, [sbp.make_policy("topk", keep=1.0)]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
    found = compare_gradients([p.grad for p in model.parameters()], dense)
    assert (found.cosine, found.relative_error, found.sign_agreement) == (pytest.approx(1.0, abs=1e-15), 0.0, 1.0)


def test_random_draws_differ_from_those_of_training() -> None:
    policy = sbp.make_policy("random", keep=0.5)
    grad_NO = torch.randn(32, 8)
    site = sbp.policy.Site("layer", 8, (32,))
    chosen = [policy.select(grad_NO, site, Step(0, draw=draw)).index_K.tolist() for draw in range(4)]  # type: ignore
    assert len({tuple(rows) for rows in chosen}) == 4


def test_a_comparison_keeps_no_draw() -> None:
    """Of one draw nothing but sums; from two on one more set of tensors, whatever their number."""
    for num_draws, sets in ((1, 1), (2, 2), (5, 2)):
        comparison = GradientComparison(_gradients(0), num_draws=num_draws)
        draws = [_gradients(seed) for seed in range(1, num_draws + 1)]
        alive = [weakref.ref(grad) for draw in draws for grad in draw.values()]
        for draw in draws:
            comparison.add_draw(draw)
        del draw, draws
        assert not [ref for ref in alive if ref() is not None]
        held = [t for store in vars(comparison).values() if isinstance(store, dict) for t in store.values()]
        assert sum(isinstance(t, Tensor) for t in held) == sets * len(SHAPES)
