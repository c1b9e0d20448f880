"""The data: sets by name (datasets.py), batched augmentation (augment.py) and the order of samples (loader.py)."""
