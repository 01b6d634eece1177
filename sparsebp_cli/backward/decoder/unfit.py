"""Reasons why the layers of some architectures have no layout."""

from __future__ import annotations

_INDEXED = "its attention chooses keys with an indexer that has a separate cache"
_MIXING = "some of its layers mix neighbouring positions, by a convolution or a recurrence"
_ENCODER = "it is an encoder layer: it attends to later positions, and its modules add the residual connection"
_UNFIT = {
    **dict.fromkeys(
        (
            "AXK2DecoderLayer",
            "DeepseekV32DecoderLayer",
            "GlmMoeDsaDecoderLayer",
            "HYV4DecoderLayer",
        ),
        _INDEXED,
    ),
    **dict.fromkeys(
        (
            "BailingHybridDecoderLayer",
            "FalconH1DecoderLayer",
            "FalconMambaBlock",
            "InklingDecoderLayer",
            "JambaAttentionDecoderLayer",
            "JambaMambaDecoderLayer",
            "LaraMiniDecoderLayer",
            "Lfm2DecoderLayer",
            "Lfm3DecoderLayer",
            "MambaBlock",
            "MiniMaxDecoderLayer",
            "NemotronHBlock",
            "OlmoHybridAttentionDecoderLayer",
            "OlmoHybridLinearAttentionDecoderLayer",
            "Qwen3NextDecoderLayer",
            "Qwen3_5DecoderLayer",
            "Qwen3_5MoeDecoderLayer",
            "Qwen4ExpTextDecoderLayer",
            "RecurrentGemmaDecoderLayer",
            "RwkvBlock",
        ),
        _MIXING,
    ),
    **dict.fromkeys(
        ("BertLayer", "CamembertLayer", "ElectraLayer", "RobertaLayer", "XLMRobertaLayer", "XLMRobertaXLLayer"),
        _ENCODER,
    ),
    "LongcatFlashDecoderLayer": "it has two attention modules",
    "Llama4TextDecoderLayer": "its attention computes position numbers itself, from the length of its input",
    "DogeDecoderLayer": "its attention computes its own mask from the value vectors",
    "GPTBigCodeBlock": "its model expects outputs of the last layer for all positions",
    "HrmTextDecoderLayer": "its model runs each layer several times",
    "JetMoeDecoderLayer": "the queries of its attention are computed by experts",
    "PhimoeDecoderLayer": "its routers draw experts at random",
    "XGLMDecoderLayer": "its attention does not use transformers' attention interface",
}


def explain(layer: str) -> str | None:
    """Return why the layers of a class have no layout; None if no reason is known, so that a plug-in can add one."""
    return _UNFIT.get(layer)
