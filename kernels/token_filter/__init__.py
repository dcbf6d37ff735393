"""Token Filtering: decide which tokens skip the attention of a layer."""
