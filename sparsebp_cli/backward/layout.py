"""Where the residual branches are in a layer, by the layer's class: what the site `branches` knows of an architecture.

A branch is what is computed between taking the residual stream and adding to it again: a norm, attention or MLP, and in
some architectures another norm. Layouts of other architectures come through the entry-point group `sparsebp.layouts`:
the entry's name is the class of the layer, its object a tuple of :class:`BranchLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from sparsebp_cli.errors import UnsupportedError

GROUP = "sparsebp.layouts"


@dataclass(frozen=True)
class AttentionLayout:
    """The linears of an attention, as names of its children.

    Args:
        query: Read by the query alone; empty where queries, keys and values come from one linear.
        key_value: Read by keys or values alone.
        output: After the attention.
        cache: The argument of ``forward`` that takes a key/value cache.
    """

    query: tuple[str, ...]
    key_value: tuple[str, ...]
    output: tuple[str, ...]
    cache: str = "past_key_values"


@dataclass(frozen=True)
class BranchLayout:
    """One residual branch, as names of the layer's children.

    Args:
        core: The attention or MLP.
        before: The norm whose output the core reads; None: the core reads the residual stream.
        after: The norm that reads the core's output; None: there is none.
        attention: Its linears; None where each position is computed on its own, as in an MLP.
    """

    core: str
    before: str | None = None
    after: str | None = None
    attention: AttentionLayout | None = None


_SEPARATE = AttentionLayout(("q_proj",), ("k_proj", "v_proj"), ("o_proj",))
_PRE_NORM = (
    BranchLayout("self_attn", "input_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "post_attention_layernorm"),
)
_BOTH_NORMS = (
    BranchLayout("self_attn", "input_layernorm", "post_attention_layernorm", _SEPARATE),
    BranchLayout("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_BUILT_IN: dict[str, tuple[BranchLayout, ...]] = {
    **dict.fromkeys(
        (
            "LlamaDecoderLayer",
            "MistralDecoderLayer",
            "Qwen2DecoderLayer",
            "Qwen3DecoderLayer",
            "SmolLM3DecoderLayer",
            "GemmaDecoderLayer",
            "OlmoDecoderLayer",
            "GraniteDecoderLayer",
        ),
        _PRE_NORM,
    ),
    "Gemma2DecoderLayer": _BOTH_NORMS,
    "Gemma3DecoderLayer": _BOTH_NORMS,
    "Olmo2DecoderLayer": (
        BranchLayout("self_attn", None, "post_attention_layernorm", _SEPARATE),
        BranchLayout("mlp", None, "post_feedforward_layernorm"),
    ),
    "Phi3DecoderLayer": (
        BranchLayout("self_attn", "input_layernorm", attention=AttentionLayout((), (), ("o_proj",))),
        BranchLayout("mlp", "post_attention_layernorm"),
    ),
    "PhiDecoderLayer": (  # both branches read one norm
        BranchLayout(
            "self_attn",
            "input_layernorm",
            attention=AttentionLayout(("q_proj",), ("k_proj", "v_proj"), ("dense",)),
        ),
        BranchLayout("mlp", "input_layernorm"),
    ),
    "GPTNeoXLayer": (
        BranchLayout("attention", "input_layernorm", attention=AttentionLayout((), (), ("dense",), "layer_past")),
        BranchLayout("mlp", "post_attention_layernorm"),
    ),
    "GPT2Block": (
        BranchLayout("attn", "ln_1", attention=AttentionLayout((), (), ("c_proj",))),
        BranchLayout("mlp", "ln_2"),
    ),
}


def find_layouts() -> dict[str, tuple[BranchLayout, ...]]:
    """Return every known layout by the layer's class; those of plugins come before built-in ones.

    Returns:
        Class name to branches.

    Raises:
        UnsupportedError: A plugin's layout cannot be read.
    """
    layouts = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        try:
            layout = tuple(entry.load())
        except Exception as error:
            raise UnsupportedError(f"the layout {entry.name!r} is broken: {type(error).__name__}: {error}") from None
        if not layout or not all(isinstance(branch, BranchLayout) for branch in layout):
            raise UnsupportedError(f"the layout {entry.name!r} is not a tuple of BranchLayout, got {layout!r}")
        layouts[entry.name] = layout
    return layouts
