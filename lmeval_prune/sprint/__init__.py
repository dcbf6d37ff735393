"""SPRINT: outcomes of pruned heads, the router that is learned from them, and what it is compared with."""
