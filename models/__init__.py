"""The models: one nn.Module a file, each built as `(in_shape, num_classes, **knobs)`."""

if __name__ == "models":  # imported in a clone, by the name of its folder
    from stoker.clone import alias

    alias(__name__)
