"""Scores of every target, from a forward without dropout and without gradients.

The head runs only for targets, and for a limited number at a time, so that the logits stay small. The model's own
forward runs the head, so that changes of the logits (soft capping, scaling) apply. During this, a function that returns
their earlier output replaces the layers below the head.

Shape letters: B examples, T positions, N rows (= B*T), D width, V vocabulary, K rows at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sparsebp_cli.backward.core.loss_weight import IGNORED
from sparsebp_cli.backward.patch.forward import replace_forwards
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Score

MOST_LOGITS = 1 << 24  # largest number of logits at a time: 64 MiB in float32
_LABELS = ("labels", "num_items_in_batch", "shift_labels")


class HasLogits(Protocol):
    """The part of a model's output that scores need."""

    logits: Tensor


class Scorer:
    """Scores the targets of batches with one model.

    ``what`` names the policy that needs the scores, at the beginning of errors. Raises :class:`UnsupportedError` unless
    the model is a transformers model with a language-modelling head and ``logits_to_keep``.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, what: str) -> None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        base = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
        accepted = inspect.signature(type(model).forward).parameters
        if head is None or not isinstance(base, nn.Module) or "logits_to_keep" not in accepted:
            raise UnsupportedError(
                f"{what} needs a transformers model with a language-modelling head and the argument "
                f"logits_to_keep, got {type(model).__name__}"
            )
        self.model, self._what, self._base = model, what, base
        decoder = getattr(model, "get_decoder", lambda: None)()  # some forwards call the base's decoder directly
        self._bases = [base, *(module for module in base.modules() if module is decoder and module is not base)]
        self.num_tokens: int = head.weight.shape[0]
        self._most_rows = max(1, MOST_LOGITS // self.num_tokens)

    def score(
        self,
        arguments: Mapping[str, object],
        next_BT: Tensor,
        forward: Callable[..., HasLogits],
        wanted: Collection[Score],
    ) -> dict[Score, Tensor]:
        """Run the model by ``forward`` and return each wanted score, (B, T), float32, 0 at positions without target.

        ``next_BT`` is the token that each position predicts, -100 for none. Labels among the arguments are ignored.
        """
        target_N = next_BT.flatten()
        found: dict[Score, Tensor] = {
            name: torch.zeros(target_N.shape, dtype=torch.float32, device=target_N.device) for name in wanted
        }
        with torch.no_grad(), evaluating(self.model):
            rows = (target_N != IGNORED).nonzero()[:, 0]  # waits for a GPU; before the forward the wait is short
            hidden_ND = self._hidden(arguments, forward)
            for row_K in torch.split(rows, self._most_rows):
                logits_KV = self._logits(hidden_ND[row_K], forward)
                for name, score_N in found.items():
                    score_N[row_K] = _SCORES[name](logits_KV, target_N[row_K])
        shape, ignored_BT = next_BT.shape, next_BT == IGNORED
        return {
            name: score_N.view(shape)
            if is_known(score_N)
            else draw_like(score_N).view(shape).masked_fill(ignored_BT, 0.0)
            for name, score_N in found.items()
        }

    def _hidden(self, arguments: Mapping[str, object], forward: Callable[..., HasLogits]) -> Tensor:
        """Return the input of the head, (N, D)."""
        given = {name: value for name, value in arguments.items() if name not in _LABELS}
        kept: list[tuple[nn.Module, Tensor]] = []
        handles = [
            base.register_forward_hook(lambda base, _, output: kept.append((base, output[0]))) for base in self._bases
        ]
        try:
            # Run the head for one unused position. The logits of the targets follow in pieces.
            forward(**(given | {"use_cache": False, "logits_to_keep": 1}))
        finally:
            for handle in handles:
                handle.remove()
        if not kept:
            raise UnsupportedError(
                f"{self._what} needs a model that calls its base model; {type(self.model).__name__} does not"
            )
        self._base, hidden = kept[-1]  # the outermost module ends last
        return hidden.flatten(0, -2)

    def _logits(self, hidden_KD: Tensor, forward: Callable[..., HasLogits]) -> Tensor:
        """Return the logits of some rows, (K, V), float32."""
        output = _hidden_class()(last_hidden_state=hidden_KD[None])
        with replace_forwards([(self._base, lambda *_, **__: output)]):
            logits: Tensor = forward(
                input_ids=torch.zeros(1, len(hidden_KD), dtype=torch.int64, device=hidden_KD.device)
            ).logits[0]
        return logits.float()


def is_known(score: Tensor) -> bool:
    """Return whether a score has values. In a forecast, which runs a step with fake tensors on the CPU, it has none."""
    return not (hasattr(score, "fake_mode") and score.device.type == "cpu")


def draw_like(score: Tensor) -> Tensor:
    """Return random numbers instead of a score without values. A choice by them has the same size as a real one, among
    the same candidates."""
    return torch.rand(score.shape, generator=torch.Generator().manual_seed(0))


def real_positions(arguments: Mapping[str, object], like_BT: Tensor) -> Tensor:
    """Return which positions are not padding, as a boolean (B, T), by a two-dimensional ``attention_mask`` alone."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask != 0
    return torch.ones_like(like_BT, dtype=torch.bool)


def next_tokens(labels_BT: Tensor) -> Tensor:
    """Return the token that each position predicts, (B, T), -100 where there is none.

    ``labels_BT`` has transformers' form: the entry at t is the token at t.
    """
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED)


@cache
def _hidden_class() -> Callable[..., object]:
    # transformers takes seconds to import, and only models that score need it.
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    class Hidden(BaseModelOutputWithPastAndCrossAttentions):
        """The output of the layers below the head. Other fields, such as routers' logits, are None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    return Hidden


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block, and restore each module's mode afterwards."""
    # Not model.train() afterwards: modules that the script has in eval mode stay in it.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _loss(logits_KV: Tensor, target_K: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_KV, target_K, reduction="none")


def _entropy(logits_KV: Tensor, _: Tensor) -> Tensor:
    log_share_KV = logits_KV.log_softmax(-1)
    return -(log_share_KV.exp() * log_share_KV).sum(-1)


def gradient_norm(logits_KV: Tensor, target_K: Tensor) -> Tensor:
    """Return the 2-norm of the gradient of each row's loss with respect to its logits, (K,). This gradient is the
    probabilities, minus 1 at the target."""
    share_KV = logits_KV.softmax(-1)
    share_KV.scatter_add_(1, target_K[:, None], share_KV.new_full((len(target_K), 1), -1.0))
    norm_K: Tensor = torch.linalg.vector_norm(share_KV, dim=-1)
    return norm_K


_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss": _loss,
    "entropy": _entropy,
    "gradient_norm": gradient_norm,
}
