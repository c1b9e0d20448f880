"""Text: windows, the GPT against torch's own layers, what it writes, and a run from file to report."""

import functools
import html
import json
import math

import numpy as np
import pytest
import torch
from conftest import assert_same, make_trainer
from safetensors.torch import load_file
from torch import nn

from stoker import Trainer
from stoker.command import arguments, shell
from stoker.data import text as texts
from stoker.data.description import is_description
from stoker.data.loader import DeviceLoader, HostLoader, make_loaders, resident_view
from stoker.data.record import default_metrics, fingerprint
from stoker.models.gpt import GPT, take_rows
from stoker.runs import report
from stoker.runs.inference import Trained
from stoker.runs.samples import Samples, write_on
from stoker.trainer import checkpoint, losses
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, as_typed

WORDS = "the cat sat on a mat, and zoë saw it.\nthen they went home\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.txt"
    generator = torch.Generator().manual_seed(0)
    words = WORDS.split(" ")
    chosen = torch.randint(len(words), (400,), generator=generator).tolist()
    path.write_text(" ".join(words[i] for i in chosen), encoding="utf-8")
    return path


def make_gpt(length=8, classes=11, seed=0, **options):
    torch.manual_seed(seed)
    return GPT((length,), classes, **{"layers": 2, "heads": 2, "width": 16, **options})


def as_file(path, form):
    """The text in another form: (path, its tokens)."""
    letters = path.read_text(encoding="utf-8")
    if form in ("characters", "bytes"):
        known = sorted(set(letters))
        ids = [known.index(letter) for letter in letters]
        return path, ids if form == "characters" else list(letters.encode())
    ids = np.array([ord(letter) for letter in letters], "uint16" if form == "npy" else form)
    other = path.with_suffix(".npy" if form == "npy" else ".bin")
    if form == "npy":
        np.save(other, ids)
    else:
        ids.tofile(other)
    return other, ids.tolist()


@pytest.mark.parametrize("form", ["characters", "bytes", "npy", "uint16", "uint32"])
def test_windows_are_slices_of_the_text(file, form):
    path, ids = as_file(file, form)
    data = texts.text(str(path), form, length=16, stride=5, val_fraction=0.2, test_fraction=0.1)
    held_out = [round(len(ids) * 0.2), round(len(ids) * 0.1)]
    places = np.cumsum([len(ids) - sum(held_out), *held_out])
    parts = dict(zip(("train", "val", "test"), np.split(np.array(ids), places[:2]), strict=True))
    for name, part in data.parts().items():
        stride = 5 if name == "train" else 16
        starts = range(0, len(parts[name]) - 16, stride)
        inputs = torch.tensor(np.array([parts[name][i : i + 16] for i in starts]))
        targets = torch.tensor(np.array([parts[name][i + 1 : i + 17] for i in starts]))
        assert len(part) == len(starts)
        assert_same(part[list(range(len(part)))], (inputs, targets))
        assert_same(part.tensors(), (inputs, targets))
    about = data.description()
    assert is_description(json.loads(json.dumps(about)))
    trained = Trained(GPT((16,), data.num_classes, layers=1, width=8), about).eval()
    for length in (1, 16):
        tokens = data.train[[0]][0][:, :length]
        assert torch.equal(trained(tokens), trained.module(tokens))
    with pytest.raises(UserError, match=r"the model takes a tensor of shape \(N, 16\)"):
        trained(torch.zeros(1, 17, dtype=torch.int64))
    written = texts.decode(ids, about)
    assert written == (file.read_text("utf-8") if "s" in form[4:] else " ".join(map(str, ids)))
    assert texts.encode(written, about) == ids
    assert data.num_classes == (256 if form == "bytes" else max(ids) + 1)


def test_a_text_is_kept_once_and_read_alike_from_the_memory_and_the_file(file):
    """All windows are views of one tensor. Batches are the same streamed, and by any order."""
    path, ids = as_file(file, "uint16")
    data = texts.text(str(path), length=16, stride=1)
    inputs, targets = data.train.tensors()
    assert inputs.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()
    for view in (inputs, resident_view(inputs, torch.device("meta"))):
        assert view.shape == inputs.shape
        assert view.untyped_storage().nbytes() == 8 * len(data.train.tokens)
    assert isinstance(data.train.tokens, np.memmap)
    options = {"batch_size": 7, "seed": 3, "shuffle": True}
    loaders = [kind(data, "train", **options) for kind in (DeviceLoader, HostLoader)]
    for loader in loaders:
        loader.seek(2, 5)
    resident, streamed = map(list, loaders)
    assert_same(resident, streamed)
    order = loaders[0].order(2)[35:].split(7)
    whole = torch.tensor(ids)
    for (given, _), samples in zip(resident, order, strict=True):
        assert torch.equal(given, torch.stack([whole[i : i + 16] for i in samples]))
    for loader in loaders:
        loader.close()
    changed = np.fromfile(path, "uint16")
    before = fingerprint(data)
    changed[100] = 97 + (changed[100] == 97)
    changed.tofile(path)
    assert fingerprint(texts.text(str(path), length=16, stride=1)) != before


def test_mistakes_in_a_text_are_one_sentence(file, tmp_path):
    binary = tmp_path / "odd.txt"
    binary.write_bytes(b"ab\xff")
    ids = tmp_path / "ids.npy"
    np.save(ids, np.array([3, -1]))
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}]), allow_pickle=True)
    about = texts.text(str(file), length=16).description()
    empty = tmp_path / "empty.txt"
    empty.touch()
    other = tmp_path / "other.txt"
    other.write_text("the caß")
    cases = [
        ({"path": str(binary)}, "byte 2 is not UTF-8.\nType dataset.tokens=bytes"),
        ({"path": str(objects)}, "not a valid npy file"),
        ({"path": str(tmp_path)}, "not a regular file"),
        ({"path": str(tmp_path / "none")}, "Type dataset.path=FILE"),
        ({"path": 2024}, "dataset.path=2024: No such file"),
        ({"path": str(binary), "tokens": "uint16"}, "not a valid uint16 file"),
        ({"path": str(empty)}, "the file is empty"),
        ({"path": str(file), "length": 10**6}, "Type a shorter dataset.length"),
        (
            {"path": str(other), "length": 16, "trained": about},
            "the training text of the run does not contain 'ß'",
        ),
        (
            {"path": str(file), "tokens": "bytes", "trained": about},
            "but the model's are characters",
        ),
    ]
    for options, message in cases:
        with pytest.raises(UserError) as caught:
            texts.text(**options)
        assert message in str(caught.value)
    with pytest.raises(
        UserError, match=r"from -1 to 3, but token ids range from 0 to 16,777,215\."
    ):
        texts.text(str(ids))
    ids.with_suffix(".bin").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(UserError, match="Check dataset.tokens=uint32"):
        texts.text(str(ids.with_suffix(".bin")), tokens="uint32")
    with pytest.raises(
        UserError, match="prompt: the training text of the run does not contain 'q'"
    ):
        texts.encode("the q", about)
    for key, value in (("classes", ["ab"]), ("tokens", "x"), ("kind", "other")):
        assert not is_description(about | {key: value})
    many = about | {"classes": [chr(0x4E00 + place) for place in range(3000)]}
    with pytest.raises(UserError, match=r"does not contain 'q'\.\nIt contains (., ){200}\.\.\.\.$"):
        texts.encode("q", many)


def test_a_prompt_without_tokens_is_none(file, tmp_path):
    """And one of too many digits is refused; a training that has diverged writes nothing."""
    about = texts.text(str(file), length=16).description()
    model = make_gpt(classes=about["num_classes"]).eval()
    alone = write_on(model, about, tokens=5)
    assert write_on(model, about, "", tokens=5) == alone and len(alone) == 5
    ids = about | {"tokens": "ids", "classes": None}
    assert write_on(model, ids, " ", tokens=5) == write_on(model, ids, tokens=5)
    with pytest.raises(UserError, match="type token ids below"):
        texts.encode("9" * 5000, ids)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    samples = Samples(tmp_path / "samples.jsonl", about)
    samples.on_log(make_trainer(model), {"step": 1, "epoch": 1, "val/loss": math.nan})
    assert not samples.path.exists()


def test_a_model_that_cannot_write_is_trained_without_samples(file, tmp_path, caplog):
    about = texts.text(str(file), length=16).description()
    model = make_gpt(classes=about["num_classes"])
    model.generate = lambda tokens, count: tokens
    samples = Samples(tmp_path / "samples.jsonl", about)
    for step in (1, 2):
        samples.on_log(make_trainer(model), {"step": step, "epoch": 1, "val/loss": 1.0})
    assert not samples.path.exists()
    [record] = caplog.records
    assert record.message.startswith("GPT.generate failed (TypeError: ")


@pytest.mark.parametrize(
    ("options", "key"),
    [({"layers": 0}, "layers"), ({"width": 0}, "width"), ({"width": 9}, "width")],
)
def test_impossible_sizes_name_their_key(options, key):
    with pytest.raises(UserError, match=f"^model.{key}\\b"):
        make_gpt(**options)


def reference(model, width=16, heads=2, layers=2):
    """The same model, of torch's own encoder layers, on embedded tokens."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, layers, model.norm, enable_nested_tensor=False)
    for theirs, ours in zip(encoder.layers, model.blocks, strict=True):
        pairs = [
            (theirs.self_attn.in_proj_weight, ours.attention.qkv.weight),
            (theirs.self_attn.in_proj_bias, ours.attention.qkv.bias),
            (theirs.self_attn.out_proj.weight, ours.attention.out.weight),
            (theirs.self_attn.out_proj.bias, ours.attention.out.bias),
        ]
        modules = [
            (theirs.linear1, ours.widen),
            (theirs.linear2, ours.shrink),
            (theirs.norm1, ours.attention_norm),
            (theirs.norm2, ours.mlp_norm),
        ]
        for one, same in modules:
            pairs += [(one.weight, same.weight), (one.bias, same.bias)]
        with torch.no_grad():
            for one, same in pairs:
                one.copy_(same)

    def forward(inputs):
        x = model.tokens.weight[inputs] + model.positions.weight[: inputs.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        return encoder(x, mask, is_causal=True) @ model.tokens.weight.T

    return forward


def test_the_gpt_is_torchs_encoder_and_causal():
    model = make_gpt()
    for parameter in model.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.3)
    inputs = torch.randint(11, (3, 8))
    outputs = model(inputs)
    assert outputs.shape == (3, 11, 8)
    torch.testing.assert_close(outputs.transpose(1, 2), reference(model)(inputs))
    changed = inputs.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    assert torch.equal(model(changed)[:, :, :5], outputs[:, :, :5])
    assert not torch.isclose(model(changed)[:, :, 5:], outputs[:, :, 5:]).any(1).all()


def test_weights_begin_as_those_of_gpt_2():
    model = make_gpt(length=64, classes=99, layers=8, width=128)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("weight")))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            is_last = name.endswith(("out.weight", "shrink.weight"))
            std = 0.02 / 4 if is_last else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize(("temperature", "top_k"), [(0, None), (1.0, None), (0.7, 3)])
def test_what_is_written_is_drawn_from_the_plain_forward(temperature, top_k):
    """Beyond the positions too; greedy is the argmax."""
    model = make_gpt(layers=2).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    prompt = torch.randint(11, (2, 3))
    options = {"temperature": temperature, "top_k": top_k}
    generator = torch.Generator().manual_seed(5)
    written = model.generate(prompt, 30, generator=generator, **options)
    generator = torch.Generator().manual_seed(5)
    tokens = prompt
    start = 0  # of what the model sees
    for _ in range(30):
        if tokens.shape[1] - start > 8:
            start = tokens.shape[1] - 4
        logits = model(tokens[:, start:])[:, :, -1]
        if temperature == 0:
            new = logits.argmax(1, keepdim=True)
        else:
            if top_k:
                lowest = logits.sort(descending=True).values[:, top_k - 1 : top_k]
                logits = logits.where(logits >= lowest, -math.inf)
            shares = (logits.detach() / temperature).softmax(1)
            new = torch.multinomial(shares, 1, generator=generator)
        tokens = torch.cat([tokens, new], 1)
    assert torch.equal(tokens, written)
    coldest = model.generate(prompt, 5, temperature=1e-45)
    assert torch.equal(coldest, model.generate(prompt, 5, temperature=0))
    with torch.no_grad():
        past = [[] for _ in model.blocks]
        steps = [model(prompt[:, :2], past), model(prompt[:, 2:], past)]
        torch.testing.assert_close(torch.cat(steps, 2), model(prompt))


def test_rows_of_classes_give_the_loss_of_torch(file):
    """The hook changes the order of memory alone: values, gradients and weights stay."""
    data = texts.text(str(file), length=16)
    inputs, targets = data.train[[0, 3, 4]]
    targets[0, :5] = -100
    for loss in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(torch.rand(data.num_classes), label_smoothing=0.1),
    ):
        model = make_gpt(16, data.num_classes)
        results = []
        for function in (loss, with_rows(loss)):
            model.zero_grad()
            value = function(model(inputs), targets)
            value.backward()
            results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
        for one, same in zip(*results, strict=True):
            torch.testing.assert_close(one, same)
        divisor = losses.divisor(with_rows(loss))
        assert divisor is not None
        assert divisor(targets) == losses.divisor(loss)(targets)


def with_rows(loss):
    rows = nn.CrossEntropyLoss(loss.weight, label_smoothing=loss.label_smoothing)
    take_rows(rows)
    return rows


def train(data, resume=None, callbacks=(), optimizer=torch.optim.AdamW, **settings):
    (train_loader, val_loader, _), _ = make_loaders(data, batch_size=20, seed=1)
    model = make_gpt(16, data.num_classes, dropout=settings.pop("dropout", 0.0))
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        functools.partial(optimizer, lr=1e-2),
        metrics=default_metrics(data.kind, target_dims=1),
        callbacks=callbacks,
        max_steps=12,
        eval_every=4,
        device="cpu",
        max_grad_norm=1.0,
        **settings,
    )
    trainer.fit(train_loader, val_loader, resume=resume)
    return trainer, val_loader


def test_a_training_on_text_keeps_what_the_trainer_promises(file, tmp_path):
    """Resumed == uninterrupted, with the samples too; micro-batches == one batch; perplexity."""
    data = texts.text(str(file), length=16)
    about = data.description()
    plain, val_loader = train(data, dropout=0.1)
    paths = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    whole, _ = train(data, dropout=0.1, callbacks=[Samples(paths[0], about)])
    assert_same(whole.state_dict()["model"], plain.state_dict()["model"])
    states = []

    class Keep(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 7:
                states.append(checkpoint.copy(trainer.state_dict()))

    train(data, dropout=0.1, callbacks=[Samples(paths[1], about), Keep()])
    assert paths[0].read_text() == paths[1].read_text()
    again, _ = train(data, states[0], [Samples(paths[1], about), Keep()], dropout=0.1)
    assert_same(again.state_dict()["model"], whole.state_dict()["model"])
    assert paths[0].read_text() == paths[1].read_text()
    rows = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert rows[-1]["text"] == write_on(whole.module.eval(), about, seed=0)

    results = whole.evaluate(val_loader)
    outputs = torch.cat([whole.module(inputs) for inputs, _ in val_loader])
    targets = torch.cat([targets for _, targets in val_loader])
    mean = nn.functional.cross_entropy(outputs.double(), targets)
    assert results["val/loss"] == pytest.approx(mean.item(), rel=1e-6)
    assert results["val/perplexity"] == pytest.approx(mean.exp().item(), rel=1e-6)
    assert results["val/acc"] == (outputs.argmax(1) == targets).double().mean().item()

    # Not Adam, which makes numbers of what is 0 but for rounding: the gradients of the keys' biases.
    one, _ = train(data, optimizer=torch.optim.SGD)
    several, _ = train(data, optimizer=torch.optim.SGD, grad_accum_steps=3)
    for weight, same in zip(one.module.parameters(), several.module.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-7)


def test_any_prompt_is_text():
    """Hydra reads back what was typed, whatever its signs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for prompt in ("true", "1e3", 'it\'s, a: {b} [c] "d"', "back\\", "\\' \\\\'", "Ännä\nB"):
        override = arguments.for_hydra([f"prompt={prompt}"])[0]
        assert OverridesParser.create().parse_override(override).value() == prompt
    for typed in ("dataset.delimiter=;", "dataset.delimiter=';'"):
        [override, *_] = arguments.for_hydra([typed])
        assert override == "dataset.delimiter=';'"
    assert shell.setting("run_dir", "a/b c") == "run_dir=a/b c"


@pytest.mark.parametrize(
    "text",
    [
        "id",
        "null",
        "NaN",
        "2024",
        "it's",
        'a "b" (c)',
        "back\\",
        "back\\\n",
        "größe",
        "a,b",
        "x: y",
        "",
    ],
)
def test_a_list_is_shown_as_hydra_reads_it(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = f"key={as_typed([text, {'a': text}])}"
    assert OverridesParser.create().parse_override(override).value() == [text, {"a": text}]


@pytest.mark.slow
def test_two_processes_train_as_one_and_the_run_writes(file, forks, tmp_path):
    """A run on two processes, its report, whose samples are escaped, and text from a prompt."""
    settings = [
        "dataset=text", f"dataset.path={file}", "model=gpt", "dataset.length=16", "max_steps=12",
        "epochs=null", "model.layers=1", "model.width=16", "optimizer._target_=torch.optim.SGD",
        "~optimizer.betas", "~optimizer.eps", "eval_every=6", "device=cpu", "precision=fp32",
    ]  # fmt: skip
    two = forks.ranks(tmp_path, 2, *settings, "run_dir=two", "strategy=ddp")
    assert two.codes == [0, 0], two.errs
    one = forks.run(tmp_path, *settings, "run_dir=one")
    assert one.code == 0, one.err
    weights = load_file(tmp_path / "two" / "model.safetensors")
    for name, weight in load_file(tmp_path / "one" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-7)

    card = (tmp_path / "one" / "model.md").read_text(encoding="utf-8")
    assert " generate run=one prompt=TEXT`.\n" in card
    samples = tmp_path / "one" / "samples.jsonl"
    page = html.unescape(report.html(tmp_path / "one"))
    for line in samples.open():
        assert "<br>".join(json.loads(line)["text"].split("\n")) in page
    samples.write_text(json.dumps({"step": 1, "epoch": 1, "text": "<script>\x1b"}) + "\n")
    assert "<pre>&lt;script&gt;\\x1b<br></pre>" in report.html(tmp_path / "one")

    generate = ["task=generate", "run=one", "prompt=they went, ", "tokens=40"]
    written = [forks.run(tmp_path, *generate, *seed).out for seed in ([], [], ["seed=1"])]
    assert written[0] == written[1] != written[2]
    assert all(text.startswith("they went, ") for text in written)
