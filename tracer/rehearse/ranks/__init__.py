"""Which ranks are run, and the processes that run them."""
