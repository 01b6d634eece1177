"""A loss that reads what was not computed is found whatever its form: flat, dead, choosing, or without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import sparsebp_cli as sbp
from sparsebp_cli.backward.patch.twin import Twin, settle
from sparsebp_cli.errors import UnsupportedError

from .test_boundary import cross_entropy, gradient, make, make_batch, without

Read = Callable[[Tensor], Tensor]


def _entropy(z: Tensor) -> Tensor:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


# Each reads all positions. At equal or at small values most of them have no gradient.
ALIVE: dict[str, Read] = {
    "entropy": lambda z: _entropy(z).mean(),
    "uniform smoothing": lambda z: z.log_softmax(-1).mean(),
    "margin of two": lambda z: (z[..., 5] - z[..., 9]).square().mean(),
    "variance": lambda z: z.var(-1).mean(),
    "largest less mean": lambda z: (z.amax(-1) - z.mean(-1)).mean(),
    "hinge": lambda z: (1 - (z[..., 5] - z[..., 9])).relu().mean(),
    "z loss": lambda z: z.logsumexp(-1).square().mean(),
    "four largest": lambda z: z.topk(4, dim=-1).values.mean(),
    "neighbours": lambda z: (z[:, 1:] - z[:, :-1]).square().mean(),
    "norm": lambda z: z.norm(dim=-1).mean(),
    "layer norm": lambda z: functional.layer_norm(z, z.shape[-1:]).pow(3).mean(),
    "cosine": lambda z: functional.cosine_similarity(z[:, 1:], z[:, :-1], dim=-1).mean(),
}
# These have a gradient at some positions or values alone, or none at all where they read.
DEAD: dict[str, Read] = {
    "smallest of positions": lambda z: z.mean(-1).amin(1).mean(),
    "clipped ratio": lambda z: (z.log_softmax(-1)[..., 3] + 4).exp().clamp(0.8, 1.2).mean(),
    "far hinge": lambda z: (z[..., 5] - z[..., 9] - 3).relu().mean(),
    "detached divisor": lambda z: z[:, 6].square().mean() / _entropy(z).detach().mean(),
    "counted": lambda z: z[:, 6].square().mean() * (z.argmax(-1) > 31).float().mean().add(1),
    "dropped out": lambda z: functional.dropout(z, 0.5).square().mean(),
}


def _run(kind: Any, config: Any, read: Read, policy: Any, *, given: bool) -> None:
    model, batch = make(kind, config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), make_batch()
    before = [parameter.clone() for parameter in model.parameters()]
    with sbp.attach(model, policy) as engine:
        if given:
            engine.columns(labels=batch["labels"])
        output = model(**without(batch))
        loss = read(output.logits if hasattr(output, "logits") else output.last_hidden_state)
        if given:
            loss = loss + cross_entropy(output.logits, batch["labels"])
        with pytest.raises(UnsupportedError, match="that the policy skipped"):
            engine.backward(loss)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("vocabulary", [60, 64])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("name", ALIVE)
def test_a_loss_that_is_flat_at_equal_logits_is_refused(
    name: str, verify: str, given: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import test_boundary

    monkeypatch.setitem(test_boundary.SIZES, "vocab_size", 64)
    read = ALIVE[name]
    _run(
        LlamaForCausalLM,
        LlamaConfig,
        lambda z: read(z[..., :vocabulary]),
        sbp.make_policy("lossless", verify=verify),
        given=given,
    )


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", DEAD)
def test_a_loss_with_a_dead_zone_is_refused_at_the_first_batch(name: str, given: bool) -> None:
    _run(LlamaForCausalLM, LlamaConfig, DEAD[name], "lossless", given=given)


@pytest.mark.parametrize(("kind", "config"), [(LlamaModel, LlamaConfig), (BertModel, BertConfig)])
@pytest.mark.parametrize("name", ["variance", "layer norm", "largest less mean", "cosine"])
def test_a_loss_of_hidden_states_that_is_flat_is_refused(name: str, kind: Any, config: Any) -> None:
    _run(kind, config, ALIVE[name], "lossless", given=False)


@pytest.mark.parametrize("name", ["margin of two", "variance", "entropy", "hinge"])
@pytest.mark.parametrize("policies", [["tokens"], ["tokens", "lossless"]])
def test_exact_tokens_refuse_a_loss_of_positions_without_a_label(name: str, policies: list[str]) -> None:
    tokens = {"name": "tokens", "score": "random", "keep": 0.5, "mode": "exact"}
    made: list[Any] = [tokens if policy == "tokens" else policy for policy in policies]
    _run(LlamaForCausalLM, LlamaConfig, ALIVE[name], made, given=True)


def _in_place(z: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros(())
    total += functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    scaled = z.clone()
    scaled[labels == -100] = 0.0
    scaled[..., 0] *= 0.5
    return total + scaled[:, 6].square().mean() * 0.1


def _masked(z: Tensor, labels: Tensor) -> Tensor:
    chosen = (labels[:, 1:] != -100).float()
    each = -z[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    return (functional.dropout(each, 0.3) * chosen).sum() / chosen.sum()


def _margins(z: Tensor, labels: Tensor) -> Tensor:
    found = z[:, :-1][labels[:, 1:] != -100]
    return (1 - found[..., 5] + found[..., 9]).relu().mean() + found.var(-1).mean() + float(found[0, 0].detach() * 0)


@pytest.mark.parametrize("loss", [cross_entropy, _in_place, _masked, _margins])
@pytest.mark.parametrize("given", [True, False])
def test_a_loss_of_what_is_there_is_not_refused_and_has_the_plain_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], given: bool
) -> None:
    model, batch = make(), make_batch()
    torch.manual_seed(5)
    loss(model(**without(batch)).logits, batch["labels"]).backward()
    expected = gradient(model)
    with sbp.attach(model, "lossless") as engine:
        if given:
            engine.columns(labels=batch["labels"])
        for _ in range(2):  # a compared batch and one that is not
            torch.manual_seed(5)
            engine.backward(loss(model(**without(batch)).logits, batch["labels"]))
            assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


def test_a_backward_that_the_script_calls_itself_is_refused_as_well() -> None:
    model, batch = make(), make_batch()
    with sbp.attach(model, "lossless"):
        logits = model(**without(batch)).logits
        with pytest.raises(UnsupportedError, match="that the policy skipped"):
            (logits[:, 6].square().mean() / _entropy(logits).detach().mean()).backward()


def test_second_values_follow_functions_lists_and_writes() -> None:
    def refuse() -> None:
        raise UnsupportedError("apart")

    def pair() -> Twin:
        return Twin.of(torch.ones(2, 3, requires_grad=True) * 1, torch.full((2, 3), 2.0), refuse)

    assert torch.equal(settle(pair().sum() * 0), torch.zeros(()))
    written, listed = torch.zeros(3), pair()
    written += listed[0]
    parts: list[Any] = [torch.cat([listed, listed]), torch.stack(listed.unbind(0)), nn.Linear(3, 1)(listed), written]
    for value in parts:
        assert isinstance(value, Twin)
        with pytest.raises(UnsupportedError, match="apart"):
            settle(value)
    assert float(pair().detach().sum()) == 6.0
    assert isinstance(pair().shape, torch.Size)
