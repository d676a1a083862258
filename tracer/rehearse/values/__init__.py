"""Numbers: which are known, which are computed, and what the script is told of the others."""
