"""Segmented backward: parts of a network whose activations are never stored at the same time.

The forward stores only each segment's input. The backward runs the segments again one by one, the last one first. With
N segments of L layers, autograd stores N inputs and the activations of L / N layers. If a layer stores a bytes and has
an input of i bytes, sqrt(L a / i) segments need the least memory. For a = i this is the square root of L; transformers
need more segments. The last segment does not run again, because the backward starts with its activations.

There are two interfaces: :func:`~sparsebp_cli.backward.execution.segment.chain.segmented_backward` for any list of
modules, and ``attach(model, policies, segments=...)`` for a model whose own forward runs its layers.
"""
