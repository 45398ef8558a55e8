"""Measurements of attention as pure functions, for monitoring training and analysing trained models."""
