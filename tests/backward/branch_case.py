"""One step of a tiny model with a policy at its branches, and how two such steps are held against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import Report
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step
from tests.selector import Promises

from .conftest import tokens

ROWS = sbp.make_policy("topk", keep=0.3, along="rows")
IDS = tokens(1, batch=3)
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[1, :5] = 0
RIGHT[2, 11:] = 0


@dataclass
class Outcome:
    """What one step left behind."""

    loss: float
    gradients: dict[str, Tensor | None]
    generator: Tensor
    report: Report | None


def step(
    model: nn.Module,
    policy: GradientSelector | None,
    *,
    inputs: Sequence[dict[str, Any]] = ({},),
    autocast: bool = False,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    plain: bool = False,
    **options: Any,
) -> Outcome:
    """Run forward and backward once for each micro-batch.

    Args:
        model: A model that no engine has been attached to.
        policy: Policy at its branches; None: dense.
        inputs: Arguments of each micro-batch, beside the tokens.
        autocast: Whether the forward is cast to bfloat16.
        prepare: Changes the model before the engine is attached.
        plain: Whether PyTorch's own backward runs, without an engine.
        **options: Options of ``attach``.
    """
    prepare(model)
    engine = None if plain else sbp.attach(model, [policy] if policy else [], sites="branches", **options)
    torch.manual_seed(5)  # of dropout
    total = 0.0
    for extra in inputs:
        given = {"input_ids": IDS, "labels": IDS} | extra
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**given).loss / len(inputs)
        engine.backward(loss) if engine else loss.backward()
        total += loss.item()
    report = engine.report() if engine else None
    if engine:
        engine.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Outcome(total, gradients, torch.get_rng_state(), report)


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float) -> None:
    """Fail unless loss and generator are the same, and gradients as near as the tolerance, by each one's largest."""
    assert ours.loss == theirs.loss
    assert torch.equal(ours.generator, theirs.generator)
    assert ours.gradients.keys() == theirs.gradients.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.gradients.values() if grad is not None)
    far = {}
    for name, expected in theirs.gradients.items():
        grad = ours.gradients[name]
        assert (grad is None) == (expected is None), name
        if grad is None or expected is None:
            continue
        assert grad.isfinite().all(), name
        # Where a query sees one key alone its gradient is zero, but for rounding.
        error = float((grad - expected).abs().max() / expected.abs().max().clamp(min=1e-3 * largest))
        if error > tolerance:
            far[name] = error
    assert far == {}
    assert largest > 0.0


def assert_fast_is_reference(
    make: Callable[[], nn.Module],
    policy: GradientSelector = ROWS,
    *,
    tolerance: float = 1e-12,
    checkpointing: Sequence[str] = ("none", "sparse"),
    **options: Any,
) -> Outcome:
    """Fail unless both ways of sparse recompute give what masking and multiplying all gives.

    Returns:
        The last of them.
    """
    reference = step(make(), policy, execution="reference", **options)
    for kept in checkpointing:
        fast = step(make(), policy, checkpointing=kept, **options)
        assert_same(fast, reference, tolerance)
        assert fast.report is not None
        assert reference.report is not None
        shares = [[site.kept_share for site in report.sites] for report in (fast.report, reference.report)]
        assert shares[0] == shares[1]
    return fast


class RandomWeights(Promises):
    """Keep given rows, each with a weight of its own."""

    rows: tuple[int, ...]
    examples: int = 1

    @property
    def selection(self) -> type[Selection]:
        from sparsebp_cli.policy import Rows

        return Rows

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection:
        from sparsebp_cli.policy import Rows

        index_K = torch.tensor(self.rows, dtype=torch.int64)
        weight_K = torch.rand(len(self.rows), generator=step.generator(site)) + 0.5
        return Rows(index_K, weight_K, self.examples)
