"""Execute plans: cut heads and channels out of a model and write a smaller checkpoint."""
