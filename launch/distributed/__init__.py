"""Ranks: process topology, process groups, error handling across ranks, and the shards of each rank."""
