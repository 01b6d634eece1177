"""Skip tiles of attention in one model: transformers' attention function consults a tile selector in the backward.

A transformers model looks up its attention function by the name ``sdpa``. While a model is attached, that name returns
our function. It calls the previous function, and replaces the backward for the modules of attached models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import EngineExtension, LayerNumbers, find_attentions, refuse_uncalled, uncompiled
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Step
from sparsebp_shelf.tile.attention import Attention, attend, attend_by_definition
from sparsebp_shelf.tile.kind import AttentionTiles, TileSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
NAME = "sdpa"


@final
class TileExtension(EngineExtension):
    """Carry out a tile selector's choices in one model.

    Raises :class:`UnsupportedError` if the model has another attention than sdpa.
    """

    engine: EngineView
    policy: TileSelector

    def __init__(self, policy: TileSelector, model: nn.Module, given: Given) -> None:  # noqa: ARG002 - as of all
        self.policy, self._model = policy, model
        names = find_attentions(model)
        if names != {NAME}:
            raise UnsupportedError(
                f"{type(policy).__name__} skips tiles of transformers' attention {NAME}, got "
                f"{' and '.join(sorted(names)) or f'{type(model).__name__}, which has none'}"
            )
        self._layers = LayerNumbers(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._checked: set[nn.Module] = set()
        self._kept: list[Tensor] = []  # kept tiles and all tiles of this step, one pair for each example and module
        self._was_called = False

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        for module in self._names:
            _extensions[module] = self
        _replace()

    def remove(self) -> None:
        for module in self._names:
            _extensions.pop(module, None)
        if not _extensions:
            _restore()

    def start_step(self, step: Step) -> None:
        """Report what the last step kept."""
        if self._kept:
            kept, found = torch.stack(self._kept).sum(0).tolist()
            self._kept.clear()
            self.engine.notes["tiles"] = (
                f"before step {step.index} {kept / max(1.0, found):.1%} of the tiles that the mask leaves had a "
                "backward"
            )

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)

    def attend(
        self,
        own: AttentionFunction,
        module: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: Mapping[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        """Run an attention of the model.

        Args:
            own: The attention function that the model itself would call.
            module: The attention module that calls it.
            tensors: Query, key and value.
            mask: Additive or boolean mask, or None, in the function's format.
            options: Other arguments of the function by name.

        Returns:
            The function's return value.
        """
        self._was_called = True
        if not torch.is_grad_enabled() or not self.engine.enabled or self.policy.at(self.engine.now()).exact:
            return own(module, *tensors, mask, **options)
        attention = self._describe(module, tensors, mask, options)

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return own(module, query, key, value, mask, **options)[0]

        # A cost probe skips this check, which few steps run: a resumed run would count different FLOPs.
        if module not in self._checked and not self.engine.is_probing:
            self._check(module, tensors, attention, run)
        return attend(*tensors, attention, run, _Tiles(self, module)), None

    def _describe(
        self,
        module: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Attention:
        name, asker = self._names[module], type(self.policy).__name__
        for option, what in _UNKNOWN.items():
            if options.get(option) is not None and options[option] != 0.0:
                raise UnsupportedError(f"{asker}: the attention {name!r} has {what}, which is not supported")
        if mask is not None and mask.requires_grad:
            raise UnsupportedError(
                f"{asker}: the attention {name!r} trains a bias of its scores, which is not supported"
            )
        query = tensors[0]
        scale = options.get("scaling")
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        return Attention(
            mask,
            bool(is_causal) and mask is None and query.shape[2] > 1,
            query.shape[-1] ** -0.5 if scale is None else cast("float", scale),
        )

    @torch.no_grad()
    def _check(
        self,
        module: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        attention: Attention,
        run: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        """Compare an attention with its definition, once."""
        output, by_definition = run(*tensors), None
        query, key, value = tensors
        if query.shape[1] % key.shape[1] == 0 and key.shape[:3] == value.shape[:3]:
            by_definition = attend_by_definition(query, key, value, attention)
        good = by_definition is not None and by_definition.shape == output.shape
        if not good or not _is_close(output, cast("Tensor", by_definition)):
            raise UnsupportedError(
                f"{type(self.policy).__name__}: the attention {self._names[module]!r} does not compute the "
                "softmax of scaled scores under its mask"
            )
        self._checked.add(module)

    def choose(self, module: nn.Module, mass_HQK: Tensor, example: int) -> Tensor:
        step = self.engine.now()
        name = self._names[module]
        tiles = AttentionTiles(name, self._layers.number_of(name), example)
        keep_HQK = self.policy.at(step).select(mass_HQK, tiles, step)
        if keep_HQK.shape != mass_HQK.shape or keep_HQK.dtype != torch.bool:
            raise PolicyError(
                f"{type(self.policy).__name__} must return bool of shape {tuple(mass_HQK.shape)}, got "
                f"{keep_HQK.dtype} of {tuple(keep_HQK.shape)}"
            )
        found_HQK = mass_HQK > 0.0
        self._kept.append(torch.stack([(keep_HQK & found_HQK).sum(), found_HQK.sum()]).double())
        return keep_HQK


_UNKNOWN = {
    "dropout": "dropout",
    "softcap": "a cap of its scores",
    "position_bias": "a bias of positions",
    "s_aux": "sinks",
}


class _Tiles:
    """The decisions of one backward of an attention."""

    def __init__(self, extension: TileExtension, module: nn.Module) -> None:
        self._extension, self._module = extension, module

    @property
    def is_reference(self) -> bool:
        return self._extension.engine.reference

    def size(self) -> int | None:
        engine = self._extension.engine
        policy = self._extension.policy.at(engine.now())
        return policy.tile_size if engine.enabled and not policy.exact else None

    def choose(self, mass_HQK: Tensor, example: int) -> Tensor:
        return self._extension.choose(self._module, mass_HQK, example)


def _is_close(output: Tensor, other: Tensor) -> bool:
    limit = max(1e-5, 8 * torch.finfo(output.dtype).eps) * float(output.abs().max())
    # allclose instead of reading the maximum: it returns True for a forecast, whose tensors have no data. Under
    # autocast the two outputs have different dtypes.
    return torch.allclose(output.float(), other.float(), rtol=0.0, atol=limit)


_extensions: WeakKeyDictionary[nn.Module, TileExtension] = WeakKeyDictionary()
_before: list[AttentionFunction] = []  # the function that ours replaced


def _find() -> AttentionFunction:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return cast("Mapping[str, AttentionFunction]", ALL_ATTENTION_FUNCTIONS)[NAME]


def _register(function: AttentionFunction) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, function)


def _replace() -> None:
    if _find() is not _attend:
        _before[:] = [_find()]
        _register(_attend)


def _restore() -> None:
    if _find() is _attend:  # otherwise another library has replaced it, and calls ours
        _register(_before[0])


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    extension = _extensions.get(module)
    if extension is None or not module.training:
        return _before[0](module, query, key, value, attention_mask, **kwargs)
    return uncompiled(extension.attend)(_before[0], module, (query, key, value), attention_mask, kwargs)
