"""Your own parts, and complete tasks. Each file starts with its command, which a test runs."""
