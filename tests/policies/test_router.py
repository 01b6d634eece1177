"""A router is a short plugin that knows nothing of autograd, and the suite catches each broken promise."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import Field

from sparsebp_cli.policy import Edge, EdgeRouter, Step, find_policies, make_policy
from sparsebp_cli.testing import check_policy
from tests.policies.example_router import SkipSmall
from tests.promise import Everything, Nothing

EXAMPLE = Path(__file__).with_name("example_router.py")


def test_a_plugin_with_a_router_is_found_and_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "skip_small_from_outside.py")
    info = tmp_path / "outside-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[sparsebp.policies]\nskip-small = skip_small_from_outside:SkipSmall\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = find_policies()["skip-small"]
    assert (found.source, found.kind, found.problem) == ("outside 0.1.0", "EdgeRouter", "")
    assert make_policy("skip-small", share=0.25, norm="l2").model_dump()["missing"] == "none"
    for share in (0.0, 0.25, 1.0):
        check_policy("skip-small", share=share)


def test_the_example_is_short_and_knows_nothing_of_autograd() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 40
    assert not {"torch", "grad_fn", "autograd"} & set(text.split())


@pytest.mark.parametrize(("norm", "size"), [("l1", 12.0), ("l1_mean", 2.0), ("l2", 24**0.5)])
def test_sizes_are_summed_in_float32_and_find_what_is_not_a_number(norm: str, size: float) -> None:
    router = SkipSmall(norm=norm)
    low = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    sizes = router.sizes([torch.full((2, 3), -2.0), torch.tensor([1.0, float("nan")]), low])
    assert sizes == pytest.approx([size, float("inf"), {"l1": 4096.0, "l1_mean": 1.0, "l2": 64.0}[norm]])


@pytest.mark.parametrize("norm", ["l1", "l1_mean", "l2"])
def test_sizes_far_below_one_keep_their_order(norm: str) -> None:
    small, smaller = torch.full((2, 3), 2e-30), torch.full((2, 3), 1e-30)
    sizes = SkipSmall(norm=norm).sizes([smaller, small, torch.zeros(2, 3)])
    assert sizes[2] == 0.0 < sizes[0]
    assert sizes[1] / sizes[0] == pytest.approx(2.0)


class _All(Everything, EdgeRouter):
    """Keeps the contract: everything goes on. Each router below breaks one promise."""

    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return list(range(len(edges)))

    def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
        return self.choose(edges, step)


class _OutOfRange(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [len(edges)]


class _Twice(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [0, 0]


class _Tensors(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [torch.tensor(0)]  # type: ignore[list-item]


class _UsesGlobalGenerator(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [int(torch.randint(len(edges), (1,)))]


class _ChangesGradient(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        edges[0].gradient.mul_(2.0)
        return super().choose(edges, step)


class _NotExact(Nothing, _All):
    """Keeps it too, and promises less."""


_CALLS: list[int] = []  # where nothing but the suite can find it
_FIRST: dict[int, tuple[object, int]] = {}  # by policy


class _Forgets(_NotExact):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        _CALLS.append(step.index)
        return [len(_CALLS) % len(edges)]


class _Remembers(_NotExact):
    """Decides as at the first step that it saw: right when asked twice, wrong after a resume."""

    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        _, first = _FIRST.setdefault(id(self), (self, step.index))
        return [first % len(edges)]


class _SameAtEveryStep(_NotExact):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [step.draw % len(edges)]


class _SaysExact(_All):
    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [0]


class _SaysUnbiased(_NotExact):
    @property
    def unbiased(self) -> bool:
        return True

    def choose(self, edges: Sequence[Edge], step: Step) -> list[int]:
        return [0]


class _LosesAnOption(_NotExact):
    first: int = Field(0, description="Not written to JSON.", exclude=True)


class _OptionWithoutDescription(_NotExact):
    size: int = 1


def test_a_router_that_keeps_everything_keeps_the_contract() -> None:
    check_policy(_All)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_OutOfRange, r"must return numbers in \[0, 2\), each at most once, got \[2\]"),
        (_Twice, r"each at most once, got \[0, 0\]"),
        (_Tensors, "must return numbers"),
        (_UsesGlobalGenerator, "global random generator"),
        (_ChangesGradient, "changes what it receives"),
        (_Forgets, "decides differently when called again"),
        (_Remembers, "decides differently in a resumed run"),
        (_SameAtEveryStep, "draws the same for every index"),
        (_SaysExact, "declares exact"),
        (_SaysUnbiased, "declares unbiased"),
        (_OptionWithoutDescription, "'size' has no description"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_promise_is_caught(policy: type[EdgeRouter], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy)


def test_option_that_json_loses_is_caught() -> None:
    with pytest.raises(AssertionError, match="differ after conversion to JSON"):
        check_policy(_LosesAnOption, first=1)
