"""The best of very many layouts."""
