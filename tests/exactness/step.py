"""Loss and gradients of one step, and how far one is from another; each text of a batch computed alone.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput

from tests.exactness.batch import IGNORED


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step, by parameter."""

    loss: float
    grads: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, loss: float, scale: float = 1.0) -> Step:
        """Take a copy of the gradients of a model's trained parameters, without the factor of their loss."""
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = tuple(torch.zeros_like(p) if p.grad is None else p.grad.detach() / scale for p in trained)
        return cls(loss, grads)

    @property
    def is_finite(self) -> bool:
        """Whether the gradients are: the mean loss of a batch without a label is no number, and its gradient is 0."""
        return all(bool(g.isfinite().all()) for g in self.grads)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is differentiated."""
        return not any(bool(g.any()) for g in self.grads)

    def error(self, other: Step) -> float:
        """Return the largest error of a row of a gradient, and of the loss, relative to this one's rows; infinite where
        the other one is no number."""
        if math.isnan(self.loss) != math.isnan(other.loss) or not other.is_finite:
            return math.inf
        worst = 0.0 if math.isnan(self.loss) else abs(other.loss - self.loss) / max(abs(self.loss), 1e-3)
        pairs = [_by_row(*both) for both in zip(self.grads, other.grads, strict=True)]
        # A row of nearly nothing, such as a bias of keys has, is judged beside the others.
        least = max(1e-3 * max((float(one.norm(dim=-1).mean()) for one, _ in pairs), default=0.0), 1e-9)
        for one, two in pairs:
            size = one.norm(dim=-1)
            floor = max(float(size.square().mean().sqrt()), least)
            worst = max(worst, float(((two - one).norm(dim=-1) / size.clamp_min(floor)).max()))
        return worst


def _by_row(*grads: Tensor) -> list[Tensor]:
    return [g.double().flatten(0, -2) if g.dim() > 1 else g.double().reshape(1, -1) for g in grads]


class Alone:
    """Runs each text of a batch by itself, without padding and masks, and returns their logits at their places."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **batch: Any) -> CausalLMOutput:
        """Return logits (0 at padding) and, with labels, the mean cross-entropy."""
        name = "input_ids" if "input_ids" in batch else "inputs_embeds"
        ids = batch[name][..., 0] if batch[name].dim() == 3 else batch[name]  # or of their shape
        real = batch.get("attention_mask", torch.ones(ids.shape)).bool()
        given = batch.get("position_ids")
        given = None if given is None else given.expand(ids.shape)  # one row may stand for all
        rows = []
        for row in range(len(ids)):
            columns = real[row].nonzero()[:, 0]
            cuts = []
            if given is not None and "attention_mask" not in batch:
                cuts = ((given[row].diff() != 1).nonzero()[:, 0] + 1).tolist()
            parts = []
            for part in columns.tensor_split(cuts):
                if len(part):
                    own = {} if given is None else {"position_ids": given[row, part][None]}
                    own[name] = batch[name][row, part][None]
                    parts.append((part, self._model(use_cache=False, **own).logits[0]))
            rows.append(_place(parts, ids.shape[1]))
        width = max(row.shape[1] for row in rows)
        logits = torch.stack([row if row.shape[1] else row.new_zeros(len(row), width) for row in rows])
        labels = batch.get("labels")
        return CausalLMOutput(loss=None if labels is None else _loss(logits, labels, batch), logits=logits)


class AloneWhereRestarting(Alone):
    """Runs the texts of rows in which positions restart by themselves, and every other batch as it is."""

    def __call__(self, **batch: Any) -> Any:
        """Return what the model does, or the logits of each text."""
        return super().__call__(**batch) if restarts(batch) else self._model(**batch)

    def mixes(self, batch: dict[str, Any]) -> bool:
        """Return whether the plain forward lets texts of a row read each other."""
        if not restarts(batch):
            return False
        given = {name: value for name, value in batch.items() if name != "labels"}
        was_training = self._model.training
        self._model.eval()  # dropout of adapters draws another mask for each forward
        with torch.no_grad():
            plain, own = self._model(**given).logits.float(), super().__call__(**given).logits.float()
        self._model.train(was_training)
        return float((plain - own).norm()) > 1e-3 * float(own.norm())


class AloneWithoutCache(AloneWhereRestarting):
    """Runs only those of these texts by themselves whose forward is told to make no cache: others are one text."""

    def __call__(self, **batch: Any) -> Any:
        """Return what the model does, or the logits of each text."""
        return self._model(**batch) if batch.get("use_cache") is not False else super().__call__(**batch)


def restarts(batch: dict[str, Any]) -> bool:
    """Return whether positions of a batch do not follow each other, and no mask says that a row is one text."""
    given = batch.get("position_ids")
    return given is not None and "attention_mask" not in batch and bool((given.diff() != 1).any())


def _place(parts: list[tuple[Tensor, Tensor]], length: int) -> Tensor:
    if not parts:
        return torch.zeros(length, 0)
    columns, values = torch.cat([part for part, _ in parts]), torch.cat([z for _, z in parts])
    return values.new_zeros(length, values.shape[-1]).index_copy(0, columns, values)


def _loss(logits: Tensor, labels: Tensor, batch: dict[str, Any]) -> Tensor:
    target = labels[:, 1:]
    total = cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / batch.get("num_items_in_batch", (target != IGNORED).sum())
