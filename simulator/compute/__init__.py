"""How long operations take on a device."""
