"""One self-contained page about a run, or about two on one axis."""
