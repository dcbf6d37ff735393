"""Output projection of an attention layer of which some heads are masked."""
