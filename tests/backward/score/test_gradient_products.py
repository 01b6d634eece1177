"""Products of gradients are those of autograd, example by example; the pass leaves no trace, its cost is counted."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, OPTConfig, OPTForCausalLM

from sparsebp_cli.backward import ModuleTrace, attach, count_flops
from sparsebp_cli.backward.observe.flops import DensePass
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policies.frozen import Frozen
from sparsebp_cli.policies.topk import TopK
from sparsebp_shelf.example import gradient_products as room
from sparsebp_shelf.example.gradient_products import GradientProducts
from sparsebp_shelf.policies.greats import Greats
from tests.backward.conftest import VOCABULARY
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch


def encoder(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=4,
        **options,
    )
    return AutoModelForSequenceClassification.from_config(config).double().train()


def opt() -> Any:
    """A decoder whose MLP gets the rows of all examples in one dimension."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    return (
        OPTForCausalLM(OPTConfig(vocab_size=VOCABULARY, max_position_embeddings=64, dropout=0.1, **sizes))
        .double()
        .train()
    )


MODELS = {
    "llama": partial(tiny_decoder, "llama", dtype=torch.float64),
    "gpt2": partial(tiny_decoder, "gpt2", dtype=torch.float64),  # Conv1D, tied, with dropout
    "opt": opt,
    "bert": partial(encoder, "bert"),
    "albert": partial(encoder, "albert", embedding_size=16),  # both layers are one module
}


def group(number: int, *, classes: bool, length: int = 12) -> dict[str, Tensor]:
    given = batch(number, length)
    return given | ({"labels": torch.arange(number) % 4} if classes else {})


def products(model: Any, examples: Any, validation: Any, *, reference: bool = False) -> Any:
    forward = partial(type(model).forward, model)
    computer = GradientProducts(model, "the test")
    return computer.compute(examples, validation, forward, nullcontext, reference=reference)


@pytest.mark.parametrize("form", ["rows", "weights"])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_gradients_of_single_examples(name, form, monkeypatch) -> None:
    monkeypatch.setattr(room, "rows_are_cheaper", lambda *_: form == "rows")
    model, classes = MODELS[name](), name.endswith("bert")
    groups = group(4, classes=classes), group(3, classes=classes, length=9)
    fast, slow = (products(model, *groups, reference=reference) for reference in (False, True))
    for ours, theirs in zip(fast, slow, strict=True):
        assert theirs.abs().min() > 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, check_dtype=False)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_reference_is_the_plain_gradient_of_each_example_alone() -> None:
    model, examples, validation = tiny_decoder("llama").eval(), batch(3), batch(2, 9)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]

    def gradients(given: dict[str, Tensor]) -> Tensor:
        rows = ({name: value[n : n + 1] for name, value in given.items()} for n in range(len(given["labels"])))
        found = [torch.autograd.grad(model(**row).loss, weights) for row in rows]
        return torch.stack([torch.cat([part.flatten() for part in each]) for each in found])

    ours, (one, other) = products(model, examples, validation, reference=True), map(gradients, (examples, validation))
    torch.testing.assert_close(ours.product_B, one @ other.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.product_BB, one @ one.T, rtol=1e-4, atol=1e-6)


def test_frozen_and_excluded_linears_do_not_count() -> None:
    model, examples, validation = MODELS["llama"](), batch(3), batch(2)
    everything = products(model, examples, validation)
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    head = products(model, examples, validation)
    assert not torch.allclose(head.product_B, everything.product_B)
    model.requires_grad_(requires_grad=True)
    without = GradientProducts(model, "the test", ["lm_head"])
    rest = without.compute(examples, validation, partial(type(model).forward, model), nullcontext)
    torch.testing.assert_close(head.product_BB + rest.product_BB, everything.product_BB)


def test_rows_of_unknown_examples_are_refused_by_name() -> None:
    model = tiny_decoder("llama")
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: plain(x.transpose(0, 1)).transpose(0, 1)
    with pytest.raises(
        UnsupportedError, match=r"must know to which example each row belongs, but at 'model.layers.0.mlp"
    ):
        products(model, batch(3), batch(2))


def engine_of(model: Any, *policies: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return attach(model, list(policies), optimizer=optimizer, validation=batch(4), **options)


def test_a_step_trains_the_chosen_examples_alone_whatever_else_is_attached() -> None:
    model, examples = tiny_decoder("llama"), batch(6)
    found = {}
    for name, policies in {
        "alone": [Greats(keep=1 / 3)],
        "topk": [Greats(keep=1 / 3), TopK(keep=1.0)],
        "frozen": [Greats(keep=1 / 3), Frozen(freeze=["*.layers.0.*"])],
    }.items():
        model.zero_grad(set_to_none=True)
        with engine_of(model, *policies) as engine:
            engine.backward(model(**examples).loss)
            assert engine.take_chosen().chosen_examples == 2
        found[name] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found["alone"], found["topk"]))
    assert len(found["frozen"]) < len(found["alone"])
    with engine_of(model, Greats(keep=1 / 3), execution="reference") as engine:
        model.zero_grad(set_to_none=True)
        engine.backward(model(**examples).loss)
    assert all(map(torch.allclose, found["alone"], [p.grad for p in model.parameters()]))


def test_what_the_pass_multiplies_is_counted_and_claimed() -> None:
    model, examples = tiny_decoder("llama"), batch(6)
    with engine_of(model, Greats(keep=1 / 3, validation_batch_size=3)) as engine:
        (extension,) = engine.extensions
        with engine.disabled(), ModuleTrace(model) as trace, count_flops(trace) as dense:
            loss = model(**examples).loss
            engine.backward(loss)
        with ModuleTrace(model) as trace, count_flops(trace) as counted:
            engine.backward(model(**examples).loss)
        scoring = engine.take_chosen().scoring_flops
        claim = extension.claim(DensePass(loss, trace, dense))
    forward, backward = dense.forward.total(), dense.backward.total()
    left = [
        sum(flops * share[name] for name, flops in count.items())
        for count, share in ((dense.forward, claim.forward), (dense.backward, claim.backward))
    ]
    # transformers 5.17 multiplies its rotary frequencies once a batch, which is 64 FLOPs here
    assert counted.forward.total() == pytest.approx(left[0] + scoring, rel=1e-5)
    assert counted.backward.total() == pytest.approx(left[1], rel=1e-12)
    assert left == pytest.approx([forward / 3, backward / 3])
    # Forward and backward of 9 in place of 6 examples, without gradients of weights and of the first layer's input.
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    first = [name for name in linears if ".layers.0.self_attn" in name and not name.endswith("o_proj")]
    spared = sum(dense.forward[name] for name in (*linears, *first))
    examples_of_9 = 1.5 * (forward + backward - spared)
    pairs = 6 * 12 * (12 * 7 / 2 + 3 * 12)
    form = [
        min(pairs * (m.in_features + m.out_features), (9 * 12 + 6 + 36) * m.in_features * m.out_features)
        for m in linears.values()
    ]
    assert scoring == pytest.approx(examples_of_9 + 2 * sum(form), rel=1e-5)
