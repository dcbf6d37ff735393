"""ATHENA, a model that answers a math word problem with an expression over the problem's numbers."""
