"""Connections between trainer ranks and engine workers: their keys, messages and deadlines."""
