"""Plays recorded steps again with other durations: what would the run have taken?"""
