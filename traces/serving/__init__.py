"""A web server for the person at this machine, and the runs that it shows."""
