"""What is known about decoders of transformers: layers, layouts of branches, key/value caches."""
