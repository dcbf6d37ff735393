"""Makes plans: what of a model matters least, by scores of its heads and feed-forward channels."""
