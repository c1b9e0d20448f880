"""The data: sets by name (datasets, images, tables), batched augmentation, and the order of samples
(loader).
"""

if __name__ == "data":  # a clone imports it as `data`, the folder's name
    from stoker.clone import alias

    alias(__name__)
