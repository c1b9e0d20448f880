"""What to change after an error that torch raises in a step."""

import re

PAIR = "A batch must be (inputs, targets), unless you override compute_loss and update_metrics."
# regular expression for an error message of torch -> what to do about it, in one line
ADVICE = {
    "(on|at) the same device|not on the expected device|Expected object of device type": (
        "The model uses a tensor on another device. Register the model's tensors as buffers "
        "(self.register_buffer), and create others with device=inputs.device."
    ),
    "device-side assert": (
        "An assertion inside a GPU kernel failed (device-side assert). Usually, a class in the "
        "targets or an index into an Embedding is out of range. "
        "Type device=cpu, where the same step fails with a clear message."
    ),
    "index out of range in self": (
        "An index into an Embedding must be at least 0 and below its num_embeddings."
    ),
    # Here, `inputs, targets = batch` unpacked the keys of a dict.
    r"must be Tensor, not str|got \(str, |'str' .* no attribute '(flatten|shape|size|view)'": (
        PAIR
    ),
    "Expected more than 1 value per channel": (
        "BatchNorm needs at least two samples, but a batch or micro-batch has only one. "
        "Type drop_last=true, or change batch_size or micro_batch."
    ),
    "view size is not compatible": (
        "The model calls .view() on an image whose memory format may be channels_last. "
        "Use .flatten(1) or .reshape() instead, or type channels_last=false."
    ),
    r"InvalidCxxCompiler|No working C\+\+ compiler|TritonMissing|Cannot find a working triton": (
        "compile=true needs a compiler, but none is installed. "
        "On the CPU, install g++, clang++ or cl (on the PATH); on a GPU, install Triton. Or type "
        "compile=false."
    ),
    "DTensor|FSDP|[Ss]harding (strategy|propagation)": (
        "strategy=fsdp: torch does not support this operation on sharded parameters. "
        "Type strategy=ddp, or, if the optimizer causes the error, choose a different one. "
        "A step must call self.model as a whole, not parts of it."
    ),
    "mark a variable ready only once|marked as ready twice": (
        "strategy=ddp: a parameter got two gradients in one backward(). "
        "A step must call self.model (not self.module) once per backward()."
    ),
}


def advice(error: BaseException) -> str | None:
    """Return what to do about this error, or None if it is not known."""
    text = str(error)
    return next((known for pattern, known in ADVICE.items() if re.search(pattern, text)), None)
