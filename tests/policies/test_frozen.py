"""Which parameters `frozen` trains, when, and what the suite of parameter selectors catches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Parameter, ParameterSelector, Step, make_policy
from sparsebp_cli.testing import check_policy
from tests.promise import Everything, Nothing

LAYERS = [
    Parameter(f"model.layers.{number}.{name}", number, 4)
    for number in range(5)
    for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")
]
PARAMETERS = [
    Parameter("model.embed_tokens.weight", None, 8, ("lm_head.weight",)),
    *LAYERS,
    Parameter("model.norm.weight", None, 2),
]


def chosen(step: int = 0, **options: object) -> set[str]:
    policy = make_policy("frozen", **options)
    assert isinstance(policy, ParameterSelector)
    return set(policy.select(PARAMETERS, Step(step)))


def layers(step: int, **options: object) -> set[int]:
    by_name = {p.name: p.layer for p in PARAMETERS}
    return {layer for name in chosen(step, **options) if (layer := by_name[name]) is not None}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.norm.weight", 1),
        ("model.norm", 1),
        ("*norm*", 6),
        ("model.layers.3", 3),
        ("model.layers.[34]", 6),
        ("*.mlp", 5),
        ("lm_head", 1),
        (r"/layers\.[0-2]\..*proj/", 6),
        ("/norm/", 6),
        ("model", 17),
    ],
)
def test_a_pattern_names_parameters_modules_and_shared_ones_by_any_name(pattern, count) -> None:
    trained, rest = chosen(train=[pattern]), chosen(freeze=[pattern]) if count < 17 else set()
    assert len(trained) == count
    assert trained | rest == {p.name for p in PARAMETERS}
    assert not trained & rest


def test_a_pattern_that_matches_nothing_is_an_error_with_a_hint() -> None:
    with pytest.raises(
        PolicyError, match=r"train: 'model.layer.3' matches no trainable parameter .* did you mean model.layers.3"
    ):
        chosen(train=["model.norm", "model.layer.3"])
    with pytest.raises(PolicyError, match=r"freeze: '/layers\\\.9/' matches no trainable parameter of the model$"):
        chosen(freeze=["/layers\\.9/"])
    with pytest.raises(PolicyError, match="freeze: the patterns match all parameters"):
        chosen(freeze=["model"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give one of the options train, freeze and turn: otherwise nothing is frozen"),
        ({"train": [], "turn": None}, "give one of the options train, freeze and turn"),
        ({"train": ["a"], "freeze": ["b"]}, "give only one of train and freeze"),
        ({"train": ["a"], "every": 3}, "every needs 'turn: layers'"),
        ({"train": ["a"], "order": "random"}, "order needs 'turn: layers'"),
        ({"train": ["/(/"]}, "is not a regular expression"),
        ({"train": [""]}, "train"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text) -> None:
    with pytest.raises(PolicyError, match=text):
        make_policy("frozen", **options)


def test_layers_take_turns_in_the_order_that_is_asked_for() -> None:
    assert [layers(step, turn="layers") for step in range(6)] == [{4}, {3}, {2}, {1}, {0}, {4}]
    assert [layers(step, turn="layers", order="ascending", every=2) for step in range(4)] == [{0}, {0}, {1}, {1}]
    assert [layers(step, turn="layers", at_once=2) for step in range(4)] == [{4, 3}, {2, 1}, {0}, {4, 3}]
    rounds = [[layers(5 * number + turn, turn="layers", order="random") for turn in range(5)] for number in range(6)]
    assert all(set.union(*turns) == set(range(5)) for turns in rounds)
    assert len({str(turns) for turns in rounds}) > 3


def test_what_is_outside_of_the_layers_is_trained_unless_a_pattern_freezes_it() -> None:
    outside = {"model.embed_tokens.weight", "model.norm.weight"}
    assert all(outside < chosen(step, turn="layers") for step in range(6))
    assert chosen(1, turn="layers", freeze=["*norm*", "lm_head"]) == {
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    }
    assert chosen(2, turn="layers", train=["*.[13].mlp"]) == {"model.layers.3.mlp.up_proj.weight"}


class _All(Everything, ParameterSelector):
    """Keeps the contract: everything is trained. Each policy below breaks one promise."""

    @property
    def changes(self) -> bool:
        return False

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return [p.name for p in parameters]


class _Nothing(_All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return []


class _Invents(_All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return ["model.weight"]


class _Text(_All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return parameters[0].name


class _Twice(_All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return [p.name for p in parameters] * 2


class _SaysExact(_All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return [parameters[-1].name]


class _SaysUnbiased(_SaysExact):
    @property
    def exact(self) -> bool:
        return False


class _ChangesInSecret(Nothing, _All):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return [parameters[step.index % 3].name]


_CALLS: list[int] = []  # where nothing but the suite can find it


class _Counts(_ChangesInSecret):
    @property
    def changes(self) -> bool:
        return True

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        _CALLS.append(step.index)
        return [parameters[len(_CALLS) % 3].name]


class _Draws(_Counts):
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        return [parameters[int(torch.randint(3, ()))].name]


def test_a_policy_that_trains_everything_keeps_the_contract() -> None:
    check_policy(_All)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Nothing, "trains nothing at step 0"),
        (_Invents, "must return only names that it received"),
        (_Text, "must return only names that it received"),
        (_Twice, "names a parameter twice"),
        (_SaysExact, "declares exact, but does not train all parameters"),
        (_SaysUnbiased, "declares unbiased, so must declare exact"),
        (_ChangesInSecret, "declares that its choice never changes, but chose 3 sets"),
        (_Counts, "decides differently when called again"),
        (_Draws, "global random generator"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_promise_is_caught(policy: type[ParameterSelector], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy)
