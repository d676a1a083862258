"""The world that is not there: groups, collectives, stores, and what other ranks would have said."""
