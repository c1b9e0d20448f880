"""Examples of your own parts and of complete tasks. Each file starts with the command to run it."""
