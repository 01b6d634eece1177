"""Decoders of transformers: their layers, the layouts of their residual blocks, and replacements for KV caches."""
