"""Layouts of residual blocks in a layer, by the layer's class.

A residual block computes an addition to the residual stream: a norm, attention or MLP, and in some architectures
another norm. Plug-ins add layouts through the entry-point group `sparsebp.layouts`: the entry's name is the class of
the layer, its object a tuple of :class:`BranchLayout`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import UnsupportedError

GROUP = "sparsebp.layouts"


@dataclass(frozen=True)
class AttentionLayout:
    """The names of an attention's linears: queries, keys, values.

    Args:
        query: Children that compute only queries: linears, and norms over their whole width; empty if one linear
            computes queries, keys and values.
        key_value: Children that compute keys or values, or the one linear that computes all three.
        cache: The argument of ``forward`` with the key/value cache, if it has neither of transformers' names.
        bias: The argument of ``forward`` with a bias for each key, such as ALiBi's; None: no bias. Its shape is
            (examples * heads, 1, positions) or (examples, heads, 1, positions).
        is_one_bias: Whether all examples share that bias, (heads, 1, positions). The attention uses its last positions.
        excludes: Whether True in its attention mask excludes a key.
        expands: Children that compute keys and values from cached values, position by position.
        window: A buffer, (1, 1, positions, positions), with True where a position may attend to another. The attention
            itself selects its rows; None: no such buffer.
    """

    query: tuple[str, ...]
    key_value: tuple[str, ...]
    cache: str = CACHE_NAMES[0]
    some_queries: bool = True  # this one and the next of 0.5 have no effect; the next release removes them
    any_heads: bool = True
    bias: str | None = None
    is_one_bias: bool = False
    excludes: bool = False
    expands: tuple[str, ...] = ()
    window: str | None = None

    @property
    def fused(self) -> bool:
        """Whether one linear computes queries, keys and values."""
        return not self.query

    def fitted(self, arguments: Collection[str]) -> AttentionLayout:
        """Return the layout with the cache's name in a ``forward`` of these arguments; unchanged without a cache."""
        return replace(self, cache=next((name for name in (self.cache, *CACHE_NAMES) if name in arguments), self.cache))


@dataclass(frozen=True)
class BranchLayout:
    """Describes one residual block of a layer by the names of its modules.

    Args:
        core: The attention or MLP; a name with dots if it is not a child.
        last: The core's last linear, whose output is only added or dropped out. None, or a child that the core lacks,
            as in a mixture of experts: no such linear.
        before: The norm whose output the core reads, or several names, of which the layer's first is that norm; None:
            the core reads the residual stream.
        after: The norm that reads the core's output, if any.
        attention: Its linears; None for a core that computes each position independently, such as an MLP.
        num_outputs: Number of values that the core's forward returns, of which the layer adds the first. 0: an
            attention returns 2 values, another core a tensor.
        is_written: Whether the layer changes the core's output in place.
        adds: The argument with the residual stream that the core's ``forward`` adds to its output itself; None: the
            layer adds it.
    """

    core: str
    last: str | None
    before: str | tuple[str, ...] | None = None
    after: str | None = None
    attention: AttentionLayout | None = None
    num_outputs: int = 0
    is_written: bool = False
    adds: str | None = None

    def norm_before(self, layer: nn.Module) -> str | None:
        """Return the name of the norm whose output the core of a layer reads; None: it reads the residual stream."""
        names = (self.before,) if isinstance(self.before, str) else self.before or ()
        found = [name for name in names if hasattr(layer, name)]
        return next(iter((*found, *names)), None)

    def is_in(self, layer: nn.Module) -> bool:
        """Return whether a layer has the block. Its core is None if the model's configuration excludes it."""
        return find_child(layer, self.core, self) is not None


def find_child(module: nn.Module, name: str, default: object = None) -> object:
    """Return a module's attribute by a name that may contain dots."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, default)
    return found


def find_attention(
    layer: nn.Module, layouts: Mapping[str, tuple[BranchLayout, ...]]
) -> tuple[nn.Module, AttentionLayout] | None:
    """Return the attention of a decoder's layer and its layout; None if ``layouts`` do not contain its class."""
    branches = layouts.get(type(layer).__name__, ())
    found = next((branch for branch in branches if branch.attention is not None), None)
    core = None if found is None else find_child(layer, found.core)
    if found is None or found.attention is None or not isinstance(core, nn.Module):
        return None
    return core, found.attention


_SEPARATE = AttentionLayout(("q_proj",), ("k_proj", "v_proj"))
_WIDE_NORMS = AttentionLayout(("q_proj", "q_norm"), ("k_proj", "v_proj", "k_norm"))  # norms over all heads together
_PRE_NORM = (
    BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "down_proj", "post_attention_layernorm"),
)
_PRE_NORM_WIDE = (BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_WIDE_NORMS), _PRE_NORM[1])
_BOTH_NORMS = (
    BranchLayout("self_attn", "o_proj", "input_layernorm", "post_attention_layernorm", _SEPARATE),
    BranchLayout("mlp", "down_proj", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_ONE_NORM = (  # both residual blocks read one norm
    BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "down_proj", "input_layernorm"),
)
_NORM_AFTER = (
    BranchLayout("self_attn", "o_proj", after="post_attention_layernorm", attention=_WIDE_NORMS),
    BranchLayout("mlp", "down_proj", after="post_feedforward_layernorm"),
)
_FOUR_NORMS = (
    BranchLayout("self_attn", "o_proj", "input_layernorm", "post_self_attn_layernorm", _SEPARATE),
    BranchLayout("mlp", "down_proj", "post_attention_layernorm", "post_mlp_layernorm"),
)
_OWN_NAMES = (
    BranchLayout("self_attn", "o_proj", "attention_layernorm", attention=_SEPARATE),
    BranchLayout("mlp", "down_proj", "feedforward_layernorm"),
)
_EXPERTS = (  # the core "block_sparse_moe", and an MLP that every position goes through, if there is one
    BranchLayout("self_attn", "o_proj", "input_layernorm", attention=_SEPARATE),
    BranchLayout("block_sparse_moe", None, "post_attention_layernorm"),
    BranchLayout("shared_mlp", "output_linear", "post_attention_layernorm"),
)
_LOOSE_MLP = (BranchLayout("self_attn", "out_proj", "self_attn_layer_norm", attention=_SEPARATE),)
_LATENT = (  # the cache contains latents and rotated parts of keys
    BranchLayout(
        "self_attn",
        "o_proj",
        "input_layernorm",
        attention=AttentionLayout(("q_proj", "q_a_proj", "q_b_proj"), ("kv_a_proj_with_mqa",), expands=("kv_b_proj",)),
    ),
    _PRE_NORM[1],
)
_PRE_NORM_LAYERS = (
    "ArceeDecoderLayer",
    "AriaTextDecoderLayer",
    "BitNetDecoderLayer",
    "CwmDecoderLayer",
    "DiffLlamaDecoderLayer",
    "Ernie4_5DecoderLayer",
    "Ernie4_5_MoeDecoderLayer",
    "ExaoneMoeDecoderLayer",
    "FlintDecoderLayer",
    "GemmaDecoderLayer",
    "Glm4MoeDecoderLayer",
    "GlmDecoderLayer",
    "GraniteDecoderLayer",
    "GraniteSWADecoderLayer",
    "HYV3DecoderLayer",
    "HeliumDecoderLayer",
    "HunYuanDenseV1DecoderLayer",
    "Jais2DecoderLayer",
    "LagunaDecoderLayer",
    "LlamaDecoderLayer",
    "MellumDecoderLayer",
    "MiMoV2FlashDecoderLayer",
    "Ministral3DecoderLayer",
    "MinistralDecoderLayer",
    "MistralDecoderLayer",
    "MixtralDecoderLayer",
    "NemotronDecoderLayer",
    "OlmoDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "SeedOssDecoderLayer",
    "SmolLM3DecoderLayer",
    "SolarOpenDecoderLayer",
    "StableLmDecoderLayer",
)
_BUILT_IN: dict[str, tuple[BranchLayout, ...]] = {
    **dict.fromkeys(_PRE_NORM_LAYERS, _PRE_NORM),
    "AfmoeDecoderLayer": (
        BranchLayout("self_attn", "o_proj", "input_layernorm", "post_attention_layernorm", _SEPARATE),
        BranchLayout("mlp", "down_proj", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ),
    "AXK1DecoderLayer": _LATENT,
    "ApertusDecoderLayer": _OWN_NAMES,
    "Apertus1p5TextDecoderLayer": _OWN_NAMES,
    "BioGptDecoderLayer": _LOOSE_MLP,
    "BloomBlock": (
        BranchLayout(
            "self_attention",
            "dense",
            "input_layernorm",
            attention=AttentionLayout((), ("query_key_value",), "layer_past", bias="alibi"),
            adds="residual",
        ),
        BranchLayout("mlp", "dense_4h_to_h", "post_attention_layernorm", adds="residual"),
    ),
    "CodeGenBlock": (  # both residual blocks read one norm
        BranchLayout("attn", "out_proj", "ln_1", attention=AttentionLayout((), ("qkv_proj",), "layer_past")),
        BranchLayout("mlp", "fc_out", "ln_1"),
    ),
    "CohereDecoderLayer": _ONE_NORM,
    "Cohere2DecoderLayer": _ONE_NORM,
    "Cohere2MoeDecoderLayer": _ONE_NORM,
    "DeepseekV2DecoderLayer": _LATENT,
    "DeepseekV3DecoderLayer": _LATENT,
    "Exaone4DecoderLayer": (
        BranchLayout("self_attn", "o_proj", after="post_attention_layernorm", attention=_SEPARATE),
        BranchLayout("mlp", "down_proj", after="post_feedforward_layernorm"),
    ),
    "FalconDecoderLayer": (
        BranchLayout(
            "self_attention",
            "dense",
            ("ln_attn", "input_layernorm"),
            attention=AttentionLayout((), ("query_key_value",), "layer_past", bias="alibi"),
        ),
        BranchLayout(
            "mlp", "dense_4h_to_h", ("ln_mlp", "post_attention_layernorm", "input_layernorm"), is_written=True
        ),
    ),
    "FlexOlmoDecoderLayer": _NORM_AFTER,
    "Gemma2DecoderLayer": _BOTH_NORMS,
    "Gemma3DecoderLayer": _BOTH_NORMS,
    "Glm4DecoderLayer": _FOUR_NORMS,
    "Glm4MoeLiteDecoderLayer": _LATENT,
    "GPTJBlock": (  # both residual blocks read one norm
        BranchLayout(
            "attn", "out_proj", "ln_1", attention=AttentionLayout(("q_proj",), ("k_proj", "v_proj"), "layer_past")
        ),
        BranchLayout("mlp", "fc_out", "ln_1"),
    ),
    "GptOssDecoderLayer": (_PRE_NORM[0], BranchLayout("mlp", None, "post_attention_layernorm", num_outputs=2)),
    "GraniteMoeDecoderLayer": _EXPERTS[:2],
    "GraniteMoeSWADecoderLayer": _EXPERTS,
    "GraniteMoeSharedDecoderLayer": _EXPERTS,
    "HyperCLOVAXDecoderLayer": (
        BranchLayout("self_attn", "o_proj", "input_layernorm", "post_norm1", _SEPARATE),
        BranchLayout("mlp", "down_proj", "post_attention_layernorm", "post_norm2"),
    ),
    "Kolibri1DecoderLayer": _FOUR_NORMS,
    "MiniCPM3DecoderLayer": _LATENT,
    "MiniMaxM2DecoderLayer": _PRE_NORM_WIDE,
    "ModernBertDecoderLayer": (
        BranchLayout("attn", "Wo", "attn_norm", attention=_SEPARATE),
        BranchLayout("mlp", "Wo", "mlp_norm"),
    ),
    "MptBlock": (
        BranchLayout(
            "attn",
            "out_proj",
            "norm_1",
            attention=AttentionLayout(
                (), ("Wqkv",), "layer_past", bias="position_bias", is_one_bias=True, excludes=True
            ),
        ),
        BranchLayout("ffn", "down_proj", "norm_2", adds="residual"),
    ),
    "NanoChatDecoderLayer": (
        _PRE_NORM[0],
        BranchLayout("mlp", "fc2", "post_attention_layernorm"),
    ),
    "Olmo2DecoderLayer": _NORM_AFTER,
    "Olmo3DecoderLayer": _NORM_AFTER,
    "OlmoeDecoderLayer": _PRE_NORM_WIDE,
    "OPTDecoderLayer": _LOOSE_MLP,
    "PersimmonDecoderLayer": (
        BranchLayout("self_attn", "dense", "input_layernorm", attention=AttentionLayout((), ("query_key_value",))),
        BranchLayout("mlp", "dense_4h_to_h", "post_attention_layernorm"),
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
    "YoutuDecoderLayer": _LATENT,
    "PhiDecoderLayer": (  # both residual blocks read one norm
        BranchLayout("self_attn", "dense", "input_layernorm", attention=_SEPARATE),
        BranchLayout("mlp", "fc2", "input_layernorm"),
    ),
    "GPTNeoBlock": (
        BranchLayout(
            "attn.attention",
            "out_proj",
            "ln_1",
            attention=AttentionLayout(("q_proj",), ("k_proj", "v_proj"), "layer_past", window="bias"),
        ),
        BranchLayout("mlp", "c_proj", "ln_2"),
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


def find_layouts(classes: Collection[str] | None = None) -> dict[str, tuple[BranchLayout, ...]]:
    """Return every known layout by the layer's class. Layouts of plug-ins override built-in ones.

    With ``classes`` load plug-ins only for these layers. Raises :class:`UnsupportedError` if a plug-in's layout cannot
    be loaded.
    """
    layouts = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        if classes is not None and entry.name not in classes:
            continue
        try:
            layout = tuple(entry.load())
        except Exception as error:
            raise UnsupportedError(f"entry point {entry.name!r} is broken: {type(error).__name__}: {error}") from None
        if not layout or not all(isinstance(branch, BranchLayout) for branch in layout):
            raise UnsupportedError(f"entry point {entry.name!r} must be a tuple of BranchLayout, got {layout!r}")
        layouts[entry.name] = layout
    return layouts
