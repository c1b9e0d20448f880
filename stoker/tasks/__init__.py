"""The tasks of the command: one module per task, `main` to choose one, `parts` to build a run."""
