"""The demo: what pruning does to a small packaged model, offline."""
