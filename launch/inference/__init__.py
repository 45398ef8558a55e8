"""Inference with a trained model: loading it, generating text, evaluating a text."""

DEFAULT_BATCH_TOKENS = 4096
DEFAULT_NEW_TOKENS = 128
