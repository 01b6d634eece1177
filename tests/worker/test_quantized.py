"""QLoRA in a run: what is trained, what is counted and saved, and that the next recipe goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from sparsebp_cli.recipe.schema import ModelSection, Recipe
from sparsebp_cli.run import History, RunFolder
from tests.worker.conftest import LLAMA, work

# Of peft 0.21, about transformers and about what it does to a base.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

IDS = torch.randint(3, 60, (4, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def base(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    torch.manual_seed(0)
    options = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**options, vocab_size=len(tokenizer), pad_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def config_of(kind: str) -> Any:
    """What transformers takes for a type of quantisation."""
    from torchao.quantization import Int8WeightOnlyConfig

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def quantization_of(kind: str) -> dict[str, Any]:
    return {"type": kind} if kind == "int8" else {"type": kind, "bnb_4bit_use_double_quant": True}


@pytest.fixture
def recipe_of(tiny_recipe: Any, base: str) -> Any:
    def make(model: dict[str, Any], **sections: Any) -> Recipe:
        made: Recipe = tiny_recipe(**sections)
        return made.model_copy(update={"model": ModelSection(**model)})

    return make


def train(recipe: Recipe, prepared: Any) -> RunFolder:
    run: RunFolder = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return run


def merge(base: str, adapter: Path, kind: str) -> Any:
    """Return a quantised base with restored weights and an adapter merged into it, by transformers and peft."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, quantization_config=config_of(kind), device_map={"": "cpu"})
    if kind == "int8":
        for module in model.modules():
            if hasattr(getattr(module, "weight", None), "dequantize") and type(module.weight.data) is not torch.Tensor:
                module.weight = torch.nn.Parameter(module.weight.dequantize())
    else:
        model = model.dequantize()
    return peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_on_a_quantised_base_ends_in_a_model_for_the_next_recipe(
    kind: str, base: str, recipe_of: Any, prepared: Any
) -> None:
    given = {"name": base, "quantization": quantization_of(kind), "lora": {"r": 4}}
    rows = [{"name": "topk", "keep": 0.5, "along": "rows"}]
    measure = {"eval_every": 10, "probe_every": 5, "fidelity_every": 5}
    run = train(recipe_of(given, policy=rows, measure=measure, checkpoint={"keep_best": "eval/loss"}), prepared)
    history = History.load(run.path)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert history.facts["num_parameters"] - history.facts["num_trainable_parameters"] == plain.num_parameters()

    expected = merge(base, run.path / "model" / "adapter", kind)
    found = AutoModelForCausalLM.from_pretrained(run.path / "model")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, expected(IDS).logits)
    assert "quantization_config" not in json.loads((run.path / "model" / "config.json").read_text())
    last, best = (load_file(run.path / folder / "model.safetensors") for folder in ("model", "best"))
    assert last.keys() == best.keys() == load_file(Path(base) / "model.safetensors").keys()

    (*_, end) = history.series("eval/loss").values()
    for model in ({"name": str(run.path / "model")}, given | {"lora": None, "adapter": str(run.path / "model")}):
        second = train(recipe_of(model, training={"max_steps": 1}), prepared)
        (start, *_) = History.load(second.path).series("eval/loss").values()
        assert start == pytest.approx(end, rel=1e-5)
