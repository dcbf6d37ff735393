"""Load, identify and save model checkpoints: embedded models, cut models, and models without weights."""
