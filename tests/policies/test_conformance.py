"""Installed policies of this repository keep the contract with any options; the suite catches each broken promise."""

from __future__ import annotations

import contextlib
import itertools
import json
import random as python_random
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policies.random import Random
from sparsebp_cli.policies.topk import TopK
from sparsebp_cli.policy import (
    Elements,
    GradientSelector,
    InformedSelector,
    Policy,
    Rows,
    Selection,
    Site,
    Step,
    TwoToFour,
    find_policies,
)
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.saver import InputSaver
from tests.guess import guess_required, guess_values
from tests.plugin import find_packaged
from tests.selector import Promises


def _option_sets(policy_class: type[Policy]) -> list[dict[str, Any]]:
    """Every value of every option, and every two together, as far as the policy takes them."""
    schemas = policy_class.model_json_schema().get("properties", {})
    required = guess_required(policy_class)
    single = [(name, value) for name, schema in schemas.items() for value in guess_values(name, schema)]
    sets: dict[str, dict[str, Any]] = {}
    for chosen in ((), *((one,) for one in single), *itertools.combinations(single, 2)):
        options = required | dict(chosen)
        with contextlib.suppress(ValidationError):
            policy = policy_class.model_validate_json(json.dumps(options))
            sets.setdefault(policy.model_dump_json(), options)  # the shortest way to say it
    return list(sets.values())


def _cases() -> list[Any]:
    cases = []
    for name, found in find_packaged().items():
        assert found.policy_class is not None, f"{name}: {found.problem}"
        # Each set takes thousands of draws with all that is read: pairs of options and options that every selector has
        # are left to the long tests. So are pairs of other policies, unless one of the two is the form of what is kept.
        draws_much = issubclass(found.policy_class, InformedSelector | InputSaver)
        num_required = len(found.policy_class.model_json_schema().get("required", []))
        common = set(GradientSelector.model_fields) if draws_much else set()
        for options in _option_sets(found.policy_class):
            is_pair = len(options) > num_required + 1
            is_long = (is_pair or not common.isdisjoint(options)) if draws_much else is_pair and "along" not in options
            marks = [pytest.mark.long] if is_long else []
            cases.append(pytest.param(name, options, id=f"{name}-{options}", marks=marks))
    return cases


@pytest.mark.parametrize(("name", "options"), _cases())
def test_installed_policy_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    check_policy(name, **options)


def test_built_in_policies_are_installed() -> None:
    assert {"dense", "topk", "random"} <= set(find_policies())


class _Half(Promises):
    """Keeps the contract: the upper half of the rows. Each policy below breaks one promise."""

    @property
    def budget(self) -> float:
        return 0.5

    @property
    def selection(self) -> type[Selection] | None:
        return Rows

    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        return torch.arange((len(grad_NO) + 1) // 2)

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return Rows(self.index(grad_NO, site, step))


class _NoSuchControl(_Half):
    control = property(lambda self: {"name": "randm"})


class _ControlOfAnotherKind(_Half):
    control = property(lambda self: {"name": "random-child"})


class _ControlOfAnotherBudget(_Half):
    control = property(lambda self: {"name": "random", "keep": 0.25})


class _ControlThatChooses(_Half):
    control = property(lambda self: {"name": "topk", "keep": 0.5})


class _TakesAnything(_Half):
    model_config = ConfigDict(extra="ignore")


class _CanBeChanged(_Half):
    model_config = ConfigDict(frozen=False)


class _OptionWithoutDescription(_Half):
    size: int = 1


class _LosesAnOption(_Half):
    share: float = Field(0.5, description="Not written to JSON.", exclude=True)


class _UsesGlobalGenerator(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        return torch.randperm(len(grad_NO))[: (len(grad_NO) + 1) // 2]


class _UsesPythonRandom(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        python_random.random()
        return super().index(grad_NO, site, step)


class _ChangesGradient(_Half):
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        grad_NO[0] = 0.0
        return super().select(grad_NO, site, step)


class _Counts(_Half):
    _count: int = PrivateAttr(0)


class _HasAList(_Half):
    seen: ClassVar[list[int]] = []


_CALLS: list[int] = []  # where nothing but the suite can find it
_FIRST: dict[int, tuple[object, int]] = {}  # by policy


class _Forgets(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        _CALLS.append(step.index)
        return (torch.arange((len(grad_NO) + 1) // 2) + len(_CALLS)) % len(grad_NO)


class _Remembers(_Half):
    """Decides as at the first step that it saw: right when asked twice, wrong after a resume."""

    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        _, first = _FIRST.setdefault(id(self), (self, step.index))
        return (torch.arange((len(grad_NO) + 1) // 2) + first) % len(grad_NO)


class _SameAtEveryStep(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step.draw)
        return torch.randperm(len(grad_NO), generator=generator)[: (len(grad_NO) + 1) // 2]


class _OutOfRange(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        return torch.tensor([len(grad_NO) - 1]) if len(grad_NO) > 1 else torch.tensor([-1])


class _Twice(_Half):
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return Rows(torch.zeros(2, dtype=torch.int64))

    @property
    def budget(self) -> float:
        return 1.0


class _ShortIndex(_Half):
    def index(self, grad_NO: torch.Tensor, site: Site, step: Step) -> torch.Tensor:
        return super().index(grad_NO, site, step).int()


class _BadWeight(_Half):
    @property
    def selection(self) -> type[Selection] | None:
        return Elements

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return Elements(torch.arange(grad_NO.numel() // 2), float("nan"))


class _ThreeOfFour(_Half):
    @property
    def selection(self) -> type[Selection] | None:
        return TwoToFour

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return TwoToFour((torch.arange(grad_NO.shape[1]) % 4 != 0).expand(grad_NO.shape))


class _KeepsTooMuch(_Half):
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return None


class _SaysExact(_Half):
    @property
    def exact(self) -> bool:
        return True


class _SaysUnbiased(_Half):
    @property
    def unbiased(self) -> bool:
        return True


class _WrongWeight(_SaysUnbiased):
    """Random rows, weighted as if 0.3 of them were always kept: with few rows it is another share."""

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        chosen = Random(keep=0.3, weighted=True).select(grad_NO, site, step)
        assert isinstance(chosen, Rows)
        return Rows(chosen.index_K, torch.full((len(chosen.index_K),), 1 / 0.3))


class _ClaimsToSkip(_Half):
    """Masks single entries, so that everything is multiplied, and claims rows."""

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return TopK(keep=0.5, along="elements").select(grad_NO, site, step)


class _BudgetOfNonsense(_Half):
    @property
    def budget(self) -> float:
        return 1.5


class _UnequalExamples(_Half):
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        index_K = torch.arange(len(grad_NO) // 2)
        return Rows(index_K[: len(index_K) // 2 * 2], num_examples=2)


class _KeepAllIsNotDense(_Half):
    keep: float = Field(0.5, description="Has no effect.")


def test_half_keeps_the_contract() -> None:
    check_policy(_Half)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_TakesAnything, "accepts unknown options"),
        (_CanBeChanged, "allows changes of its options"),
        (_OptionWithoutDescription, "'size' has no description"),
        (_UsesGlobalGenerator, "global random generator"),
        (_UsesPythonRandom, "global random generator"),
        (_ChangesGradient, "changes what it receives"),
        (_Counts, "_Counts keeps state in its private attribute '_count', which no checkpoint saves"),
        (_HasAList, r"_HasAList has a class attribute 'seen' that can change \(list\)"),
        (_Forgets, "decides differently when called again"),
        (_Remembers, "decides differently in a resumed run"),
        (_SameAtEveryStep, "draws the same for every index"),
        (_NoSuchControl, "its control cannot be made: unknown policy 'randm'"),
        (_ControlOfAnotherKind, "it must be a GradientSelector"),
        (_ControlOfAnotherBudget, "its budget is 0.5, but its control has 0.25"),
        (_ControlThatChooses, "its control must have no control"),
        (_OutOfRange, r"index_K of \w+ must contain only numbers in \[0, "),
        (_Twice, "must contain each number at most once"),
        (_ShortIndex, "must be an int64 tensor of one dimension"),
        (_BadWeight, "weights and values of Elements must be finite"),
        (_ThreeOfFour, "two of every four features"),
        (_KeepsTooMuch, "its budget 0.5 allows"),
        (_SaysExact, "declares exact"),
        (_SaysUnbiased, "declares unbiased"),
        (_WrongWeight, "declares unbiased"),
        (_ClaimsToSkip, "returns Elements, but declares Rows"),
        (_BudgetOfNonsense, r"budget must be in \(0, 1\], got 1.5"),
        (_UnequalExamples, "num_examples must be 1, or B"),
        (_KeepAllIsNotDense, "keep=1.0 must be exact"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_promise_is_caught(policy: type[GradientSelector], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy)


def test_option_that_json_loses_is_caught() -> None:
    with pytest.raises(AssertionError, match="differ after conversion to JSON"):
        check_policy(_LosesAnOption, share=0.25)


def test_unknown_name_is_told() -> None:
    with pytest.raises(AssertionError, match="no policy 'topq' is installed"):
        check_policy("topq")


def test_an_instance_is_checked_with_the_options_that_it_has() -> None:
    check_policy(TopK(keep=0.25, along="rows"))
    with pytest.raises(AssertionError, match="differ after conversion to JSON"):
        check_policy(_LosesAnOption(share=0.25))


def test_what_is_no_policy_and_options_beside_an_instance_are_refused() -> None:
    with pytest.raises(UsageError, match="takes the name, the class or an instance of a policy, got 3"):
        check_policy(3)
    with pytest.raises(UsageError, match="an instance has its options already: leave out keep"):
        check_policy(TopK(keep=0.25, along="rows"), keep=0.5)
