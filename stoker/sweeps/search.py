"""What the searches have in common: which end is good, what is searched, and what became of a trial."""

import math
import warnings

from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from stoker.command import cli, settings
from stoker.runs import rundir
from stoker.sweeps import sweep
from stoker.trainer import launch
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import default_metrics

# Hydra's keys whose part ours have, and what to type instead.
TAKEN = {
    "direction": "monitor_mode=max or monitor_mode=min",
    "ax_config.experiment.minimize": "monitor_mode=max or monitor_mode=min",
    "ax_config.early_stop.minimize": "monitor_mode=max or monitor_mode=min",
    "n_trials": "sweep.trials=N",
    "ax_config.max_trials": "sweep.trials=N",
    "n_jobs": "sweep.at_once=N, with hydra/launcher=joblib",
    "max_batch_size": "sweep.at_once=N, with hydra/launcher=joblib",
    "max_failure_rate": "sweep.on_error=continue or sweep.on_error=stop",
}


class Sweepers(Callback):
    """Hydra's callback that makes our sweeper known to it, before it is looked for."""

    def on_multirun_start(self, config, **_):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries below Ax
                if config.hydra.runtime.choices["hydra/sweeper"] == "ax":
                    from stoker.sweeps.ax_search import Search
                else:
                    from stoker.sweeps.optuna_search import Search
        except ImportError as error:  # of an Exception Hydra would make a warning
            raise SystemExit(
                cli.report(UserError(f"sweep: its sweeper cannot be imported ({error})."))
            ) from None
        Plugins.instance().register(Search)


def trials_of(cfg):
    """How many trials there are to be; UserError for that, or a setting of Hydra's sweeper that is ours to make."""
    for override in cfg.hydra.overrides.hydra:
        key = override.partition("=")[0].lstrip("+").removeprefix("hydra.sweeper.")
        if key in TAKEN:
            raise UserError(f"{override}: a search takes this from elsewhere. Type {TAKEN[key]}.")
    return settings.check("sweep.trials", cfg.sweep.trials)


def at_once(cfg):
    """How many trials are proposed together: as many as the launcher runs at the same time."""
    launcher, node = cfg.hydra.runtime.choices["hydra/launcher"], cfg.hydra.launcher
    if launcher == "basic":
        return 1
    if launcher == "submitit_slurm":
        return node.array_parallelism
    from stoker.sweeps import launchers

    if launcher == "joblib":
        return node.n_jobs if node.n_jobs > 0 else launch.cores()
    return launchers.how_many(
        cfg.sweep.at_once, cfg.sweep.per_gpu, launchers.count_gpus(cfg.device), launch.cores()
    )[0]


def maximizes(cfg):
    """Whether the search looks for the highest value. It has to know before the first trial has built any metric."""
    if cfg.monitor_mode != "auto":
        return settings.check("monitor_mode", cfg.monitor_mode) == "max"
    if cfg.monitor == "auto":
        return True  # val/acc or val/r2; where it is another one, check_mode ends the search
    higher = {"val/loss": False, "train/loss": False}
    for kind in ("classification", "regression"):
        higher |= {
            f"val/{name}": metric.higher_is_better for name, metric in default_metrics(kind).items()
        }
    for name, node in cfg.metrics.items():
        from stoker.command.build import locate

        higher[f"val/{name}"] = getattr(
            locate(f"metrics.{name}", node.get("_target_")), "higher_is_better", None
        )
    if not isinstance(higher.get(cfg.monitor), bool):
        raise UserError(
            f"monitor={cfg.monitor}: a search has to know whether high or low is good.\n"
            "Type monitor_mode=max or monitor_mode=min."
        )
    return higher[cfg.monitor]


def check_mode(maximize, name, mode):
    """UserError where the number that a trial monitors has its good end on the other side."""
    if mode != ("max" if maximize else "min"):
        sides = ("lowest", "highest") if mode == "min" else ("highest", "lowest")
        raise UserError(
            f"monitor: the trials look for the {sides[0]} {name}, and the search for the {sides[1]} value.\n"
            f"Type monitor={name} monitor_mode={mode}, and another hydra.sweep.dir."
        )


def space_of(cfg, typed, own=None):
    """The overrides to search over: those of `sweep.space` that the config has a key for, and then those typed."""
    keys = {override.partition("=")[0] for override in typed}
    several = {
        key for key, _, value in (override.partition("=") for override in typed) if "," in value
    }
    kept, left = [], []
    for key, values in {**cfg.sweep.space, **(own or {})}.items():
        of_one = key.partition(".")[0] in several & set(
            cfg.hydra.runtime.choices
        )  # of one option of a group
        there = OmegaConf.select(cfg, key, throw_on_missing=False) is not None and not of_one
        if key not in keys:
            (kept if there else left).append(f"{key}={values}")
    if left:
        print(
            f"search   without {', '.join(item.partition('=')[0] for item in left)}: not every trial has such a key"
        )
    return [*kept, *typed]


def nothing_to_search(name):
    example = "'optimizer.lr=tag(log, interval(1e-4, 1e-1))'"
    return UserError(
        f"sweep={name}: nothing is searched. Type a key and its range, as in {example}."
    )


def check_goes_on(folder, fixed, searched):
    """UserError where the search in the folder was over other keys, or its trials had other settings beside those."""
    again = f"Type another hydra.sweep.dir, or to go on with that one:\n{sweep.command(folder)}"
    before = (rundir.read_result(folder / sweep.SWEEP) or {}).get("searched")
    if (
        isinstance(before, list)
        and all(isinstance(key, str) for key in before)
        and sorted(searched) != before
    ):
        now, before = (", ".join(keys) or "nothing" for keys in (sorted(searched), before))
        raise UserError(
            f"hydra.sweep.dir={folder}: this search is over {now}, that one over {before}.\n{again}"
        )

    def settled(settings_typed):
        return {
            key: value
            for key, value in settings_typed.items()
            if sweep.matters(key) and key not in searched
        }

    now = settled(sweep.setting_of(fixed))
    for job in sweep.read_jobs(folder):
        was = settled(job.settings)
        if other := [key for key in {**now, **was} if now.get(key) != was.get(key)]:
            key = other[0]
            difference = f"{key}={now.get(key, '(default)')} (was {was.get(key, '(default)')})"
            raise UserError(
                f"hydra.sweep.dir={folder}: its trials have other settings: {difference}.\n{again}"
            )


def outcome(folder):
    """What became of a trial: ("complete" or "pruned", its best), or ("failed", None); None where it has no result.

    The best is that of result.json: {"name", "mode", "step", "value"}.
    """
    result = rundir.finished(folder)
    if result is None:
        return None if rundir.read_result(folder / "result.json") is None else ("failed", None)
    if not result.get("best") or not math.isfinite(result["best"]["value"]):
        return "failed", None
    return "pruned" if sweep.is_pruned(result) else "complete", result["best"]
