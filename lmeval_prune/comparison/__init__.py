"""Paired comparison of evaluations, question by question: reading of samples, statistics, report and page."""
