"""Parts that all reports share: statistics, tables, documents and the style of figures."""
