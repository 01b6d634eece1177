"""Layouts of residual branches in a layer, by the layer's class.

A branch computes what is added to the residual stream: a norm, attention or MLP, and in some architectures another
norm. Plugins add layouts through the entry-point group `sparsebp.layouts`: the entry's name is the class of the layer,
its object a tuple of :class:`BranchLayout`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import UnsupportedError

GROUP = "sparsebp.layouts"


@dataclass(frozen=True)
class AttentionLayout:
    """The linears of an attention, as names of its children.

    Args:
        query: Children that compute only queries: linears, and norms over their whole width; empty if one linear
            computes queries, keys and values.
        key_value: Children that compute keys or values, or the one linear that computes all three.
        cache: The argument of ``forward`` that takes a key/value cache, if it has neither of transformers' names.
        some_queries: Whether its forward can compute the queries of some positions only; not where it takes their
            number from its own input. Such an attention is recomputed whole.
    """

    query: tuple[str, ...]
    key_value: tuple[str, ...]
    cache: str = CACHE_NAMES[0]
    some_queries: bool = True

    @property
    def fused(self) -> bool:
        """Whether one linear computes queries, keys and values."""
        return not self.query

    def fitted(self, arguments: Collection[str]) -> AttentionLayout:
        """Return the layout with the name that one ``forward`` has for the cache.

        Args:
            arguments: Names of its arguments.

        Returns:
            The layout; as it is if the forward names none.
        """
        return replace(self, cache=next((name for name in (self.cache, *CACHE_NAMES) if name in arguments), self.cache))


@dataclass(frozen=True)
class BranchLayout:
    """One residual branch, as names of the layer's children.

    Args:
        core: The attention or MLP.
        last: The core's last linear, whose output is only added or dropped out.
        before: The norm whose output the core reads; None: the core reads the residual stream.
        after: The norm that reads the core's output; None: there is none.
        attention: Its linears; None for a core that computes each position independently, such as an MLP.
    """

    core: str
    last: str
    before: str | None = None
    after: str | None = None
    attention: AttentionLayout | None = None


_SEPARATE = AttentionLayout(("q_proj",), ("k_proj", "v_proj"))
_PRE_NORM = (
    BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "down_proj", "post_attention_layernorm"),
)
_BOTH_NORMS = (
    BranchLayout("self_attn", "o_proj", "input_layernorm", "post_attention_layernorm", _SEPARATE),
    BranchLayout("mlp", "down_proj", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_ONE_NORM = (  # both branches read it
    BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "down_proj", "input_layernorm"),
)
_NORM_AFTER = (
    BranchLayout(
        "self_attn",
        "o_proj",
        after="post_attention_layernorm",
        attention=AttentionLayout(("q_proj", "q_norm"), ("k_proj", "v_proj", "k_norm")),
    ),
    BranchLayout("mlp", "down_proj", after="post_feedforward_layernorm"),
)
_PRE_NORM_LAYERS = (
    "ArceeDecoderLayer",
    "BitNetDecoderLayer",
    "CwmDecoderLayer",
    "Ernie4_5DecoderLayer",
    "FlintDecoderLayer",
    "GemmaDecoderLayer",
    "GlmDecoderLayer",
    "GraniteDecoderLayer",
    "HeliumDecoderLayer",
    "HunYuanDenseV1DecoderLayer",
    "Jais2DecoderLayer",
    "LlamaDecoderLayer",
    "MinistralDecoderLayer",
    "Ministral3DecoderLayer",
    "MistralDecoderLayer",
    "NemotronDecoderLayer",
    "OlmoDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "SeedOssDecoderLayer",
    "SmolLM3DecoderLayer",
)
_BUILT_IN: dict[str, tuple[BranchLayout, ...]] = {
    **dict.fromkeys(_PRE_NORM_LAYERS, _PRE_NORM),
    "ApertusDecoderLayer": (
        BranchLayout("self_attn", "o_proj", "attention_layernorm", attention=_SEPARATE),
        BranchLayout("mlp", "down_proj", "feedforward_layernorm"),
    ),
    "CohereDecoderLayer": _ONE_NORM,
    "Cohere2DecoderLayer": _ONE_NORM,
    "Exaone4DecoderLayer": (
        BranchLayout("self_attn", "o_proj", after="post_attention_layernorm", attention=_SEPARATE),
        BranchLayout("mlp", "down_proj", after="post_feedforward_layernorm"),
    ),
    "Gemma2DecoderLayer": _BOTH_NORMS,
    "Gemma3DecoderLayer": _BOTH_NORMS,
    "Glm4DecoderLayer": (
        BranchLayout("self_attn", "o_proj", "input_layernorm", "post_self_attn_layernorm", _SEPARATE),
        BranchLayout("mlp", "down_proj", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "NanoChatDecoderLayer": (
        _PRE_NORM[0],
        BranchLayout("mlp", "fc2", "post_attention_layernorm"),
    ),
    "Olmo2DecoderLayer": _NORM_AFTER,
    "Olmo3DecoderLayer": _NORM_AFTER,
    "PersimmonDecoderLayer": (
        BranchLayout("self_attn", "dense", "input_layernorm", attention=AttentionLayout((), ("query_key_value",))),
        BranchLayout("mlp", "dense_4h_to_h", "post_attention_layernorm"),
    ),
    "StableLmDecoderLayer": (
        BranchLayout(
            "self_attn",
            "o_proj",
            "input_layernorm",
            attention=AttentionLayout(("q_proj",), ("k_proj", "v_proj"), some_queries=False),
        ),
        BranchLayout("mlp", "down_proj", "post_attention_layernorm"),
    ),
    "Starcoder2DecoderLayer": (
        _PRE_NORM[0],
        BranchLayout("mlp", "c_proj", "post_attention_layernorm"),
    ),
    "VaultGemmaDecoderLayer": (
        _PRE_NORM[0],
        BranchLayout("mlp", "down_proj", "pre_feedforward_layernorm"),
    ),
    "Phi3DecoderLayer": (
        BranchLayout("self_attn", "o_proj", "input_layernorm", attention=AttentionLayout((), ("qkv_proj",))),
        BranchLayout("mlp", "down_proj", "post_attention_layernorm"),
    ),
    "PhiDecoderLayer": (  # both branches read one norm
        BranchLayout("self_attn", "dense", "input_layernorm", attention=_SEPARATE),
        BranchLayout("mlp", "fc2", "input_layernorm"),
    ),
    "GPTNeoXLayer": (
        BranchLayout(
            "attention",
            "dense",
            "input_layernorm",
            attention=AttentionLayout((), ("query_key_value",), "layer_past"),
        ),
        BranchLayout("mlp", "dense_4h_to_h", "post_attention_layernorm"),
    ),
    "GPT2Block": (
        BranchLayout("attn", "c_proj", "ln_1", attention=AttentionLayout((), ("c_attn",))),
        BranchLayout("mlp", "c_proj", "ln_2"),
    ),
}


def find_layouts() -> dict[str, tuple[BranchLayout, ...]]:
    """Return every known layout by the layer's class; those of plugins override built-in ones.

    Raises :class:`UnsupportedError` if a plugin's layout cannot be loaded.
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
