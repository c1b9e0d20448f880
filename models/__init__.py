"""The models: one nn.Module a file, each built as `(in_shape, num_classes, **knobs)`."""
