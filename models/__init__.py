"""The models: one nn.Module a file, each built as `(in_shape, num_classes, **knobs)`."""

if __name__ == "models":  # a clone imports it as `models`, the folder's name
    from stoker.clone import alias

    alias(__name__)
