"""``check_kind`` lets an honest kind pass, of a package as of ours, and names each promise that another one breaks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Kind, Policy, find_policies, make_policy
from sparsebp_cli.policy.kind import load
from sparsebp_cli.policy.known_kind import KINDS, find_kinds
from sparsebp_cli.testing import check_kind
from tests.backward.families import tiny_decoder
from tests.plugin import find_our_kinds

PLUGIN = Path(__file__).parents[1] / "plugins" / "sparsebp-depth"
# Those of the shelf among them, and not the example, which the tests install anew where it is installed already.
INSTALLED = tuple(kind for kind in find_kinds().kinds if kind.policy.__module__.partition(".")[0] != "sparsebp_depth")
ENTRIES = "[sparsebp.kinds]\ndepth = {kind}\n[sparsebp.policies]\nrandom-depth = sparsebp_depth:RandomDepth\n"


def _install(folder: Path, kind: str, name: str = "sparsebp-depth") -> None:
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES.format(kind=kind))
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, and behind it the example, which is not installed."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def depth(folder: Path) -> Any:
    """The example's package, installed."""
    _install(folder, "sparsebp_depth:DEPTH_SELECTOR")
    return importlib.import_module("sparsebp_depth")


def test_a_kind_of_a_package_keeps_every_promise(depth: Any) -> None:
    check_kind(depth.DEPTH_SELECTOR, [depth.RandomDepth(full=1.0), {"name": "random-depth", "full": 0.3}])


@pytest.mark.parametrize("full", [0.5, 0.7, 0.9])
def test_a_kind_is_not_refused_because_a_few_steps_were_drawn_dense(depth: Any, full: float) -> None:
    check_kind(depth.DEPTH_SELECTOR, [depth.RandomDepth(full=full)])


def test_a_kind_of_a_package_works_in_a_decoder(depth: Any) -> None:
    check_kind(depth.DEPTH_SELECTOR, [depth.RandomDepth(full=0.3)], make_model=_decoder, loss=_loss)


def _decoder() -> nn.Module:
    return tiny_decoder("llama")


def _loss(model: nn.Module, batch: int) -> torch.Tensor:
    ids = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(batch))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def test_a_kind_of_a_package_is_refused_by_the_table_with_its_own_words(depth: Any) -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    policy = depth.RandomDepth()
    with pytest.raises(UnsupportedError, match=r"RandomDepth needs sites='linears', got 'nodes'"):
        sbp.attach(model, policy, sites="nodes", optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(
        UnsupportedError, match=r"RandomDepth needs attach\(optimizer=...\): the choice of layers changes"
    ):
        sbp.attach(model, policy)
    with pytest.raises(UnsupportedError, match="RandomDepth and Lossless in one"):
        sbp.attach(model, [policy, "lossless"], optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_a_kind_is_listed_with_its_policies(depth: Any) -> None:
    assert find_policies()["random-depth"].kind == "DepthSelector"
    kinds = find_kinds().kinds
    assert kinds[: len(KINDS)] == KINDS
    assert set(kinds) == {*INSTALLED, depth.DEPTH_SELECTOR}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("a_package_that_nobody_has:KIND", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("sparsebp_depth:DepthSelector", "it is a ModelMetaclass, not a Kind"),
        ("sparsebp_cli.policy.packer:BATCH_PACKER", "BatchPacker derives from BatchPacker, which is a kind"),
    ],
)
def test_a_broken_kind_is_named_where_its_policy_is_refused_and_harms_no_other(
    folder: Path, kind: str, problem: str
) -> None:
    _install(folder, kind)
    assert find_kinds().kinds == INSTALLED
    policy = importlib.import_module("sparsebp_depth").RandomDepth()
    with pytest.raises(
        UnsupportedError, match=r"must derive from an installed kind of policy; .* Installed: Grad"
    ) as raised:
        sbp.attach(nn.Linear(2, 2), policy)
    assert f"'depth' of sparsebp-depth 0.1.0 is broken: {problem}" in str(raised.value)
    sbp.attach(nn.Linear(2, 2), make_policy("dense")).detach()


Break = Callable[[Any, pytest.MonkeyPatch], Policy]


def _extension(depth: Any) -> Any:
    del depth
    return importlib.import_module("sparsebp_depth.extension").DepthExtension


def _leaves_a_hook(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    patch.setattr(_extension(depth), "remove", lambda _: None)
    return depth.RandomDepth(full=0.3)  # type: ignore[no-any-return]


def _does_nothing(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    patch.setattr(_extension(depth), "_cut", lambda *_: None)
    return depth.RandomDepth(full=0.3)  # type: ignore[no-any-return]


def _ignores_disabled(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    def cut(self: Any, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return ((2.0 * args[0], *args[1:]), kwargs) if number == 1 else None

    patch.setattr(_extension(depth), "_cut", cut)
    return depth.RandomDepth(full=0.3)  # type: ignore[no-any-return]


def _overclaims(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    def claim(self: Any, dense: Any) -> Any:
        return sbp.backward.PassEstimate(backward=dict.fromkeys(dense.flops.backward, 0.1))

    patch.setattr(_extension(depth), "claim", claim)
    return depth.RandomDepth(full=1.0)  # type: ignore[no-any-return]


def _claims_another_draw(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    def find_depth(self: Any, step: Any) -> int:
        return int(self._policy.depth(3, replace(step, micro_batch=0, call=0, rank=0)))

    patch.setattr(_extension(depth), "_depth", find_depth)
    return depth.RandomDepth(full=0.3)  # type: ignore[no-any-return]


def _counts_its_calls(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    calls: list[int] = []

    def find_depth(self: Any, step: Any) -> int:
        calls.append(1)
        return 1 + len(calls) // 7 % 3

    patch.setattr(_extension(depth), "_depth", find_depth)
    return depth.RandomDepth(full=0.3)  # type: ignore[no-any-return]


def _is_not_exact(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    patch.setattr(_extension(depth), "_depth", lambda *_: 1)
    return depth.RandomDepth(full=1.0)  # type: ignore[no-any-return]


def _draws_globally(depth: Any, patch: pytest.MonkeyPatch) -> Policy:
    def start_step(self: Any, step: Any) -> None:
        torch.rand(1)

    patch.setattr(_extension(depth), "start_step", start_step)
    return depth.RandomDepth(full=1.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("breaks", "promise"),
    [
        (_leaves_a_hook, "after detach, these remain changed: modules"),
        (_does_nothing, "declares not exact, but trains the same as dense"),
        (_ignores_disabled, "a disabled engine computes a different loss"),
        (_overclaims, "FLOPs of a backward, but"),
        (_claims_another_draw, "FLOPs of a backward, but"),
        (_counts_its_calls, "training ends with different weights"),
        (_is_not_exact, "declares exact, but differs from dense by"),
        (_draws_globally, "uses a global random generator"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_broken_promise_of_an_extension_is_named(
    depth: Any, monkeypatch: pytest.MonkeyPatch, breaks: Break, promise: str
) -> None:
    policy = breaks(depth, monkeypatch)
    with pytest.raises(AssertionError, match=promise):
        check_kind(depth.DEPTH_SELECTOR, [policy])


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"suite": ""}, "has no test suite"),
        ({"suite": "sparsebp_depth.suite:nothing"}, "cannot be imported: AttributeError"),
        ({"extensions": ()}, "no code applies its policies"),
    ],
    ids=str,
)
def test_a_record_that_names_nothing_is_named(depth: Any, change: dict[str, Any], promise: str) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_kind(replace(depth.DEPTH_SELECTOR, **change), [depth.RandomDepth()])


def _kind(name: str) -> Kind:
    return next(kind for kind in find_kinds().kinds if kind.name == name)


def test_a_kind_of_our_own_keeps_every_promise() -> None:
    policies = [{"name": "frozen", "turn": "layers"}, {"name": "grades", "threshold": 1e9, "grace": 0.0}]
    check_kind(_kind("ParameterSelector"), policies, make_model=_decoder, loss=_loss)


def test_a_policy_of_another_kind_is_refused() -> None:
    with pytest.raises(AssertionError, match="is not of the kind ParameterSelector"):
        check_kind(_kind("ParameterSelector"), ["dense"])


def test_a_policy_that_cannot_be_made_is_named() -> None:
    with pytest.raises(PolicyError, match="unknown policy 'nobody'"):
        check_kind(_kind("ParameterSelector"), ["nobody"])


@pytest.mark.parametrize("kind", find_our_kinds(), ids=lambda kind: kind.name)
def test_what_a_record_names_exists(kind: Kind) -> None:
    named = [*(name for _, name in kind.extensions), kind.suite, kind.places, kind.adapter]
    assert all(callable(load(name)) for name in named if name)
    assert bool(kind.suite) != bool(kind.fact)  # aspects are tested with the kinds that have them


def test_extensions_change_a_model_in_the_order_that_they_always_had() -> None:
    found = sorted((number, name.rpartition(":")[2]) for kind in find_our_kinds() for number, name in kind.extensions)
    assert [name for _, name in found] == [
        "make_extension",
        "InputSaving",
        "ParameterExtension",
        "BlockExtension",
        "PackingExtension",
        "make_chooser",
        "make_example_extension",
        "LayerExtension",
        "PartExtension",
    ]
    assert found[-1][0] < Kind.OF_PACKAGES
