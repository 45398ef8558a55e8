"""Folders in Hugging Face's layout: how their files correspond to a checkpoint's."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
