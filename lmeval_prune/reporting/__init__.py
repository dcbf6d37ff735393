"""What every report shares: statistics, tables, documents and the look of figures."""
