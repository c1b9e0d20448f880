"""The models: one nn.Module per file, each built as `(in_shape, num_classes, **settings)`."""

if __name__ == "models":  # a clone imports this package by its folder name
    from stoker.clone import alias

    alias(__name__)
