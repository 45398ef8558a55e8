"""Folders in Hugging Face's layout: how their files correspond to a checkpoint's."""
