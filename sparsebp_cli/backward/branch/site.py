"""The site `branches`: finds a model's residual branches and installs the overrides of their modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, cast, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.branch.branch import Branch
from sparsebp_cli.backward.branch.forward import AfterOverride, BeforeOverride, BranchSite, CoreOverride
from sparsebp_cli.backward.core.extension import SiteAdapter
from sparsebp_cli.backward.decoder.decoder import argument_names, refuse_routers
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import BranchLayout, find_child, find_layouts
from sparsebp_cli.backward.decoder.unfit import explain
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.patch.forward import ForwardPatches, check_free
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine

POST_NORM = "apply_residual_connection_post_layernorm"  # bloom's: it adds to the output of the norm, not to the stream


@final
class BranchAdapter(SiteAdapter):
    """Attaches an engine to every residual branch; see :class:`~sparsebp_cli.backward.core.extension.SiteAdapter`.

    ``exclude`` has globs over module names; a branch whose core matches stays dense. Raises :class:`UsageError` if a
    pattern matches no module, and :class:`UnsupportedError` if no layout is known, the model is attached already, or a
    module of a branch has hooks.
    """

    def __init__(self, model: nn.Module, exclude: Iterable[str] = ()) -> None:
        refuse_routers(model, "sites='branches'")
        found, patterns = _find_branches(model), list(exclude)
        names = [branch.name for branch in found]
        modules = [name for name, _ in model.named_modules()]
        for pattern in patterns:  # any module is accepted: base recipes exclude lm_head, which is no branch
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise UsageError(f"exclude: {pattern!r} matches no branch of the model{did_you_mean(pattern, names)}")
        self.excluded: tuple[str, ...] = tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))
        self._branches = [branch for branch in found if branch.name not in self.excluded]
        shared = {id(b.before) for b in found if b.name in self.excluded}
        for branch in self._branches:
            if id(branch.before) in shared:  # the norm must really run for the excluded branch that also reads it
                branch.before = None
                branch.parts = [part for part in branch.parts if id(part) not in shared]
        self._patches = ForwardPatches()
        self._with_routers = [m for m in model.modules() if "output_router_logits" in argument_names(m)]
        self._hooks: list[RemovableHandle] = []
        self.names: tuple[str, ...] = tuple(branch.name for branch in self._branches)
        self.not_covered = find_linears(model).not_covered
        for branch in self._branches:
            for part in branch.parts:
                _check_part(branch.name, part)

    def install(self, engine: SiteEngine) -> None:
        sites = []
        for branch in self._branches:
            site = BranchSite(branch, engine, self._patches)
            sites.append(site)
            branch.dropouts.install(self._patches)
            self._patches.install(branch.core, CoreOverride(site))
            if branch.before is not None:
                self._patches.install(branch.before, BeforeOverride(branch.before, site))
            if branch.after is not None:
                self._patches.install(branch.after, AfterOverride(branch.after, site))
        for site in sites:
            override = None if site.branch.before is None else site.branch.before.__dict__["forward"]
            if isinstance(override, BeforeOverride):  # the last one that was installed, where branches share a norm
                site.norm = override
                override.num_readers += 1
        self._hooks = [m.register_forward_pre_hook(_refuse_logits, with_kwargs=True) for m in self._with_routers]
        if self._branches and all(branch.attention is not None for branch in self._branches):
            engine.notes["branches"] = "only attentions are branches of this model: its other linears stay dense"

    def remove(self) -> None:
        self._patches.remove()
        for hook in self._hooks:
            hook.remove()

    @override
    def backward_context(self, loss: Tensor) -> AbstractContextManager[None]:
        return nullcontext()


def _find_branches(model: nn.Module) -> list[Branch]:
    layouts, layers = find_layouts(), LayerNumbers(model)
    branches = []
    for name, module in model.named_modules():
        layout = layouts.get(type(module).__name__, ())
        present = [part for part in layout if part.is_in(module)]
        branches += [_make_branch(f"{name}." if name else "", module, part, layers) for part in present]
    if not branches:
        layer = type(layers.layers[0]).__name__ if layers.layers else type(model).__name__
        reason = explain(layer)
        if reason is not None:
            raise UnsupportedError(f"sites='branches' does not know {layer}: {reason}")
        raise UnsupportedError(
            f"sites='branches' does not know where the branches of {layer} are, as it does for {len(layouts)} other "
            "layers; a plugin can add it through the entry-point group sparsebp.layouts"
        )
    return branches


def _make_branch(prefix: str, layer: nn.Module, layout: BranchLayout, layers: LayerNumbers) -> Branch:
    name = prefix + layout.core
    if layout.adds is not None and getattr(layer, POST_NORM, False):
        raise UnsupportedError(f"sites='branches' needs {POST_NORM}=False in {type(layer).__name__}, got True")
    parts = []
    for child in (layout.core, layout.norm_before(layer), layout.after):
        part = None if child is None else find_child(layer, child)
        if child is not None and part is None:
            raise UnsupportedError(f"the layout of {type(layer).__name__} names {child!r}, which is not at {name!r}")
        parts.append(part)
    core, before, after = cast("tuple[nn.Module, nn.Module | None, nn.Module | None]", tuple(parts))
    return Branch(name, core, before, after, layout, layers.number_of(name))


def _refuse_logits(module: nn.Module, _: object, arguments: Mapping[str, object]) -> None:
    if arguments.get("output_router_logits"):
        raise UnsupportedError(
            f"sites='branches' gives the loss of routers no gradient, which {type(module).__name__} adds with "
            "output_router_logits: leave it out"
        )


def _check_part(name: str, part: nn.Module) -> None:
    for inner, module in part.named_modules():
        check_free(f"{name}: {inner}" if inner else name, module)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, hook) for hook in hooks):
        raise UnsupportedError(f"a module of the branch {name!r} has hooks, which would not run: remove them first")
