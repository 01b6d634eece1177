"""Branches leave a model as it was, work while they are there, and refuse by name what they cannot carry."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForMaskedLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaMLP

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError

from .branch_case import IDS, LEFT, ROWS, assert_fast_is_reference, assert_same, step
from .conftest import filled_cache, tokens
from .families import tiny_decoder


def _double(family: str = "llama", **options: Any) -> nn.Module:
    return tiny_decoder(family, dtype=torch.float64, **options)


def _forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2", "gpt2"])
def test_detaching_gives_the_model_back(family: str) -> None:
    model = _double(family)
    keys, plain = list(model.state_dict()), step(_double(family), None, plain=True)
    engine = sbp.attach(model, [ROWS], sites="branches")
    assert _forwards(model)
    assert list(model.state_dict()) == keys
    engine.backward(model(input_ids=IDS, labels=IDS).loss)
    engine.detach()
    engine.detach()
    assert _forwards(model) == []
    model.zero_grad()
    assert_same(step(model, None, plain=True), plain, 0.0)
    assert pickle.loads(pickle.dumps(copy.deepcopy(model))) is not None


def test_an_attached_model_cannot_be_copied_or_pickled() -> None:
    model = _double()
    with sbp.attach(model, [ROWS], sites="branches"):
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                copier(model)
        with pytest.raises(UnsupportedError, match="already attached"):
            sbp.attach(model, [ROWS], sites="branches")
        with pytest.raises(UnsupportedError, match="already attached"):
            sbp.attach(model, [], sites="linears")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "phi"])
def test_evaluation_and_generation_are_what_they_were(family: str) -> None:
    model = tiny_decoder(family).eval()
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=LEFT).logits
    text = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with sbp.attach(model, [ROWS], sites="branches") as engine:
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS, attention_mask=LEFT).logits, logits)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=IDS, attention_mask=LEFT, use_cache=True).logits, logits)
        with engine.disabled():
            assert torch.equal(model(input_ids=IDS, attention_mask=LEFT).logits, logits)
        assert torch.equal(model(input_ids=IDS, attention_mask=LEFT).logits, logits)  # with gradients
        assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0), text)
        assert engine.report().num_backwards == 0


def test_training_with_a_cache_that_is_returned_is_its_reference() -> None:
    """transformers makes a cache in training, too, unless told otherwise: each branch computes without it."""
    assert_fast_is_reference(_double, inputs=[{"use_cache": True}])
    assert_fast_is_reference(_double, inputs=[{"use_cache": False}])


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_cache_that_holds_something_is_refused(family: str) -> None:
    """Its keys and values would be left out."""
    model = _double(family)
    cache = filled_cache(model, IDS)
    with (
        sbp.attach(model, [ROWS], sites="branches"),
        pytest.raises(UnsupportedError, match=r"got a key.value cache with earlier positions"),
    ):
        model(input_ids=IDS, **cache)


def test_a_backward_from_outside_is_refused_and_disabled_it_is_dense() -> None:
    model, plain = _double(), step(_double(), None, plain=True)
    for engine_kind in ("fast", "reference"):
        with sbp.attach(model, [ROWS], sites="branches", execution=engine_kind) as engine:
            with pytest.raises(UsageError, match=r"call engine\.backward"):
                model(input_ids=IDS, labels=IDS).loss.backward()
            model.zero_grad()
            with engine.disabled():
                model(input_ids=IDS, labels=IDS).loss.backward()
        assert all(torch.equal(p.grad, plain.gradients[name]) for name, p in model.named_parameters())
        model.zero_grad()


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("left", ["mlp", "self_attn"])
def test_a_branch_that_is_left_out_is_dense_and_the_other_of_its_layer_is_not(family: str, left: str) -> None:
    tolerance = 1e-6 if family == "gemma2" else 1e-12
    outcome = assert_fast_is_reference(lambda: _double(family), exclude=[f"*.0.{left}"], tolerance=tolerance)
    assert outcome.report is not None
    assert outcome.report.excluded == (f"model.layers.0.{left}",)
    assert [site.kept_share for site in outcome.report.sites] == pytest.approx([14 / 48] * 3)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_branch() -> None:
    with pytest.raises(
        UsageError, match=r"'model.layers.0.mpl' matches no branch .* did you mean model.layers.0.mlp\?"
    ):
        sbp.attach(_double(), [ROWS], sites="branches", exclude=["model.layers.0.mpl"])


def test_an_architecture_without_a_layout_is_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(UnsupportedError, match="does not know BertLayer: its layers are an encoder's"):
        sbp.attach(AutoModelForMaskedLM.from_config(config), [ROWS], sites="branches")
    with pytest.raises(UnsupportedError, match="does not know where the branches of Sequential are"):
        sbp.attach(nn.Sequential(nn.Linear(3, 3)), [ROWS], sites="branches")


@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm", "mlp.act_fn"])
def test_a_part_with_hooks_or_a_forward_of_its_own_is_refused(part: str) -> None:
    model = _double()
    module = model.get_submodule(f"model.layers.1.{part}")
    if part != "mlp.act_fn":  # what lies inside of a part is run as ever
        handle = module.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match=r"a module of the branch 'model.layers.1.\w+' has hooks"):
            sbp.attach(model, [ROWS], sites="branches")
        handle.remove()
    module.forward = type(module).forward.__get__(module)
    with pytest.raises(UnsupportedError, match="has a forward of its own"):
        sbp.attach(model, [ROWS], sites="branches")
    assert _forwards(model) == [f"model.layers.1.{part}"]


def test_what_is_computed_between_the_parts_of_a_branch_is_refused_when_it_runs() -> None:
    class Between(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 1.0)

    model = _double()
    layer = model.model.layers[0]
    plain = type(layer).forward

    class Changed(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            mlp, self.mlp = self.mlp, Between(self.mlp)
            try:
                return plain(self, *args, **kwargs)
            finally:
                self.mlp = mlp

    Changed.__name__ = type(layer).__name__
    layer.__class__ = Changed
    with (
        sbp.attach(model, [ROWS], sites="branches"),
        pytest.raises(UnsupportedError, match=r"'model.layers.0.mlp' and"),
    ):
        model(input_ids=IDS, labels=IDS)


@pytest.mark.parametrize(("attention", "mask", "whole"), [("known_keys", LEFT, False), ("known_keys", None, True)])
def test_an_attention_of_ones_own_gets_rows_where_a_mask_says_what_it_looks_at(
    attention: str, mask: torch.Tensor | None, whole: bool
) -> None:
    AttentionInterface.register(attention, sdpa_attention_forward)
    AttentionMaskInterface.register(attention, sdpa_mask)
    outcome = assert_fast_is_reference(
        lambda: _double(attn_implementation=attention), inputs=[{"attention_mask": mask}]
    )
    assert outcome.report is not None
    assert [attention in note for note in outcome.report.notes] == [True, True] * whole


def lora(model: nn.Module, dropout: float, **options: Any) -> nn.Module:
    """Return the model with adapters at every linear, none of them zero."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.to(model.dtype)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "olmo2", "gemma2"])
def test_adapters_are_their_reference(family: str, dropout: float) -> None:
    options = {"gpt2": {"attn_pdrop": 0.0}}.get(family, {})
    more = {"fan_in_fan_out": True} if family == "gpt2" else {}
    outcome = assert_fast_is_reference(
        lambda: lora(_double(family, **options), dropout, **more), tolerance=1e-6 if family == "gemma2" else 1e-12
    )
    assert {name for name, grad in outcome.gradients.items() if grad is not None} == {
        name for name in outcome.gradients if "lora_" in name
    }
    assert outcome.report is not None
    assert outcome.report.notes == ()


LAYOUT = """
from torch import nn
from sparsebp_cli.backward.decoder.layout import BranchLayout


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.core = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.core(self.norm(x))


layout = (BranchLayout("core", "2", "norm"),)
wrong = (BranchLayout("cor", "2", "norm"),)
text = ("core",)
"""


def _plugin(folder: Path, value: str) -> None:
    (folder / "layer_plugin.py").write_text(LAYOUT)
    info = folder / "layer_plugin-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layer-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sparsebp.layouts]\nLayer = {value}\n")


def test_a_layout_comes_through_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _plugin(tmp_path, "layer_plugin:layout")
    from layer_plugin import Layer  # type: ignore[import-not-found]

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer()).to(torch.float64)
        with sbp.attach(model, [ROWS], sites="branches", **options) as engine:
            engine.backward(model(x).square().sum())
            assert [site.name for site in engine.report().sites] == ["0.core", "1.core"]
        return [p.grad for p in model.parameters()]

    for fast, reference in zip(gradients(checkpointing="sparse"), gradients(execution="reference"), strict=True):
        assert torch.allclose(fast, reference, rtol=1e-12)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("layer_plugin:nothing", r"the layout 'Layer' is broken: AttributeError: .*nothing"),
        ("no_such_module:layout", r"the layout 'Layer' is broken: ModuleNotFoundError: .*no_such_module"),
        ("layer_plugin:text", r"the layout 'Layer' is not a tuple of BranchLayout, got \('core',\)"),
        ("layer_plugin:wrong", r"the layout of Layer names 'cor', which is not at '0.cor'"),
    ],
)
def test_a_broken_layout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _plugin(tmp_path, value)
    from layer_plugin import Layer

    with pytest.raises(UnsupportedError, match=message):
        sbp.attach(nn.Sequential(Layer()), [ROWS], sites="branches")


def test_a_broken_layout_of_another_layer_does_not_matter_at_linears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _plugin(tmp_path, "no_such_module:layout")
    with sbp.attach(model := nn.Sequential(nn.Linear(4, 4)), [ROWS]) as engine:
        engine.backward(model(torch.ones(2, 4)).sum())
        assert [site.name for site in engine.report().sites] == ["0"]


def test_a_linear_that_is_used_twice_is_computed_again() -> None:
    """Its output cannot be kept under one name."""

    class Twice(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x + 1.0) + self.up_proj(x))

    def make() -> nn.Module:
        model = _double()
        for layer in model.model.layers:
            layer.mlp.__class__ = Twice
        return model

    assert_fast_is_reference(make)


def test_the_empty_batch_and_one_position_are_their_reference() -> None:
    for ids in (tokens(0, 3, 2), tokens(0, 1, 2)):
        assert_fast_is_reference(_double, inputs=[{"input_ids": ids, "labels": ids}])
