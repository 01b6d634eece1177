"""The model of a run, written for others: bit by bit that of the run, under the config and tokenizer of its source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.source.rounded import find_rounded
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_cli.worker.reload import check_again
from sparsebp_tools.checkpoint_model import rebuild
from sparsebp_tools.release import ReleasedModel, find_weights, write_model
from sparsebp_tools.release.folder import _list_files
from tests.worker.conftest import LLAMA, work
from tests.worker.ranks import make_run, train_on_two

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of peft, about what it does to a base
]

IDS = torch.randint(3, 60, (4, 20), generator=torch.Generator().manual_seed(0))
CHAT = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content + eos_token }}{% endgeneration %}\n{% endfor %}"
)


def logits(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**(inputs or {"input_ids": IDS})).logits
    return found


def train(recipe: Recipe, prepared: Any) -> RunFolder:
    run: RunFolder = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return run


def release(run: RunFolder, place: Path, word: str | None = None, *, title: str = "mine") -> Path:
    """Write the model of a run as the verb does, but for its processes."""
    plan, history = Plan.load(run.plan_file), History.load(run.path)
    weights = find_weights(run, plan, history, word)
    names: Any = history.facts.get("label_names", [])
    classes = len(names) if plan.recipe.dataset.format == "classification" else None
    request = {"plan": str(run.plan_file), "labels": classes, "step": weights.step}

    def write(part: Path) -> None:
        rebuild(json.dumps(request | {"folder": str(part)}), lambda *_: None)

    released = ReleasedModel(run, plan, history, weights, place, title)
    released.check()
    assert write_model(released, write, check_again) == []
    return place


def of_card(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.fixture
def base(tiny_folder: Path, tmp_path: Path) -> Path:
    """A llama with the keys of an older transformers, dropout, a cache, and tokens with names of its own."""
    folder, tokenizer = tmp_path / "base", AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>", "<tool a/b>"]})
    torch.manual_seed(0)
    values: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"} | {
        "attention_dropout": 0.2
    }
    LlamaForCausalLM(LlamaConfig(**values, vocab_size=len(tokenizer), pad_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    old = {"rope_theta": 5000.0, "rope_scaling": None, "torch_dtype": config.pop("dtype"), "note_of_mine": 1}
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | old | {"use_cache": True}))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    return folder


@pytest.mark.slow
def test_a_full_fine_tune_leaves_bit_by_bit_with_the_files_of_its_source(
    base: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    model = {"name": str(base), "dropout": 0.0}
    named = AutoTokenizer.from_pretrained(base)
    named.chat_template = {"default": CHAT, "tool_use": "{{ tools | tojson }}" + CHAT}
    named.save_pretrained(base)
    recipe = tiny_recipe(policy=[{"name": "topk", "keep": 0.5, "along": "rows"}], checkpoint={"every": 5})
    run = train(Recipe.model_validate(recipe.model_dump() | {"model": model}), prepared)
    folder = release(run, tmp_path / "out")

    # The run's model as it was evaluated: of its source, with the weights of the last step.
    evaluated = build_model(
        Plan.load(run.plan_file).recipe.model, build_tokenizer(Plan.load(run.plan_file).recipe.model), None
    )
    last = CheckpointFolder(run.path / "checkpoints", 9, writes=False).load(10).weights
    evaluated.load_state_dict(last, strict=False)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(found), logits(evaluated))
    assert not torch.equal(logits(found), logits(AutoModelForCausalLM.from_pretrained(base)))

    config, source = (json.loads((place / "config.json").read_text()) for place in (folder, base))
    ours = {key: config[key] for key in source if key != "transformers_version"}
    assert ours == {key: value for key, value in source.items() if key != "transformers_version"}
    assert AutoConfig.from_pretrained(folder).rope_parameters == AutoConfig.from_pretrained(base).rope_parameters
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    assert found.generation_config.use_cache is not False
    assert (folder / "tokenizer.model").read_bytes() == b"sentencepiece"
    before, after = (AutoTokenizer.from_pretrained(place) for place in (base, folder))
    text = "<|im_start|>the fox<tool a/b> jumps<|im_end|>"
    assert before(text)["input_ids"] == after(text)["input_ids"]
    assert before.special_tokens_map == after.special_tokens_map
    assert type(before) is type(after)
    assert before.chat_template == after.chat_template
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
    }
    check_card(folder, run, recipe)


def test_a_release_has_the_vocabulary_of_every_tokenizer_of_transformers(tmp_path: Path) -> None:
    names = set[str]()
    for file in Path(transformers.__file__).parent.rglob("tokenization*.py"):
        table = re.search(r"VOCAB_FILES_NAMES.*?= \{(.*?)\}", file.read_text(encoding="utf-8"), re.DOTALL)
        names |= set() if table is None else set(re.findall(r": *\"([^\"]+)\"", table[1]))
    assert {"bpe.codes", "source.spm", "vocab.txt", "tokenizer.model"} < names
    for name in (*names, "notes.py", "pytorch_model.bin"):
        (tmp_path / name).touch()
    assert {file.name for file in _list_files(tmp_path)} == names


def check_card(folder: Path, run: RunFolder, recipe: Recipe) -> None:
    front, text = of_card(folder)
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["sparsebp", "topk"]}
    assert str(folder.parent) not in text  # no path of this machine
    for words in (
        run.run_id,
        "`base`",
        "`topk keep=0.5`",
        "an approximation of the gradient",
        "| train |",
        "`eval/loss`",
    ):
        assert words in text, words
    assert "It was not compared with dense training" in text
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    named = shown.replace("name: base", f"name: {folder.parent / 'base'}").replace(
        "name: text.txt", f"name: {recipe.dataset.name}"
    )
    (folder.parent / "recipe.yaml").write_text(named)
    again = load_recipe(folder.parent / "recipe.yaml")
    for section in ("dataset", "training", "measure", "backward"):
        assert getattr(again, section) == getattr(recipe, section), section
    policies = [[make_policy(entry.name, **entry.options) for entry in one.policy] for one in (again, recipe)]
    assert policies[0] == policies[1]


@pytest.mark.slow
def test_adapters_leave_as_peft_merges_them_and_from_a_checkpoint_alike(
    base: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": f" {n}"}]} for n in range(60)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": str(tmp_path / "chat.jsonl"), "format": "chat", "max_seq_length": 48, "chat_template": CHAT}
    values = tiny_recipe(checkpoint={"every": 2, "keep_last": 9, "keep_best": "eval/loss"}).model_dump()
    model = {"name": str(base), "lora": {"r": 4}}
    run = train(Recipe.model_validate(values | {"model": model, "dataset": dataset}), prepared)

    def merge(adapter: Path) -> Any:
        plain = AutoModelForCausalLM.from_pretrained(base)
        return peft.PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()

    last = release(run, tmp_path / "last")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(last)), logits(merge(run.path / "model" / "adapter"))
    )
    best = release(run, tmp_path / "best", "best")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(best)), logits(merge(run.path / "best" / "adapter")))
    from_step = release(run, tmp_path / "ten", "10")
    assert load_file(from_step / "model.safetensors").keys() == load_file(last / "model.safetensors").keys()
    for name, tensor in load_file(from_step / "model.safetensors").items():
        assert torch.equal(tensor, load_file(last / "model.safetensors")[name]), name
    assert not (last / "adapter").exists()
    assert AutoTokenizer.from_pretrained(last).chat_template == CHAT
    assert (from_step / "chat_template.jinja").read_text() == CHAT
    front, text = of_card(last)
    assert front["tags"] == ["sparsebp", "dense", "lora"]
    assert "chat_template: chat_template.jinja" in text
    assert "so the numbers on that split look better" in of_card(best)[1]

    with pytest.raises(
        UsageError, match=r"no checkpoint of step 3: the run has checkpoints of step 2, 4, (5, )?6, 8, 10"
    ):
        release(run, tmp_path / "three", "3")
    with pytest.raises(UsageError, match="--checkpoint must be last, best or a step, got 'newest'"):
        release(run, tmp_path / "three", "newest")
    assert not (tmp_path / "three").exists()


def _notes(run: RunFolder) -> list[str]:
    return [text for _, _, text in History.load(run.path).notes]


@pytest.mark.slow
def test_a_quantised_base_leaves_as_plain_numbers(base: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path) -> None:
    model = {"name": str(base), "quantization": {"type": "nf4"}, "lora": {"r": 2}}
    values = tiny_recipe(training={"max_steps": 2}, checkpoint={"every": 2}).model_dump()
    run = train(Recipe.model_validate(values | {"model": model}), prepared)
    folder = release(run, tmp_path / "out")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = load_file(run.path / "model" / "model.safetensors")
    rebuilt = release(run, tmp_path / "rebuilt", "2")
    for name, tensor in load_file(rebuilt / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
    assert AutoModelForCausalLM.from_pretrained(folder).generate(IDS, max_new_tokens=2).shape == (4, 22)
    assert "quantised to nf4" in of_card(folder)[1]
    assert find_rounded(folder) == find_rounded(run.path / "model") == "nf4"
    assert find_rounded(base) is None
    following = train(Recipe.model_validate(values | {"model": model | {"name": str(folder)}}), prepared)
    (told,) = (text for text in _notes(following) if "Quantising it again" in text)
    assert told.startswith(f"{folder} contains adapters merged into a base model quantised to nf4")
    assert not [text for text in _notes(run) if "Quantising it again" in text]


@pytest.mark.slow
def test_a_classifier_leaves_with_the_names_of_its_classes(
    base: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    rows = [{"text": f"fox {n}", "label": ["bad", "good", "so-so"][n % 3]} for n in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": str(tmp_path / "texts.jsonl"), "format": "classification", "max_seq_length": 16}
    values = tiny_recipe(training={"max_steps": 2}, checkpoint={"every": 2}).model_dump()
    run = train(Recipe.model_validate(values | {"model": {"name": str(base)}, "dataset": dataset}), prepared)
    for word in (None, "2"):
        folder = release(run, tmp_path / f"out{word}", word)
        found = AutoModelForSequenceClassification.from_pretrained(folder)
        assert found.config.id2label == {0: "bad", 1: "good", 2: "so-so"}
        trained = AutoModelForSequenceClassification.from_pretrained(run.path / "model")
        assert torch.equal(logits(found), logits(trained))
    assert of_card(folder)[0]["pipeline_tag"] == "text-classification"
    assert "`eval/accuracy`" in of_card(tmp_path / "outNone")[1]


@pytest.mark.slow
def test_an_encoder_decoder_leaves_and_generates(
    tiny_folder: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"fox {n}", "completion": f"{n}"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    sizes |= {"dropout_rate": 0.1, "pad_token_id": 2, "decoder_start_token_id": 2}
    config = T5Config(**sizes, vocab_size=len(tokenizer))
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    recipe = tiny_recipe(
        training={"max_steps": 2},
        checkpoint={"every": 2},
        dataset={"name": str(tmp_path / "pairs.jsonl"), "format": "completion"},
    )
    model = {"name": str(tmp_path / "t5"), "dropout": 0.0}
    run = train(Recipe.model_validate(recipe.model_dump() | {"model": model}), prepared)
    folder = release(run, tmp_path / "out")
    found = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert found.config.dropout_rate == 0.1  # the source's, and not the recipe's
    assert found.generate(IDS, max_new_tokens=3).shape[0] == 4
    rebuilt = AutoModelForSeq2SeqLM.from_pretrained(release(run, tmp_path / "again", "2"))
    both = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    assert torch.equal(logits(found, **both), logits(rebuilt, **both))
    assert of_card(folder)[0]["pipeline_tag"] == "text2text-generation"


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_a_sharded_run_leaves_whole_from_its_end_and_its_checkpoint(
    tiny_folder: Path, tiny_recipe: Any, tmp_path: Path
) -> None:
    target = {"threads": 1, "device": "cpu", "processes": 2, "sharding": "fsdp2"}
    recipe = tiny_recipe(
        training={"max_steps": 2}, checkpoint={"every": 2}, target=target, measure={"fidelity_every": None}
    )
    run = make_run(recipe, tmp_path / "runs")
    train_on_two([run])
    with JournalWriter(run.path) as journal:  # as the worker writes, which started them
        journal.write("end", status="finished", step=2, text="")
    folder, rebuilt = release(run, tmp_path / "out"), release(run, tmp_path / "again", "2")
    assert yaml.safe_load(of_card(folder)[1].partition("```yaml\n")[2].partition("```")[0])["target"] == {
        "processes": 2,
        "sharding": "fsdp2",
    }
    assert torch.equal(*(logits(AutoModelForCausalLM.from_pretrained(place)) for place in (folder, rebuilt)))


@pytest.mark.slow
def test_a_run_that_stopped_leaves_from_its_checkpoint_alone(tiny_recipe: Any, prepared: Any, tmp_path: Path) -> None:
    run = train(tiny_recipe(checkpoint={"every": 4, "stop_at": 6}), prepared)
    with pytest.raises(
        UsageError, match=r"has no model before it finishes: `sparsebp model \w+ --checkpoint last` writes"
    ):
        release(run, tmp_path / "out")
    folder = release(run, tmp_path / "out", "last")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in CheckpointFolder(run.path / "checkpoints", 9, writes=False).load(6).weights.items():
        assert torch.equal(weights[name], tensor), name
    text = of_card(folder)[1]
    assert "from its checkpoint of step 6" in text
    assert "Its training was not finished: 10 steps were planned." in text
    with pytest.raises(UsageError, match="exists and is not empty"):
        release(run, tmp_path / "out", "last")
    with pytest.raises(UsageError, match="has no best weights"):
        release(run, tmp_path / "best", "best")
    file = next((run.path / "checkpoints" / "step-00000006").glob("weights*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="the checkpoint of step 6 is damaged"):
        release(run, tmp_path / "other", "last")


def test_the_number_of_answers_in_the_settings_of_generation_stops_no_run(
    base: Path, tiny_recipe: Any, prepared: Any
) -> None:
    (base / "generation_config.json").write_text('{"num_return_sequences": 3, "eos_token_id": 1}')
    values = tiny_recipe(training={"max_steps": 2}).model_dump()
    run = train(Recipe.model_validate(values | {"model": {"name": str(base)}}), prepared)
    (told,) = (text for text in _notes(run) if "num_return_sequences" in text)
    assert told.startswith("generation_config.json is not valid, so num_return_sequences is set to 1: Greedy methods")
    assert AutoModelForCausalLM.from_pretrained(run.path / "model").generation_config.eos_token_id == 1
