"""The residual blocks of a model, and the modules that compute them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from sparsebp_cli.backward import BranchLayout, LayerNumbers, find_layouts
from sparsebp_cli.errors import UnsupportedError
from sparsebp_shelf.block.kind import BlockDropper, ResidualBlock

if TYPE_CHECKING:
    from sparsebp_cli.backward import Given

Role = Literal["before", "core", "after"]


@dataclass(frozen=True)
class BlockLayout:
    """One residual block, as paths of modules in its layer.

    Args:
        kind: ``attention`` or ``mlp``.
        parts: The modules that compute the block's addition to the residual stream, in order, without a norm of the
            stream after the addition. The first one names the block.
        before: The module that runs before the first of ``parts``, such as a norm; None: there is none.
        num_outputs: Number of values that the first module returns, of which the first one counts; 0: it returns a
            tensor.
        is_written: Whether the layer changes the block's output in place.
    """

    kind: Literal["attention", "mlp"]
    parts: tuple[str, ...]
    before: str | None = None
    num_outputs: int = 0
    is_written: bool = False

    def role(self, path: str) -> Role:
        """Return the role of one of the parts."""
        return "core" if path == self.parts[0] else "before" if path == self.before else "after"

    def is_last(self, path: str) -> bool:
        """Return whether the output of one of the parts leaves the block."""
        return path == next(part for part in reversed(self.parts) if part != self.before)


@dataclass(frozen=True)
class BlockPart:
    """A module that computes one residual block, or several, such as the norm before a parallel attention and MLP.

    Args:
        name: Name of the module in the model.
        module: The module whose forward is replaced.
        blocks: Names of the blocks.
        kind: ``attention`` or ``mlp``; for several blocks, the kind of the first one.
        role: The attention or MLP itself, the norm before it, or a module after it.
        num_outputs: Number of values that it returns; 0: it returns a tensor.
        is_written: Whether the layer changes its output in place.
    """

    name: str
    module: nn.Module
    blocks: frozenset[str]
    kind: Literal["attention", "mlp"]
    role: Role
    num_outputs: int = 0
    is_written: bool = False


_BERT = (
    BlockLayout("attention", ("attention.self", "attention.output.dense"), num_outputs=2),
    BlockLayout("mlp", ("intermediate", "output.dense")),
)
# Encoders that add inside their submodules, so a residual block is no chain of the layer's children. `tokens` knows the
# other layouts.
_ENCODERS: dict[str, tuple[BlockLayout, ...]] = {
    "BertLayer": _BERT,
    "RobertaLayer": _BERT,
    "XLMRobertaLayer": _BERT,
    "ElectraLayer": _BERT,
    "TransformerBlock": (
        BlockLayout("attention", ("attention",), num_outputs=2),
        BlockLayout("mlp", ("ffn",)),
    ),  # DistilBERT
}


def find_places(policy: BlockDropper, model: nn.Module, given: Given) -> tuple[ResidualBlock, ...]:  # noqa: ARG001
    """Return the blocks from which a policy chooses."""
    return find_blocks(model, type(policy).__name__)[0]


def find_blocks(model: nn.Module, asker: str) -> tuple[tuple[ResidualBlock, ...], tuple[BlockPart, ...]]:
    """Return a model's residual blocks and the modules that compute them, both in the model's order.

    Raises :class:`UnsupportedError` that names ``asker`` if the model has no layers, or some of unknown layout.
    """
    layers = LayerNumbers(model)
    branches = find_layouts()
    if not layers.layers:
        raise UnsupportedError(
            f"{asker} drops residual blocks of transformer layers, but {type(model).__name__} has no layers"
        )
    blocks: list[ResidualBlock] = []
    found: dict[nn.Module, tuple[str, set[str], BlockLayout, str]] = {}
    for number, (name, layer) in enumerate(zip(layers.names, layers.layers, strict=True)):
        kind = type(layer).__name__
        of_branches = [_of_branch(branch, layer) for branch in branches.get(kind, ()) if branch.is_in(layer)]
        layout = of_branches or _ENCODERS.get(kind)
        if layout is None:
            raise UnsupportedError(
                f"{asker} does not know the residual blocks of {kind}; known: "
                f"{', '.join(sorted(_ENCODERS | branches))}; a plug-in can add others "
                "under the entry-point group sparsebp.layouts"
            )
        if all(block.kind == "attention" for block in layout):
            raise UnsupportedError(f"{asker} drops residual blocks, but the MLP of {kind} is not a separate module")
        for block in layout:
            parts = dict(_find_parts(name, layer, block))
            first = _name_of(block, parts)
            blocks.append(ResidualBlock(first, number, block.kind, _count_weights(parts.values())))
            for path, (part_name, module) in zip(block.parts, parts.items(), strict=True):
                found.setdefault(module, (part_name, set(), block, path))[1].add(first)
    parts_found = tuple(
        BlockPart(
            name,
            module,
            frozenset(names),
            block.kind,
            block.role(path),
            block.num_outputs if path == block.parts[0] else 0,
            block.is_written and block.is_last(path),
        )
        for module, (name, names, block, path) in found.items()
    )
    return tuple(blocks), parts_found


def refuse_norms_of_the_stream(model: nn.Module, asker: str) -> None:
    """Raise :class:`UnsupportedError`, naming ``asker``, if a layer normalises the residual stream itself.

    Such a norm would change the stream even without the blocks.
    """
    layouts = find_layouts()
    for layer in LayerNumbers(model).layers:
        name = type(layer).__name__
        if name in _ENCODERS and name not in layouts:
            raise UnsupportedError(
                f"{asker} skips blocks in the forward, which is not supported for {name}: this layer normalises "
                "the residual stream after each block"
            )


def _of_branch(branch: BranchLayout, layer: nn.Module) -> BlockLayout:
    before = branch.norm_before(layer)
    parts = tuple(part for part in (branch.core, before, branch.after) if part is not None)
    if branch.attention is None:
        return BlockLayout("mlp", parts, before, branch.num_outputs, branch.is_written)
    return BlockLayout("attention", parts, before, branch.num_outputs or 2, branch.is_written)


def _find_parts(prefix: str, layer: nn.Module, block: BlockLayout) -> Iterator[tuple[str, nn.Module]]:
    modules = dict(layer.named_modules(remove_duplicate=False))
    for path in block.parts:
        if path not in modules:
            raise UnsupportedError(
                f"the BranchLayout of {type(layer).__name__} names a module {path!r}, which {prefix!r} does not have"
            )
        yield f"{prefix}.{path}", modules[path]


def _name_of(block: BlockLayout, parts: dict[str, nn.Module]) -> str:
    return next(name for name in parts if name.endswith(block.parts[0]))


def _count_weights(parts: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for part in parts for parameter in part.parameters() if parameter.dim() == 2)
