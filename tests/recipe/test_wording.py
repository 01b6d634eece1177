"""What the schema refuses is said in one line: place, key, what is wrong, got, allowed, did you mean."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import yaml

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.foreign_key import ANSWERS, answer
from sparsebp_cli.recipe.schema import DatasetSection, TrainingSection
from sparsebp_cli.recipe.target import find_targets
from tests.recipe.conftest import SMALL

Refuse = Callable[..., str]
Read = Callable[..., Recipe]

TRAINING = SMALL + "training:\n  "
DATASET = SMALL.replace("dataset: {name: python-docs}", "dataset:\n  name: python-docs") + "  "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRAINING + "max_steps: abc", "6:14: training.max_steps: must be a whole number, got 'abc' (text)"),
        (
            TRAINING + "max_steps: '8'",
            "6:14: training.max_steps: must be a whole number, got '8' (text); write it without quotes",
        ),
        (
            TRAINING + "max_steps: 1E3",
            "6:14: training.max_steps: must be a whole number, got 1000.0 (a number); write 1000",
        ),
        (TRAINING + "max_steps: 8.5", "6:14: training.max_steps: must be a whole number, got 8.5 (a number)"),
        (TRAINING + "max_steps: true", "6:14: training.max_steps: must be a whole number, got true"),
        (TRAINING + "max_steps: 0", "6:14: training.max_steps: must be at least 1, got 0"),
        (TRAINING + "max_steps: [1]", "6:3: training.max_steps: must be a whole number, got a list"),
        (TRAINING + "max_steps: {}", "6:3: training.max_steps: must be a whole number, got a mapping"),
        (TRAINING + "max_steps:", "6:13: training.max_steps: must be a whole number, got nothing"),
        (TRAINING + "learning_rate: yes", "6:18: training.learning_rate: must be a number, got 'yes' (text)"),
        (TRAINING + "learning_rate: 0", "6:18: training.learning_rate: must be above 0, got 0"),
        (TRAINING + "max_grad_norm: -1.5", "6:18: training.max_grad_norm: must be above 0, got -1.5"),
        (
            TRAINING + "mixed_precision: fb16",
            "6:20: training.mixed_precision: got 'fb16', allowed: 'no', 'bf16'; did you mean bf16?",
        ),
        (TRAINING + "mixed_precision: 3", "6:20: training.mixed_precision: got 3, allowed: 'no', 'bf16'"),
        (
            SMALL + "backward: {sites: edges, exclude: lm_head}",
            "5:19: backward.sites: got 'edges', allowed: 'linears', 'nodes'; did you mean nodes?",
        ),
        (
            SMALL + "backward: {exclude: lm_head}",
            "5:21: backward.exclude: must be a list, got 'lm_head' (text); write ['lm_head']",
        ),
        (
            SMALL + "backward: {exclude: [a, 3]}",
            "5:25: backward.exclude.1: must be text, got 3 (a number); put it in quotes",
        ),
        (SMALL + "training:", "5:10: training: must be a mapping, got nothing"),
        (SMALL + "training: 3", "5:11: training: must be a mapping, got 3 (a number)"),
        (
            SMALL + "target: lokal",
            f"5:9: target.kind: unknown target 'lokal'; known: {', '.join(find_targets())}; did you mean local?",
        ),
        (
            SMALL + "target: sky",
            f"5:9: target.kind: unknown target 'sky'; known: {', '.join(find_targets())}; `sky` was removed "
            "after 0.5: the verb `export` writes a task for `sky launch`",
        ),
        (
            SMALL + "policy: max-child",
            "5:9: policy.0.name: 'max-child' decides at nodes of the autograd graph: it needs backward.sites: "
            "nodes, got linears",
        ),
        (
            "version: 1\nname: a\nmodel: {name: austen-llama, quantization: nf4}\ndataset: {name: austen}\n",
            "3:43: model.quantization: must be a mapping, got 'nf4' (text); write {type: nf4}",
        ),
        (SMALL + "policy: 3", "5:9: policy: must be a list, got 3 (a number)"),
        (
            SMALL + "schedule: [{until: 0.5, policy: dense}, {policy: topk}]",
            "5:1: schedule: unknown key 'schedule': instead, `keep: {from: 1.0, to: 0.25}` gives an option a "
            "schedule; phases of policies were removed after 0.5: start two runs",
        ),
        (SMALL + "policy: [3]", "5:10: policy.0: must be a mapping, got 3 (a number)"),
        (
            SMALL.replace("small", "a b"),
            "2:7: name: must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$, got 'a b'",
        ),
        (SMALL.replace("version: 1", "version: 2"), "1:10: version: got 2, allowed: 1"),
        (SMALL.replace("version: 1", "version: true"), "1:10: version: got true, allowed: 1"),
        (SMALL.replace("version: 1", "version: 1.0"), "1:10: version: got 1.0, allowed: 1"),
        (
            SMALL.replace("python-docs", "0123"),
            "4:17: dataset.name: must be text, got 123 (a number); put it in quotes",
        ),
        (
            SMALL.replace("python-docs}", "x, eval_fraction: 1}"),
            "4:35: dataset.eval_fraction: must be in (0, 1), got 1",
        ),
        (SMALL + "tracking: {experiment: ''}", "5:24: tracking.experiment: must be at least 1 character long, got ''"),
        (
            SMALL.replace("name: austen-llama", ""),
            "3:1: model: the model is missing: give name, or give config for a model with random weights",
        ),
        (
            SMALL.replace("austen-llama", "x, config: {model_type: gpt2}"),
            "3:1: model: give either name or config, not both",
        ),
        (
            SMALL.replace("austen-llama", "x, lora: {target_modules: 3}"),
            "3:41: model.lora.target_modules: must be a list or 'all-linear', got 3 (a number)",
        ),
        (
            SMALL.replace("austen-llama", "x, lora: {target_modules: [q, 3]}"),
            "3:45: model.lora.target_modules.1: must be text, got 3 (a number); put it in quotes",
        ),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(refuse: Refuse, text: str, expected: str) -> None:
    assert refuse(text) == f"r.yaml:{expected}"


def test_an_unknown_key_lists_the_known_ones_and_the_nearest(refuse: Refuse) -> None:
    line = refuse(SMALL + "checkpoint: {evry: 3}")
    assert line.startswith("r.yaml:5:14: checkpoint.evry: unknown key 'evry'; allowed: every, keep_last, ")
    assert line.endswith("; did you mean every?")
    line = refuse(TRAINING + "lerning_rate: 3e-4")  # of a section with many keys the nearest alone
    assert line == "r.yaml:6:3: training.lerning_rate: unknown key 'lerning_rate'; did you mean learning_rate?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SMALL + "learning_rate: 3e-4", "learning_rate belongs under training"),
        (SMALL + "warmup_steps: 3", "warmup_steps belongs under training or measure"),
        (TRAINING + "max_seq_length: 3", "max_seq_length belongs under dataset"),
        (TRAINING + "policy: [dense]", "policy belongs at the top, without indentation"),
    ],
)
def test_a_key_in_the_wrong_section_is_told_its_home(refuse: Refuse, text: str, expected: str) -> None:
    assert refuse(text).endswith(expected)


def test_a_missing_key_is_named_at_its_parent(refuse: Refuse) -> None:
    text = "version: 1\nmodel: {name: x}\ndataset:\n  split: train\n"
    assert refuse(text).startswith("r.yaml:3:1: dataset.name: missing (Hub id, local file or folder")
    assert refuse("version: 1\nmodel: {name: x}\n").startswith("r.yaml:1:1: dataset: missing (The data")


def test_the_first_error_is_named_and_a_misspelt_key_before_the_one_missing(refuse: Refuse) -> None:
    assert refuse(SMALL + "training: {seed: x}\nbackward: {sites: 3}").startswith("r.yaml:5:18: training.seed")
    assert refuse(SMALL + "backward: {sites: 3}\ntraining: {seed: x}").startswith("r.yaml:5:19: backward.sites")
    assert refuse(SMALL + "policy: [{name: topk, keep: 2}]\ntraining: {seed: x}").startswith(
        "r.yaml:5:29: policy.0.keep"
    )
    assert refuse(SMALL.replace("model", "modle")).startswith("r.yaml:3:1: modle: unknown key")


def test_every_error_is_said_each_at_its_line(read: Read) -> None:
    axolotl = "base_model: x\nsequence_len: 8\nlora_r: 8\nwandb_project: mine\n"
    with pytest.raises(RecipeError) as caught:
        read(TRAINING + "seed: x\n  lr: 1\nbackward: {sites: 3}\n" + axolotl)
    found = [(error.line, error.key) for error in (caught.value, *caught.value.others)]
    assert found == [
        (6, "training.seed"),
        (7, "training.lr"),
        (8, "backward.sites"),
        *((9, "base_model"), (10, "sequence_len"), (11, "lora_r"), (12, "wandb_project")),
    ]
    with pytest.raises(RecipeError) as caught:
        read(SMALL + "".join(f"k{number}: 1\n" for number in range(99)))
    assert str(caught.value.others[-1]).endswith("and 68 more")


def test_long_values_are_cut(refuse: Refuse) -> None:
    line = refuse(TRAINING + "seed: " + "x" * 5000)
    assert "'xxxxxxxxxx" in line
    assert len(line) < 160


def test_an_error_carries_its_parts(read: Read) -> None:
    with pytest.raises(RecipeError) as caught:
        read(TRAINING + "max_steps: 0")
    error = caught.value
    assert (error.file, error.line, error.column, error.key) == ("r.yaml", 6, 14, "training.max_steps")
    assert error.text == "must be at least 1, got 0"


def test_a_whole_number_does_for_a_number(read: Read) -> None:
    recipe = read(TRAINING + "learning_rate: 1\n  max_grad_norm: null")
    assert recipe.training.learning_rate == 1.0
    assert recipe.training.max_grad_norm is None


def test_a_target_may_be_its_kind_alone(read: Read) -> None:
    assert read(SMALL + "target: local") == read(SMALL + "target: {kind: local}") == read(SMALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SMALL + "tracking: {also: [tensorboard]}",
            "5:12: tracking.also: unknown key 'also': not needed: runs send their metrics to "
            "MLflow; version 0.5 was the last with other trackers",
        ),
        (TRAINING + "lr: 3e-4", "6:3: training.lr: unknown key 'lr': in a recipe, write training.learning_rate"),
        (TRAINING + "bf16: true", "unknown key 'bf16': in a recipe, write training.mixed_precision: bf16 (autocast)"),
        (TRAINING + "batch_size: 8", "in a recipe, write training.per_device_train_batch_size"),
        (TRAINING + "epochs: 3", "in a recipe, write training.num_train_epochs"),
        (TRAINING + "gradient_checkpointing: true", "in a recipe, write backward.checkpointing: full"),
        (TRAINING + "output_dir: out", "not needed: every run has its own folder"),
        (TRAINING + "save_total_limit: 3", "in a recipe, write checkpoint.keep_last"),
        (TRAINING + "label_smoothing_factor: 0.1", "recipes have no equivalent key"),
        (TRAINING + "load_in_4bit: true", "in a recipe, write model.quantization: {type: nf4}"),
        (SMALL + "lora_r: 8", "in a recipe, write model.lora.r"),
        (
            SMALL + "target: {kind: slurm, qos: low}",
            "5:23: target.qos: unknown key 'qos': in a recipe, write target.arguments: [--qos=NAME]",
        ),
        (TRAINING + "warmup_ratio: 0.1", "write training.warmup_steps (below 1: a fraction of the steps)"),
        (TRAINING + "warmup_steps: 1.5", "training.warmup_steps: "),
        (
            DATASET + "prompt_column: q",
            "unknown key 'prompt_column': in a recipe, write dataset.columns: {prompt: NAME}",
        ),
        (DATASET + "text_pair_column: b", "in a recipe, write dataset.columns: {text: [NAME, OTHER]}"),
        (DATASET + "group_column: g", "in a recipe, write dataset.columns: {group: NAME}"),
        (DATASET + "completion_only_loss: false", "in a recipe, write dataset.train_on: assistant (false: all)"),
        (
            DATASET + "columns: {promt: q}",
            "dataset.columns.promt: not a column of format text; allowed: text, group",
        ),
        (DATASET + "columns: {text: [a, b]}", "dataset.columns.text: must be one name, got a list"),
        (DATASET + "train_on: all", "train_on: all needs 'format: chat' or 'format: completion', got 'format: text'"),
        (
            TRAINING + "weight_decay: 0.1\n  optim_args: {weight_decay: 0.1}",
            "training: give only one of weight_decay and optim_args.weight_decay, got both",
        ),
    ],
)
def test_a_key_of_another_tool_is_answered_with_the_one_that_does_it(refuse: Refuse, text: str, expected: str) -> None:
    assert expected in refuse(text)


def test_every_key_that_answers_a_foreign_one_exists() -> None:
    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Recipe.model_fields.items()}
    named = [
        found
        for text in ANSWERS.values()
        for found in re.findall(r"\b(?:training|model|dataset|measure|checkpoint|tracking)\.(\w+)", text or "")
    ]
    assert len(named) > 40
    assert not [name for name in named if not any(name in fields for fields in sections.values())]


@pytest.mark.parametrize(
    "name", ["num_train_epochs", "weight_decay", "warmup_ratio", "save_total_limit", "bf16", "fp16"]
)
def test_a_key_of_training_arguments_exists_or_is_answered(name: str) -> None:
    assert name in Recipe.model_fields["training"].annotation.model_fields or answer(name)  # type: ignore[union-attr]


def test_a_fraction_of_warmup_steps_is_rounded_up_as_in_transformers() -> None:
    assert TrainingSection(max_steps=15, warmup_steps=0.1).num_warmup_steps == 2
    assert TrainingSection(max_steps=15, warmup_steps=3).num_warmup_steps == 3
    assert TrainingSection(max_steps=15).num_warmup_steps == 0


TWICE = "each needs its own name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("format: completion\n  columns: {prompt: a, completion: a}", f"'a' stands for prompt and completion: {TWICE}"),
        ("format: completion\n  columns: {completion: prompt}", "dataset.columns.completion: the name 'prompt' stands"),
        ("format: classification\n  columns: {text: a, label: a}", f"'a' stands for text and label: {TWICE}"),
        ("format: classification\n  columns: {label: text}", f"'text' stands for text and label: {TWICE}"),
        ("format: classification\n  columns: {text: [a, a]}", f"'a' stands for text, twice: {TWICE}"),
        ("format: chat\n  columns: {user: a, assistant: a}", f"'a' stands for user and assistant: {TWICE}"),
        ("format: chat\n  columns: {user: [a, b], assistant: [b, c]}", f"'b' stands for user and assistant: {TWICE}"),
        ("format: chat\n  columns: {messages: m, user: a, assistant: a}", f"stands for user and assistant: {TWICE}"),
        ("format: chat\n  columns: {messages: m, role: a, content: a}", f"'a' stands for role and content: {TWICE}"),
        ("format: chat\n  columns: {content: role}", f"'role' stands for role and content: {TWICE}"),
        ("format: chat\n  columns: {user: [], assistant: a}", "dataset.columns.user: must name a column, got an empty"),
        ("format: chat\n  columns: {user: a, assistant: []}", "dataset.columns.assistant: must name a column, got an"),
        ("format: text\n  columns: {text: ''}", "dataset.columns.text: must name a column, got an empty list or text"),
    ],
)
def test_a_name_that_stands_for_two_parts_of_an_example_or_none_is_refused(
    refuse: Refuse, text: str, expected: str
) -> None:
    assert expected in refuse(DATASET + text)


@pytest.mark.parametrize(
    "columns",
    [
        "{prompt: completion, completion: prompt}",
        "{messages: m, user: assistant, assistant: user}",  # a role is no column
        "{messages: content, role: messages}",
        "{user: assistant, assistant: user}",
        "{text: a, group: a}",
    ],
)
def test_names_of_other_parts_may_be_exchanged(columns: str) -> None:
    form = "completion" if "prompt" in columns else "text" if "text" in columns else "chat"
    assert DatasetSection(name="a", format=form, columns=yaml.safe_load(columns)).format == form


def test_a_polynomial_schedule_needs_a_step_after_its_warm_up() -> None:
    section = {"lr_scheduler_type": "polynomial", "max_steps": 8}
    for steps in (0.9, 8):
        with pytest.raises(ValueError, match="polynomial needs a step after the warm-up: lower warmup_steps"):
            TrainingSection.model_validate(section | {"warmup_steps": steps})
    assert TrainingSection.model_validate(section | {"warmup_steps": 0.5}).num_warmup_steps == 4
