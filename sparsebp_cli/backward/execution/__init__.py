"""Ways to run a backward pass and to hold its gradients: eager updates, segments, and a gradient store."""
