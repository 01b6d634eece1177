"""A block that is left out of the forward adds nothing to the residual stream; evaluation has every block."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Step
from sparsebp_shelf.block import BlockDropper, LayerDrop, ResidualBlock
from sparsebp_shelf.block.layout import find_blocks
from sparsebp_shelf.block.suite import check_block_dropper
from tests.backward.conftest import VOCABULARY, tiny_model, tokens
from tests.backward.families import DECODERS, tiny_decoder
from tests.block import attach, check_equal, gradients, prove_blocks, tiny_encoder


class Skipping(BlockDropper):
    """Leaves out the blocks whose names contain one of some texts."""

    skips_forward: ClassVar[bool] = True
    texts: tuple[str, ...] = ()

    @property
    def budget(self) -> float:
        return 0.5

    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> list[str]:
        return [block.name for block in blocks if any(text in block.name for text in self.texts)]


class WithoutBlocks(nn.Module):
    """The forward of a llama, written out, in which some blocks are no part of the sum."""

    def __init__(self, model: Any, dropped: set[str]) -> None:
        super().__init__()
        self.model, self.dropped = model, dropped

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.model.model
        x = inner.embed_tokens(ids)
        rotary = inner.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])
        for number, layer in enumerate(inner.layers):
            if f"model.layers.{number}.self_attn" not in self.dropped:
                added, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=None)
                x = x + added
            if f"model.layers.{number}.mlp" not in self.dropped:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = self.model.lm_head(inner.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("texts", [(".0.",), ("mlp",), ("1.self_attn",), ("",)])
def test_a_llama_written_out_without_the_blocks_has_the_same_loss_and_gradient(texts: tuple[str, ...]) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    policy = Skipping(texts=texts)
    dropped = set(policy.drop(find_blocks(model, "the test")[0], Step(0)))
    expected_loss = WithoutBlocks(model, dropped)(ids)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    engine = attach(model, policy)
    loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    torch.testing.assert_close(loss, expected_loss)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def _last(family: str) -> dict[str, str]:
    last = {name: name for name in ("self_attn", "attention", "attn", "mlp")}
    if family in ("gemma2", "gemma3_text", "olmo2"):
        last |= {"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
    return last


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_in_every_family_a_skipped_block_is_one_whose_output_is_zero(family: str, checkpointing: bool) -> None:
    ids, policy = tokens(0), Skipping(texts=("0.mlp", "1.self_attn", "1.attn", "1.attention"))
    model, ours = tiny_decoder(family), tiny_decoder(family, checkpointing=checkpointing)
    for dropout in (module for one in (model, ours) for module in one.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0  # what is skipped draws no random numbers
    blocks, last = find_blocks(model, "the test")[0], _last(family)
    dropped = policy.drop(blocks, Step(0))
    assert len(dropped) == 2
    for block in blocks:
        layer, key = next((block.name.removesuffix(f".{key}"), key) for key in last if block.name.endswith(f".{key}"))
        if block.name in dropped:
            model.get_submodule(f"{layer}.{last[key]}").register_forward_hook(_zero)
    expected_loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    expected_loss.backward()
    engine = attach(ours, policy)
    loss = ours(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    assert torch.equal(loss, expected_loss)
    check_equal(gradients(ours), gradients(model))


@pytest.mark.parametrize("family", ["gpt_oss", "falcon", "granitemoeshared"])
def test_a_skipped_block_adds_nothing_to_an_output_in_place_or_in_a_tuple(family: str) -> None:
    policy, sizes = Skipping(texts=("0.mlp", "0.block_sparse_moe")), {"hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 48}
    sizes |= {"num_local_experts": 4, "shared_intermediate_size": 16, "head_dim": 8} if family != "falcon" else {}
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).train()
    model, ids = copy.deepcopy(ours), tokens(0)
    dropped = policy.drop(find_blocks(model, "the test")[0], Step(0))
    assert len(dropped) == 1
    model.get_submodule(dropped[0]).register_forward_hook(_zero)
    engine = attach(ours, policy)
    for one, backward in ((model, torch.Tensor.backward), (ours, engine.backward)):
        backward(one(input_ids=ids, labels=ids, use_cache=False).loss)
    check_equal(gradients(ours), gradients(model))


def _zero(module: nn.Module, args: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return torch.zeros_like(output[0]), *output[1:]
    return torch.zeros_like(output)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("texts", [("",), ("mlp",), (".0.",), ("0.self_attn", "1.mlp")])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_what_is_claimed_of_forward_and_backward_is_executed(family: str, texts: Any, checkpointing: bool) -> None:
    proof, dropped = prove_blocks(tiny_decoder(family, checkpointing=checkpointing), Skipping(texts=texts))
    assert dropped
    assert proof.excess_share == 0.0
    assert proof.policy.flops.forward.total() == pytest.approx(proof.claimed_forward_flops, rel=1e-12)
    assert proof.policy.flops.forward.total() < proof.dense.flops.forward.total()
    if not checkpointing:
        assert proof.executed_share == pytest.approx(proof.claimed_share, rel=1e-12)
    flops = proof.policy.flops
    for name in dropped:
        for count in (flops.forward, flops.recomputed, flops.backward, proof.policy.saved.by_module):
            assert not any(counted for module, counted in count.items() if f"{module}.".startswith(f"{name}.")), name


def test_evaluation_has_every_block() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    model.eval()
    dense = model(input_ids=ids).logits
    engine = attach(model, Skipping(texts=("mlp",)))
    assert torch.equal(model(input_ids=ids).logits, dense)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, dense)
    with engine.disabled():
        assert torch.equal(model(input_ids=ids).logits, dense)
    assert not torch.equal(model(input_ids=ids).logits, dense)
    assert "of 4 residual blocks are computed" in str(engine.report())


def test_layers_are_left_out_whole_and_each_by_its_own_draw() -> None:
    blocks = [
        ResidualBlock(f"layers.{n}.{kind}", n, kind, 1) for n, kind in itertools.product(range(3), ("attention", "mlp"))
    ]
    drawn = [frozenset(LayerDrop(keep=0.5).drop(blocks, Step(index))) for index in range(400)]
    sets = [out for number in range(4) for out in itertools.combinations(range(3), number)]
    wanted = {frozenset(block.name for block in blocks if block.layer in out) for out in sets}
    assert set(drawn) == wanted


def test_with_nothing_left_out_every_bit_is_the_dense_one() -> None:
    policy = sbp.make_policy("layerdrop", keep=1.0)
    assert policy.exact
    model, ids = tiny_model("llama"), tokens(0)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    engine = attach(model, policy)
    engine.backward(model(input_ids=ids, labels=ids).loss)
    check_equal(gradients(model), expected)


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="not supported for BertLayer: this layer normalises the residual stream after each"
    ):
        attach(tiny_encoder("bert"), "layerdrop")
    with pytest.raises(UnsupportedError, match="segments first run all blocks, without gradients"):
        attach(tiny_model("llama"), "layerdrop", segments=2)
    for other in ({"name": "tokens", "score": "random", "keep": 0.5}, {"name": "lossless"}):
        with pytest.raises(UnsupportedError, match="in one forward is not supported"):
            attach(tiny_model("llama"), ["layerdrop", other])


class _Lavish(Skipping):
    @property
    def budget(self) -> float:
        return 0.75


def test_the_suite_finds_a_broken_promise() -> None:
    with pytest.raises(AssertionError, match=r"0\.500 have a backward on average, but its budget is 0\.75"):
        check_block_dropper(_Lavish(texts=("mlp",)))
