"""The advice on speed: which setting to change, given where the time of a fit went."""

from stoker.runs.result import STAGES

SOON = 10.0  # seconds; in a shorter run, advice would save little
COMPUTE = ("forward", "backward", "optimizer", "step")
# A stage is reported if it takes at least this share of the time. Stages that do useful work have
# higher thresholds.
WORTH = {
    "data": 0.1,
    "transfer": 0.1,
    "checkpoint": 0.1,
    "logging": 0.1,
    "evaluation": 0.2,
    "fixed": 0.3,
    "idle": 0.5,
}
# {stage, or "stage of KIND" for a kind of loader: what to say}
SENTENCES = {
    "data": (
        "the {device} waited {share} for data: set a larger dataset.workers (for your own "
        "DataLoader, its num_workers; an IterableDataset must split its samples among workers)"
    ),
    "data of HostLoader": (
        "the {device} waited {share} for data: set a larger dataset.workers, or "
        "dataset.resident=true"
    ),
    "data of DeviceLoader": (
        "the {device} waited {share} for data: remove entries from dataset.augment, or use "
        "larger batches"
    ),
    "transfer": (
        "the {device} waited {share} for batches to be copied: give your own DataLoader "
        "pin_memory=True, or use larger batches"
    ),
    "transfer of HostLoader": (
        "the {device} waited {share} for batches to be copied: set dataset.resident=true"
    ),
    "checkpoint": (
        "checkpoints took {share}: set a larger eval_every, checkpoint.every, checkpoint.epochs or "
        "checkpoint.minutes"
    ),
    "logging": "loggers took {share}: remove one of the callbacks, or set a larger log_every",
    "evaluation": (
        "evaluations took {share}: set a larger eval_every, or use a smaller validation split"
    ),
    "fixed": (
        "{share} went to the optimizer and the loop, which cost the same for any batch size: use "
        "larger batches"
    ),
    "idle": (
        "the {device} waited {share} for Python to launch work: use larger batches, or "
        "compile=graph"
    ),
}


def speed_verdict(seconds: dict[str, float], device: str, loader: str, idle: float) -> str | None:
    """Say in one sentence which setting to change to save the most time.

    Returns None if no setting would save much, or if the total time is below SOON.

    Args:
        seconds: {stage: seconds} of a fit.
        device: "CPU" or "GPU".
        loader: The class name of the training loader, because not all settings apply to each.
        idle: The fraction of steps in which the device waited for Python.
    """
    total = sum(seconds.values())
    if total < SOON:
        return None
    share = {stage: seconds.get(stage, 0.0) / total for stage in STAGES}
    compute = sum(share[stage] for stage in COMPUTE)
    share["fixed"] = share["optimizer"] + share["other"]
    share["idle"] = idle * compute
    excess = {name: share[name] - least for name, least in WORTH.items()}
    worst = max(excess, key=excess.__getitem__)
    if excess[worst] >= 0:
        sentence = SENTENCES.get(f"{worst} of {loader}", SENTENCES[worst])
        return sentence.format(device=device, share=of_the_time(share[worst]))
    if compute > 0.5:
        return f"compute bound: {of_the_time(compute)} is forward, backward and optimizer"
    return None


def of_the_time(share: float) -> str:
    return f"{100 * share:.0f}% of the time"
