"""The demo: what pruning does to a small packaged model, in a minute and a half, offline."""
