"""Why torch cannot use a GPU of this machine."""

import functools
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from stoker.trainer import settings
from stoker.trainer.errors import UserError, log


def cuda_facts() -> dict[str, Any]:
    """Return the arguments of `no_cuda` for this machine."""
    driver = os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/kfd")
    error = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as failure:  # without CUDA, torch asserts that it has it
        error = str(failure)
    return {
        "has_driver": driver or shutil.which("nvidia-smi") is not None,
        "built_for": torch.version.cuda or torch.version.hip,
        "visible": os.environ.get(settings.VISIBLE_GPUS),
        "error": error,
    }


def no_cuda(has_driver: bool, built_for: str | None, visible: str | None, error: str) -> str:
    """Return why torch cannot use a GPU.

    Args:
        has_driver: Whether a GPU driver is installed.
        built_for: Version of CUDA or ROCm that torch was built for; None for a CPU build.
        visible: Value of CUDA_VISIBLE_DEVICES.
        error: Message of torch when it looked for a GPU.
    """
    if not has_driver:
        build = "" if built_for else ", and this is a CPU-only build of torch"
        return f"no GPU driver is installed{build}"
    if not built_for:
        return "this is a CPU-only build of torch; https://pytorch.org/get-started has one for GPUs"
    if visible is not None and visible.strip() in ("", "-1"):
        return f"{settings.VISIBLE_GPUS}={visible} hides every GPU"
    if "too old" in error:
        return f"the driver is too old for torch's CUDA {built_for}; update it"
    if error:
        sentence = re.split(r"[.\n]", error)[0]
        return f"torch says: {sentence}"
    return "torch sees no GPU"


@functools.cache
def warn_of_idle_gpu() -> None:
    """Warn once if this machine has a GPU that torch cannot use, unless you have hidden it."""
    facts = cuda_facts()
    if facts["has_driver"] and facts["visible"] is None:
        log.warning("device=auto: training on the CPU, since %s.", no_cuda(**facts))


def check_kernels(device: torch.device) -> None:
    """Raise UserError if this build of torch has no kernels for the GPU."""
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if not has_kernels(capability, built_for):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"device={device}: torch {torch.__version__} has no kernels for {name} "
            f"(sm_{capability[0]}{capability[1]}), only for {', '.join(built_for)}.\n"
            "Install another build (https://pytorch.org/get-started), or type device=cpu."
        )


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether one of these architectures (sm_90, compute_120) runs on such a GPU.

    Binaries (sm) run on the same major version from their minor version on, those with a letter
    (sm_90a) on theirs only; PTX (compute) is compiled for any later GPU. ROCm's names (gfx90a) are
    not compared.
    """
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in built_for]
    for name in names:
        if name is None:
            return True
        version = (int(name[2]), int(name[3]))
        is_portable = not name[4] and (name[1] == "compute" or version[0] == capability[0])
        if version == capability or (version < capability and is_portable):
            return True
    return not names
