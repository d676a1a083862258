"""The page that reports are drawn with: template, style and scripts, loaded as package data."""
