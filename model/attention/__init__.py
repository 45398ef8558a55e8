"""Attention variants by the name that `model.attention.kind` gives them."""

from model.attention.mha import MultiHeadAttention

ATTENTION = {"mha": MultiHeadAttention}
