"""Measurements of a whole service that are no tests: they take minutes, and a person reads what they print."""
