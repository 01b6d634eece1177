"""A dropped residual block is one whose output is detached: nothing of it is computed or kept for the backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_shelf.block import BlockDropper, ResidualBlock
from sparsebp_shelf.block.layout import find_blocks
from tests.backward.conftest import tiny_model, tokens
from tests.backward.families import DECODERS, tiny_decoder
from tests.block import attach, check_equal, gradients, prove_blocks, tiny_encoder

# Where an encoder adds inside of a module, the last module of the block is not the block.
ENCODERS: dict[str, dict[str, str]] = {
    "bert": {"attention.self": "attention.output.dense", "intermediate": "output.dense"},
    "roberta": {"attention.self": "attention.output.dense", "intermediate": "output.dense"},
    "distilbert": {"attention": "attention", "ffn": "ffn"},
}
AFTER = {"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
NORMED_AFTER = ("gemma2", "gemma3_text", "olmo2")


class Named(BlockDropper):
    """Drops the blocks whose names contain one of some texts, at every step."""

    texts: tuple[str, ...] = ()
    share: ClassVar[float] = 0.5

    @property
    def budget(self) -> float:
        return self.share if self.texts else 1.0

    def drop(self, blocks: Any, step: Step) -> list[str]:
        return [block.name for block in blocks if any(text in block.name for text in self.texts)]


EVERYTHING = Named(texts=("",))


def dropbp(keep: float = 0.5) -> BlockDropper:
    policy = sbp.make_policy("dropbp", keep=keep)
    assert isinstance(policy, BlockDropper)
    return policy


def reference(model: nn.Module, dropped: Iterable[str], last: dict[str, str], forward: Any) -> dict[str, Tensor]:
    """Return the gradients of plain autograd with the outputs of some blocks detached."""
    model = copy.deepcopy(model)
    for name in dropped:
        layer, block = next((name.removesuffix(f".{key}"), key) for key in last if name.endswith(f".{key}"))
        model.get_submodule(f"{layer}.{last[block]}").register_forward_hook(_detach)
    forward(model).backward()
    return gradients(model)


def _detach(module: nn.Module, args: object, output: Any) -> Any:
    return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output.detach()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_a_dropped_block_is_a_detached_one_to_the_last_bit(family, checkpointing) -> None:
    model, ids = tiny_decoder(family, checkpointing=checkpointing), tokens(0)
    last = {name: name for name in ("self_attn", "attention", "attn", "mlp")}
    last |= AFTER if family in NORMED_AFTER else {}

    def forward(model: Any) -> Tensor:
        torch.manual_seed(5)  # of dropout
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    blocks, _ = find_blocks(model, "the test")
    for policy in (dropbp(), Named(texts=(".0.",)), Named(texts=("mlp",))):
        dropped = policy.drop(blocks, Step(0, seed=1))
        assert len(dropped) == 2
        expected = reference(model, dropped, last, forward)
        with attach(model, policy) as engine:
            engine.backward(forward(model))
            check_equal(gradients(model), expected)
        model.zero_grad()


@pytest.mark.parametrize("family", ENCODERS)
def test_a_dropped_block_of_an_encoder_is_a_detached_one(family) -> None:
    model, ids = tiny_encoder(family), tokens(0)

    def forward(model: Any) -> Tensor:
        torch.manual_seed(5)
        loss: Tensor = model(input_ids=ids, labels=torch.tensor([0, 1])).loss
        return loss

    blocks, _ = find_blocks(model, "the test")
    assert Counter(block.kind for block in blocks) == {"attention": 2, "mlp": 2}
    for policy in (dropbp(), Named(texts=(".0.",)), EVERYTHING):
        expected = reference(model, policy.drop(blocks, Step(0, seed=1)), ENCODERS[family], forward)
        with attach(model, policy) as engine:
            engine.backward(forward(model))
            check_equal(gradients(model), expected)
        model.zero_grad()


class _Llama(nn.Module):
    """The forward of a llama, written out, with the branches of some layers under ``detach``."""

    def __init__(self, model: Any, dropped: set[str]) -> None:
        super().__init__()
        self.model, self.dropped = model, dropped

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.model.model
        x = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        rotary = inner.rotary_emb(x, position_ids=positions)
        for number, layer in enumerate(inner.layers):
            added, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=None)
            x = x + (added.detach() if f"model.layers.{number}.self_attn" in self.dropped else added)
            added = layer.mlp(layer.post_attention_layernorm(x))
            x = x + (added.detach() if f"model.layers.{number}.mlp" in self.dropped else added)
        logits = self.model.lm_head(inner.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_llama_written_out_with_detach_has_the_same_gradient() -> None:
    model, ids, policy = tiny_model("llama", num_hidden_layers=4), tokens(0), dropbp()
    blocks, _ = find_blocks(model, "the test")
    for index in range(4):
        dropped = set(policy.drop(blocks, Step(index, seed=1)))
        by_hand = copy.deepcopy(model)
        _Llama(by_hand, dropped)(ids).backward()
        with attach(model, policy) as engine:
            engine.load_state_dict(engine.state_dict() | {"index": index})
            engine.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            check_equal(gradients(model), gradients(by_hand))
        model.zero_grad()


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_with_nothing_dropped_every_bit_is_the_dense_one(family) -> None:
    model, ids = tiny_decoder(family), tokens(0)
    dense = copy.deepcopy(model)
    for each, policies in ((model, dropbp(1.0)), (dense, [])):
        torch.manual_seed(5)
        attach(each, policies).backward(each(input_ids=ids, labels=ids).loss)
    check_equal(gradients(model), gradients(dense))


def test_a_step_with_every_block_dropped_trains_embeddings_and_head() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    engine = attach(model, EVERYTHING, exclude=["lm_head"])
    engine.backward(model(input_ids=ids, labels=ids).loss)
    assert gradients(model).keys() == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear"))
    return model.train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_with_adapters_alone_the_last_block_is_trained_if_all_are_dropped() -> None:
    model, ids = _adapted(), tokens(0)
    engine = attach(model, EVERYTHING)
    engine.backward(model(input_ids=ids, labels=ids).loss)
    trained = gradients(model)
    assert trained
    assert all(".layers.1.mlp." in name for name in trained)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_of_dropped_blocks_have_no_gradient_and_others_that_of_detach() -> None:
    model, ids = _adapted(), tokens(0)

    def forward(model: Any) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    blocks, _ = find_blocks(model, "the test")
    dropped = dropbp().drop(blocks, Step(0, seed=1))
    expected = reference(model, dropped, {"self_attn": "self_attn", "mlp": "mlp"}, forward)
    engine = attach(model, dropbp())
    engine.backward(forward(model))
    check_equal(gradients(model), expected)


def test_the_optimizer_leaves_parameters_of_dropped_blocks_alone() -> None:
    """No weight decay, no momentum, no count of steps; also where gradients are zeroed and not removed."""
    model, policy = tiny_model("llama"), dropbp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    blocks, _ = find_blocks(model, "the test")
    turns = Counter[str]()
    with sbp.attach(model, policy, optimizer=optimizer, seed=1) as engine:
        for index in range(4):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for number in range(2):  # accumulation: one choice for both
                ids = tokens(2 * index + number)
                engine.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            dropped = policy.drop(blocks, Step(index, seed=1))
            for name, parameter in model.named_parameters():
                is_still = torch.equal(parameter, before[name])
                if "proj" in name:
                    assert is_still == any(name.startswith(f"{block}.") for block in dropped), (index, name)
                    turns[name] += not is_still
                assert "norm" in name or not is_still or "proj" in name
    names = {name: p for name, p in model.named_parameters() if turns[name]}
    assert names
    assert {name: float(optimizer.state[p]["step"]) for name, p in names.items()} == {n: turns[n] for n in names}


def test_the_choice_is_made_once_a_step_and_another_one_at_the_next() -> None:
    asked: list[Step] = []

    class Counting(Named):
        def drop(self, blocks: Any, step: Step) -> list[str]:
            asked.append(step)
            return [blocks[step.index].name]

    model, ids = tiny_decoder("llama", checkpointing=True), tokens(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sbp.attach(model, Counting(texts=("",)), optimizer=optimizer, seed=3, num_steps=9) as engine:
        for _ in range(3):
            for _ in range(2):
                engine.backward(model(input_ids=ids, labels=ids).loss)
                with torch.no_grad():
                    model(input_ids=ids)
            optimizer.step()
            optimizer.zero_grad()
    assert asked == [Step(index, seed=3, num_steps=9) for index in range(4)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("texts", [("",), ("mlp",), (".0.",), ("0.self_attn", "1.mlp")])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_what_is_claimed_is_executed_and_nothing_of_a_dropped_block_is_kept(family, texts, checkpointing) -> None:
    proof, dropped = prove_blocks(tiny_decoder(family, checkpointing=checkpointing), Named(texts=texts))
    assert dropped
    assert proof.excess_share == 0.0
    if not checkpointing:  # which ends a repeated forward at the last tensor, not at the last product
        assert proof.executed_share == pytest.approx(proof.claimed_share, rel=1e-12)
    for name in dropped:
        for count in (proof.policy.flops.backward, proof.policy.saved.by_module):
            assert not any(counted for module, counted in count.items() if f"{module}.".startswith(f"{name}.")), name
    assert proof.policy.saved.total < proof.dense.saved.total or checkpointing
    assert proof.policy.flops.forward == proof.dense.flops.forward


def test_a_layer_with_both_blocks_dropped_is_not_computed_again() -> None:
    proof, _ = prove_blocks(tiny_decoder("llama", checkpointing=True), Named(texts=(".0.",)))
    assert not any(count for name, count in proof.policy.flops.recomputed.items() if ".0." in name)
    assert any(count for name, count in proof.policy.flops.recomputed.items() if ".1." in name)


@pytest.mark.parametrize("count", [1, 4, 7, 24])
@pytest.mark.parametrize("keep", [0.1, 0.25, 0.5, 0.9])
def test_each_block_has_the_rate_and_the_number_differs_by_one_at_most(count, keep) -> None:
    blocks = [ResidualBlock(f"layers.{n}.mlp", n, "mlp", 1) for n in range(count)]
    drawn = [dropbp(keep).drop(blocks, Step(index)) for index in range(2000)]
    rate = 1 - keep
    assert {len(names) for names in drawn} <= {int(rate * count + 1e-9), int(rate * count + 1 - 1e-9)}
    times = Counter(name for names in drawn for name in names)
    error = 5 * (rate * keep / len(drawn)) ** 0.5
    for block in blocks:
        assert times[block.name] / len(drawn) == pytest.approx(rate, abs=error)


def test_a_weight_cast_without_autograd_is_not_the_one_that_another_use_gets() -> None:
    """Autocast keeps a weight's cast for the next use; two layers here share one attention."""
    model, ids = tiny_model("llama"), tokens(0)
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    engine = attach(model, Named(texts=("0.self_attn",)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    names = gradients(model)
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.0.self_attn.k_proj.weight" not in names


def test_evaluation_and_a_disabled_engine_are_dense() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    engine = attach(model, EVERYTHING)
    with engine.disabled():
        model(input_ids=ids, labels=ids).loss.backward()
    assert len(gradients(model)) == len(list(model.parameters()))
    model.zero_grad()
    engine.detach()
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(gradients(model)) == len(list(model.parameters()))
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_report_says_how_many_blocks_have_a_backward() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    engine = attach(model, dropbp(0.25))
    engine.backward(model(input_ids=ids, labels=ids).loss)
    assert "on average 1.0 of 4 residual blocks have a backward" in str(engine.report())


def test_what_is_not_built_is_refused_by_name() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UnsupportedError, match=r"DropBP needs attach\(optimizer=...\)"):
        sbp.attach(model, dropbp())
    with pytest.raises(UnsupportedError, match="DropBP needs sites='linears', got 'nodes'"):
        attach(model, dropbp(), sites="nodes")
    with pytest.raises(UnsupportedError, match="make the same decision"):
        attach(model, [dropbp(), dropbp(0.25)])
    with pytest.raises(UnsupportedError, match=r"not supported with torch\.compile"):
        sbp.attach(torch.compile(model, backend="eager"), dropbp(), optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="does not know the residual blocks of Sequential"):
        attach(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])), dropbp())
    with pytest.raises(UnsupportedError, match="drops residual blocks of transformer layers, but Linear has no layers"):
        attach(nn.Linear(2, 2), dropbp())
    with pytest.raises(PolicyError, match=r"keep: must be in \(0, 1\], got 0.0"):
        dropbp(0.0)
    model.eval()
    with pytest.raises(UsageError, match="DropBP was not called"):
        attach(model, dropbp()).backward(model(input_ids=ids, labels=ids).loss)


def test_an_unknown_block_is_a_broken_policy() -> None:
    class Wrong(Named):
        def drop(self, blocks: Any, step: Step) -> list[str]:
            return ["model.layers.9.mlp"]

    with pytest.raises(
        PolicyError, match=r"Wrong\.drop must return only names that it received, got 'model\.layers\.9\.mlp'"
    ):
        attach(tiny_model("llama"), Wrong(texts=("",)))


def test_a_forward_of_another_step_is_not_computed_again_with_another_choice() -> None:
    model, ids = tiny_decoder("llama", checkpointing=True), tokens(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, dropbp(), optimizer=optimizer)
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.step()
    with pytest.raises(UsageError, match=r"cannot recompute the forward of .* after the optimizer step"):
        engine.backward(loss)


def test_reentrant_checkpointing_is_refused_also_if_it_comes_later() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    with attach(model, dropbp()) as engine:
        checkpoint_activations(model, use_reentrant=True)
        model.enable_input_require_grads()
        with pytest.raises(UsageError, match="DropBP was not called"):
            engine.backward(model(input_ids=ids, labels=ids).loss)
    with pytest.raises(UnsupportedError, match=r"reentrant checkpointing \(at 'model'\)"):
        attach(model, dropbp())
