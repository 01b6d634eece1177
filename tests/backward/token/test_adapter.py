"""An architecture that is not supported in works with the map that the guide shows, found by its entry point."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from sparsebp_cli.backward.decoder.layout import BranchLayout, find_layouts
from tests.docs.block import blocks

from .case import assert_near, make_batch, plain_step, step


class MyDecoderLayer(OPTDecoderLayer):
    """A layer whose class no layout is built in for."""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [block.text for block in blocks("python") if block.file.name == "tokens.md" and "MINE = (" in block.text]
    entry = next(b.text for b in blocks("toml") if b.file.name == "tokens.md" and "MyDecoderLayer" in b.text)
    package, name = re.findall(r'"(\w+)\.(\w+):MINE"', entry)[0]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{name}.py").write_text("\n".join(shown))
    info = tmp_path / "my_layout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-layout\nVersion: 1.0\n")
    text = entry.replace("[project.entry-points.", "[").replace('"sparsebp.layouts"]', "sparsebp.layouts]")
    (info / "entry_points.txt").write_text(text.replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("mask", ["none", "right", "left"])
def test_a_layer_works_with_the_map_of_the_guide(mask: Any) -> None:
    assert all(isinstance(branch, BranchLayout) for branch in find_layouts()["MyDecoderLayer"])
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(vocab_size=64, word_embed_proj_dim=32, dropout=0.0, **sizes)).train()
    for layer in model.model.decoder.layers:
        layer.__class__ = MyDecoderLayer
    for name in ("scattered", "prompts"):
        batch = make_batch(name, mask)
        assert_near(step(model, batch, "exact"), plain_step(model, batch))
        assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))
