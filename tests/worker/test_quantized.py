"""QLoRA in a run: what is trained, what is counted and saved, and that the next recipe goes on from it."""

from __future__ import annotations

import json
import subprocess
import sys
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

import sparsebp_cli as sbp
from sparsebp_cli.backward.linear.quantized import find_quantized
from sparsebp_cli.errors import DataError, RecipeError, UnsupportedError
from sparsebp_cli.policy.composition import ADAPTER_TYPES, READERS
from sparsebp_cli.recipe import load_recipe, refuse_unsupported
from sparsebp_cli.recipe.schema import ModelSection, Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.worker.adapter import merge_beside
from sparsebp_cli.worker.model import build_model, read_model_config
from sparsebp_tools.forecast.fake import pretend
from sparsebp_tools.forecast.model import build_by_config
from tests.worker.conftest import LLAMA, start, work
from tests.worker.test_adapters import LORAS, OPTIONS, gradients

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
        bnb_4bit_compute_dtype=torch.float32,
    )


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
    given = {"name": base, "quantization": {"type": kind}, "lora": {"r": 4}}
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_stopped_run_goes_on_to_the_same_bits(kind: str, base: str, recipe_of: Any, prepared: Any) -> None:
    given = {"name": base, "quantization": {"type": kind}, "lora": {"r": 4, "lora_dropout": 0.1}}
    rows = [{"name": "random", "keep": 0.5, "along": "rows"}]
    training = {"max_steps": 4}
    straight = train(recipe_of(given, policy=rows, training=training, checkpoint={"every": 100}), prepared)
    run = prepared(recipe_of(given, policy=rows, training=training, checkpoint={"every": 1, "keep_last": 1}))
    process = start(run)
    while process.is_alive() and not list((run.path / "checkpoints").glob("step-*")):
        process.join(0.01)
    process.kill()
    process.join()
    assert work(run) == 0, (run.path / "worker.log").read_text()
    file = Path("model") / "model.safetensors"
    assert (run.path / file).read_bytes() == (straight.path / file).read_bytes()


@pytest.mark.parametrize("name", [*ADAPTER_TYPES, "rslora", "dora", "saved whole"])
def test_methods_of_peft_train_and_merge_over_quantised_linears_or_are_refused(
    name: str, base: str, tmp_path: Path
) -> None:
    adapters = {"lora": LORAS[name]} if name in LORAS else {"peft": {"type": name} | OPTIONS[name]}
    for kind in ("nf4", "int8"):
        section = ModelSection(name=base, quantization={"type": kind}, **adapters)
        if name in READERS[kind]:
            recipe = Recipe(version=1, name="x", model=section, dataset={"name": "austen"})
            with pytest.raises(
                UnsupportedError, match=f"model.peft: {name} with model.quantization: {kind} is not supported"
            ):
                refuse_unsupported(recipe)
            continue
        model: Any = build_model(section, AutoTokenizer.from_pretrained(base), None)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        expected = gradients(model, lambda loss: loss.backward())
        with sbp.attach(model, sbp.make_policy("topk", keep=1.0, along="rows")) as engine:
            found = gradients(model, engine.backward)
        assert expected.norm() > 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            logits = model.eval()(IDS).logits
            merged = merge_beside(model, tmp_path / kind, keeps=False).eval()
            torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ("model: {name: austen-llama, quantization: {type: nf4}}", "nf4 freezes the weights: also give model.lora"),
        ("model: {name: austen-llama, quantization: {type: nf5}, lora: {}}", "model.quantization.type: .*nf4"),
        (
            "model: {name: austen-llama, quantization: {type: nf4, bnb_4bit_compute_dtype: bfloat16}, lora: {}}",
            "unknown key 'bnb_4bit_compute_dtype': in a recipe, write model.dtype",
        ),
        (
            "model: {config: {model_type: llama}, tokenizer: austen-llama, quantization: {type: nf4}, lora: {}}",
            "quantization needs a trained model: give model.name",
        ),
        (
            "model: {name: austen-llama, quantization: {type: nf4}, lora: {}}\ntraining: {compile: true}",
            "nf4 is not supported with torch.compile",
        ),
        (
            "model: {name: austen-llama, quantization: {type: nf4}, float8: emulated, lora: {}}",
            "nf4 with model.float8: emulated is not supported",
        ),
        (
            "model: {name: austen-llama, quantization: {type: nf4}, lora: {}}\n"
            "target: {kind: local, processes: 2, sharding: fsdp2}",
            "nf4 is not supported with target.sharding: fsdp2",
        ),
        ("model: {name: austen-llama, load_in_4bit: true}", r"write model.quantization: \{type: nf4\}"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(tmp_path: Path, sections: str, says: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"version: 1\nname: x\ndataset: {{name: austen}}\n{sections}\n")
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(file)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_told_with_the_way_to_get_it(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.worker.quantization.find_spec", lambda _: None)
    section = ModelSection(name=base, quantization={"type": "nf4"}, lora={})
    with pytest.raises(DataError, match=r"nf4 needs bitsandbytes: pip install 'sparsebp\[quantized\]'$"):
        build_model(section, AutoTokenizer.from_pretrained(base), None)


def test_files_that_are_quantised_already_are_taken_as_what_they_are(base: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=config_of("nf4"), device_map={"": "cpu"})
    packed.save_pretrained(tmp_path)

    def build(**section: Any) -> Any:
        torch.manual_seed(0)
        return build_model(ModelSection(name=str(tmp_path), lora={"r": 2}, **section), tokenizer, None)

    model = build(quantization={"type": "nf4"})
    torch.manual_seed(0)
    whole = ModelSection(name=base, lora={"r": 2}, quantization={"type": "nf4"})
    expected: Any = build_model(whole, tokenizer, None)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    for section, says in (
        ({}, r"files are quantised: give 'model.quantization: \{type: nf4\}'"),
        ({"quantization": {"type": "int8"}}, "int8: the model's files are already quantised: give type: nf4"),
    ):
        with pytest.raises(DataError, match=says):
            build(**section)


def test_bitsandbytes_fetches_no_kernel_from_a_hub(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("def get_kernel(*_, **__):\n    raise SystemExit('a kernel was fetched')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sparsebp_cli.worker.training, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_from_a_chat_file_to_a_model_for_the_next_recipe(
    base: str, recipe_of: Any, prepared: Any, tmp_path: Path
) -> None:
    talks = [
        {"messages": [{"role": "user", "content": f"fox {n}"}, {"role": "assistant", "content": f"dog {n % 5}"}]}
        for n in range(60)
    ]
    file, template = tmp_path / "chat.jsonl", tmp_path / "template.jinja"
    file.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    template.write_text(
        "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
    )
    sections: dict[str, Any] = {
        "dataset": {"name": str(file), "format": "chat", "chat_template": str(template), "max_seq_length": 64},
        "training": {"max_steps": 2},
        "measure": {"generate": {"examples": 4, "max_new_tokens": 4, "metrics": ["exact_match", "cer"]}},
    }
    sections["dataset"]["eval_fraction"] = 0.3
    model = {"name": base, "quantization": {"type": "nf4"}, "lora": {"r": 4}}
    policies = ([{"name": "dense"}], [{"name": "tokens", "score": "loss", "keep": 0.5}])
    runs = [train(recipe_of(model, policy=policy, **sections), prepared) for policy in policies]
    comparison = compare_runs(runs, "eval/cer")
    assert len(comparison["groups"]) == 2

    folder = runs[1].path / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("<s>user:fox 3</s><s>assistant:", return_tensors="pt")
    answer = AutoModelForCausalLM.from_pretrained(folder).generate(**batch, max_new_tokens=4)
    assert answer.shape[1] > batch["input_ids"].shape[1]
    following = train(recipe_of({"name": str(folder)}, **sections), prepared)
    (*_, end) = History.load(runs[1].path).series("eval/loss").values()
    (start_loss, *_) = History.load(following.path).series("eval/loss").values()
    assert start_loss == pytest.approx(end, rel=1e-4)


def compare_runs(runs: list[RunFolder], metric: str) -> Any:
    """Return what `sparsebp compare` says about runs, as JSON."""
    command = [str(Path(sys.executable).with_name("sparsebp")), "compare", *(str(run.path) for run in runs)]
    done = subprocess.run([*command, "--metric", metric, "-o", "json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_base_without_data_has_the_tensors_of_one_that_was_loaded(base: str) -> None:
    """What a forecast counts, against what bitsandbytes made of real weights; and forward and backward run on it."""
    section = ModelSection(name=base, quantization={"type": "nf4"}, lora={"r": 4})
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = build_model(section, tokenizer, None)
    with pretend(gpu=False):
        config = read_model_config(section, len(tokenizer), None)
        made = build_by_config(section, config, 2, architecture="causal")
        sizes = [
            {name: [(t.shape, t.dtype) for t in layout.parts()] for name, layout in find_quantized(model)}
            for model in (loaded, made)
        ]
        plain = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()} for m in (loaded, made)]
        made(input_ids=IDS, labels=IDS).loss.backward()
        gradients = {name for name, p in made.named_parameters() if p.grad is not None}
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 14
    assert plain[0] == plain[1]
    assert gradients == {name for name, (_, _, trained) in plain[0].items() if trained}
