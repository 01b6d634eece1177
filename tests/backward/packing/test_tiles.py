"""The head in tiles: the model's own loss and gradient, without the logits of all rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import sparsebp_cli as sbp
from benchmarks.live_bytes import live_bytes
from sparsebp_cli.backward import Engine
from sparsebp_cli.backward import count_flops as count_executed
from sparsebp_cli.backward.kind.packing import tiled_head as module
from sparsebp_cli.backward.kind.packing.tiles import Tail, TiledLoss, TileJob
from sparsebp_cli.backward.observe.module_trace import ModuleTrace
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Policy

from .case import LIMIT, count_flops, error, gradients, make_batch

WIDTH, VOCABULARY = 32, 301
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT2: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
WITHOUT_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED)),
    "llama, tied": (tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**GPT2, **WITHOUT_DROPOUT)),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**GROUPED)),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**GROUPED, head_dim=8)),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)),
    "opt": (tf.OPTForCausalLM, tf.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=WIDTH, dropout=0.0)),
    "phi, a head with a bias": (tf.PhiForCausalLM, tf.PhiConfig(**SMALL)),
    "gemma2, capped": (tf.Gemma2ForCausalLM, tf.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.2)),
    "granite, divided": (tf.GraniteForCausalLM, tf.GraniteConfig(**GROUPED, logits_scaling=0.3)),
    "cohere, multiplied": (tf.CohereForCausalLM, tf.CohereConfig(**GROUPED, logit_scale=7.0)),
}
ARRANGEMENTS = [
    ("none", "dense", "none"),
    ("right", "scattered", "groups"),
    ("none", "completion", "tree"),
    ("left", "completion", "pairs"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of a few numbers have tiles."""
    monkeypatch.setattr(module, "MIN_ROWS", {"cpu": 7})
    monkeypatch.setattr(module, "MIN_SAVED", -(2**30))


def make(family: str = "llama") -> Any:
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).train()  # a test may set another attention
    for parameter in model.parameters():  # logits in which a wrong tail would show
        parameter.data.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model


def lossless(**options: Any) -> Policy:
    return sbp.make_policy("lossless", **({"verify": "never"} | options))


@contextmanager
def attached(model: nn.Module, **options: Any) -> Iterator[Engine]:
    with sbp.attach(model, lossless(**options)) as engine:
        yield engine


def ran_in_tiles(engine: Engine) -> bool:
    return "in tiles" in engine.notes["packing"]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_transformers(family: str) -> None:
    model = make(family)
    batches = [make_batch(*which) for which in ARRANGEMENTS]
    plain = [gradients(model, None, batch) for batch in batches]
    with attached(model) as engine:
        for batch, (loss, grads) in zip(batches, plain, strict=True):
            own_loss, own = gradients(model, engine, batch)
            assert error(grads, own) < LIMIT
            assert abs(float(own_loss / loss) - 1) < LIMIT
        assert "tiles in 4 batches" in engine.notes["packing"]


@pytest.mark.parametrize("when", ["before", "between two steps"])
def test_a_hook_of_the_script_at_the_head_does_what_it_does_in_the_plain_step(when: str) -> None:
    model, batch, seen = make(), make_batch(*ARRANGEMENTS[1]), []

    def halve(_: nn.Module, __: object, output: Tensor) -> Tensor:
        seen.append(output.detach().abs().max().item())
        return output * 0.5

    with attached(model) as engine:
        if when == "between two steps":
            gradients(model, engine, batch)
            assert ran_in_tiles(engine)
        with model.lm_head.register_forward_hook(halve):
            own_loss, own = gradients(model, engine, batch)
    assert min(seen) > 0  # logits, not what stands in their place
    with model.lm_head.register_forward_hook(halve):
        loss, grads = gradients(model, None, batch)
    assert error(grads, own) < LIMIT
    assert abs(float(own_loss / loss) - 1) < LIMIT


@pytest.mark.parametrize("tail", [Tail(), Tail(multiplier=0.3), Tail(divisor=3.0), Tail(cap=1.5)], ids=str)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_loss_in_tiles_is_a_weighted_cross_entropy(tail: Tail, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((13, 6), (29, 6), (29,))]
    row_I = torch.tensor([0, 0, 0, 2, 3, 3, 5, 7, 8, 11, 12, 12])  # several targets a row, and rows without any
    label_I = torch.randint(0, 29, (12,), generator=generator)
    label_I[1] = label_I[0]
    weight_I = torch.rand(12, generator=generator)
    ends = [int((row_I < first + size).sum()) for first in range(0, 13, size)]
    job = TileJob(row_I, label_I, weight_I, ends, size, tail, torch.float32, differentiates=True, keeps=True)
    loss = TiledLoss.apply(*leaves, job)  # type: ignore[no-untyped-call]
    logits = nn.functional.linear(*leaves) * tail.multiplier / tail.divisor
    logits = logits if tail.cap is None else tail.cap * (logits / tail.cap).tanh()
    expected = (cross_entropy(logits[row_I], label_I, reduction="none") * weight_I).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.cat(job.logits), logits.detach())
    wanted = torch.autograd.grad(expected * 3, leaves)
    again = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    torch.testing.assert_close(again, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, leaves), wanted)  # a second backward finds the same


def test_weights_of_tokens_and_counts_of_other_batches_are_in_the_loss() -> None:
    model, batch = make(), make_batch("right", "completion", "groups")
    weight = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    weight[:, ::3] = 0
    found = []
    for logits in ("whole", "tiles"):
        with attached(model, logits=logits) as engine:
            engine.columns(loss_weight=weight)
            found.append(
                [gradients(model, engine, batch), gradients(model, engine, batch | {"num_items_in_batch": 17})]
            )
            assert ran_in_tiles(engine) == (logits == "tiles")
    for (loss, grads), (own_loss, own) in zip(*found, strict=True):
        assert error(grads, own) < LIMIT
        assert abs(float(own_loss / loss) - 1) < LIMIT


@pytest.mark.parametrize("trained", ["head", "rest"])
def test_a_part_of_the_model_may_be_frozen(trained: str) -> None:
    model, batch = make(), make_batch("right", "completion", "none")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head") == (trained == "head"))
    _, expected = gradients(model, None, batch)
    with attached(model) as engine:
        _, got = gradients(model, engine, batch)
        assert ran_in_tiles(engine)
    assert error(expected, got) < LIMIT


def test_the_flops_are_those_of_the_plain_head_at_the_same_modules() -> None:
    model, batch = make(), make_batch("right", "completion", "groups")
    counts, totals, shares = [], [], []
    for logits in ("whole", "tiles"):
        with attached(model, logits=logits) as engine:
            with ModuleTrace(model) as trace, count_executed(trace) as count:
                gradients(model, engine, batch)
            counts.append((count.forward, count.backward, count.recomputed))
            totals.append(count_flops(model, engine, batch))
            shares.append(engine.report().whole_share)
            assert ran_in_tiles(engine) == (logits == "tiles")
    assert counts[0] == counts[1]
    assert counts[0][1]["lm_head"] == 2 * counts[0][0]["lm_head"] > 0
    assert totals[0] == totals[1]
    assert shares[0] == shares[1] is not None


class Largest(TorchDispatchMode):
    """The most elements that a tensor of a step has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel())
        return result


def test_the_logits_of_all_rows_never_exist() -> None:
    model, batch = make(), make_batch("none", "dense", "none")
    held, largest = {}, {}
    for logits in ("whole", "tiles"):
        with attached(model, logits=logits) as engine:
            gradients(model, engine, batch)  # the first batch keeps them
            with Largest() as largest[logits], live_bytes(model.parameters()) as held[logits]:
                gradients(model, engine, batch)
    num_rows = int((batch["labels"][:, 1:] != -100).sum())
    assert largest["whole"].size >= num_rows * VOCABULARY
    assert largest["tiles"].size <= max(num_rows * 48, VOCABULARY * WIDTH)  # of the MLP, or of a weight's gradient
    # In place of the logits' logarithms, the gradient of the head's weight and that of its rows.
    left = 4 * (num_rows * VOCABULARY - VOCABULARY * WIDTH - num_rows * WIDTH)
    assert held["whole"].peak - held["tiles"].peak >= 0.9 * left


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt2", "mixtral", "gemma2, capped"])
def test_a_batch_of_which_nothing_is_left_out_has_tiles_as_well(family: str) -> None:
    model, ids = make(family), torch.randint(3, 60, (3, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    plain, plain_flops = gradients(model, None, batch), count_flops(model, None, batch)
    with attached(model, logits="whole") as engine:
        assert all(map(torch.equal, plain[1], gradients(model, engine, batch)[1]))
        assert "nothing to skip" in engine.notes["packing"]
    with attached(model, verify="first") as engine:
        for _ in range(2):
            loss, grads = gradients(model, engine, batch)
            assert error(plain[1], grads) < LIMIT
            assert abs(float(loss / plain[0]) - 1) < LIMIT
        flops = count_flops(model, engine, batch)  # without the last of 64 positions, which predicts nothing
        assert 0.95 * plain_flops <= flops <= plain_flops
        with Largest() as largest:
            gradients(model, engine, batch)
        assert largest.size < 3 * 63 * VOCABULARY
        assert "tiles in 4 batches" in engine.notes["packing"]
        assert "compared with the ordinary one in 1 of these" in engine.notes["packing"]
        model(input_ids=ids)  # whose logits a loss of one's own reads: plain
        assert "in 4 of 5 batches" in engine.notes["packing"]


def test_a_gradient_of_a_gradient_is_refused_and_has_a_way_out() -> None:
    model, ids = make(), torch.randint(3, 60, (3, 64), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")  # sdpa has no second derivative on a CPU
    with attached(model) as engine:
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(UnsupportedError, match=r"gradients of gradients .* inside engine\.disabled\(\)"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        with engine.disabled():
            loss = model(input_ids=ids, labels=ids).loss
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        torch.stack([grad.square().sum() for grad in grads]).sum().backward()
        assert any(parameter.grad is not None for parameter in model.parameters())


def test_reading_the_logits_gives_them_and_changes_nothing_else() -> None:
    found = []
    for reads in (False, True):
        model, losses = make(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sbp.attach(model, lossless(verify="first"), optimizer=optimizer) as engine:
            for number in range(4):
                batch = make_batch(*ARRANGEMENTS[number])
                output = model(**batch)
                if reads and number != 2:  # the one after it is computed again
                    with torch.no_grad(), engine.disabled():
                        expected = model(**batch).logits[:, :-1]
                    read = batch["labels"][:, 1:] != -100
                    torch.testing.assert_close(output.logits[:, :-1][read], expected[read])
                engine.backward(output.loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(output.loss.item())
            assert ("it ran again in 1 of these" in engine.notes["packing"]) == reads
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_logits_that_are_read_after_every_update_are_kept_and_others_refused() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sbp.attach(model, lossless(verify="first"), optimizer=optimizer) as engine:

        def step() -> Any:
            output = model(**make_batch("none", "completion", "none"))
            engine.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
            return output

        for _ in range(3):
            assert step().logits.shape[-1] == VOCABULARY
        step()
        with pytest.raises(UnsupportedError, match="weights have changed since: read output"):
            _ = step().logits


def test_a_comparison_reads_the_logits_of_the_tiles() -> None:
    model = make()
    with attached(model, verify="always") as engine:
        for which in ARRANGEMENTS:
            gradients(model, engine, make_batch(*which))
        assert "compared" in engine.notes["packing"]
        assert "read" not in engine.notes["packing"].split("in tiles")[1]


def test_bfloat16_is_as_near_to_float32_as_the_plain_head() -> None:
    batch, wide = make_batch("right", "completion", "groups"), make()
    _, exact = gradients(wide, None, batch)
    model = make().bfloat16()
    wide.load_state_dict(model.state_dict())
    _, exact = gradients(wide, None, batch)
    _, plain = gradients(model, None, batch)
    with attached(model) as engine:
        _, own = gradients(model, engine, batch)
        assert ran_in_tiles(engine)
    assert own[-1].dtype == torch.bfloat16
    assert error(exact[-1:], own[-1:]) < 1.5 * error(exact[-1:], plain[-1:])
    assert error(exact, own) < 1.5 * error(exact, plain)


def test_under_autocast_the_products_are_in_its_dtype() -> None:
    batch, model = make_batch("right", "completion", "groups"), make()
    _, exact = gradients(model, None, batch)
    with torch.autocast("cpu", torch.bfloat16):
        _, plain = gradients(model, None, batch)
        with attached(model) as engine:
            _, own = gradients(model, engine, batch)
            assert ran_in_tiles(engine)
            assert model(**batch).logits.dtype == torch.bfloat16
    assert own[-1].dtype == torch.float32
    assert error(exact, own) < 1.5 * error(exact, plain)


def test_without_a_gradient_the_loss_needs_no_logits() -> None:
    model, batch = make(), make_batch("none", "dense", "none")
    with torch.no_grad():
        expected = model(**batch)
    with attached(model) as engine, torch.no_grad():
        with Largest() as largest:
            loss = model(**make_batch("none", "completion", "none")).loss
        assert float(loss) > 0
        assert largest.size < 6 * 20 * VOCABULARY
        with engine.scoring(batch["labels"]):  # the script reads logits
            output = model(**batch)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits[:, :-1], expected.logits[:, :-1])


class Bent(tf.LlamaForCausalLM):
    """A model whose configuration does not say what becomes of its logits."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **_: Any
    ) -> Any:
        """Run it."""
        output = super().forward(input_ids, attention_mask, position_ids)
        output.logits = output.logits * 1.7
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, VOCABULARY)
        return output


def bent() -> Any:
    torch.manual_seed(0)
    return Bent(FAMILIES["llama"][1]).train()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make(), LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False)).train()


def with_another_loss() -> Any:
    model = make()

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:] if shift_labels is None else shift_labels
        return cross_entropy(logits.view(-1, vocab_size), shifted.reshape(-1), label_smoothing=0.1)

    model.loss_function = loss
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("other", [bent, adapted, with_another_loss])
def test_other_heads_tails_and_losses_run_whole(other: Any) -> None:
    model, batch = other(), make_batch("right", "completion", "groups")
    loss, expected = gradients(model, None, batch)
    with attached(model) as engine:
        own_loss, got = gradients(model, engine, batch)
        assert "skipped" in engine.notes["packing"]
        assert not ran_in_tiles(engine)
    assert error(expected, got) < LIMIT
    assert abs(float(own_loss / loss) - 1) < LIMIT


def test_small_logits_and_few_rows_beside_a_trained_head_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    head = nn.Linear(1024, 32_000, bias=False, device="meta")
    tiles = module.TiledHead(head, head, "tiles")

    def rows_of_a_tile(num_rows: int, *, trained: bool, differentiates: bool = True) -> int:
        head.weight = nn.Parameter(torch.empty(()).expand(32_000, 1024), requires_grad=trained)
        return tiles._least_size(num_rows, head, torch.float32, differentiates=differentiates)

    assert rows_of_a_tile(4096, trained=True) == 132  # logits as large as the rows
    assert rows_of_a_tile(400, trained=True) == 64
    assert rows_of_a_tile(200, trained=True) == 0  # the gradient of the weight would be held longer
    assert rows_of_a_tile(200, trained=False) == 64
    assert rows_of_a_tile(200, trained=True, differentiates=False) == 64
    assert rows_of_a_tile(60, trained=False) == 0
