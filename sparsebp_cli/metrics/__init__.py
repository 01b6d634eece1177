"""PUBLIC. The entry of a metric of generated texts, and the metrics that ship in the entry-point group
``sparsebp.metrics``.

The entry declares the better direction and the unit of each number. A run records both, so comparing runs needs neither
the plug-in nor a guess. Importing this package imports no library that computes a metric.
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
    Compute,  # noqa: F401 - a name of 0.5, for one release
    Figure,
    TextMetric,
    find_text_metric,
    find_text_metric_sources,
    list_text_metrics,
)

__all__ = ["Figure", "TextMetric", "find_text_metric", "find_text_metric_sources", "list_text_metrics"]

_SHARE = Figure("higher", "share", is_mean=True)
EXACT_MATCH = TextMetric(count_exact_matches, {"exact_match": _SHARE})
NUMERIC_MATCH = TextMetric(count_numeric_matches, {"numeric_match": _SHARE})
BLEU = TextMetric(measure_bleu, {"bleu": Figure("higher", "of 100")}, package="sacrebleu")
ROUGE_L = TextMetric(measure_rouge_l, {"rouge_l": _SHARE}, package="rouge_score")
CER = TextMetric(measure_cer, {"cer": Figure("lower", "edits/character")}, package="jiwer")
WER = TextMetric(measure_wer, {"wer": Figure("lower", "edits/word")}, package="jiwer")
