"""How a backward pass runs and what it leaves: eager updates, segments, a store of gradients."""
