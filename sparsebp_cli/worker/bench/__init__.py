"""The process that measures forms of a policy against dense: ``python -m sparsebp_cli.worker.bench``.

``variant``, ``subject`` and ``rounds`` need torch alone and support CUDA; ``benchmarks/gpu.py`` uses them too.
"""
