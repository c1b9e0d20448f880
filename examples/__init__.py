"""Your own parts, and complete tasks. Each file is short and starts with its command, which a test runs."""
