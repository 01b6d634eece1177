"""Segments: parts of a network whose activations are never held together.

The forward keeps each segment's input alone; the backward runs one segment after the other again, the last one first.
With N segments of L layers it holds N inputs and one segment's activations, so about the square root of L is least.
The last segment is not run again: its activations are what the backward begins with.

Two ways to the same: :func:`~sparsebp_cli.backward.segment.chain.segmented_backward` for any list of modules, and
``attach(model, policies, segments=...)`` for a model whose own forward runs its layers.
"""
