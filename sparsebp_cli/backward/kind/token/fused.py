"""Token selection under trl's fused head, where the trainer computes its own loss from log-probabilities.

The trainer's loss and log read the values of all labels, so the head computes all of them, without a graph. The policy
chooses rows of the head's backward. The gradient of each log-probability is multiplied by the token's weight. Then the
head runs again, with a graph, for rows whose gradient is not zero. The model's gradient is linear in the gradient at
the head. So tokens drawn with known probabilities and weighted by their inverse have the gradient of all tokens as
their mean over draws, for any loss of the values: divergences, clipped ratios, sums.

Shape letters: B examples, T positions, R labels, K rows of the head's backward, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.decoder.decoder import refuse_routers
from sparsebp_cli.backward.kind.fused_head import ARGUMENT, IGNORED, LEFT, FusedHeadExtension
from sparsebp_cli.backward.kind.model_output import with_changes
from sparsebp_cli.backward.patch.forward import (
    ForwardOverride,
    ModulePlaces,
    call_module,
    replace_forwards,
    uncompiled,
)
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import ReadTokens, Score, TokenChoice, Tokens, TokenSelector, returned

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.policy_state import PolicyStates

NEEDED = (
    "with this head, token selection supports only mode: exact, within: batch and random, loss or entropy "
    "scores, without a data column"
)
_DIFFERENTIABLE = ("log_probs", "entropy")  # outputs of trl's head with a gradient, a number for each label


@final
class FusedTokens(FusedHeadExtension[TokenSelector]):
    """A token selector in a model with trl's fused head.

    Raises :class:`UnsupportedError` for a selector that needs values that the head does not return.
    """

    places: ModulePlaces

    def __init__(self, policy: TokenSelector, model: nn.Module, states: PolicyStates) -> None:
        if not policy.fits_head:
            raise UnsupportedError(f"{type(policy).__name__} is not supported with trl's fused head: {NEEDED}; {LEFT}")
        refuse_routers(model, f"{type(policy).__name__} under trl's fused head")
        super().__init__(policy, model, states)

    def install(self, engine: EngineView) -> None:
        self._engine, self.places = engine, ModulePlaces(self.model)
        self._patches.install(self.model, FusedForward(self, engine))

    def choose(self, values: Mapping[str, Tensor | None]) -> Tensor:
        """Return the weight of each label, (R,), 0 for a label that is not chosen. ``values`` are the head's outputs,
        each (R,) or None.
        """
        policy, step = self.policy, self._engine.now()
        scores: dict[Score, Tensor] = {}
        for name, key in (("loss", "log_probs"), ("entropy", "entropy")):
            if name in policy.needs:
                value_R = values[key]
                if value_R is None:
                    raise UnsupportedError(
                        f"{type(policy).__name__} reads the {name} of tokens, which this trainer's head does not return"
                    )
                scores[name] = (-value_R if name == "loss" else value_R).float()[None]
        log_prob_R = values["log_probs"]
        assert log_prob_R is not None
        target_1R = torch.ones_like(log_prob_R, dtype=torch.bool)[None]
        tokens = Tokens(None, target_1R, target_1R, scores)
        if self._states.watches(policy, ReadTokens):
            self._states.see(policy, ReadTokens(self._states.next_forward(policy), tokens), step)
        choice = policy.at(step).choose(tokens, self._states.show(policy, step))
        returned.require_token_choice(f"{type(policy).__name__}.choose", choice, target_1R)
        counts = (target_1R.sum(), choice.trained_BT.sum())
        self._engine.add_chosen(Chosen(*counts, *counts))
        return _weights(policy, choice)[0]


def _weights(policy: TokenSelector, choice: TokenChoice) -> Tensor:
    """Return the factor of each label's gradient, (1, R), float32.

    In an unbiased choice without weights all labels have the same probability, so its inverse is the factor. Other
    choices without weights sum the trainer's terms over the chosen labels, with the trainer's divisor.
    """
    weight_1R = choice.trained_BT.float()
    if choice.weight_BT is not None:
        return weight_1R * choice.weight_BT.to(weight_1R)
    if not policy.unbiased:
        return weight_1R
    return weight_1R * (weight_1R.numel() / weight_1R.sum().clamp(min=torch.finfo(weight_1R.dtype).tiny))


class FusedForward(ForwardOverride):
    """The ``forward`` of a model with trl's fused head, whose backward has only the chosen rows."""

    def __init__(self, extension: FusedTokens, engine: EngineView) -> None:
        self._extension, self._engine, self._model = extension, engine, extension.model
        self._stack: nn.Module = extension.model.base_model  # type: ignore[assignment]
        # Do not compile, since the number of rows differs from step to step. Compiled layers stay compiled.
        self._run = uncompiled(self._choose)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate's wrapper calls the wrapped forward as a method
            args = args[1:]
        active = self._engine.enabled and self._model.training and torch.is_grad_enabled()
        if self.is_removed or not active:
            return self.run_covered(self._model, *args, **kwargs)
        if not kwargs.get(ARGUMENT):
            raise UnsupportedError(
                f"{type(self._extension.policy).__name__} chooses tokens under trl's fused head, but this "
                f"training forward ran without the head: put it under engine.disabled(); {LEFT}"
            )
        return self._run(args, kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        extension = self._extension
        extension.was_called = True
        extension.places.check()
        given = dict(kwargs)
        label_BT, shifted_BT = given.pop("labels", None), given.pop("shift_labels", None)
        target_BT = label_BT[:, 1:] if shifted_BT is None else shifted_BT
        mask_BT = target_BT != IGNORED
        if not bool(mask_BT.any()):  # without labels nothing has a gradient, but the loss needs a graph
            return self.run_covered(self._model, *args, **kwargs)
        if self._engine.reference:
            return self._run_all(args, kwargs, mask_BT)
        target_R, found = target_BT[mask_BT], list[Tensor]()
        covered = self._stack.__dict__.get("forward")

        def cut(*inner: Any, **named: Any) -> Any:
            with torch.enable_grad():
                output = call_module(self._stack, *inner, **named) if covered is None else covered(*inner, **named)
                hidden = output.last_hidden_state
                found.append((hidden[:, :-1] if shifted_BT is None else hidden)[mask_BT.to(hidden.device)])
            return with_changes(output, last_hidden_state=found[0].detach()[None])

        with torch.no_grad(), replace_forwards([(self._stack, cut)]):
            output = self.run_covered(self._model, *args, **given, shift_labels=target_R[None])
        if output.aux_loss is not None:
            raise UnsupportedError(
                f"{type(extension.policy).__name__} under trl's fused head does not support a loss of routers"
            )
        values = {f.name: _first(getattr(output, f.name)) for f in fields(output) if f.name not in ("loss", "aux_loss")}
        weight_R = extension.choose(values)
        values |= self._attach_graph(values, found[0], target_R, weight_R)
        spread = {name: None if value is None else _spread(value, mask_BT) for name, value in values.items()}
        spread["label_mask"] = mask_BT
        count = given.get("num_items_in_batch")
        loss = -spread["log_probs"].sum() / (mask_BT.sum() if count is None else count)  # type: ignore[union-attr]
        return type(output)(loss=loss, **spread)

    def _attach_graph(
        self, values: Mapping[str, Tensor | None], hidden_RD: Tensor, target_R: Tensor, weight_R: Tensor
    ) -> dict[str, Tensor]:
        """Return the differentiable values, with a graph for the chosen rows."""
        names = [name for name in _DIFFERENTIABLE if values.get(name) is not None]
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
        autocast = _autocast_of(hidden_RD.device)

        def run(hidden_KD: Tensor, index_K: Tensor) -> list[Tensor]:
            def give(*_: Any, **__: Any) -> Any:
                return _Hidden(hidden_KD[None])

            with autocast(), replace_forwards([(self._stack, give)]):
                output = self.run_covered(
                    self._model, **{ARGUMENT: True}, shift_labels=target_R.index_select(0, index_K)[None]
                )
            return [getattr(output, name)[0] for name in names]

        plain = [values[name] for name in names]
        outputs = _ChosenRows.apply(run, weight_R, plain, hidden_RD, *weights)  # type: ignore[no-untyped-call]
        return dict(zip(names, outputs, strict=True))

    def _run_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], mask_BT: Tensor) -> Any:
        """Compute all rows, and multiply arriving gradients by the weights: the reference implementation."""
        output = self.run_covered(self._model, *args, **kwargs)
        values = {f.name: getattr(output, f.name) for f in fields(output)}
        known = {name: None if v is None or not v.dim() else v[mask_BT] for name, v in values.items()}
        weight_BT = _spread(self._extension.choose(known), mask_BT)
        changed = {n: _Weighted.apply(values[n], weight_BT) for n in _DIFFERENTIABLE if values[n] is not None}  # type: ignore[no-untyped-call]
        count = kwargs.get("num_items_in_batch")
        changed["loss"] = -changed["log_probs"].sum() / (mask_BT.sum() if count is None else count)
        return type(output)(**values | changed)


class _Hidden:
    """The field of a base model's output that trl's head reads."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class _ChosenRows(torch.autograd.Function):
    """Returns the head's values for all labels, with a backward that runs the head again for the chosen ones."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Tensor, Tensor], list[Tensor]],
        weight_R: Tensor,
        values: list[Tensor],
        hidden_RD: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.save_for_backward(weight_R, hidden_RD, *weights)
        return tuple(value.clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_R, hidden_RD, *weights = ctx.saved_tensors
        scaled = [None if grad is None else grad * weight_R.to(grad.dtype) for grad in grads]
        given = [grad != 0 for grad in scaled if grad is not None]
        index_K = torch.stack(given).any(0).nonzero()[:, 0] if given else weight_R.new_zeros(0, dtype=torch.long)
        grad_RD = torch.zeros_like(hidden_RD)
        if not len(index_K):
            return None, None, None, grad_RD, *(torch.zeros_like(weight) for weight in weights)
        with torch.enable_grad():
            hidden_KD = hidden_RD.index_select(0, index_K).requires_grad_()
            outputs = ctx.run(hidden_KD, index_K)
        pairs = [(o, g.index_select(0, index_K)) for o, g in zip(outputs, scaled, strict=True) if g is not None]
        heads, arriving = zip(*pairs, strict=True)
        grad_KD, *found = torch.autograd.grad(heads, [hidden_KD, *weights], arriving)
        return None, None, None, grad_RD.index_copy_(0, index_K, grad_KD), *found


class _Weighted(torch.autograd.Function):
    """Returns its input, with a backward that multiplies the gradient by weights."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] * weight.to(grads[0].dtype), None


def _autocast_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes a context with the present autocast settings, for the backward."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype)


def _first(value: Tensor | None) -> Tensor | None:
    """Return the head's values for the single row of labels."""
    return None if value is None else value[0]


def _spread(value_R: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the values of labels at their positions, 0 elsewhere."""
    return value_R.new_zeros(mask_BT.shape).masked_scatter(mask_BT, value_R)
