"""The data: sets by name (datasets, images, tables), batched augmentation, and the order of samples
(loader).
"""

if __name__ == "data":  # imported in a clone, by the name of its folder
    from stoker.clone import alias

    alias(__name__)
