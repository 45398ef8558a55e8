"""The network in pure PyTorch, and the role of each of its parameters."""
