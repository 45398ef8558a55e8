"""Measurements of attention, as pure functions: live in training, and offline on a trained model."""
