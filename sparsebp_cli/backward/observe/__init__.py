"""Readers of PyTorch's autograd and dispatcher. Private names of PyTorch are used here."""
