"""Decoders of transformers: their layers, the layouts of their branches, and stand-ins for key/value caches."""
