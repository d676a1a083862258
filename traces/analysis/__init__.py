"""Where the time of a run goes: states, waiting, causes, the longest path, and findings in words."""
