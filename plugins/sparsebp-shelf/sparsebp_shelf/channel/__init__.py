"""Compute only some channels of frozen weights under adapters, in forward and backward."""

from sparsebp_shelf.channel.kind import CHANNEL_SELECTOR, ChannelGroup, ChannelSelector, Estimate
from sparsebp_shelf.channel.sparse_lora import SparseLoRA

__all__ = ["CHANNEL_SELECTOR", "ChannelGroup", "ChannelSelector", "Estimate", "SparseLoRA"]
