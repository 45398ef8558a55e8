"""Text to tokens, tokens to shards, shards to batches: NumPy and PyTorch on the CPU.

Nothing here knows about process groups: ranks and world sizes are plain arguments.
"""
