"""Remove arguments that are meant for a different target from a config."""

from omegaconf import DictConfig, OmegaConf, open_dict

from stoker import configs
from stoker.command import arguments, settings
from stoker.command.build import arguments_of
from stoker.command.defaults import chosen, files_of
from stoker.command.dotted import flat, is_interpolation, plain
from stoker.trainer.errors import UserError


def drop_leftovers(cfg: DictConfig) -> None:
    """Remove the arguments that a file sets for a target that has been replaced.

    Typed arguments stay. So do arguments that refer to another setting (`${...}`), if the new
    target accepts them.
    """
    is_typed = any("_target_" in override for override in arguments.typed())
    if not is_typed and len(configs.folders()) == 1:
        return  # the built-in files set each target only once
    for path, target in flat(cfg).items():
        name, _, last = path.rpartition(".")
        if last != "_target_":
            continue
        if not isinstance(target, str):
            raise UserError(f"{path}: expected the dotted name of a class or function.")
        given = arguments_given(name, target)
        if name == "dataset":
            given.update(settings.LOADER_KEYS)  # these are valid for any data set
        node = OmegaConf.select(cfg, name)
        for key, value in plain(node).items():
            if key in given or (is_interpolation(value) and key in arguments_of(name, target)[0]):
                continue
            with open_dict(cfg):
                node.pop(key)


def arguments_given(name: str, target: str) -> set[str]:
    """Return the keys of a node that were typed, or that a file sets for this target."""
    given = {"_target_", "_partial_"}
    for typed in arguments.typed_keys():
        if typed.startswith(f"{name}."):
            given.add(typed.removeprefix(f"{name}.").partition(".")[0])
    for file in files_of(*chosen(), *arguments.search_path()):
        node = settings.value_of(file, name)
        if isinstance(node, dict) and node.get("_target_", target) == target:
            given.update(node)
    return given
