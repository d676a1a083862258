"""What a rank issues, seen operator by operator and written down in order."""
