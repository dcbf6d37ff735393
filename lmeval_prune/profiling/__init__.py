"""Costs of a model: parameters, FLOPs, time and memory."""
