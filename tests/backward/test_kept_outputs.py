"""Frozen lower layers run once for each example, and training is what it is without that, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.kind.parameter.kept_output.context import FrozenContext
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError

BATCH, LENGTH, VOCABULARY, EXAMPLES = 4, 16, 61, 12
LOWER = {"llama": ["model.embed_tokens", "/layers\\.[01]\\./"], "gpt2": ["*.wte", "*.wpe", "/h\\.[01]\\./"]}
LOWER["bert"] = ["bert.embeddings", "/layer\\.[012]\\./"]
NO_DROPOUT = {"attention_dropout": 0.0}


def llama(layers: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = sizes | {"use_cache": False, "vocab_size": VOCABULARY, "num_hidden_layers": layers} | options
    return LlamaForCausalLM(LlamaConfig(**given)).train()


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": VOCABULARY, "use_cache": False}
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return AutoModelForCausalLM.from_config(GPT2Config(**(sizes | none | options))).train()


def bert(width: int = 32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4, "num_hidden_layers": 6}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**({"vocab_size": VOCABULARY} | sizes | none | options))).train()


def packed(name: str) -> Callable[[list[int]], dict[str, Tensor]]:
    """Batches of texts of one length."""
    ids = torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))

    def batch(rows: list[int]) -> dict[str, Tensor]:
        labels = ids[rows] if name != "bert" else ids[rows, 0] % 2
        return {"input_ids": ids[rows], "labels": labels}

    return batch


def padded(name: str) -> Callable[[list[int]], dict[str, Tensor]]:
    """Batches of texts of unlike length, padded to the longest."""
    draw = torch.Generator().manual_seed(8)
    texts = [torch.randint(1, VOCABULARY, (3 + 5 * number % 14,), generator=draw) for number in range(EXAMPLES)]

    def batch(rows: list[int]) -> dict[str, Tensor]:
        longest = max(len(texts[row]) for row in rows)
        ids, mask = (
            torch.zeros(len(rows), longest, dtype=torch.int64),
            torch.zeros(len(rows), longest, dtype=torch.int64),
        )
        for number, row in enumerate(rows):
            ids[number, : len(texts[row])], mask[number, : len(texts[row])] = texts[row], 1
        labels = ids.masked_fill(mask == 0, -100) if name != "bert" else ids[:, 0] % 2
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return batch


def epochs(number: int) -> Iterator[list[int]]:
    draw = torch.Generator().manual_seed(3)
    for _ in range(number):
        order = torch.randperm(EXAMPLES, generator=draw).tolist()
        yield from (order[start : start + BATCH] for start in range(0, EXAMPLES, BATCH))


class Course:
    """A training, and what it left: losses, weights, counts of what was known, and FLOPs of each step."""

    def __init__(
        self,
        model: nn.Module,
        policy: Any,
        batch: Callable[[list[int]], dict[str, Tensor]],
        *,
        num_epochs: int = 3,
        inside: Callable[[nn.Module, int], None] = lambda model, step: None,
        **options: Any,
    ) -> None:
        self.model, self.losses, self.uses, self.flops = model, list[Tensor](), list[Any](), list[int]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with sbp.attach(model, policy, optimizer=optimizer, **options) as engine:
            for step, rows in enumerate(epochs(num_epochs)):
                inside(model, step)
                with count_flops() as flops:
                    loss = model(**batch(rows)).loss
                    engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(loss.detach())
                self.uses.append(engine.take_output_use())
                self.flops.append(flops.total)
            self.notes = engine.report().notes

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Course)
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return torch.equal(torch.stack(self.losses), torch.stack(other.losses)) and all(
            torch.equal(one, two) for one, two in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def known(self) -> list[int]:
        return [use.known for use in self.uses]


def frozen(name: str, **options: Any) -> Any:
    return sbp.make_policy("frozen", freeze=LOWER[name], **options)


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_training_equals_that_without_a_cache_to_the_last_bit(name: str, place: str, tmp_path: Path) -> None:
    plain = Course(MODELS[name](), frozen(name), packed(name))
    kept = Course(MODELS[name](), frozen(name, cache=place), packed(name), folder=tmp_path)
    assert kept == plain
    assert kept.known == [0] * 3 + [BATCH] * 6
    assert all(use.relative_error == 0 for use in kept.uses)


@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_are_equal_too_and_known_where_their_length_comes_again(name: str) -> None:
    plain = Course(MODELS[name](), frozen(name), padded(name), num_epochs=6)
    kept = Course(MODELS[name](), frozen(name, cache="memory"), padded(name), num_epochs=6)
    assert kept == plain
    assert sum(kept.known[6:]) > 0


@pytest.mark.parametrize(
    ("options", "attach"),
    [
        ({}, {"update": "eager"}),
        ({"attn_implementation": "eager"}, {}),
        ({"tie_word_embeddings": True}, {}),
    ],
    ids=["eager update", "eager attention", "tied"],
)
def test_other_ways_to_train_are_equal_too(options: dict[str, Any], attach: dict[str, Any]) -> None:
    plain = Course(llama(**options), frozen("llama"), packed("llama"), **attach)
    kept = Course(llama(**options), frozen("llama", cache="memory"), packed("llama"), **attach)
    assert kept == plain
    assert kept.known == [0] * 3 + [BATCH] * 6


def test_checkpointing_and_a_selector_at_linears_are_equal_too() -> None:
    ends = []
    for cache in ({}, {"cache": "memory"}):
        model = llama()
        checkpoint_activations(model)
        ends.append(Course(model, [frozen("llama", **cache), sbp.make_policy("topk", keep=0.5)], packed("llama")))
    assert ends[0] == ends[1]
    assert ends[1].known == [0] * 3 + [BATCH] * 6


def test_half_of_an_encoder_costs_a_sixth_of_dense_less_from_the_second_epoch_on() -> None:
    """Forward and backward, counted. With the update, which is the price in a run's journal, it is 0.63 and 0.47."""
    dense, plain, kept = (
        Course(bert(96), policy, packed("bert")).flops
        for policy in ([], frozen("bert"), frozen("bert", cache="memory"))
    )
    assert all(0.64 < mine / whole < 0.66 for mine, whole in zip(plain, dense, strict=True))
    saved = [(one - other) / whole for one, other, whole in zip(plain, kept, dense, strict=True)][3:]
    assert saved == pytest.approx([1 / 6] * 6, abs=0.004)
    assert sum(kept[:3]) == pytest.approx(sum(plain[:3]) + plain[0] - kept[3])  # the batch that was shuffled once


def test_no_more_bytes_are_kept_than_allowed_and_the_rest_is_computed() -> None:
    one = LENGTH * 32 * 4 + 32
    plain = Course(llama(), frozen("llama"), packed("llama"), num_epochs=5)
    kept = Course(llama(), frozen("llama", cache="memory", cache_bytes=5 * one), packed("llama"), num_epochs=5)
    assert kept == plain
    assert [use.num_bytes for use in kept.uses] == [4 * one] + [5 * one] * 14
    assert 0 < sum(kept.known[9:]) <= 2 * 5  # each of the five at most once an epoch
    nothing = Course(llama(), frozen("llama", cache="memory", cache_bytes=one - 1), packed("llama"), num_epochs=2)
    assert nothing.known == [0] * 6
    assert nothing.uses[-1].num_bytes == 0


def _scale(model: Any, step: int) -> None:
    if step == 3:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)


def _write_past_autograd(model: Any, step: int) -> None:
    if step == 3:
        weight = model.model.layers[1].self_attn.q_proj.weight.data
        weight[0], weight[1] = weight[1].clone(), weight[0].clone()  # the sum of all stays


def _replace_weight(model: Any, step: int) -> None:
    if step == 3:
        model.model.layers[0].mlp.down_proj.weight = nn.Parameter(
            model.model.layers[0].mlp.down_proj.weight.detach() + 0.1, requires_grad=False
        )


def _change_epsilon(model: Any, step: int) -> None:
    if step == 3:
        model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def _change_attention(model: Any, step: int) -> None:
    if step == 3:
        model.set_attn_implementation("eager")


def _change_mode(model: Any, step: int) -> None:
    if step == 3:
        model.model.layers[0].eval()


def _change_code(model: Any, step: int) -> None:
    if step == 3:
        mlp = model.model.layers[0].mlp
        inner = type(mlp)
        mlp.__class__ = type("Twice", (inner,), {"forward": lambda self, x: 2.0 * inner.forward(self, x)})


def _change_embeddings(model: Any, step: int) -> None:
    if step == 3:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)


def _change_threads(model: Any, step: int) -> None:
    torch.set_num_threads(1 if step < 3 else 2)


@pytest.mark.parametrize(
    "change",
    [
        _scale,
        _write_past_autograd,
        _replace_weight,
        _change_epsilon,
        _change_attention,
        _change_mode,
        _change_code,
        _change_embeddings,
        _change_threads,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_whatever_an_output_follows_from_makes_all_of_them_anew(change: Callable[[nn.Module, int], None]) -> None:
    before = torch.get_num_threads()
    try:
        plain = Course(llama(), frozen("llama"), packed("llama"), inside=change)
        kept = Course(llama(), frozen("llama", cache="memory"), packed("llama"), inside=change)
    finally:
        torch.set_num_threads(before)
    assert kept == plain
    assert kept.known == [0] * 6 + [BATCH] * 3


def _four_bits() -> tuple[nn.Module, Tensor]:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(64, 64, bias=False, quant_type="nf4")
    layer.weight = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu")
    return layer, layer.weight.quant_state.state2.absmax


def _eight_bits() -> tuple[nn.Module, Tensor]:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer.weight = Int8Params(torch.randn(64, 64), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    layer(torch.randn(2, 64))
    return layer, layer.state.SCB


def _plain_attribute() -> tuple[nn.Module, Tensor]:
    layer = nn.Linear(4, 4)
    layer.scale = torch.ones(1)
    return layer, layer.scale


@pytest.mark.parametrize("make", [_four_bits, _eight_bits, _plain_attribute])
def test_scales_beside_weights_are_part_of_what_outputs_follow_from(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    layer, scale = make()
    context = FrozenContext(["layer"], [nn.Sequential(layer)])
    before = context.digest()
    assert context.digest() == before
    with torch.no_grad():
        scale.mul_(2)
    assert context.digest() != before


def test_autocast_another_length_and_other_positions_are_other_outputs() -> None:
    model, batch = llama(), packed("llama")([0, 1, 2, 3])
    shorter = {name: tensor[:, :8] for name, tensor in batch.items()}
    moved = batch | {"position_ids": torch.arange(3, LENGTH + 3).expand(BATCH, -1)}
    masked = batch | {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64).index_fill(1, torch.tensor(0), 0)}
    with sbp.attach(model, frozen("llama", cache="memory")) as engine:

        def known(given: dict[str, Tensor]) -> int:
            engine.backward(model(**given).loss)
            use = engine.take_output_use()
            assert use is not None
            return use.known

        for given in (batch, shorter, moved, masked):
            assert [known(given), known(given)] == [0, BATCH]
        assert known(batch) == BATCH
        with torch.autocast("cpu", torch.bfloat16):
            assert known(batch) == 0


def test_evaluation_and_what_is_disabled_are_computed_and_keep_nothing() -> None:
    model, batch = llama(), packed("llama")([0, 1, 2, 3])
    with sbp.attach(model, frozen("llama", cache="memory")) as engine:
        with torch.no_grad():
            model(**batch)
        model.eval()(**batch)
        model.train()
        with engine.disabled():
            model(**batch).loss.backward()
        with engine.probing():
            engine.backward(model(**batch).loss)
        use = engine.take_output_use()
        assert use is not None
        assert (use.examples, use.num_bytes) == (0, 0)


@pytest.mark.parametrize(("form", "low", "high"), [("bfloat16", 1e-3, 4e-3), ("int8", 2e-3, 2e-2)])
def test_rounded_outputs_have_a_measured_error_from_the_first_visit_on(form: str, low: float, high: float) -> None:
    """So it does not matter what is known: a killed training goes on as one that was not."""
    options = {"cache": "memory", "cache_dtype": form}
    kept = Course(llama(), frozen("llama", **options), packed("llama"))
    nothing = Course(llama(), frozen("llama", **options, cache_bytes=1), packed("llama"))
    assert kept.known == [0] * 3 + [BATCH] * 6
    assert nothing.known == [0] * 9
    assert kept == nothing
    outputs = list[Tensor]()
    model: Any = llama()
    model.model.layers[1].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    with torch.no_grad():
        model(packed("llama")(list(range(EXAMPLES)))["input_ids"])
    (exact,) = outputs
    if form == "bfloat16":
        rounded = exact.bfloat16().float()
    else:
        scale = exact.abs().amax(-1, keepdim=True) / 127
        rounded = (exact / scale).round() * scale
    error = float((rounded - exact).norm() / exact.norm())
    assert low < error < high
    assert kept.uses[-1].relative_error == pytest.approx(error, rel=1e-3)
    exactly = Course(llama(), frozen("llama"), packed("llama"))
    assert kept != exactly
    assert float(kept.losses[-1]) == pytest.approx(float(exactly.losses[-1]), rel=0.05)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_outputs_on_disk_are_those_of_the_next_process_as_long_as_they_are_whole(tmp_path: Path) -> None:
    plain = Course(llama(), frozen("llama"), packed("llama"))
    other = tmp_path / "kept-outputs" / "notes"
    other.mkdir(parents=True)
    first = Course(llama(), frozen("llama", cache="disk"), packed("llama"), folder=tmp_path)
    assert len(_files(tmp_path)) == EXAMPLES
    assert sum(path.stat().st_size for path in _files(tmp_path)) == first.uses[-1].num_bytes
    torn, changed, *_ = _files(tmp_path)
    torn.write_bytes(torn.read_bytes()[:-7])
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    again = Course(llama(), frozen("llama", cache="disk"), packed("llama"), folder=tmp_path)
    assert first == plain
    assert again == plain
    # This process has not shown yet that neighbours do not matter: it compares a batch that is known whole, and one
    # that is not, with computed ones.
    assert 0 < sum(again.known[:3]) <= EXAMPLES - 2
    assert again.known[3:] == [BATCH] * 6
    with torch.no_grad():
        scaled: Any = llama()
        scaled.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    changed_weights = Course(scaled, frozen("llama", cache="disk"), packed("llama"), folder=tmp_path)
    assert changed_weights.known == [0] * 3 + [BATCH] * 6
    assert len(_files(tmp_path)) == EXAMPLES  # of the other weights: removed
    assert other.is_dir()


def test_a_disk_that_is_full_ends_keeping_and_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Course(llama(), frozen("llama"), packed("llama"))

    def fail(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    kept = Course(llama(), frozen("llama", cache="disk"), packed("llama"), folder=tmp_path)
    assert kept == plain
    assert kept.known == [0] * 9
    assert any("no more outputs are kept" in note and "No space" in note for note in kept.notes)


class _Neighbours(nn.Module):
    """A linear whose output depends on the other examples, as a batch norm's does."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x - 0.01 * x.mean(0, keepdim=True) * torch.arange(1, len(x) + 1).view(-1, 1, 1))
        return result


def test_outputs_that_depend_on_other_examples_are_computed_and_it_is_told() -> None:
    def model() -> nn.Module:
        made: Any = llama()
        made.model.layers[0].mlp.up_proj = _Neighbours(made.model.layers[0].mlp.up_proj)
        return made

    plain = Course(model(), frozen("llama"), packed("llama"))
    kept = Course(model(), frozen("llama", cache="memory"), packed("llama"))
    assert kept == plain
    assert kept.known == [0] * 9
    assert kept.uses[-1].num_bytes == 0
    assert any("depend on the other examples" in note for note in kept.notes)


def _hooked() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "policy", "error", "text"),
    [
        (llama, {"freeze": ["/layers\\.1\\./"]}, PolicyError, "model.layers.0 is trained"),
        (llama, {"freeze": ["/layers\\.0\\./"]}, PolicyError, "the embeddings before them are trained"),
        (lambda: llama(attention_dropout=0.1), {}, UnsupportedError, "layers.0.self_attn drops out 0.1"),
        (_hooked, {}, UnsupportedError, "layers.1.mlp has a forward hook"),
        (llama, {"cache": "disk"}, UsageError, "give attach(folder=...)"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_attach(
    model: Callable[[], nn.Module], policy: dict[str, Any], error: type[Exception], text: str
) -> None:
    made = model()
    before = copy.deepcopy({name: p.requires_grad for name, p in made.named_parameters()})
    with pytest.raises(error) as raised:
        sbp.attach(made, sbp.make_policy("frozen", **({"freeze": LOWER["llama"], "cache": "memory"} | policy)))
    assert text in str(raised.value)
    assert {name: p.requires_grad for name, p in made.named_parameters()} == before


@pytest.mark.parametrize(
    ("model", "name", "given", "text"),
    [
        (lambda: llama(use_cache=True), "llama", {}, "use_cache = False"),
        (llama, "llama", {"output_hidden_states": True}, "which output_hidden_states reads"),
        (lambda: gpt2(embd_pdrop=0.1), "gpt2", {}, "is random in each forward"),
    ],
    ids=["key/value cache", "hidden states", "dropout before"],
)
def test_what_shows_in_the_forward_is_refused_by_name(
    model: Callable[[], nn.Module], name: str, given: dict[str, Any], text: str
) -> None:
    made = model()
    with sbp.attach(made, frozen(name, cache="memory")), pytest.raises(UnsupportedError) as raised:
        made(**packed(name)([0, 1]), **given)
    assert text in str(raised.value)


@pytest.mark.parametrize("name", MODELS)
def test_without_padding_every_example_is_known_later_up_to_rounding(name: str) -> None:
    plain = Course(MODELS[name](), frozen(name), padded(name))
    kept, nothing = (
        Course(MODELS[name](), frozen(name, cache="memory", cache_padding="drop", cache_bytes=size), padded(name))
        for size in (2**30, 1)
    )
    assert kept.known == [0] * 3 + [BATCH] * 6
    assert nothing.known == [0] * 9
    assert kept == nothing  # an example alone has no neighbours on which its bits could depend
    torch.testing.assert_close(torch.stack(kept.losses), torch.stack(plain.losses), rtol=1e-4, atol=1e-4)
    assert all(fewer < more for fewer, more in zip(kept.flops[3:], plain.flops[3:], strict=True))
    assert any("differ from those in padded batches by" in note for note in kept.notes)


def test_the_gradient_of_examples_alone_is_that_of_the_padded_batch_up_to_rounding() -> None:
    batch, gradients = padded("llama")([0, 5, 7, 9]), list[Tensor]()
    for options in ({}, {"cache": "memory", "cache_padding": "drop"}):
        model = llama()
        with sbp.attach(model, frozen("llama", **options)) as engine:
            for _ in range(2):  # computed, and known
                model.zero_grad()
                engine.backward(model(**batch).loss)
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for other in gradients[2:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


class _Longer(nn.Module):
    """A linear whose output depends on the padded length."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * x.shape[1]
        return result


def test_examples_that_are_something_else_alone_are_refused() -> None:
    model: Any = llama()
    model.model.layers[1].mlp.down_proj = _Longer(model.model.layers[1].mlp.down_proj)
    policy = frozen("llama", cache="memory", cache_padding="drop")
    with sbp.attach(model, policy), pytest.raises(UnsupportedError, match="use cache_padding: keep"):
        model(**padded("llama")([0, 1, 2, 3]))


@pytest.mark.parametrize("place", [0, 3])
def test_padding_before_or_inside_of_an_example_is_refused_where_it_is_dropped(place: int) -> None:
    batch = packed("llama")([0, 1])
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, place] = 0
    policy = frozen("llama", cache="memory", cache_padding="drop")
    model = llama()
    with sbp.attach(model, policy), pytest.raises(UnsupportedError, match="padding only at the end of examples"):
        model(**batch, attention_mask=mask)


@pytest.mark.parametrize(
    ("other", "options", "text"),
    [
        ({"name": "lossless"}, {}, "whose bits depend on the packing; give one of them, or leave cache out"),
        ({"name": "uniform", "keep": 0.5}, {}, "one keeps outputs of frozen layers: give one of them, or leave cache"),
        ({"name": "dropbp", "keep": 0.5}, {}, "one keeps outputs of frozen layers: give one of them, or leave cache"),
        (None, {"sites": "nodes"}, "Frozen with cache needs sites='linears', got 'nodes'"),
        (None, {"segments": 2}, "segments and cache both change how the model runs"),
    ],
)
def test_what_does_not_go_with_kept_outputs_is_refused_by_name(other: Any, options: Any, text: str) -> None:
    policies = [frozen("llama", cache="memory"), *([] if other is None else [other])]
    for given in (policies, policies[::-1]):
        with pytest.raises(UnsupportedError) as raised:
            sbp.attach(llama(), given, **options)
        assert text in str(raised.value)
