"""Channels that are left out under adapters: the model equals a dense one whose frozen products are masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.errors import PolicyError, RecipeError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step, make_policies
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History, metric
from sparsebp_cli.testing import check_kind
from sparsebp_shelf.channel import CHANNEL_SELECTOR, ChannelGroup, ChannelSelector, SparseLoRA
from sparsebp_shelf.channel.suite import check_channel_selector
from tests.backward.conftest import tiny_model, tokens
from tests.chaos.kill import resume_killed
from tests.proof import prove
from tests.worker.conftest import LLAMA

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
LENGTH, CONTEXT = 12, 7  # positions 7 and on are outputs, and 6 predicts the first of them
HEADS, SHARED, HEAD_DIM = 4, 2, 8  # of query, that share a head of keys
FULL = 10_000  # more singular values than there are
POLICY = SparseLoRA(mlp_keep=0.25, attention_keep=0.5, start=0.0, rank=3)


def made(family: str = "llama", **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model(family, **options), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.endswith("proj.base_layer.bias"):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.double()


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = tokens(seed, 2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    labels = ids.clone()
    labels[:, :CONTEXT] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


CONTEXT_BT = torch.arange(LENGTH).expand(2, -1) < CONTEXT - 1
SCORED_BT = CONTEXT_BT & batch()["attention_mask"].bool()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def low_rank(weight: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def largest(score_C: Tensor, keep: float) -> Tensor:
    """Return a mask of the largest, by its definition."""
    kept_C = torch.zeros(len(score_C), dtype=torch.bool)
    kept_C[score_C.argsort(descending=True)[: max(1, round(keep * len(score_C)))]] = True
    return kept_C


class MaskedReference:
    """A dense model of which frozen products are masked, from the equations: W x is computed whole, and multiplied by
    0 for channels that are left out at context positions."""

    def __init__(self, model: Any, policy: SparseLoRA, scored_BT: Tensor, context_BT: Tensor) -> None:
        self.policy, self.scored_BT, self.context_BT = policy, scored_BT, context_BT
        for layer in model.base_model.model.model.layers:
            layer.mlp.register_forward_pre_hook(self.mask_mlp)
            layer.self_attn.register_forward_pre_hook(self.mask_attention, with_kwargs=True)

    def norm(self, output_NC: Tensor) -> Tensor:
        return output_NC.square().sum(0).sqrt()

    def estimate(self, module: Any, x_ND: Tensor) -> Tensor:
        weight = module.base_layer.weight.detach()
        return x_ND @ low_rank(weight, self.policy.rank).T

    def mask_mlp(self, mlp: Any, args: Any) -> None:
        x_ND = args[0].detach()[self.scored_BT]
        hidden_NC = nn.functional.silu(self.estimate(mlp.gate_proj, x_ND)) * self.estimate(mlp.up_proj, x_ND)
        kept_C = largest(self.norm(hidden_NC), float(self.policy.mlp_keep))
        for module in (mlp.gate_proj, mlp.up_proj):
            self.mask(module, kept_C)
        self.mask(mlp.down_proj, kept_C, inputs=True)

    def mask_attention(self, attention: Any, args: Any, kwargs: Any) -> None:
        x_ND, keep = kwargs["hidden_states"].detach()[self.scored_BT], float(self.policy.attention_keep)
        query_C = self.norm(self.estimate(attention.q_proj, x_ND)).view(-1, SHARED, HEAD_DIM)
        key_C = self.norm(self.estimate(attention.k_proj, x_ND)).view(-1, 1, HEAD_DIM)
        kept_C = largest((query_C.mean(1) * key_C[:, 0]).flatten(), keep)
        self.mask(attention.k_proj, kept_C)
        self.mask(attention.q_proj, kept_C.view(-1, 1, HEAD_DIM).expand(-1, SHARED, -1).flatten())
        kept_C = largest(self.norm(self.estimate(attention.v_proj, x_ND)), keep)
        self.mask(attention.v_proj, kept_C)
        inputs = kept_C.view(-1, 1, HEAD_DIM).expand(-1, SHARED, -1).flatten()
        self.mask(attention.o_proj, inputs, inputs=True)

    def mask(self, module: Any, kept_C: Tensor, *, inputs: bool = False) -> None:
        linear, computed = module.base_layer, kept_C.expand(*self.context_BT.shape, -1) | ~self.context_BT[..., None]

        def run(x: Tensor) -> Tensor:
            if inputs:
                return nn.functional.linear(x * computed, linear.weight, linear.bias)
            output = nn.functional.linear(x, linear.weight) * computed
            return output if linear.bias is None else output + linear.bias

        linear.forward = run


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", POLICY),
        ("llama", POLICY.model_copy(update={"outputs": "sparse"})),
        ("llama", POLICY.model_copy(update={"rank": FULL})),
        ("qwen2", POLICY.model_copy(update={"mlp_keep": 1.0})),
        ("qwen3", POLICY),
    ],
    ids=["llama", "all positions", "full rank", "biases", "norms of heads"],
)
def test_it_equals_a_dense_forward_whose_frozen_products_are_masked(family: str, policy: SparseLoRA) -> None:
    ours, theirs = made(family), made(family)
    scored_BT, context_BT = SCORED_BT, CONTEXT_BT
    if policy.outputs == "sparse":
        scored_BT, context_BT = batch()["attention_mask"].bool(), torch.ones_like(CONTEXT_BT)
    MaskedReference(theirs, policy, scored_BT, context_BT)
    expected = theirs(**batch()).loss
    expected.backward()
    engine = sbp.attach(ours, policy)
    loss = ours(**batch()).loss
    engine.backward(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # transformers computes the loss in float32
    found, wanted = gradients(ours), gradients(theirs)
    assert found.keys() == wanted.keys()
    assert all("lora_" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-8, msg=name)
    with engine.disabled():
        assert abs(float((ours(**batch()).loss - loss).detach())) > 1e-6


def test_by_full_rank_and_by_the_weights_the_same_channels_are_computed() -> None:
    losses = [
        float(_loss_of(POLICY.model_copy(update={"rank": FULL}))),
        float(_loss_of(POLICY.model_copy(update={"by": "exact"}))),
        float(_loss_of(POLICY.model_copy(update={"by": "random"}))),
    ]
    assert losses[0] == losses[1] != losses[2]


def _loss_of(policy: SparseLoRA) -> Tensor:
    model = made()
    engine = sbp.attach(model, policy)
    loss: Tensor = model(**batch()).loss
    engine.backward(loss)
    return loss.detach()


def test_without_sparsity_every_bit_is_that_of_plain_adapters() -> None:
    model = made()
    model(**batch()).loss.backward()
    expected = gradients(model)
    for policy, num_steps in ((SparseLoRA(mlp_keep=1.0), None), (SparseLoRA(mlp_keep=0.1, start=0.5), 4)):
        model.zero_grad()
        with sbp.attach(model, policy, num_steps=num_steps) as engine:
            engine.backward(model(**batch()).loss)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_steps_and_layers_that_are_to_be_dense_are_dense() -> None:
    policy = SparseLoRA(mlp_keep=(1.0, 0.25), attention_keep=0.5, start=0.05)
    groups = [ChannelGroup("m", layer, 2, "mlp", 48) for layer in range(2)]
    assert [policy.count(groups[1], Step(index, num_steps=100)) for index in (0, 4, 5, 99)] == [48, 48, 12, 12]
    assert policy.count(groups[0], Step(50, num_steps=100)) == 48
    with pytest.raises(PolicyError, match="mlp_keep must have a share for each of the model's 3 layers, got 2"):
        policy.count(ChannelGroup("m", 0, 3, "mlp", 48), Step(50, num_steps=100))


def test_evaluation_computes_all_channels_and_the_report_says_so() -> None:
    model = made().eval()
    dense = model(**batch()).loss
    engine = sbp.attach(model, POLICY)
    assert torch.equal(model(**batch()).loss, dense)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(**batch()).loss, dense)
    engine.backward(model(**batch()).loss)
    text = str(engine.report())
    assert "50% of the positions skip channels of frozen weights" in text
    assert "training and evaluation compute different models" in text
    assert not POLICY.exact
    assert not POLICY.unbiased


def test_checkpointed_layers_compute_the_same_channels_again() -> None:
    plain, again = made(), made()
    checkpoint_activations(again)
    for model in (plain, again):
        sbp.attach(model, POLICY).backward(model(**batch()).loss)
    theirs = gradients(again)
    assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients(plain).items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("by", ["svd", "exact", "random"])
def test_what_is_claimed_is_executed(by: str, checkpointing: bool) -> None:
    model = made()
    if checkpointing:
        checkpoint_activations(model)
    engine = sbp.attach(model, POLICY.model_copy(update={"by": by}))
    prove(model, engine, lambda: model(**batch()).loss, checkpointing=checkpointing)


def test_the_control_computes_as_many_channels_at_random() -> None:
    control = make_policies(POLICY.control)[0]
    assert isinstance(control, SparseLoRA)
    assert control.by == "random"
    assert control.control is None
    group = ChannelGroup("model.layers.0.mlp", 0, 2, "mlp", 48)
    drawn = torch.cat([control.choose(None, group, Step(index)) for index in range(1000)])
    assert control.count(group, Step(0)) == POLICY.count(group, Step(0)) == 12
    share = torch.bincount(drawn, minlength=48) / 1000
    assert bool(((share - 0.25).abs() < 5 * (0.25 * 0.75 / 1000) ** 0.5).all())


@pytest.mark.slow
def test_it_keeps_what_every_kind_promises() -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    # In the last layer the MLP of the context reaches no output, so the attention is sparse as well.
    half: dict[str, Any] = {"mlp_keep": 0.5, "attention_keep": 0.5}
    policies = [SparseLoRA(mlp_keep=1.0), SparseLoRA(**half, start=0.2), SparseLoRA(**half, by="random")]
    check_kind(
        CHANNEL_SELECTOR,
        policies,
        make_model=lambda: made(**small),
        loss=lambda model, number: model(**batch(number)).loss,
    )


@pytest.mark.slow
def test_a_killed_run_resumes_identically_and_does_what_it_claims(tiny_recipe: Any, prepared: Any) -> None:
    recipe = tiny_recipe(
        model={"config": LLAMA | {"attention_dropout": 0.1}, "lora": {"r": 2, "target_modules": "all-linear"}},
        policy=[{"name": "sparse-lora", "mlp_keep": 0.5, "attention_keep": 0.5, "outputs": "sparse", "rank": 2}],
        training={"max_steps": 10, "gradient_accumulation_steps": 2, "max_grad_norm": None},
        checkpoint={"every": 3},
        measure={"probe_every": 4, "warmup_steps": 0},
        backward={"checkpointing": "full"},
    )
    history = History.load(resume_killed(recipe, prepared).path)
    assert set(history.series(metric.EXCESS_SHARE.name).values()) == {0.0}


def test_a_recipe_without_adapters_or_with_outputs_alone_is_refused() -> None:
    recipe = ROOT / "recipes" / "methods" / "sparse-lora.yaml"
    with pytest.raises(RecipeError, match=r"so only adapters can train: needs model\.lora, got null"):
        load_recipe(recipe, ["~model.lora"])
    text = ["dataset.name=python-docs", "dataset.format=text", "dataset.eval_split=test"]
    with pytest.raises(
        RecipeError, match="keeps all channels at output positions, and all positions of a text are outputs"
    ):
        load_recipe(recipe, text)
    load_recipe(recipe, [*text, "policy.0.outputs=sparse"])


def test_what_is_not_built_is_refused_by_name() -> None:
    from peft import LoraConfig, get_peft_model

    model = made()
    for other in ({"name": "topk", "keep": 0.5}, {"name": "uniform", "start": 0}, {"name": "lossless"}):
        with pytest.raises(UnsupportedError, match="in one forward is not supported"):
            sbp.attach(model, [other, POLICY], num_steps=4)
    with pytest.raises(UsageError, match=r"SparseLoRA: its dense steps are a share of the training: .*num_steps"):
        sbp.attach(model, SparseLoRA())
    engine = sbp.attach(model, POLICY)
    with pytest.raises(UsageError, match="needs labels among the arguments"):
        model(input_ids=tokens(0))
    engine.detach()
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="is merged into its weight: unmerge it to train"):
        sbp.attach(model, POLICY)
    with pytest.raises(UnsupportedError, match="is trained, allowed: frozen weights"):
        sbp.attach(tiny_model("llama"), POLICY)
    with pytest.raises(UnsupportedError, match="needs layers like Llama's"):
        sbp.attach(get_peft_model(tiny_model("gpt_neox"), LoraConfig(r=2)), POLICY)
    dora = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear", use_dora=True))
    with pytest.raises(UnsupportedError, match="is not a plain LoRA"):
        sbp.attach(dora, POLICY)
    with pytest.raises(UsageError, match="was not called"):
        sbp.attach(made().eval(), POLICY).backward(next(made().parameters()).sum())


def test_an_adapter_that_is_merged_while_it_trains_is_refused() -> None:
    model = made()
    sbp.attach(model, POLICY)
    model.base_model.model.model.layers[0].mlp.gate_proj.merge()
    with pytest.raises(UnsupportedError, match="is merged into its weight"):
        model(**batch())


class _Half(ChannelSelector):
    """The first half of the channels."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def estimate(self) -> Any:
        return "none"

    @property
    def num_singular(self) -> int:
        return 1

    @property
    def keeps_outputs(self) -> bool:
        return False

    def count(self, group: ChannelGroup, step: Step) -> int:
        return group.num_channels // 2

    def choose(self, score_C: Tensor | None, group: ChannelGroup, step: Step) -> Tensor:
        return torch.arange(group.num_channels // 2)


class _Backwards(_Half):
    def choose(self, score_C: Tensor | None, group: ChannelGroup, step: Step) -> Tensor:
        return super().choose(score_C, group, step).flip(0)


class _Many(_Half):
    def count(self, group: ChannelGroup, step: Step) -> int:
        return 2 * group.num_channels


class _Exact(_Half):
    @property
    def exact(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("policy", "text"),
    [(_Backwards, "channels must ascend"), (_Many, "count must be a whole number"), (_Exact, "says it is exact")],
)
def test_the_suite_finds_a_broken_promise(policy: type[ChannelSelector], text: str) -> None:
    check_channel_selector(_Half())
    with pytest.raises(AssertionError, match=text):
        check_channel_selector(policy())
