"""What packing goes together with, what it gives back, and how it is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LilyConfig, LoHaConfig, LoKrConfig, OFTConfig, PveraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.kind.packing import forward as forward_module
from sparsebp_cli.backward.kind.packing import groups as groups_module
from sparsebp_cli.backward.observe.flops import DensePass
from sparsebp_cli.backward.observe.module_trace import ModuleTrace
from sparsebp_cli.backward.patch.deferred import Deferred
from sparsebp_cli.errors import PolicyError, UnsupportedError

from .case import IGNORED, LIMIT, SOME, error, errors, gradients, make_batch

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**(SMALL | {"num_key_value_heads": 2} | options))).train()


def packing(engine: sbp.Engine) -> str:
    return engine.notes["packing"]


def test_a_sliding_window_is_kept() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=7)).train()
    assert errors(model) == {}


@pytest.mark.parametrize("call_cost", [0, 10**9], ids=["one size a call", "few calls"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 7])
def test_segments_of_several_sizes_attend_in_one_call_as_apart(
    monkeypatch: pytest.MonkeyPatch, window: int | None, implementation: str, call_cost: int
) -> None:
    monkeypatch.setattr(groups_module, "CALL_COST", call_cost)
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=window, attn_implementation=implementation)
    assert errors(MistralForCausalLM(config).train()) == {}


def test_segments_are_joined_where_that_costs_less() -> None:
    sizes = {0: (30, 30), 1: (30, 30), 2: (20, 20), 3: (1000, 1000), 4: (10, 10)}
    same = dict.fromkeys(sizes, 0)
    assert groups_module.arrange(sizes, dict.fromkeys(sizes, True), same) == [[3], [0, 1, 2, 4]]
    assert groups_module.arrange(sizes, dict.fromkeys(sizes, True), same | {2: 1}) == [[3], [0, 1, 4], [2]]
    assert groups_module.arrange(sizes, dict.fromkeys(sizes, False), same) == [[3], [0, 1], [2], [4]]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_the_packed_rows_again(*, reentrant: bool) -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert errors(model) == {}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_of_peft_get_the_same_gradient() -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert errors(model) == {}


@pytest.mark.compiles
def test_a_compiled_model_is_packed() -> None:
    model = llama()
    batch = make_batch("right", "completion", "groups")
    _, expected = gradients(model, None, batch)
    compiled = torch.compile(model, backend="eager")
    with sbp.attach(compiled, "lossless") as engine:
        engine.backward(compiled(**batch).loss)
        assert error(expected, [p.grad for p in model.parameters()]) < LIMIT
        assert "1 of 1 batches" in packing(engine)


def test_under_autocast_the_gradient_is_that_of_autocast() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, expected = gradients(model, None, batch)
        with sbp.attach(model, "lossless") as engine:
            _, got = gradients(model, engine, batch)
            assert "skipped" in packing(engine)
    assert error(expected, got) < 2e-2  # bfloat16


def test_gradients_of_micro_batches_add_up() -> None:
    model = llama()
    batches = [make_batch(*which) for which in SOME[:3]]
    items = torch.tensor(sum(int((b["labels"][:, 1:] != IGNORED).sum()) for b in batches))

    def accumulate(engine: sbp.Engine | None) -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            loss = model(**batch, num_items_in_batch=items).loss
            engine.backward(loss) if engine else loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = accumulate(None)
    with sbp.attach(model, "lossless") as engine:
        assert error(expected, accumulate(engine)) < LIMIT


@pytest.fixture
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("verify", ["never", "always"])
def test_ddp_sums_the_gradients_of_packed_batches(verify: str) -> None:
    model = llama()
    for batch in (make_batch("right", "completion", "groups"), make_batch("left", "last", "none")):
        _, expected = gradients(model, None, batch)
        with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
            wrapped = nn.parallel.DistributedDataParallel(model)
            engine.backward(wrapped(**batch).loss)
        assert error(expected, [p.grad for p in model.parameters()]) < LIMIT


def test_parameters_may_be_frozen_as_well() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    frozen = sbp.make_policy("frozen", train=["*.layers.1.*"])
    with sbp.attach(model, [frozen]) as engine:
        _, expected = gradients(model, engine, batch)
    with sbp.attach(model, [frozen, "lossless"]) as engine:
        _, got = gradients(model, engine, batch)
    assert error(expected, got) < LIMIT


@pytest.mark.parametrize("kept", [0, 7, torch.tensor([40, 41, 43])], ids=["all", "last", "chosen"])
def test_a_loss_of_the_users_own_reads_logits_of_the_plain_shape(kept: Any) -> None:
    model, batch = llama(), make_batch("right", "dense", "groups")
    del batch["labels"]
    if isinstance(kept, Tensor):
        batch = make_batch("left", "dense", "groups")
        del batch["labels"]

    def logits(engine: sbp.Engine | None) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        found = model(**batch, logits_to_keep=kept).logits
        columns = kept if isinstance(kept, Tensor) else slice(-kept if kept else None, None)
        real = batch["attention_mask"].bool()[:, columns]
        loss = (found.log_softmax(-1)[..., 5] * real).sum()
        engine.backward(loss) if engine else loss.backward()
        return found.detach() * real[..., None], [p.grad.clone() for p in model.parameters()]

    expected = logits(None)
    with sbp.attach(model, "lossless") as engine:
        got = logits(engine)
        assert "skipped" in packing(engine)
    torch.testing.assert_close(got[0], expected[0])
    assert error(expected[1], got[1]) < LIMIT


def test_logits_beside_a_loss_are_there_for_whoever_reads_them() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    trained = batch["labels"][:, 1:] != IGNORED
    expected = model(**batch).logits[:, :-1][trained]
    with sbp.attach(model, "lossless"):
        output = model(**batch)
        assert isinstance(dict(output.items())["logits"], Deferred)  # nobody has read them
        torch.testing.assert_close(output.logits[:, :-1][trained], expected)
        assert output.logits.shape == (6, 44, 64)
        with pytest.raises(UnsupportedError, match="leave the labels out of the forward"):
            (output.loss + output.logits.sum()).backward()


def test_labels_that_the_script_keeps_can_be_given_to_the_engine() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    labels = batch.pop("labels")
    trained = labels[:, 1:] != IGNORED

    def run(engine: sbp.Engine | None) -> list[Tensor]:
        model.zero_grad()
        logits = model(**batch).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits[trained], labels[:, 1:][trained])
        engine.backward(loss) if engine else loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run(None)
    with sbp.attach(model, "lossless") as engine:
        engine.columns(labels=labels)
        assert error(expected, run(engine)) < LIMIT
        assert "of the head's rows" in packing(engine)


def rows_of(module: nn.Module) -> list[int]:
    rows: list[int] = []

    def count(_: nn.Module, inputs: tuple[Tensor, ...], __: object) -> None:
        rows.append(inputs[0].numel() // inputs[0].shape[-1])

    count.__module__ = "torch"  # packing makes way for a hook of a script
    module.register_forward_hook(count)
    return rows


def test_the_last_layer_runs_the_rows_that_are_read_alone() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    expected = gradients(model, None, batch)
    rows, trained = [rows_of(layer.mlp) for layer in model.model.layers], int((batch["labels"] != IGNORED).sum())
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        got = gradients(model, engine, batch)
        before = [list(counts) for counts in rows]
        gradients(model, engine, batch)
        assert "of the last layer's" in packing(engine)
    assert error(expected[1], got[1]) < LIMIT
    # The first batch runs each layer twice more, without gradients, to see that the head gets the same.
    assert before[0] == [before[0][0]] * 3
    assert before[1] == [before[0][0], trained, trained]
    assert [list(counts)[3:] for counts in rows] == [[before[0][0]], [trained]]


def test_a_model_that_shapes_the_output_of_its_layers_gets_it_whole() -> None:
    """GPT-2 views the last layer's output as the batch: rows that nobody reads are zeros there, and not computed."""
    torch.manual_seed(0)
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    batch = make_batch("right", "completion", "groups")
    expected, trained = gradients(model, None, batch), int((batch["labels"] != IGNORED).sum())
    rows = rows_of(model.transformer.h[-1].mlp)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        got = gradients(model, engine, batch)
        assert "of the last layer's rows, in 1" in packing(engine)
    assert error(expected[1], got[1]) < LIMIT
    assert rows[-1] == trained < rows[0]


def _classified(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**{name: value for name, value in batch.items() if name != "labels"}, "labels": torch.arange(6) % 2}


def _bert(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SMALL, **WITHOUT_DROPOUT)).train()


@pytest.mark.parametrize("pad", ["right", "left"])
def test_a_classification_head_of_a_decoder_reads_what_it_would(pad: str) -> None:
    model, batch = llama(LlamaForSequenceClassification), _classified(make_batch(pad, "dense", "groups"))
    expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        got = gradients(model, engine, batch)
        assert "skipped" in packing(engine)
    torch.testing.assert_close(got[0], expected[0])
    assert error(expected[1], got[1]) < LIMIT


@pytest.mark.parametrize("pad", ["right", "left"])
@pytest.mark.parametrize("verify", ["first", "never"])
def test_an_encoder_that_reads_padding_is_left_alone(pad: str, verify: str) -> None:
    """Its pooler reads the first position, which is padding where that is on the left: such a batch runs the plain
    step, and others are packed all the same.
    """
    model, batch = _bert(BertForSequenceClassification), _classified(make_batch(pad, "dense", "groups"))
    expected = gradients(model, None, batch)
    with sbp.attach(model, {"name": "lossless", "verify": verify}) as engine:
        got = gradients(model, engine, batch)
        assert ("first position" in engine.notes) == (pad == "left")
        gradients(model, engine, _classified(make_batch("right", "dense", "groups")))
        assert f"in {1 + (pad == 'right')} of 2 batches" in packing(engine)
    assert error(expected[1], got[1]) < 10 * LIMIT  # the gradients of six examples nearly cancel


@pytest.mark.parametrize("call_cost", [0, 10**9], ids=["one size a call", "few calls"])
def test_a_masked_language_model_loses_its_padding_alone(monkeypatch: pytest.MonkeyPatch, call_cost: int) -> None:
    monkeypatch.setattr(groups_module, "CALL_COST", call_cost)
    model, batch = _bert(BertForMaskedLM), make_batch("right", "completion", "groups")
    expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        got = gradients(model, engine, batch)
        assert "0 in a shared prefix" in packing(engine)
    torch.testing.assert_close(got[0], expected[0])
    assert error(expected[1], got[1]) < LIMIT


def test_a_base_model_returns_hidden_states_of_the_plain_shape() -> None:
    model, batch = llama(LlamaModel), make_batch("right", "dense", "groups")
    del batch["labels"]
    real = batch["attention_mask"].bool()
    expected = model(**batch).last_hidden_state[real]
    with sbp.attach(model, "lossless") as engine:
        torch.testing.assert_close(model(**batch).last_hidden_state[real], expected)
        assert "skipped" in packing(engine)


def test_sequences_that_are_packed_already_stay_apart() -> None:
    model = llama()
    ids = make_batch("none", "dense", "none")["input_ids"].reshape(1, -1)[:, :60]
    position = torch.cat((torch.arange(25), torch.arange(20), torch.arange(15)))[None]
    labels = ids.masked_fill(position < 9, IGNORED)
    batch = {"input_ids": ids, "position_ids": position, "labels": labels, "use_cache": False}
    expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        got = gradients(model, engine, batch)
        assert "of the head's rows" in packing(engine)
    assert error(expected[1], got[1]) < LIMIT


def test_nothing_to_leave_out_is_the_plain_step_bit_for_bit() -> None:
    model, batch = llama(), make_batch("none", "dense", "none")
    batch = {name: value[:, :40].repeat(1, 1) for name, value in batch.items()} | {"attention_mask": torch.ones(6, 40)}
    whole = sbp.make_policy("lossless", labels=False)
    expected = gradients(model, None, batch)
    with sbp.attach(model, whole) as engine:
        got = gradients(model, engine, batch)
        assert packing(engine) == "nothing to skip in 1 batches"
    assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))


def test_evaluation_and_detach_run_the_model_as_it_was() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    implementation = model.config._attn_implementation
    before = model.eval()(**batch)
    engine = sbp.attach(model.train(), "lossless")
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, before.logits)
    engine.detach()
    assert model.config._attn_implementation == implementation
    assert "forward" not in vars(model)
    assert torch.equal(model(**batch).logits, before.logits)


@pytest.mark.parametrize("num_items", [None, 17])
def test_no_label_in_the_batch_gives_the_plain_loss_and_gradients_of_zero(num_items: int | None) -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    if num_items is not None:
        batch["num_items_in_batch"] = torch.tensor(num_items)
    expected, plain = gradients(model, None, batch)  # the mean of nothing is no number, its share of 17 is 0
    with sbp.attach(model, sbp.make_policy("lossless")) as engine:
        loss, grads = gradients(model, engine, batch)
        assert "in 1 of 1 batches" in packing(engine)
    assert torch.equal(loss, expected) if num_items else bool(loss.isnan() & expected.isnan())
    assert not any(grad.any() for grad in (*plain, *grads))


def test_the_reference_is_the_plain_step() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    _, expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless", execution="reference") as engine:
        _, got = gradients(model, engine, batch)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_larger_batches_are_compared_again_and_smaller_ones_not() -> None:
    model = llama()
    with sbp.attach(model, "lossless") as engine:
        for length, count in ((30, 1), (20, 1), (44, 2), (44, 2)):
            batch = {name: value[:, :length] for name, value in make_batch("none", "completion", "none").items()}
            gradients(model, engine, batch)
            assert f"compared with the ordinary one in {count} of" in packing(engine)


def test_a_gradient_that_differs_ends_packing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    _, expected = gradients(model, None, batch)
    spread = forward_module.run_head
    monkeypatch.setattr(forward_module, "run_head", lambda *args: spread(*args) * 1.001)
    with sbp.attach(model, "lossless") as engine:
        for _ in range(2):
            _, got = gradients(model, engine, batch)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert "in 2 batches; 2 batches ran without lossless: under lossless, outputs differ" in packing(engine)


def test_a_failed_comparison_is_that_of_one_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    odd, good = make_batch("left", "completion", "groups"), make_batch("right", "completion", "groups")
    wanted = [gradients(model, None, batch)[1] for batch in (odd, good)]
    spread = forward_module.run_head
    with sbp.attach(model, "lossless") as engine:
        monkeypatch.setattr(forward_module, "run_head", lambda *args: spread(*args) * 1.001)
        gradients(model, engine, odd)
        monkeypatch.setattr(forward_module, "run_head", spread)
        for batch, expected in zip((odd, good, good), (wanted[0], wanted[1], wanted[1]), strict=True):
            _, got = gradients(model, engine, batch)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True))
        assert "in 2 of 4 batches" in packing(engine)
        assert "; 2 batches ran without lossless: under lossless, outputs differ" in packing(engine)


class _TermForCausalLM(LlamaForCausalLM):
    """Adds a small term for large logits to the loss, like Bamba's ``z_loss_coefficient``."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        if output.loss is not None:
            output.loss = output.loss + 1e-3 * output.logits.float().logsumexp(-1).square().mean()
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_term_that_a_model_adds_to_its_loss_is_kept(dtype: torch.dtype) -> None:
    """In bfloat16 a comparison of gradients would not notice that the term is missing."""
    model = _TermForCausalLM(llama().config).to(dtype).train()
    shared, padded = make_batch("none", "dense", "groups"), make_batch("right", "dense", "groups")
    with torch.no_grad():
        scores = [model(**batch).loss for batch in (shared, padded)]
    expected = [gradients(model, None, batch) for batch in (shared, padded)]
    with sbp.attach(model, "lossless") as engine:
        got = [gradients(model, engine, batch) for batch in (shared, padded)]
        with torch.no_grad():
            assert torch.equal(torch.stack(scores), torch.stack([model(**batch).loss for batch in (shared, padded)]))
        assert "in 1 of 2 batches" in packing(engine)
        assert "the model's own loss reads positions of padding" in packing(engine)
    for (loss, grads), (own, found) in zip(expected, got, strict=True):
        assert abs(own / loss - 1) < (1e-6 if dtype == torch.float32 else 1e-5)
        assert error(grads, found) < (LIMIT if dtype == torch.float32 else 2e-2)


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: llama(attention_dropout=0.1), "has dropout 0.1"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "a transformers model, got Sequential"),
        (lambda: get_peft_model(llama(), LoHaConfig(target_modules=["q_proj"], rank_dropout=0.2)), "has dropout 0.2"),
        (lambda: get_peft_model(llama(), LoKrConfig(target_modules=["q_proj"], module_dropout=0.3)), "has dropout 0.3"),
        (
            lambda: get_peft_model(
                llama(), OFTConfig(r=8, oft_block_size=0, target_modules=["q_proj"], module_dropout=0.4)
            ),
            "has dropout 0.4",
        ),
        (lambda: _bert(BertForMaskedLM).to(torch.float32).apply(_drop), "has dropout 0.5"),
        (lambda: llama().apply(_count_tokens), "'model.embed_tokens', which divides .* scale_grad_by_freq to False"),
    ],
    ids=["attention dropout", "no transformers", "LoHa", "LoKr", "OFT", "dropout", "frequencies"],
)
def test_what_is_not_exact_is_refused_by_name(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        sbp.attach(make(), "lossless")


class _OwnTerm(LlamaForCausalLM):
    """A script's own forward, without position_ids: its loss has a term that needs the mask."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)
        if labels is not None:
            size_BT = output.logits.logsumexp(-1) * attention_mask
            output.loss = self.loss_function(output.logits, labels, 64) + size_BT.square().sum() / attention_mask.sum()
        return output


class _Shifted(LlamaForCausalLM):
    """Another, whose head reads each position's state and that of the position before."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        logits = self.lm_head(hidden + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])
        loss = None if labels is None else self.loss_function(logits, labels, 64)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("kind", [_OwnTerm, _Shifted])
def test_a_forward_of_the_script_keeps_its_loss_and_positions(kind: Any) -> None:
    model = llama(kind)
    real = [each for each in SOME if each[0] != "left"]  # the shift reads padding on the left
    assert errors(model, real, verify="never") == {}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("kind", [LilyConfig, PveraConfig])
def test_an_adapter_that_mixes_positions_needs_a_comparison(kind: Any) -> None:
    model = get_peft_model(llama(), kind(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=f"set verify to first, not never: {kind.__name__} may mix"):
        sbp.attach(model, sbp.make_policy("lossless", verify="never"))
    sbp.attach(model, "lossless").detach()


def _drop(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.5


def _count_tokens(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        module.scale_grad_by_freq = True


def test_an_unknown_name_of_a_policy_is_refused_by_attach() -> None:
    with pytest.raises(PolicyError, match="did you mean lossless"):
        sbp.attach(llama(), "losless")


# What copies from a device to its host, so that the host waits for it.
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "is_nonzero", "equal", "item"}


class Waits(TorchDispatchMode):
    """Counts operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexes = name in {"index", "index_put", "index_put_"} and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in WAITS or indexes:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_no_layer_waits_for_the_device() -> None:
    found = []
    for layers in (2, 5):
        model, batch = llama(num_hidden_layers=layers), make_batch("right", "completion", "tree")
        with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
            gradients(model, engine, batch)  # finds out whether the last layer can leave out rows
            with Waits() as waits:
                gradients(model, engine, batch)
            assert "of the last layer's" in packing(engine)
        found.append(waits.found)
    assert found[0] == found[1]
    assert found[0].total() < 60


@pytest.mark.parametrize("kind", [BertForSequenceClassification, LlamaForSequenceClassification])
def test_every_linear_of_a_classifier_executes_what_is_claimed_of_it(kind: Any) -> None:
    model = _bert(kind) if kind is BertForSequenceClassification else llama(kind)
    batch = _classified(make_batch("right", "dense", "none"))

    def count(backward: Callable[[Tensor], object]) -> tuple[DensePass, Counter[str]]:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            loss = model(**batch).loss
            backward(loss)
        return DensePass(loss, trace, flops), flops.backward

    with sbp.attach(model, "lossless") as engine:
        executed = count(engine.backward)[1]
        with engine.disabled():
            dense, plain = count(Tensor.backward)
        (extension,) = (one for one in engine.extensions if "claim" in one.hooks)
        claimed = extension.claim(dense).backward
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    shares = {name: executed[name] / plain[name] for name in linears}
    assert shares == pytest.approx({name: claimed.get(name, 1.0) for name in linears})
    assert len(set(shares.values())) == 2  # of packed rows, and of all
