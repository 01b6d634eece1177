"""Gradients apart from their parameters: summed, merged, taken out, clipped, applied; bad use is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UsageError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module, number: int = 0) -> Tensor:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
    return model(x).square().mean()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_new_store_is_empty() -> None:
    store = sbp.GradStore()
    assert (len(store), list(store), list(store.items())) == (0, [], [])
    assert store.norm() == 0
    store.apply()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_two_losses_in_one_store_step_as_plain_accumulation_does(name: str) -> None:
    plain, stored = _model(), _model()
    optimizers = [getattr(torch.optim, name)(m.parameters(), lr=0.1) for m in (plain, stored)]
    for step in range(3):
        for number in (2 * step, 2 * step + 1):
            _loss(plain, number).backward()
        store = sbp.GradStore(stored)
        for number in (2 * step, 2 * step + 1):
            store.backward(_loss(stored, number))
        assert not _gradients(stored)
        assert store.norm() == torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        store.clip(0.05)
        store.apply()
        assert all(torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(stored), strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), stored.parameters(), strict=True))


def test_merging_sums_what_is_shared_and_leaves_the_other_store_as_it_was() -> None:
    shared, alone = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    first, second = sbp.GradStore(), sbp.GradStore()
    given = torch.ones(2)
    first.add(shared, given)
    second.add(shared, torch.full((2,), 2.0))
    second.add(shared, torch.full((2,), 4.0))  # the second store's own tensor from here on
    second.add(alone, torch.ones(3))
    assert first.merge(second) is first
    second.add(shared, torch.ones(2))
    second.add(alone, torch.ones(3))
    assert first[shared].tolist() == [7, 7]
    assert first[alone].tolist() == [1, 1, 1]
    assert second[shared].tolist() == [7, 7]
    assert given.tolist() == [1, 1]
    assert list(first) == [shared, alone]


def test_an_entry_is_taken_out_such_as_the_gradient_of_a_segments_input() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    store = sbp.GradStore()
    store.backward(layer(x), torch.ones(1, 2))
    assert x in store
    assert torch.equal(store.pop(x), layer.weight.sum(0, keepdim=True))
    assert x not in store
    assert store.pop(x, None) is None
    assert dict(store.items()).keys() == {layer.weight, layer.bias}


def test_a_loop_over_segments_can_be_written_by_hand() -> None:
    """As it was first asked for: keep inputs, then run, differentiate, take the input's gradient out, merge."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    network, x = [shared, nn.Linear(4, 4), shared], torch.linspace(-1, 1, 8).view(2, 4)
    shared(network[1](shared(x))).square().sum().backward()
    plain = [p.grad.clone() for p in (*shared.parameters(), *network[1].parameters())]
    for module in network:
        module.zero_grad()

    inputs, value = [], x
    for segment in network:
        inputs.append(value.detach().requires_grad_())
        with torch.no_grad():
            value = segment(value)
    incoming, store = 2 * value, sbp.GradStore()
    for segment, kept in zip(reversed(network), reversed(inputs), strict=True):
        one = sbp.GradStore()
        one.backward((segment(kept) * incoming).sum())
        incoming = one.pop(kept)
        store.merge(one)
    store.apply()
    found = [p.grad for p in (*shared.parameters(), *network[1].parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_what_is_handed_in_is_never_changed() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    one = torch.full((2,), 3.0)  # autograd, too, gives one tensor to the two terms of a sum
    store = sbp.GradStore()
    for parameter in parameters:
        store.add(parameter, one)
    store.clip(1.0)
    store.apply()
    parameters[0].grad.add_(5.0)
    assert one.tolist() == [3, 3]
    torch.testing.assert_close(parameters[1].grad, torch.full((2,), 0.5))
    store.add(parameters[0], one)
    copy = store.to()
    copy.add(parameters[0], one)
    copy.add(parameters[0], one)
    store.add(parameters[0], one)
    assert (copy[parameters[0]].tolist(), store[parameters[0]].tolist()) == ([9, 9], [6, 6])


def test_applying_adds_to_the_gradient_as_a_backward_does_and_empties_the_store() -> None:
    model = _model()
    _loss(model).backward()
    once = [grad.clone() for grad in _gradients(model)]
    store = sbp.GradStore()
    store.backward(_loss(model))
    store.apply()
    store.apply()
    assert len(store) == 0
    assert all(torch.equal(grad, 2 * before) for grad, before in zip(_gradients(model), once, strict=True))


def test_names_and_parameters_are_two_ways_to_say_the_same() -> None:
    model = _model()
    model.tied = model[2]
    by_name = sbp.GradStore(model)
    by_name.add("2.bias", torch.ones(3))
    by_name.add("tied.bias", torch.ones(3))
    by_name.add(model[2].bias, torch.ones(3))
    assert by_name["2.bias"].tolist() == [3, 3, 3]
    assert (len(by_name), "tied.bias" in by_name, "0.bias" in by_name) == (1, True, False)
    loose = sbp.GradStore()
    loose.add("2.bias", torch.ones(3))
    loose.apply(model)
    assert model[2].bias.grad.tolist() == [1, 1, 1]


def test_another_dtype_or_device_comes_back_to_the_parameters() -> None:
    model = _model().to(torch.bfloat16)
    store = sbp.GradStore(model)
    store.add("2.bias", torch.ones(3, dtype=torch.bfloat16))
    wide = store.to(dtype=torch.float32)
    wide.add("2.bias", torch.full((3,), 2.0**-9, dtype=torch.bfloat16))  # lost in a sum of bfloat16
    assert wide["2.bias"].tolist() == [1 + 2.0**-9] * 3
    assert store["2.bias"].dtype == torch.bfloat16
    elsewhere = store.to("meta")
    with pytest.raises(UsageError, match=r"'2.bias': the gradient is on cpu, allowed: meta"):
        elsewhere.add("2.bias", torch.ones(3))
    with pytest.raises(UsageError, match=r"'2.bias': the gradient is on meta, allowed: cpu"):
        store.merge(elsewhere)
    wide.apply()
    assert model[2].bias.grad.dtype == torch.bfloat16


def test_hooks_run_once_and_the_layout_is_the_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2).t())
    seen: list[Tensor] = []
    parameter.register_hook(lambda grad: 2 * grad)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    store = sbp.GradStore()
    store.backward((parameter * 3).sum())
    store.backward((parameter * 4).sum())
    assert not seen
    store.apply()
    assert [grad.unique().tolist() for grad in seen] == [[14]]
    assert parameter.grad.stride() == parameter.stride()


def test_sparse_gradients_are_summed_clipped_and_applied() -> None:
    plain, stored = (nn.Embedding(6, 2, sparse=True) for _ in range(2))
    stored.load_state_dict(plain.state_dict())
    ids = torch.tensor([1, 1, 4])
    store = sbp.GradStore()
    for _ in range(2):
        plain(ids).sum().backward()
        store.backward(stored(ids).sum())
    store.backward(stored.weight.sum())
    plain.weight.grad = plain.weight.grad.to_dense() + 1
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(store.clip(1.0), norm)
    store.apply()
    torch.testing.assert_close(stored.weight.grad, plain.weight.grad)


FOREIGN = nn.Parameter(torch.zeros(3))
MISUSES: list[tuple[Callable[[sbp.GradStore, nn.Sequential], Any], str]] = [
    (lambda s, m: s.add("2.bias", torch.ones(4)), r"'2.bias': the gradient has shape \(4,\), allowed: \(3,\)"),
    (lambda s, m: s.add("2.bias", torch.ones(3, device="meta")), "'2.bias': the gradient is on meta, allowed: cpu"),
    (lambda s, m: s.add("2.bais", torch.ones(3)), r"Sequential has no parameter '2.bais'; did you mean 2.bias\?"),
    (lambda s, m: s.add(FOREIGN, torch.ones(3)), r"a tensor of shape \(3,\) is not a parameter of Sequential"),
    (lambda s, m: s.add(3, torch.ones(3)), "a key must be a parameter or its name, got int"),
    (lambda s, m: s.add("2.bias", [1.0]), "a gradient must be a tensor, got list"),
    (lambda s, m: s.add(m[2].bias.requires_grad_(False), torch.ones(3)), "'2.bias' does not require grad"),
    (lambda s, m: sbp.GradStore().add(m[2].bias * 2, torch.ones(3)), r"a tensor of shape \(3,\) is a computed tensor"),
    (lambda s, m: s.pop("2.bias"), "the store holds no gradient of '2.bias'"),
    (lambda s, m: s[m[2].bias], "the store holds no gradient of '2.bias'"),
    (lambda s, m: s.merge(s), "cannot be merged with itself"),
    (lambda s, m: s.clip(0.0), "max_norm must be a number above 0, got 0.0"),
    (lambda s, m: s.backward(torch.zeros(())), "nothing to differentiate"),
    (lambda s, m: s.backward(FOREIGN.sum()), "is not a parameter of Sequential"),
    (lambda s, m: s.backward(m(torch.ones(1, 4)).sum(), [None, None]), "1 outputs and 2 gradients"),
    (
        lambda s, m: s.add("2.bias", torch.ones(3).long()),
        "a gradient must have a floating-point or complex dtype, got torch.int64",
    ),
    (
        lambda s, m: s.add("2.bias", torch.ones(3) > 0),
        "a gradient must have a floating-point or complex dtype, got torch.bool",
    ),
    (lambda s, m: s.add("2.bias", torch.ones(3) * 1j), "complex, but the weight is real .torch.float32."),
    (
        lambda s, m: s.add("2.weight", torch.ones(3, 8).to_mkldnn()),
        "layout torch.strided or torch.sparse_coo, got torch._mkldnn",
    ),
    (lambda s, m: s.merge({}), "only a GradStore can be merged, got dict"),
    (lambda s, m: s.to(dtype=torch.int32), "a gradient must have a floating-point or complex dtype, got torch.int32"),
    (lambda s, m: s.to(dtype="float64"), "dtype must be a torch.dtype, got 'float64'"),
    (lambda s, m: s.clip("1.0"), "max_norm must be a number above 0, got '1.0'"),
    (lambda s, m: s.clip(True), "max_norm must be a number above 0, got True"),
    (lambda s, m: s.backward(None), "outputs must be a tensor or a sequence of tensors, got NoneType"),
    (lambda s, m: s.backward([_loss(m), 1.0]), "each output to differentiate must be a tensor, got float"),
    (lambda s, m: s.backward(_loss(m), 1.0), "gradients must be a tensor or a sequence of tensors, got float"),
    (lambda s, m: s.backward(m(torch.ones(1, 4))), r"an output of shape \(1, 3\) needs a gradient"),
    (lambda s, m: s.backward(m(torch.ones(1, 4)), torch.ones(3)), r"shape \(1, 3\) got a gradient of shape \(3,\)"),
    (lambda s, m: sbp.GradStore("model"), "model must be an nn.Module, got str"),
    (lambda s, m: s.apply("model"), "model must be an nn.Module, got str"),
    (lambda s, m: copy.deepcopy(s), "a GradStore cannot be copied or pickled"),
]


@pytest.mark.parametrize(("misuse", "text"), MISUSES)
def test_bad_use_is_one_line_that_names_the_parameter(
    misuse: Callable[[sbp.GradStore, nn.Sequential], Any], text: str
) -> None:
    model = _model()
    store = sbp.GradStore(model)
    with pytest.raises(UsageError, match=text):
        misuse(store, model)
    assert len(store) == 0


def test_a_name_that_no_model_knows_is_refused_before_anything_is_applied() -> None:
    model, store = _model(), sbp.GradStore()
    store.add(model[2].bias, torch.ones(3))
    store.add("0.bias", torch.ones(8))
    with pytest.raises(UsageError, match=r"'0.bias' is a name, but the store has no model"):
        store.apply()
    with pytest.raises(UsageError, match=r"Tanh has no parameter '0.bias'|is not a parameter of Tanh"):
        store.apply(nn.Tanh())
    store.add("0.weight", torch.ones(8))
    with pytest.raises(UsageError, match=r"'0.weight': the gradient has shape \(8,\), allowed: \(8, 4\)"):
        store.apply(model)
    assert not _gradients(model)
    assert len(store) == 3
