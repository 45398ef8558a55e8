"""Turns text into tokens, tokens into shards and shards into batches, with NumPy and PyTorch on the CPU.

Nothing here uses process groups: ranks and world sizes are plain arguments.
"""
