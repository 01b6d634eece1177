"""Ways to run a backward pass and to store its gradients: eager updates, segments, and a gradient store."""
