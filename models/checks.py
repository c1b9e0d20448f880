"""What the models ask of their arguments: lists of sizes, and an image to look at."""

from stoker.trainer.errors import UserError, check_number


def check_sizes(key, sizes, *, empty=False):
    """The list of whole numbers of at least 1 that `sizes` (any sequence) holds; UserError naming `key` otherwise."""
    if isinstance(sizes, (str, int, float)) or sizes is None or not (len(sizes) or empty):
        raise UserError(f"{key}={sizes}: give a list of whole numbers, such as {key}=[64,128].")
    return [check_number(key, size, whole=True, least=1) for size in sizes]


def check_image(name, in_shape):
    """(channels, height, width) where the inputs are images; UserError for flat ones."""
    if len(in_shape) != 3:
        raise UserError(
            f"model={name} looks at images, and this data set has flat inputs of shape {tuple(in_shape)}.\n"
            "Type model=mlp or model=linear."
        )
    return tuple(in_shape)
