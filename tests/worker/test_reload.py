"""What is saved is what was trained: each saved folder, loaded anew, gives the outputs of the model in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sparsebp_cli.cli.worker_answer import ask
from sparsebp_cli.errors import RunFailedError
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder, durable, manifest
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.worker import reload
from sparsebp_cli.worker.build import save_model, write_whole
from sparsebp_cli.worker.prompt import Prompt
from sparsebp_cli.worker.reload import ReloadedOutputs, check_again, make_batch
from tests.worker.conftest import LLAMA, work

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of peft, about tied weights
]

ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "head": {"lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]}},
    "embedding": {"lora": {"r": 4, "target_modules": ["embed_tokens"]}},
    "head and embedding": {"lora": {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}},
    "head saved whole": {"lora": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
    "tokens": {"peft": {"type": "trainable_tokens", "token_indices": [60, 70, 80]}},
    "dora of the head": {"lora": {"r": 4, "target_modules": ["lm_head"], "use_dora": True}},
}


def make_tied(folder: Path, tiny_folder: Path) -> tuple[Path, Any]:
    """Save a llama whose head is its embedding."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def read_record(folder: Path) -> dict[str, Any]:
    assert manifest.find_damage(folder) == ""
    found: dict[str, Any] = json.loads((folder / manifest.MANIFEST).read_text())["outputs"]
    return found


@pytest.mark.slow
def test_every_kind_of_adapter_of_a_tied_model_is_saved_as_it_was_trained(
    tiny_folder: Path, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    tied, _ = make_tied(tmp_path / "tied", tiny_folder)
    values, folders = tiny_recipe(training={"max_steps": 3, "learning_rate": 0.05}).model_dump(), list[Path]()
    quantised = {"quantised head": {"quantization": {"type": "nf4"}} | ADAPTERS["head"]}
    for name, adapters in (ADAPTERS | quantised).items():
        best = {"checkpoint": {"every": 2, "keep_best": "eval/loss"}} if name == "head" else {}
        run: RunFolder = prepared(Recipe.model_validate(values | {"model": {"name": str(tied), **adapters}} | best))
        assert work(run) == 0, name + run.log_file.read_text()
        folders += [run.path / "model", *([run.path / "best"] if best else [])]
    for folder in folders:
        record = read_record(folder)
        assert record["checked"]
        assert record["difference"] <= 1e-5, folder
        assert check_again(folder, folder)["difference"] <= 1e-5  # type: ignore[operator]
    for folder in (folders[1], folders[-1]):  # of an adapter on the head, and of one on a quantised base
        assert ask("reload", [folder, folder], "loads")["difference"] <= 1e-5


def make_adapted(tmp_path: Path, tiny_folder: Path) -> tuple[Any, Any]:
    folder, tokenizer = make_tied(tmp_path / "tied", tiny_folder)
    options = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False)
    return peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder), options), tokenizer


def test_a_folder_that_gives_other_outputs_takes_the_place_of_none(
    tiny_folder: Path, prepared: Any, tiny_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: RunFolder = prepared(tiny_recipe())
    (run.path / "model").mkdir()
    (run.path / "model" / "before").write_text("kept")
    model, tokenizer = make_adapted(tmp_path, tiny_folder)
    outputs = ReloadedOutputs.of(model, make_batch(len(tokenizer)))
    monkeypatch.setattr("sparsebp_cli.worker.adapter.merge", lambda model: model.merge_and_unload())  # as peft does
    with pytest.raises(RunFailedError, match=r"the saved model differs from the trained one: .* the files stay in"):
        save_model(model, tokenizer, run, outputs=outputs)
    assert [file.name for file in (run.path / "model").iterdir()] == ["before"]
    assert (run.path / f"{durable.PART}model" / "model.safetensors").is_file()
    model, tokenizer = make_adapted(tmp_path / "again", tiny_folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(RunFailedError, match="the saved model differs from the trained one"):
        write_whole(model, tokenizer, tmp_path / "out")


def test_a_model_without_room_for_a_second_copy_is_saved_and_the_manifest_says_so(
    tiny_folder: Path, prepared: Any, tiny_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: RunFolder = prepared(tiny_recipe())
    model, tokenizer = make_adapted(tmp_path, tiny_folder)
    outputs = ReloadedOutputs.of(model, make_batch(len(tokenizer)))
    monkeypatch.setattr(reload, "ROOM", 1e12)
    assert "needs more memory than is free" in save_model(model, tokenizer, run, outputs=outputs)["reason"]
    assert not read_record(run.path / "model")["checked"]
    assert check_again(run.path / "model", run.path / "model") == {"checked": False}


def test_a_change_of_saved_weights_is_seen_by_the_check_of_a_fresh_process(
    tiny_folder: Path, prepared: Any, tiny_recipe: Any, tmp_path: Path
) -> None:
    run: RunFolder = prepared(tiny_recipe())
    folder, tokenizer = make_tied(tmp_path / "tied", tiny_folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    save_model(model, tokenizer, run, outputs=ReloadedOutputs.of(model, make_batch(len(tokenizer))))
    assert check_again(run.path / "model", run.path / "model")["checked"]
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    model.save_pretrained(run.path / "model")
    with pytest.raises(RunFailedError, match="the loaded model's outputs differ from those in training by 0"):
        ask("reload", [run.path / "model"] * 2, "loads")


def test_what_fails_while_a_saved_model_is_asked_keeps_it_saved(
    tiny_folder: Path, prepared: Any, tiny_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no\nanswer")

    monkeypatch.setattr(reload, "ask", fail)
    run: RunFolder = prepared(tiny_recipe())
    folder, tokenizer = make_tied(tmp_path / "tied", tiny_folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    question = Prompt(np.array([5, 6], dtype=np.int64), "a", "b", as_rows([{}], "rows")[0])
    outputs = replace(ReloadedOutputs.of(model, make_batch(len(tokenizer))), questions=[question])
    record = save_model(model, tokenizer, run, outputs=outputs)
    assert (record["checked"], record["unasked"]) == (True, "RuntimeError: no answer")
    assert read_record(run.path / "model")["checked"]
