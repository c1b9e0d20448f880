"""Parts of one's own, and whole tasks: each a short file with its command, which a test runs."""
