"""Data sets (datasets, images, tables, text), loaders, and batched augmentation."""

if __name__ == "data":  # a clone imports this package by its folder name
    from stoker.clone import alias

    alias(__name__)
