"""Models to load: embedded ones, and models without weights."""
