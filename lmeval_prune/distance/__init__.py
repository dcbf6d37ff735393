"""Distance of variants from the dense model: KL divergence of next-token distributions, and greedy answers."""
