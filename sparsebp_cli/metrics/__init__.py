"""PUBLIC. The entry of a metric of generated texts, and those that ship, as the group ``sparsebp.metrics`` names them.

The entry declares each number's better direction and unit. A run records both, so that whoever compares runs needs
neither the plugin nor a guess. Importing this package imports no library that computes a metric.
"""

from __future__ import annotations

from sparsebp_cli.metrics.text import (
    count_exact_matches,
    count_numeric_matches,
    measure_bleu,
    measure_cer,
    measure_rouge_l,
    measure_wer,
)
from sparsebp_cli.metrics.text_metric import (
    Compute,
    Figure,
    TextMetric,
    find_text_metric,
    find_text_metric_sources,
    list_text_metrics,
)

__all__ = ["Compute", "Figure", "TextMetric", "find_text_metric", "find_text_metric_sources", "list_text_metrics"]

_SHARE = Figure("higher", "share", is_mean=True)
EXACT_MATCH = TextMetric(count_exact_matches, {"exact_match": _SHARE})
NUMERIC_MATCH = TextMetric(count_numeric_matches, {"numeric_match": _SHARE})
BLEU = TextMetric(measure_bleu, {"bleu": Figure("higher", "of 100")}, package="sacrebleu")
ROUGE_L = TextMetric(measure_rouge_l, {"rouge_l": _SHARE}, package="rouge_score")
CER = TextMetric(measure_cer, {"cer": Figure("lower", "edits/character")}, package="jiwer")
WER = TextMetric(measure_wer, {"wer": Figure("lower", "edits/word")}, package="jiwer")
