"""Who this process is when torchrun has started several, and what they have to know of each other; without torch."""

import os


def rank():
    """The number of this process among all of them, 0 where there is one."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """How many processes train together, on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank():
    """The number of this process on its machine: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size():
    """How many processes train together on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_first():
    """Whether this is the process that prints and writes."""
    return rank() == 0


def store(timeout=300):
    """The TCPStore that all ranks share; what is in it is of this start of the ranks, not of one before a restart."""
    raise NotImplementedError  # trainer/launch.py's author: with PrefixStore per TORCHELASTIC_RESTART_COUNT


def agreed(name, make):
    """What `make()` gives on rank 0, on all ranks; plain values, as JSON through the store."""
    if world_size() == 1:
        return make()
    raise NotImplementedError
