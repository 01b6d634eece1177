"""Segments: parts of a network whose activations are never held together.

The forward keeps each segment's input alone; the backward runs one segment after the other again, the last one first.
With N segments of L layers autograd holds N inputs and the activations of L / N layers: least at sqrt(L a / i) for
layers that keep a bytes and are given i. For a = i that is the square root of L, for transformers more.
The last segment is not run again: its activations are what the backward begins with.

Two ways to the same: :func:`~sparsebp_cli.backward.execution.segment.chain.segmented_backward` for any list of modules,
and ``attach(model, policies, segments=...)`` for a model whose own forward runs its layers.
"""
