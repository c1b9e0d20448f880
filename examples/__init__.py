"""Your own parts, and whole tasks: each is a short file with its command, which a test runs."""
