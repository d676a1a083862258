"""How long training takes when machines fail, and what it costs."""
