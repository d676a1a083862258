"""Numbers: which are known, which are computed, and what a script gets that reads the others."""
