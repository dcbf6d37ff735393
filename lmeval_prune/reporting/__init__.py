"""Shared parts of all reports: statistics, tables, documents and figures."""
