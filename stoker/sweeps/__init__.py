"""Sweeps of many runs: launchers, searches, and the table and the page of the results."""
