"""Ranks: which process this is, process groups, agreements between ranks, and where each rank's weights lie."""
