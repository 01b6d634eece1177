"""Write the folder of a trained model for other programs, completely or not at all.

It has weights in safetensors, config, generation config, tokenizer with its chat template, and the model card. Only
files of these names are taken from a run, whose folder may come from a stranger.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State, durable, manifest
from sparsebp_cli.run.manifest import MANIFEST, OUTPUTS
from sparsebp_tools.release import origin as source
from sparsebp_tools.release.card import Card
from sparsebp_tools.release.figure import Beside, compare_here, list_figures
from sparsebp_tools.release.gguf import convert
from sparsebp_tools.release.origin import Origin
from sparsebp_tools.release.weights import ReleasedWeights

WEIGHTS = (".safetensors", ".safetensors.index.json")
BESIDE = (".json", ".jinja", ".txt", ".model", ".codes", ".spm", ".tokenizer")  # with all vocabularies of transformers
TEMPLATES = "additional_chat_templates"  # folder of named templates, such as for tools
CARD = "README.md"
ROOM = 8 << 20  # free bytes required beside the weights


@dataclass(frozen=True)
class ReleasedModel:
    """What is to be written, and where."""

    run: RunFolder
    plan: Plan
    history: History
    weights: ReleasedWeights
    place: Path  # path of the new folder
    title: str  # title of the card
    converter: list[str] = field(default_factory=list)  # words that start llama.cpp's converter; empty: no file for it

    def check(self) -> None:
        """Raise ``UsageError`` if the folder cannot be created, ``SparseBPError`` if the disk is too full for it."""
        place = self.place
        if place.is_symlink() or (place.exists() and (not place.is_dir() or any(place.iterdir()))):
            raise UsageError(f"{place} exists and is not empty: name another folder with --to")
        parent = next(folder for folder in place.absolute().parents if folder.exists())
        if self.weights.folder is None:
            return
        size = sum(file.stat().st_size for file in _list_files(self.weights.folder))
        needed, free = size * (2 if self.converter else 1) + ROOM, shutil.disk_usage(parent).free
        if needed > free:
            raise SparseBPError(f"{place} needs {needed / 1e6:,.0f} MB, and the disk has {free / 1e6:,.0f} MB free")


def write_model(
    model: ReleasedModel, rebuild: Callable[[Path], None], verify: Callable[[Path, Path], object]
) -> list[str]:
    """Write a model's folder, and return lines about what could not be restored. ``rebuild`` writes a checkpoint's
    model into a folder; ``verify`` compares the new folder with the run's. Raises ``UsageError`` if another process has
    written the folder meanwhile, ``SparseBPError`` if writing fails or the outputs differ."""
    try:
        with durable.filling(model.place.absolute()) as part:
            if model.weights.folder is None:
                rebuild(part)
            else:
                for file in _list_files(model.weights.folder):
                    copy = part / file.relative_to(model.weights.folder)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)
            config, notes = _restore(part, model)
            if model.weights.folder is not None and OUTPUTS in source.read_json(model.weights.folder / MANIFEST):
                verify(part, model.weights.folder)
            (part / CARD).write_text(_make_card(model, config).render(model.title), encoding="utf-8")
            if model.converter:
                name = model.place.name
                convert(model.converter, part, part / f"{name}.gguf", name, str(config.get("dtype", "")))
    except FileExistsError:
        raise UsageError(f"{model.place} exists and is not empty: name another folder with --to") from None
    except OSError as error:
        raise SparseBPError(f"{model.place} was not written: {error.strerror or error}") from None
    return notes


def _list_files(folder: Path) -> list[Path]:
    """Return the files of a saved model that belong into the folder."""
    names = {manifest.MANIFEST, CARD}
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in names]
    named = sorted((folder / TEMPLATES).glob("*.jinja"))
    return [file for file in files if file.name.endswith((*WEIGHTS, *BESIDE))] + named


def _restore(part: Path, model: ReleasedModel) -> tuple[dict[str, Any], list[str]]:
    """Undo training's changes to the files, and return the config and lines about what could not be restored."""
    section = model.plan.recipe.model
    origin, notes = Origin.find(section), []
    if origin.config is None and origin.used:
        notes.append(
            f"config.json keeps {', '.join(origin.used)} of the recipe, because the source model, which has the "
            "original values, is not on this machine"
        )
    labels: Any = model.history.facts.get("label_names") or []
    config = source.restore_config(source.read_json(part / source.CONFIG), origin, labels)
    _write(part / source.CONFIG, config)
    if generation := source.read_json(part / source.GENERATION):
        _write(part / source.GENERATION, source.restore_generation(generation, origin))
    inner = source.read_json(part / source.TOKENIZER)
    if inner and inner != (restored := source.restore_limits(inner, origin)):
        _write(part / source.TOKENIZER, restored)
    if about := source.read_json(part / source.TOKENIZER_CONFIG):
        _write(part / source.TOKENIZER_CONFIG, source.restore_tokenizer(about, inner, origin))
    for file in source.find_vocabularies(inner, origin):
        if not (part / file.name).exists():
            shutil.copyfile(file, part / file.name)
    return config, notes


def _make_card(model: ReleasedModel, config: Mapping[str, Any]) -> Card:
    classes = config.get("architectures") or ["model"]
    ended = model.weights.is_end and model.run.state() is State.FINISHED
    beside = compare_here(model.run, model.plan) if ended else Beside()
    figures = list_figures(model.run, model.weights, model.history)
    return Card(model.run, model.plan, model.history, model.weights, figures, beside, str(classes[0]))


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
