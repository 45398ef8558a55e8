"""Converts between checkpoints and folders in Hugging Face's layout."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
