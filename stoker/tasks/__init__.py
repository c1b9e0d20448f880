"""What the command does for each task: one module a task, `main` to choose among them, `parts` to build a run."""
