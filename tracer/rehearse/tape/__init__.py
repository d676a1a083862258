"""What a rank issues, seen operator by operator, priced, and written down in order."""
