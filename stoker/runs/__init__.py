"""One run on disk: its directory, results, report, card, and the model loaded from it."""
