"""Hand-written loops: the PyTorch tutorials', the fastest we know, and a captured step on a GPU."""

import ctypes

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import work


def bare(job, clock):
    """Train with the loop of the PyTorch tutorials, which uses torchvision and a DataLoader."""
    clock.begin()
    train, test = work.loaders(job)
    model = work.model(job).to(job.device)
    optimizer = clock.watch(work.optimizer(job)(model.parameters()))
    clock.steps = len(train)
    fit(job, clock, model, optimizer, train, test)
    return model


def fit(job, clock, model, optimizer, train, test, backward=torch.Tensor.backward):
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in train:
            inputs, targets = inputs.to(job.device), targets.to(job.device)
            optimizer.zero_grad()
            with work.autocast(job):
                loss = F.cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
        clock.evaluating()
        clock.evaluated(*evaluate(job, model, test))


def evaluate(job, model, batches):
    """Return (accuracy, mean loss)."""
    model.eval()
    correct = loss = samples = 0
    with torch.no_grad(), work.autocast(job):
        for inputs, targets in batches:
            inputs, targets = inputs.to(job.device), targets.to(job.device)
            outputs = model(inputs)
            loss += F.cross_entropy(outputs, targets, reduction="sum")
            correct += (outputs.argmax(1) == targets).sum()
            samples += len(targets)
    return correct.item() / samples, loss.item() / samples


def ideal(job, clock):
    """Train with the fastest loop we know: resident uint8 images, and one gather per 16 batches.

    Variants: channels_last, mallopt (keep freed pages), onednn (linear layers), fused (optimizer) and compile.
    """
    if "mallopt" in job.variants:
        keep_pages()
    clock.begin()
    epochs, test, clock.steps = resident(job)
    model = work.model(job).to(job.device, memory_format=layout(job))
    if "onednn" in job.variants:
        use_onednn(model)
    if "compile" in job.variants:
        model.compile()
    options = {"fused": True} if "fused" in job.variants else {}
    optimizer = clock.watch(work.optimizer(job)(model.parameters(), **options))
    for epoch in range(job.epochs):
        model.train()
        total = torch.zeros((), device=job.device)
        for inputs, targets in epochs(epoch):
            with work.autocast(job):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        clock.evaluating()
        clock.evaluated(*evaluate(job, model, test))
    return model


def replay(job, clock):
    """Train with the fastest loop on a GPU: one step is captured as a CUDA graph and replayed for each batch."""
    if job.device != "cuda":
        raise work.NotOffered("only with --device cuda")
    clock.begin()
    epochs, test, clock.steps = resident(job)
    model = work.model(job).to(job.device, memory_format=layout(job))
    options = (
        {"capturable": True} if job.work == "cnn" else {}
    )  # Adam then counts its steps on the device
    optimizer = work.optimizer(job)(model.parameters(), **options)

    def step(inputs, targets):
        with work.autocast(job):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    static = [tensor.clone() for tensor in next(epochs(0))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazily created state must exist before the capture
        for _ in range(3):
            step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*static)
    model.load_state_dict(start)  # in place, because the graph uses the same addresses
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    for epoch in range(job.epochs):
        for inputs, targets in epochs(epoch):
            if len(inputs) == job.batch_size:
                static[0].copy_(inputs)
                static[1].copy_(targets)
                graph.replay()
            else:  # the last batch of an epoch is smaller
                step(inputs, targets)
            clock.step()
        clock.evaluating()
        clock.evaluated(*evaluate(job, model, test))
    return model


def resident(job):
    """Return (function: epoch -> batches, test batches, steps per epoch), for uint8 images on the device."""
    from stoker.data.order import permutation

    if job.device != "cpu":
        fast_kernels()
    train, test, *scale = work.arrays(job)
    (inputs, targets), (test_inputs, test_targets) = (
        [t.to(job.device) for t in part] for part in (train, test)
    )
    test_inputs = work.normalize(test_inputs, *scale).contiguous(memory_format=layout(job))

    def epochs(epoch):
        for chunk in (
            permutation(len(inputs), job.seed, epoch).to(job.device).split(16 * job.batch_size)
        ):
            images, labels = inputs.index_select(0, chunk), targets.index_select(0, chunk)
            if job.work in work.PHOTOGRAPHS:
                images = crop_and_flip(images)
            images = work.normalize(images, *scale).contiguous(memory_format=layout(job))
            yield from zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True)

    test = list(
        zip(test_inputs.split(work.EVAL_BATCH), test_targets.split(work.EVAL_BATCH), strict=True)
    )
    return epochs, test, -(-len(inputs) // job.batch_size)


def fast_kernels():
    """Turn on TF32 and cuDNN's search for the fastest kernels, as Stoker's command does."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")


def layout(job):
    return torch.channels_last if "channels_last" in job.variants else torch.contiguous_format


def crop_and_flip(images, margin=4):
    """Shift each image by up to `margin` pixels, and mirror half of them, in one gather."""
    mirrored = torch.rand(len(images), 1, device=images.device) < 0.5
    return crop(F.pad(images, (margin,) * 4), mirrored, margin)


def crop(padded, mirrored, margin):
    """Crop each padded image at a random position, and mirror it if `mirrored` (N, 1) is true."""
    n, _, height, width = padded.shape
    device = padded.device
    offsets = torch.randint(0, 2 * margin + 1, (2, n, 1), device=device)
    columns = torch.arange(width - 2 * margin, device=device).expand(n, -1)
    columns = torch.where(mirrored, columns.flip(1), columns) + offsets[0]
    rows = torch.arange(height - 2 * margin, device=device) + offsets[1]
    samples = torch.arange(n, device=device).view(n, 1, 1)
    return padded[samples, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def keep_pages():
    """Tell glibc to keep large buffers on its heap, and to return no pages to the system (mallopt(3))."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        raise work.NotOffered("mallopt needs glibc") from None
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    for option, value in ((mmap_threshold, 2**30), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
        libc.mallopt(option, value)


class OneDNNLinear(torch.autograd.Function):
    """A linear layer in exact fp32 with oneDNN. MKL, the default, uses only AVX2 on AMD processors."""

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight)
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        linear = torch.ops.mkldnn._linear_pointwise
        to_inputs = (
            linear(gradient, weight.t(), None, "none", [], "") if ctx.needs_input_grad[0] else None
        )
        return to_inputs, linear(gradient.t(), inputs.t(), None, "none", [], ""), gradient.sum(0)


def use_onednn(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.forward = lambda inputs, layer=layer: OneDNNLinear.apply(
                inputs, layer.weight, layer.bias
            )
