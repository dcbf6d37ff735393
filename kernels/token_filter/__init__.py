"""Token filtering: which tokens skip the attention of a layer."""
