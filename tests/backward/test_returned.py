"""What a policy returns by mistake ends in one line that names the policy, its method and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor
from typing_extensions import override

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import (
    Blocks,
    Columns,
    Elements,
    Groups,
    Parameter,
    ParameterSelector,
    Policy,
    Rows,
    Score,
    Selection,
    Site,
    Split,
    Step,
    TokenChoice,
    Tokens,
    TokenSelector,
    TwoToFour,
    Values,
)
from tests.selector import Promises

from .conftest import tiny_model

Answer = Callable[[Any], Any]


class Answers(Promises):
    """Returns what a test wants, under the type that the test declares."""

    @override
    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        answer: Selection | None = ANSWER[0](grad_NO)
        return answer

    @property
    @override
    def selection(self) -> type[Selection] | None:
        return FORM[0]


class AnswersTokens(TokenSelector):
    @property
    @override
    def exact(self) -> bool:
        return False

    @property
    @override
    def unbiased(self) -> bool:
        return False

    @property
    @override
    def needs(self) -> frozenset[Score]:
        return frozenset()

    @property
    @override
    def budget(self) -> float | None:
        return None

    @override
    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        choice: TokenChoice = ANSWER[0](tokens)
        return choice


@final
class AnswersParameters(ParameterSelector):
    @property
    @override
    def exact(self) -> bool:
        return False

    @property
    @override
    def unbiased(self) -> bool:
        return False

    @property
    @override
    def changes(self) -> bool:
        return True

    @override
    def select(self, parameters: Sequence[Parameter], step: Step) -> Any:
        return ANSWER[0](parameters)


ANSWER: list[Answer] = [lambda given: given]
FORM: list[type[Selection] | None] = [Rows]


def run(policy: Policy, answer: Answer, form: type[Selection] | None = Rows) -> None:
    ANSWER[0], FORM[0] = answer, form
    model, ids = tiny_model("llama"), torch.arange(10).view(2, 5)
    with sbp.attach(model, [policy], optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)


def half(grad_NO: Tensor) -> Tensor:
    return torch.arange(len(grad_NO) // 2)


WRONG: dict[str, tuple[type[Selection] | None, Answer, str]] = {
    "a tensor": (Rows, lambda grad: grad, r"Answers\.select at 'lm_head' must return Rows or None, got torch.float32"),
    "a list": (Rows, lambda grad: [0], "must return Rows or None, got list"),
    "a class": (Rows, lambda grad: Rows, "must return Rows or None, got the class Rows"),
    "another type": (Rows, lambda grad: Columns(torch.tensor([0])), "must return Rows or None, got Columns"),
    "two selections": (Rows, lambda grad: Split(None, None), "must return Rows or None, got Split"),
    "no selection at all": (None, lambda grad: grad, "must return Selection or None, got torch.float32"),
    "int32": (
        Rows,
        lambda grad: Rows(half(grad).int()),
        "index_K of Rows must be an int64 tensor of one dimension, got",
    ),
    "a mask": (
        Rows,
        lambda grad: Rows(grad[:, 0] > 0),
        "index_K of Rows must be an int64 tensor of one dimension, got",
    ),
    "two dimensions": (
        Rows,
        lambda grad: Rows(half(grad)[None]),
        "index_K of Rows must be an int64 tensor of one dimension",
    ),
    "another device": (Rows, lambda grad: Rows(half(grad).to("meta")), "index_K of Rows must be on cpu, got meta"),
    "beyond": (Rows, lambda grad: Rows(half(grad) + len(grad)), r"index_K of Rows must contain only numbers in \[0, "),
    "negative": (Rows, lambda grad: Rows(half(grad) - 1), "got -1"),
    "twice": (Rows, lambda grad: Rows(half(grad) * 0), "each number at most once"),
    "weights": (Rows, lambda grad: Rows(half(grad), torch.ones(3)), "weight_K of Rows must have the shape"),
    "columns": (Columns, lambda grad: Columns(torch.tensor([grad.shape[1]])), "Columns must contain only numbers in"),
    "elements": (Elements, lambda grad: Elements(torch.tensor([grad.numel()])), "Elements must contain only numbers"),
    "blocks": (Blocks, lambda grad: Blocks(torch.tensor([999]), (grad.shape[0], grad.shape[1])), r"in \[0, 1\)"),
    "2:4": (TwoToFour, lambda grad: TwoToFour(grad[:1] > 0), "mask_NO of TwoToFour must have the shape"),
    "groups": (Groups, lambda grad: Groups(grad[:1], (1, 2)), "weight_NO of Groups must have the shape"),
    "values": (Values, lambda grad: Values(grad[:1]), "value_NO of Values must have the shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_selection_is_named(name: str) -> None:
    form, answer, text = WRONG[name]
    with pytest.raises(PolicyError, match=text):
        run(Answers(), answer, form)


WRONG_TOKENS: dict[str, tuple[Answer, str]] = {
    "a mask": (lambda t: t.target_BT, r"AnswersTokens\.choose must return TokenChoice, got torch.bool"),
    "nothing": (lambda t: None, "must return TokenChoice, got None"),
    "no carries": (lambda t: TokenChoice(t.target_BT, None), "carries_BT of TokenChoice must be torch.bool"),  # type: ignore[arg-type]
    "numbers": (lambda t: TokenChoice(t.target_BT.float(), t.real_BT), "trained_BT of TokenChoice must be torch.bool"),
    "one example": (lambda t: TokenChoice(t.target_BT[:1], t.real_BT[:1]), "of shape"),
}


@pytest.mark.parametrize("name", WRONG_TOKENS)
@pytest.mark.parametrize("mode", ["exact", "detach"])
def test_a_wrong_choice_of_tokens_is_named(name: str, mode: str) -> None:
    answer, text = WRONG_TOKENS[name]
    with pytest.raises(PolicyError, match=text):
        run(AnswersTokens.model_validate({"mode": mode}), answer)


WRONG_NAMES: dict[str, tuple[Answer, str]] = {
    "nothing": (lambda given: None, r"AnswersParameters\.select must return a collection of names, got None"),
    "a name": (lambda given: given[0].name, "must return a collection of names, got str"),
    "parameters": (lambda given: given[:1], "must return only names that it received, got Parameter"),
    "a name of another model": (lambda given: ["nope"], "must return only names that it received, got 'nope'"),
    "numbers": (lambda given: torch.arange(2), "must return only names that it received, got torch.int64 of shape"),
}


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_wrong_choice_of_parameters_is_named(name: str) -> None:
    answer, text = WRONG_NAMES[name]
    with pytest.raises(PolicyError, match=text):
        run(AnswersParameters(), answer)
