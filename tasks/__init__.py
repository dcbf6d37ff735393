"""lm-eval tasks that come with the package: a folder a data set, and the Python that they share."""
