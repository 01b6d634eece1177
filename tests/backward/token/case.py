"""One step of a tiny decoder with chosen positions, and batches of every shape that selection must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.policy import Score, Step, TokenChoice, Tokens, TokenSelector
from sparsebp_cli.policy.token import TokenMode
from tests.backward.conftest import VOCABULARY
from tests.promise import Nothing

IGNORED = -100
LENGTH = 16


@final
class Marked(Nothing, TokenSelector):
    """Trains and carries what two columns of the batch say."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset()

    @property
    def budget(self) -> float | None:
        return None

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"trained", "carries"})

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        trained_BT = tokens.columns["trained"] & tokens.target_BT
        return TokenChoice(trained_BT, tokens.columns["carries"] | trained_BT)


@dataclass(frozen=True)
class Batch:
    """The forward's arguments, and what is chosen."""

    inputs: dict[str, Any]
    trained: Tensor
    carries: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        return self.inputs | {"trained": self.trained, "carries": self.carries}


def random_ids(batch: int = 3, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_batch(
    name: str, mask: Literal["none", "left", "right", "packed"] = "none", batch: int = 3, length: int = LENGTH
) -> Batch:
    """Return a batch.

    Args:
        name: Trained positions: ``scattered``, ``prompt`` of one length, ``prompts`` of several, ``two`` of the batch,
            ``half`` of which only every other one is trained.
        mask: Padding or packing.
        batch: Number of examples.
        length: Positions of each example.
    """
    ids = random_ids(batch, length)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    real = torch.ones(batch, length, dtype=torch.bool)
    if mask in ("left", "right"):
        for example in range(batch):
            pad = 2 * example
            real[example, :pad] = mask != "left"
            real[example, length - pad :] = mask != "right"
        inputs |= {"attention_mask": real.long()}
        inputs["labels"] = ids.masked_fill(~real, IGNORED)
    if mask == "packed":
        inputs |= {"use_cache": False}  # with a cache transformers does not see that sequences are packed
        inputs |= {"position_ids": torch.cat([torch.arange(7), torch.arange(length - 7)]).expand(batch, -1)}
    generator = torch.Generator().manual_seed(7)
    first = torch.zeros(batch, length, dtype=torch.bool)
    position = torch.arange(length).expand(batch, -1)
    chosen = {
        "scattered": lambda: torch.rand(batch, length, generator=generator) < 0.4,
        "prompt": lambda: position >= 9,
        "prompts": lambda: position >= 8 + 2 * torch.arange(batch)[:, None],
        "two": lambda: first.index_put((torch.tensor([0, batch - 1]), torch.tensor([6, 11])), torch.tensor(True)),
        "half": lambda: position >= 5,
    }[name]()
    trained = chosen & (position % 2 == 1) if name == "half" else chosen
    return Batch(inputs, trained & real, chosen & real)


@dataclass
class Outcome:
    """What one step left behind. No report: it runs the model densely on tensors without values, which takes four
    times as long as the step; test_work.py has it of every family."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def step(
    model: nn.Module,
    batch: Batch,
    mode: TokenMode,
    *,
    execution: str = "fast",
    around: Callable[[], Any] = torch.enable_grad,
    extra: dict[str, Any] | None = None,
) -> Outcome:
    """Run forward and backward once; the model is given back."""
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, [Marked(mode=mode)], execution=execution) as attached:
        with around():
            loss = model(**batch.arguments, **(extra or {})).loss
        attached.backward(loss)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return Outcome(loss.detach(), gradients)


def detaching_projections(model: nn.Module, carries: Tensor) -> list[Any]:
    """Detach what key and value projections give at positions that carry no gradient; returns the hooks' handles."""

    def detach(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.where(carries[..., None], output, output.detach())

    projections = [m for name, m in model.named_modules() if name.endswith(("k_proj", "v_proj"))]
    return [module.register_forward_hook(detach) for module in projections]


def plain_step(
    model: nn.Module, batch: Batch, around: Callable[[], Any] = torch.enable_grad, extra: dict[str, Any] | None = None
) -> Outcome:
    """Run transformers' own forward and PyTorch's own backward, with a label for trained positions alone."""
    model.zero_grad(set_to_none=True)
    labels = batch.inputs["labels"].clone()
    labels[:, 0] = IGNORED
    labels[:, 1:][~batch.trained[:, :-1]] = IGNORED
    with around():
        loss = model(**(batch.inputs | {"labels": labels} | (extra or {}))).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return Outcome(loss.detach(), gradients)


def assert_near(ours: Outcome, theirs: Outcome, tolerance: float = 1e-5) -> None:
    """Fail unless loss and gradients are as near as the tolerance, relative to the whole gradient."""
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=0.0)
    assert ours.gradients.keys() == theirs.gradients.keys()
    far = {}
    for name, expected in theirs.gradients.items():
        got = ours.gradients[name]
        assert (got is None) == (expected is None), name
        if expected is not None and got is not None:
            size = float(expected.norm())
            error = float((got - expected).norm())
            if error > tolerance * max(size, 1e-3):
                far[name] = (error, size)
    assert not far
