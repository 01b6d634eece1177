"""The process that measures forms of a policy against dense: ``python -m sparsebp_cli.worker.bench``.

``way`` and ``subject`` and ``turn`` need torch alone, and know CUDA: ``benchmarks/gpu.py`` uses them, too.
"""
