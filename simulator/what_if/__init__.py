"""The page that answers what-if questions in a browser."""
