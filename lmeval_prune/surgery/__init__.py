"""Executes a plan: a model that is really smaller, equal to the one that the plan masks."""
