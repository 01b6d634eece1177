"""Write the model card: facts about a trained model from the run's plan and event log only.

It contains no folder names of this machine: of a local path the card has the last part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.description import describe_policies
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.census import Census, find_warnings
from sparsebp_cli.run.journal import UNENDED, list_asked
from sparsebp_cli.run.visible import make_visible
from sparsebp_cli.source import DATASETS, MODELS
from sparsebp_cli.source.name import PACKAGE, is_path
from sparsebp_cli.source.rounded import TAG
from sparsebp_tools.release.figure import Beside, CardFigure
from sparsebp_tools.release.weights import ReleasedWeights

TASKS = {  # a hub's search categories, by the class of the model
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForConditionalGeneration": "text2text-generation",
}
PACKAGES = ("python", "torch", "transformers", "peft", "bitsandbytes", "torchao", "accelerate", "datasets")
LEFT_OUT = ("target", "tracking", "checkpoint")  # sections of the recipe that say where it ran
PROCESSES = ("processes", "nodes", "sharding")  # options of the target that affect the numbers
TEMPLATE = "chat_template.jinja"  # the file beside the card


@dataclass(frozen=True)
class Card:
    """The content of a card."""

    run: RunFolder
    plan: Plan
    history: History
    weights: ReleasedWeights
    figures: Sequence[CardFigure]
    beside: Beside
    model_class: str  # as in config.json

    def render(self, name: str) -> str:
        """Return the README.md of a model's folder with this name."""
        recipe = self.plan.recipe.model_dump(mode="json")
        parts = [
            f"# {name}",
            self._open(recipe),
            *_section("Use", _use(self.model_class, name, recipe["dataset"]["format"])),
            *_section("Data", _describe_data(recipe, self.history)),
            *_section("Policy", _describe_policy(recipe, self.history)),
            *_section("Numbers", self._numbers(_name_judged(recipe))),
            *_section("What it is not", "\n".join(f"- {line}" for line in self._limits(recipe))),
            *_section("How to repeat it", self._repeat(recipe)),
        ]
        return f"---\n{_to_yaml(self._front(recipe))}---\n\n" + "\n\n".join(parts) + "\n"

    def _front(self, recipe: dict[str, Any]) -> dict[str, object]:
        """Return the data that a hub reads. Model and dataset names must be hub ids, since a hub would link other names
        to strangers' repositories."""
        model, data = recipe["model"], recipe["dataset"]
        front: dict[str, object] = {"library_name": "transformers"}
        if task := next((task for end, task in TASKS.items() if self.model_class.endswith(end)), None):
            front["pipeline_tag"] = task
        if is_hub_id(model["name"], MODELS):
            front |= {"base_model": model["name"], "base_model_relation": "finetune"}
        if is_hub_id(data["name"], DATASETS):
            front["datasets"] = [data["name"]]
        policies = [entry.name for entry in self.plan.recipe.policy if entry.name != "dense"]
        adapters = ["lora"] if model["lora"] else [model["peft"]["type"]] if model["peft"] else []
        rounded = [f"{TAG}{model['quantization']['type']}"] if model["quantization"] else []
        front["tags"] = list(dict.fromkeys(["sparsebp", *(policies or ["dense"]), *adapters, *rounded]))
        return front

    def _open(self, recipe: dict[str, Any]) -> str:
        model, training = recipe["model"], recipe["training"]
        base = f"`{_base_name(model['name'])}`" if model["name"] else f"a random `{model['config']['model_type']}`"
        which = {
            "last": f"after its last step, {self.weights.step:,}",
            "best": f"at the best `{self.weights.metric}` of its evaluations, after step {self.weights.step:,}",
            "checkpoint": f"from its checkpoint of step {self.weights.step:,}",
        }[self.weights.kind]
        opened = f"A `{self.model_class}`, fine-tuned from {base} by SparseBP, with its weights {which}."
        how = f"{training['max_steps']:,} steps of {training['optim']}, learning rate {training['learning_rate']:g}"
        merged = _describe_adapters(model)
        return " ".join([opened, f"Training: {how}.", *([merged] if merged else [])])

    def _numbers(self, judged: str) -> str:
        """Return the table; ``judged`` says which examples its numbers are of."""
        if not self.figures:
            return "Nothing was measured of these weights: the run was not evaluated after this step."
        rows = [("metric", "before training", "this model", "95 % over examples"), ("---", "--:", "--:", "--:")]
        for one in self.figures:
            ends = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g} ({one.count})"
            unit = f" ({one.unit})" if one.unit else ""
            rows.append(
                (f"`{one.name}`{unit}", "" if one.before is None else f"{one.before:.4g}", f"{one.value:.4g}", ends)
            )
        lines = ["\n".join(f"| {' | '.join(map(_escape, row))} |" for row in rows)]
        if any(one.low is not None for one in self.figures):
            lines.append(
                f"The intervals show how the numbers vary with the choice of {judged} examples (in clusters). They "
                "do not cover other seeds."
            )
        if self.beside.seeds:
            lines.append(
                f"Over the seeds of this recipe, `{self.beside.metric}` is {self.beside.seeds} (mean ± sd, runs)."
            )
        if self.beside.verdict:
            lines.append(f"Compared with dense training of the same recipe: {make_visible(self.beside.verdict)}")
            lines += [f"Warning of that comparison: {make_visible(text)}" for text in self.beside.warnings]
        if asked := list_asked(self.history):
            # Their texts stay in the run: a card is published with the model, and held-out rows may be private.
            ended = sum(not answer.endswith(UNENDED) for *_, answer in asked)
            asked_of = f"{len(asked)} {judged} prompts"
            lines.append(
                f"Asked {asked_of} by plain transformers, the model ended {ended} of its answers with an end token."
            )
        return "\n\n".join(lines)

    def _limits(self, recipe: dict[str, Any]) -> Iterator[str]:
        data, model = recipe["dataset"], recipe["model"]
        judged = f"{_name_judged(recipe)} examples of `{_base_name(data['name'])}`"
        yield f"It was judged on {judged} alone, and on nothing else."
        yield "Nobody tested it for bias, unsafe answers or memorised texts. It inherits those of its base model."
        yield "The licences of its base and of its data apply to it."
        if not self.beside.verdict and not _is_dense(recipe):
            yield (
                "It was not compared with dense training of the same recipe, so the loss of quality through its "
                "policy is unknown."
            )
        if self.weights.kind == "best":
            yield (
                f"Its step was chosen by `{self.weights.metric}` on the validation split, so the numbers on that "
                "split look better than they are."
            )
        if self.weights.kind == "checkpoint" and self.weights.step < recipe["training"]["max_steps"]:
            yield f"Its training was not finished: {recipe['training']['max_steps']:,} steps were planned."
        if any(end.get("cause") == "limit" for end in self.history.ends):
            yield f"A limit ended its training after step {self.weights.step:,}."
        if model["float8"] is not None:
            yield (
                "It was trained and evaluated with linear layers in float8. Loaded from these files, the layers "
                "multiply in the dtype of the weights."
            )
        if model["quantization"] is not None:
            kind = model["quantization"]["type"]
            yield f"Its base was quantised to {kind}; these files store the dequantised numbers."
            yield (
                "Quantised again, as in QLoRA, it loses most of what it learnt. To continue its training, use its "
                f"adapter over {kind} instead."
            )

    def _repeat(self, recipe: dict[str, Any]) -> str:
        environment: Mapping[str, Any] = self.history.environments[-1] if self.history.environments else {}
        packages = {"python": environment.get("python", ""), **(environment.get("packages") or {})}
        versions = [f"{name} {packages[name]}" for name in PACKAGES if packages.get(name)]
        facts = cast("Mapping[str, Any]", self.history.facts)
        lines = [f"SparseBP {self.plan.provenance.sparsebp_version or 'of an unknown version'}", *versions]
        code = f", its code at commit {self.plan.provenance.git_sha}" if self.plan.provenance.git_sha else ""
        if self.plan.provenance.dirty:
            code += " with changes that were not committed"
        return "\n\n".join(
            [
                f"Run `{self.run.run_id}`, seed {recipe['training']['seed']}{code}. On the machine that has "
                f"the run, `sparsebp rerun {self.run.run_id}` trains it again and says whether a bit differs. On other "
                "machines, save the recipe below as `recipe.yaml` and train it:",
                "```console\n$ sparsebp run recipe.yaml\n```",
                "```yaml\n" + _to_yaml(_publish(self.plan.recipe)) + "```",
                f"Versions: {', '.join(lines)}. Digest of the examples: `{facts.get('dataset_digest', 'unknown')}`.",
            ]
        )


def is_hub_id(name: str | None, group: str) -> bool:
    """Return whether a name of a model or dataset is a hub id, and no path, installed name or packaged file."""
    if name is None or name.startswith(PACKAGE) or is_path(name) or name in entry_points(group=group).names:
        return False
    return not Path(name).exists()


def _is_dense(recipe: dict[str, Any]) -> bool:
    return describe_policies(recipe) == "dense"


def _name_judged(recipe: dict[str, Any]) -> str:
    """Return which examples a run was judged on."""
    data = recipe["dataset"]
    return "trained" if data["eval_split"] == data["split"] and not data["test_split"] else "held-out"


def _base_name(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() or is_path(name) else name


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _describe_adapters(model: dict[str, Any]) -> str:
    kind = (
        "LoRA"
        if model["lora"]
        else model["peft"]["type"]
        if model["peft"]
        else "an adapter"
        if model["adapter"]
        else ""
    )
    return f"It was trained by {kind}, which is merged into the weights by peft." if kind else ""


def _use(model_class: str, name: str, data_format: str) -> str:
    auto = {
        "ForMaskedLM": "AutoModelForMaskedLM",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    }
    loader = next((auto[end] for end in auto if model_class.endswith(end)), "AutoModelForCausalLM")
    lines = [
        f"from transformers import {loader}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})",
        f"model = {loader}.from_pretrained({name!r})",
    ]
    if data_format == "chat" and loader == "AutoModelForCausalLM":
        lines += [
            "",
            'messages = [{"role": "user", "content": "..."}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
            "tokens = model.generate(**inputs, max_new_tokens=64)[0, inputs.input_ids.shape[1] :]",
            "print(tokenizer.decode(tokens, skip_special_tokens=True))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _describe_data(recipe: dict[str, Any], history: History) -> str:
    data, facts = recipe["dataset"], cast("Mapping[str, Any]", history.facts)
    census: Census | None = facts.get("census")
    opened = (
        f"`{_base_name(data['name'])}`, read as `{data['format']}`, at most {data['max_seq_length']} tokens an example."
    )
    if not census:
        return opened
    rows = [("split", "rows", "examples", "dropped", "cut", "tokens", "trained or judged"), ("---", *["--:"] * 6)]
    for name, split in census["splits"].items():
        counts = (split["rows"], split["examples"], sum(split["dropped"].values()), split["cut"])
        rows.append((name, *(f"{count:,}" for count in (*counts, split["tokens"], split["targets"]))))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    warnings = [f"- {make_visible(text)}" for level, text in find_warnings(census) if level == "warning"]
    return "\n\n".join([opened, table, *(["\n".join(warnings)] if warnings else [])])


def _describe_policy(recipe: dict[str, Any], history: History) -> str:
    if _is_dense(recipe):
        return "Dense: every gradient was computed."
    shown = f"`{describe_policies(recipe)}`"
    recorded: Sequence[Mapping[str, Any]] = history.facts.get("policies") or []
    if not recorded:
        return f"{shown}."
    if all(policy["exact"] for policy in recorded):
        return f"{shown}: exact by its declaration, so the gradients are those of dense training up to rounding."
    bias = "unbiased" if all(policy["unbiased"] for policy in recorded) else "biased"
    return f"{shown}: an approximation of the gradient, {bias} by its declaration."


def _publish(whole: Recipe) -> dict[str, Any]:
    """Return a recipe with its defaults, which a later version may change, and without this machine's places, store and
    folder names."""
    recipe, changed = whole.model_dump(mode="json"), whole.model_dump(mode="json", exclude_defaults=True)
    kept = {key: value for key, value in recipe.items() if key not in LEFT_OUT and value is not None}
    for section, key in (("model", "name"), ("model", "tokenizer"), ("model", "adapter"), ("dataset", "name")):
        if kept[section].get(key) is not None:
            kept[section] = kept[section] | {key: _base_name(kept[section][key])}
    if kept["dataset"].get("chat_template") is not None:
        kept["dataset"] = kept["dataset"] | {"chat_template": TEMPLATE}
    published = {key: _drop_nulls(value, changed.get(key)) for key, value in kept.items()}
    shared = {key: recipe["target"][key] for key in PROCESSES if recipe["target"].get(key) not in (None, 1, "none")}
    return published | ({"target": shared} if shared else {})


def _drop_nulls(value: Any, changed: Any) -> Any:
    """Drop a section's nulls that are defaults; ``changed`` has the non-default values."""
    if not isinstance(value, dict):
        return value
    known = changed if isinstance(changed, dict) else {}
    kept = {key: child for key, child in value.items() if child is not None or key in known}
    return {key: _drop_nulls(child, known.get(key)) for key, child in kept.items()}


def _to_yaml(content: object) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))


def _escape(text: str) -> str:
    return make_visible(text).replace("|", "\\|")
