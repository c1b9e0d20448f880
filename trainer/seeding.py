"""Seed the generators of Python, numpy, torch and the device, and keep their states."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch

CPU = torch.device("cpu")
python_generator: Any = random._inst  # private: what the functions of `random` use, Python 3.14
# Its C method. In a step, the checks of `random.seed` take 2 us.
seed_python = super(random.Random, python_generator).seed


def mix_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on all parts (numbers or strings).

    The seed is a hash. With `seed + epoch`, for example, neighboring seeds would share streams.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(device: torch.device, seed: int, replicas: Sequence[int] = ()) -> None:
    """Seed the default generators of Python, numpy, torch, the device and the GPUs with replicas.

    torch.manual_seed would take much longer than all of this, because it seeds every backend.
    """
    seed_python(seed)
    python_generator.gauss_next = None  # drops the second number that `gauss` keeps
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cpu":
        return
    backend = torch.get_device_module(device)
    backend.manual_seed(seed)
    for index in replicas:  # each DataParallel GPU has its own generator
        if index != device.index:
            backend.default_generators[index].manual_seed(mix_seed(seed, index))


def seed_own(owner: Any, seed: int) -> None:
    """Seed the generators of torch, numpy and Python that an object keeps as attributes.

    Each one gets its own seed, so its numbers differ from those of the others and of the global
    generators.
    """
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, torch.Generator):
            value.manual_seed(mix_seed(seed, name))
        elif isinstance(value, numpy.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(mix_seed(seed, name)).state
        elif isinstance(value, (random.Random, numpy.random.RandomState)):
            value.seed(mix_seed(seed, name) % 2**32)


def host_random_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of all global generators except the device's, to compare them."""
    of_numpy = [numpy.asarray(part).tobytes() for part in numpy.random.get_state(legacy=True)]
    of_torch = b"" if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), of_numpy, of_torch


@contextlib.contextmanager
def random_states_kept(device: torch.device, replicas: Sequence[int] = ()) -> Iterator[None]:
    """At the end of this context, restore the generators that `seed_generators` seeds."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        states.append((backend.set_rng_state, backend.get_rng_state()))
        for index in replicas:
            generator = backend.default_generators[index]
            states.append((generator.set_state, generator.get_state()))
    try:
        yield
    finally:
        for set_state, state in states:
            set_state(state)


@contextlib.contextmanager
def random_stream(*parts: object) -> Iterator[None]:
    """Within this context, seed the generators of Python, numpy and torch (CPU) from `parts`."""
    with random_states_kept(CPU):
        seed_generators(CPU, mix_seed(*parts))
        yield
