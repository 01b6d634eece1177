"""What PyTorch's autograd and dispatcher tell about a pass: the home of its private names."""
