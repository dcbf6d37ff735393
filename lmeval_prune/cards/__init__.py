"""Model cards: the README.md, with the Hub's front matter, of everything that a command writes as a model."""
