"""The table of settings against what it stands for, and files that are asked for by their
folder.
"""

import re
from pathlib import Path

import hydra
import pytest

from stoker import configs
from stoker.command import dotted, settings
from stoker.trainer.errors import UserError


def test_a_folder_is_no_checkpoint_to_resume_from(tmp_path):
    message = f"resume={tmp_path}: expected auto, never, or a checkpoint file."
    with pytest.raises(UserError, match=re.escape(message)):
        settings.check_resume(str(tmp_path))
    path = tmp_path / "step_20.ckpt"
    path.touch()
    settings.check_resume(str(path))


def test_what_is_in_place_of_a_run_goes_with_nothing_of_one():
    refused = [
        ({"task": "plan", "overfit": 1}, "overfit=1 applies only to task=train"),
        ({"task": "plan", "profile": True}, "profile=true applies only to task=train"),
        (
            {"task": "train", "profile": True, "overfit": 2},
            "profile=true needs a training run and cannot be combined with overfit=2",
        ),
    ]
    for config, said in refused:
        with pytest.raises(UserError, match=said):
            settings.check_task(config)
    settings.check_task({"task": "plan", "profile": False, "overfit": None})
    with pytest.raises(
        UserError, match="overfit=0: expected a whole number of at least 1, or null"
    ):
        settings.check("overfit", 0)


CONFIGS = Path(configs.__file__).parent


def composed(*overrides):
    """{key: default} of the config of these choices."""
    with hydra.initialize_config_dir(str(CONFIGS)):
        cfg = hydra.compose("train", list(overrides))
    return dotted.flat(cfg)


def test_every_key_of_the_config_has_one_record():
    """Its own, or for the arguments of a part that of the group; and each record is of a key that
    there is.
    """
    options = [f"dataset={path.stem}" for path in CONFIGS.glob("dataset/*.yaml")]
    options += [f"callbacks={path.stem}" for path in CONFIGS.glob("callbacks/*.yaml")]
    keys = set(composed())
    for option in options:
        keys.update(composed(option))
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    for key in keys:
        group = key.partition(".")[0]
        assert key in settings.SETTINGS or (group in groups and group in settings.SETTINGS), key
    searched = {"sweep.trials"}  # of a search, whose libraries may not be installed
    for key in settings.SETTINGS.keys() - searched:
        assert any(f"{name}.".startswith(f"{key}.") for name in keys), key


def test_a_record_is_that_of_the_nearest_group():
    assert settings.record("sweep/pruner").once and settings.record("sweep.space.x").once
    assert settings.record("mine.own") == settings.Setting()


def test_a_resumed_run_may_differ_in_what_changes_no_result():
    for key in ("device", "devices", "log_every", "dataset.workers", "sweep.pruner.x", "run_dir"):
        assert settings.may_differ(key), key
    for key in ("seed", "batch_size", "dataset.mean", "model.hidden", "callbacks.ema.decay"):
        assert not settings.may_differ(key) and not settings.may_differ(key, longer=True), key
    assert settings.may_differ("epochs", longer=True) and not settings.may_differ("epochs")
