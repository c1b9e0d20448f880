"""The YAML files that Hydra composes into a run: one group, one constructor."""
