"""Score heads and feed-forward channels, and make plans that remove the least important ones."""
