"""ATHENA: a host model that answers a math word problem by an expression over its numbers, thought by thought."""
