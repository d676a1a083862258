"""The world of which one rank is run: groups, collectives, stores, and what other ranks would send."""
