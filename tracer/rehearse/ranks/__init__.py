"""Which ranks are run, and the processes that act them out."""
