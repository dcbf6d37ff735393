"""Batch evaluation: every variant of a model on every task, resumable, on one machine or many, compared with tests."""
