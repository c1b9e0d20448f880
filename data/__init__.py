"""The data: sets by name (datasets, images, tables), batched augmentation, and the order of samples (loader)."""
