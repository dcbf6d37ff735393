"""Where models come from: embedded ones, and models without weights."""
