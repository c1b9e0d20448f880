"""The part of a Trainer that predicts the outputs for each batch, or for the whole loader."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stoker.trainer import batches, evaluation, misuse, parallel, step_errors, transfer
from stoker.trainer.batching import Batching
from stoker.trainer.errors import UserError, kind_of
from stoker.trainer.loading import seekable
from stoker.trainer.spans import Spans

Combine = Callable[[list[Any]], Any]  # combines corresponding leaves into one


class Predicting(Batching):
    """The part of a Trainer that makes predictions."""

    model: Any
    spans: Spans

    def predict(self, loader: Any) -> Any:
        """Return the outputs for all samples, on the CPU, in float32 even with autocast.

        The outputs have the structure that the model returns: a tensor (N, ...), or dicts and
        tuples of tensors. A list has one item per sample. If the other dimensions of a tensor
        differ between batches, it becomes such a list too.

        A batch is inputs or (inputs, targets). For other batches, override `predict_batch`.
        """
        with self.spans["evaluation"]:
            outputs = list(self.predictions(loader))
        if not outputs:
            raise UserError("predict: the loader is empty.")
        return combined(outputs, joined)

    def predictions(self, loader: Any) -> Iterator[Any]:
        """Yield the outputs for each batch of the loader, in case they do not all fit in memory.

        The model is in evaluation mode until the last batch, or until you leave your loop. With
        several processes, every process yields all outputs.
        """
        trainer: Any = self
        misuse.check_loader(trainer, loader, "predict")
        loader = seekable(loader, trainer.seed, trainer.sample_dims)
        batch = None

        # Not inference_mode, after which sharded parameters could not be trained. Decorate a
        # function, because a context around `yield` would also apply to the caller's code.
        @torch.no_grad()
        def compute(parts: list[Any]) -> list[Any]:
            results = []
            with trainer.autocast:
                for part in parts:
                    samples = trainer.samples(part)
                    results.append(on_cpu(trainer.predict_batch(part), samples))
            return results

        try:
            with evaluation.eval_mode(trainer):
                for batch in loader:
                    batch = transfer.move(batch, trainer.device)
                    parts = trainer.eval_splitter.apply(compute, batch)
                    outputs = combined(parts, joined)
                    if parallel.process_count > 1:
                        # Drop the outputs of a rank that has only a copy of a sample.
                        of_ranks = parallel.from_all(
                            outputs if parallel.has_samples(loader) else None
                        )
                        of_ranks = [part for part in of_ranks if part is not None]
                        outputs = combined(of_ranks, interleaved)
                    yield outputs
        except Exception as error:
            step_errors.raise_if_explained(trainer, error, batch, trainer.eval_splitter)
            raise

    def predict_batch(self, batch: Any) -> Any:
        """Return the outputs for a batch: (nested) tensors (N, ...) and lists of length N."""
        return self.model(misuse.inputs_of(batch))


def combined(nestings: list[Any], combine: Combine) -> Any:
    """Combine the corresponding leaves of several nested structures with `combine(leaves)`.

    A leaf is a tensor or a list. Return one structure with the combined leaves.

    Raises:
        UserError: The structures differ.
    """
    flat = [leaves_of(nesting) for nesting in nestings]
    for leaves in flat:
        if leaves.keys() != flat[0].keys():
            raise UserError(
                f"predict: the model returned {', '.join(flat[0])} for one batch and "
                f"{', '.join(leaves)} for another.\n"
                f"Override predict_batch to return the same structure each time; {misuse.HOW}."
            )

    def of_leaf(name: str, _: Any) -> Any:
        return combine([leaves[name] for leaves in flat])

    return batches.walk(of_leaf, nestings[0], "outputs", list_dim)


def list_dim(_: str, value: Any) -> int | None:
    """Treat a list as a leaf with one item per sample, but look inside a tuple."""
    return 0 if isinstance(value, list) else None


def leaves_of(nesting: Any) -> dict[str, Any]:
    """Return the tensors and lists of a nested structure as {name: leaf}."""
    leaves: dict[str, Any] = {}
    batches.walk(leaves.__setitem__, nesting, "outputs", list_dim)
    return leaves


def on_cpu(outputs: Any, samples: int) -> Any:
    """Move the outputs for a batch to the CPU; raise UserError for a leaf without samples."""
    outputs = batches.walk(to_cpu, outputs)
    for name, leaf in (leaves_of(outputs) or {"outputs": outputs}).items():
        is_right = isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.ndim > 0)
        if not is_right or len(leaf) != samples:
            length = f" of length {len(leaf)}" if is_right else ""
            raise UserError(
                f"predict: {name} is {kind_of(leaf)}{length}, not one value for each of the "
                f"{samples} samples.\n"
                "Override predict_batch to return tensors (N, ...), or a dict or tuple of them; "
                f"{misuse.HOW}."
            )
    return outputs


def to_cpu(_: str, value: Any) -> Any:
    """Move a tensor to the CPU, in float32 if it has half precision; return other values as is."""
    if not isinstance(value, Tensor):
        return value
    value = value.cpu()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def are_uniform(leaves: list[Any]) -> bool:
    """Return whether these are tensors whose samples all have the same shape."""
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    return len({leaf.shape[1:] for leaf in leaves}) == 1


def joined(leaves: list[Any]) -> Any:
    """Join the leaves of several batches into one tensor, or into a list of samples."""
    if len(leaves) == 1:
        return leaves[0]
    if are_uniform(leaves):
        return torch.cat(leaves)
    return list(itertools.chain.from_iterable(leaves))


def interleaved(leaves: list[Any]) -> Any:
    """Join the leaves of all ranks, with the samples back in the order of the batch."""
    merged = joined(leaves)  # a copy, with the samples of each rank together
    for rank, leaf in enumerate(leaves):
        merged[rank :: len(leaves)] = leaf
    return merged
