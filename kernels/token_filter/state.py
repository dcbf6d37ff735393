"""What a filter remembers of a sequence beside its anchors (see `naive.State`), as columns of numbers.

A row for each sequence, or one for a whole run. Similarities of the warm-up are kept as their number, mean, and sum of
squared deviations.
"""

THRESHOLD, SEEN, SKIPPED, KNOWN, MEAN, DEVIATIONS = range(6)
COLUMNS = 6
