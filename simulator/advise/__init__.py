"""Advice in words: which way of training fits, what is missing where it does not, what each costs."""
