"""The world of which one rank is run: who the ranks are, who starts them, and what they send each other."""
