"""Stop examples after the first layers of one model.

The model's forward runs twice, but each layer runs once. First, all examples go through the embeddings and the first
layers, and the layers above return their input. Then the model's own forward runs the chosen examples, with their
labels and masks; here the first layers return what they have computed before. So the model itself does all other work
before, between and after its layers, for the right examples.

Shape letters: B examples, T positions, K chosen, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import (
    Chosen,
    DensePass,
    EngineExtension,
    ForwardOverride,
    ForwardPatches,
    LayerNumbers,
    PassEstimate,
    refuse_uncalled,
)
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.midway.kind import Features, FeatureWidth, MidwaySelector, ReadFeatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from sparsebp_cli.backward import EngineView, Given

IGNORED = -100  # the label of a position that is no target
OF_LOSS = ("labels", "num_items_in_batch")


def find_places(policy: MidwaySelector, model: nn.Module, given: Given) -> Sequence[FeatureWidth]:  # noqa: ARG001
    """Return the width of the layers."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return () if width is None else (FeatureWidth(width),)


@final
class MidwayExtension(EngineExtension):
    """Carry out a midway selector's choices in one model.

    Raises :class:`UnsupportedError` unless the model is, or wraps, a transformers model with one stack of layers that
    is deeper than the policy's first ones, or under reentrant checkpointing.
    """

    def __init__(self, policy: MidwaySelector, model: nn.Module, given: Given) -> None:
        from transformers import PreTrainedModel  # slow to import, so not imported with the kind

        self.policy, self.states, name = policy, given.states, type(policy).__name__
        found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if found is None or getattr(found.config, "is_encoder_decoder", False):
            what = type(model).__name__ if found is None else f"{type(found).__name__}, which has two"
            raise UnsupportedError(f"{name} needs a transformers model with one stack of layers, got {what}")
        self.model, self._layers = found, LayerNumbers(model)
        self.backbone: nn.Module = found.base_model
        if self.backbone is found:
            raise UnsupportedError(f"{name} needs a model that computes a loss, got {type(found).__name__}")
        if not policy.num_first < len(self._layers.layers):
            raise UnsupportedError(
                f"{name} lets all examples through {policy.num_first} layers, which must be fewer than the model's "
                f"{len(self._layers.layers)}"
            )
        self._names = {module: name for name, module in model.named_modules()}
        self._patches, self._handles = ForwardPatches(), list[Any]()
        self._early = set[str]()  # modules outside of layers that run for all examples, too
        self._number = 1  # B of the last forward

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        layers = self._layers.layers
        self._stack = [_Layer(number, module, self.policy.num_first) for number, module in enumerate(layers)]
        for number, module in enumerate(layers):
            self._patches.install(module, self._stack[number])
        self._override = _Model(self, engine)
        self._patches.install(self.model, self._override)
        for module, name in self._names.items():
            if self._layers.number_of(name) is None and next(module.children(), None) is None:
                self._handles.append(module.register_forward_pre_hook(lambda _, __, name=name: self._note(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.remove()

    @override
    def check_called(self) -> None:
        if not self._override.was_called:
            refuse_uncalled(self.policy, self.model)

    def now(self) -> tuple[MidwaySelector, Step]:
        """Return the policy with the options of the step, and the step with its state."""
        step = self.states.show(self.policy, self._engine.now())
        return self.policy.at(step), step

    def count(self, number: int) -> int:
        """Return how many of ``number`` examples go on."""
        policy, step = self.now()
        kept = policy.count(number, step)
        if not 1 <= kept <= number:
            raise PolicyError(f"{type(policy).__name__} counts {kept} examples, allowed: 1 to {number}")
        return kept

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass over a batch of the last forward's size."""
        share = self.count(self._number) / self._number
        if share == 1.0 and not self.states.watches(self.policy, ReadFeatures):
            return PassEstimate()  # the model's own forward runs unchanged
        above, forward = dict[str, float](), dict[str, float]()
        for name in dense.flops.forward | dense.flops.backward | dense.flops.recomputed:
            layer = self._layers.number_of(name)
            if layer is None or layer >= self.policy.num_first:
                above[name] = forward[name] = share
            if name in self._early:
                # For example rotary positions: they are the same for any number of examples, and computed twice.
                module = next(module for module, own in self._names.items() if own == name)
                forward[name] = 1.0 + (share if next(module.parameters(), None) is not None else 1.0)
        return PassEstimate(above, above, forward)

    @contextmanager
    def in_part(self, part: str, hidden: Tensor | None = None) -> Iterator[None]:
        """Run only the first layers, or only the layers above, from a hidden state."""
        for layer in self._stack:
            layer.part, layer.hidden = part, hidden
        try:
            yield
        finally:
            for layer in self._stack:
                layer.part, layer.hidden = "", None

    def note_number(self, arguments: Mapping[str, object]) -> None:
        """Store the number of examples of a forward."""
        found = next((value for value in arguments.values() if isinstance(value, Tensor) and value.ndim > 1), None)
        self._number = 1 if found is None else max(1, len(found))

    def take_middle(self) -> Tensor:
        """Return the output of the last of the first layers, (B, T, D), and forget it."""
        last = self._stack[self.policy.num_first - 1]
        middle_BTD: Tensor | None = last.output
        last.output = None
        if middle_BTD is None:
            raise UnsupportedError(f"{type(self.model).__name__} did not call its layer {self.policy.num_first - 1}")
        return middle_BTD

    def _note(self, name: str) -> None:
        if self._stack and self._stack[0].part == "first":
            self._early.add(name)


class _Layer(ForwardOverride):
    """Replace the ``forward`` of one layer. A checkpointed layer runs again outside of both parts, unchanged."""

    def __init__(self, number: int, module: nn.Module, num_first: int) -> None:
        self._module, self._number, self._is_first = module, number, number < num_first
        self._is_last = number == num_first - 1
        self.part = ""  # part of the forward that runs now: first, above, or neither
        self.hidden: Tensor | None = None  # what the last of the first layers returns in the second part
        self.output: Tensor | None = None  # what it has computed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_removed or not self.part or self._is_first == (self.part == "first"):
            output = self.run_covered(self._module, *args, **kwargs)
            if self._is_last and self.part == "first":
                if not isinstance(output, Tensor):
                    raise UnsupportedError(f"layer {self._number} returns a {type(output).__name__}, not a tensor")
                self.output = output
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        return self.hidden if self._is_last and self.part == "above" else hidden


class _Model(ForwardOverride):
    """Replace the model's ``forward``: run the first layers for all examples, the rest for the chosen ones."""

    def __init__(self, extension: MidwayExtension, engine: EngineView) -> None:
        self.was_called = False
        self._extension, self._engine = extension, engine
        self._model: PreTrainedModel = extension.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        extension, model = self._extension, self._model
        if args and args[0] is model:  # accelerate's wrapper passes the model itself first
            args = args[1:]
        arguments = dict(zip(_names_of(type(model).forward), args, strict=False)) | kwargs
        extension.note_number(arguments)
        if self.is_removed or not (model.training and torch.is_grad_enabled() and self._engine.enabled):
            return self.run_covered(model, *args, **kwargs)
        self.was_called = True
        labels = self._check(arguments)
        policy, step = extension.now()
        number, targets_B = len(labels), _count_targets(labels)
        kept, observes = extension.count(number), extension.states.watches(extension.policy, ReadFeatures)
        if kept == number and not observes:
            self._count(targets_B, targets_B, number, number)
            return self.run_covered(model, **arguments)
        with extension.in_part("first"):
            extension.backbone(**_for_backbone(extension.backbone, arguments))
        middle_BTD = extension.take_middle()
        features = Features(number, _mean(middle_BTD, arguments) if policy.reads_features else None)
        if observes:
            assert features.feature_BD is not None
            extension.states.see(extension.policy, ReadFeatures("features", features.feature_BD), step)
        if kept == number:
            self._count(targets_B, targets_B, number, number)
            with extension.in_part("above", middle_BTD):
                return self.run_covered(model, **arguments)
        index_K = _check_choice(policy, policy.choose(features, step), kept, number).to(labels.device)
        self._count(targets_B, targets_B[index_K], number, kept)
        chosen = {name: _take(name, value, index_K, number) for name, value in arguments.items()}
        if arguments.get("num_items_in_batch") is not None:
            # The caller divides by the targets of the whole step, so scale them by the fraction of targets that go on.
            share = targets_B[index_K].sum() / targets_B.sum().clamp(min=1)
            chosen["num_items_in_batch"] = (arguments["num_items_in_batch"] * share).clamp(min=1.0)
        self._engine.notes["midway"] = (
            f"at step {step.index} {kept} of {number} examples went on behind the first {policy.num_first} layers"
        )
        with extension.in_part("above", middle_BTD[index_K]):
            return self.run_covered(model, **chosen)

    def _check(self, arguments: Mapping[str, object]) -> Tensor:
        """Return the labels, or raise an error if the arguments are not supported."""
        name, labels = type(self._extension.policy).__name__, arguments.get("labels")
        if not isinstance(labels, Tensor):
            raise UsageError(f"{name} needs labels among the model's arguments: the loss is that of chosen examples")
        if arguments.get("past_key_values") is not None:
            raise UnsupportedError(f"{name} does not support a cache of earlier positions")
        for module in self._model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get(
                "use_reentrant", True
            ):
                raise UnsupportedError(f"{name} with reentrant checkpointing: enable it with use_reentrant=False")
        return labels

    def _count(self, targets_B: Tensor, trained_B: Tensor, number: int, kept: int) -> None:
        self._engine.add_chosen(Chosen(targets_B.sum(), trained_B.sum(), examples=number, chosen_examples=kept))


def _check_choice(policy: MidwaySelector, index_K: Tensor, kept: int, number: int) -> Tensor:
    good = isinstance(index_K, Tensor) and index_K.dtype == torch.int64 and index_K.shape == (kept,)
    good = good and bool((index_K[1:] > index_K[:-1]).all() and index_K[0] >= 0 and index_K[-1] < number)
    if not good:
        raise PolicyError(f"{type(policy).__name__} must choose {kept} ascending examples below {number}, int64")
    return index_K


def _names_of(forward: Any) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def _for_backbone(backbone: nn.Module, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that the backbone's class declares, without a cache, which only this part would fill."""
    names = set(_names_of(type(backbone).forward)) - {*OF_LOSS, "use_cache"}
    found = {name: value for name, value in arguments.items() if name in names}
    return found | ({"use_cache": False} if "use_cache" in _names_of(type(backbone).forward) else {})


def _count_targets(labels: Tensor) -> Tensor:
    """Return the number of targets of each example, (B,): next tokens with a label, or 1 in a classification."""
    return torch.ones_like(labels) if labels.ndim == 1 else (labels[:, 1:] != IGNORED).sum(1)


def _take(name: str, value: object, index_K: Tensor, number: int) -> object:
    """Return the part of an argument for the chosen examples; an argument without an example dimension is unchanged."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != number:
        return value
    return value[index_K] if value.ndim > 1 or name == "labels" else value


@torch.no_grad()
def _mean(middle_BTD: Tensor, arguments: Mapping[str, object]) -> Tensor:
    """Return the mean over the positions that are not padding, (B, D), float32."""
    mask, middle_BTD = arguments.get("attention_mask"), middle_BTD.detach().float()
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return middle_BTD.mean(1)
    mask_BT1 = mask.to(middle_BTD)[:, :, None]
    return (middle_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1.0)
