"""Data sets by name (datasets, images, tables), batched augmentation, and the sample order
(loader).
"""

if __name__ == "data":  # a clone imports this package by its folder name
    from stoker.clone import alias

    alias(__name__)
