"""The network in pure PyTorch: what it computes, and what each of its parameters is."""
