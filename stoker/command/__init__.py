"""From the command line to objects: settings, messages, building, exit codes."""
