"""Tables and figures from artefacts and results files, never from a live run."""
