"""Trainers of one's own, each a short file that a test runs."""
