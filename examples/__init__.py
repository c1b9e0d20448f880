"""Examples of custom components and of complete tasks. Each file starts with the command to run."""
