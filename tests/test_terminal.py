"""What a run shows on a terminal: a table, a line that is redrawn, and text that is wrapped."""

import contextlib
import io
import logging
import os
import re
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
from conftest import make_data, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.trainer import number_format, terminal
from stoker.trainer.callbacks import Callback, Checkpoint, Progress, progress
from stoker.trainer.callbacks.progress_table import Table
from stoker.trainer.errors import log
from stoker.trainer.metrics import Accuracy

ROOT = Path(__file__).parents[1]


class Terminal(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self):
        return True


def open_screen(monkeypatch, columns=80):
    """Make the standard output a terminal without colour."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def left(screen):
    """Return the lines that stay on a screen."""
    lines = []
    for line in screen.getvalue().split("\n"):
        shown = ""
        for text in line.split("\r"):
            shown = text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines


class Watch(Callback):
    """Keeps the rows, and the best step after each."""

    def __init__(self, saver):
        self.saver, self.rows, self.best = saver, [], set()

    def on_log(self, trainer, row):
        self.rows.append(row)

    def on_step_end(self, trainer):
        if self.saver.best:
            self.best.add(self.saver.best["step"])


def fit(tmp_path, *more, val=None, **settings):
    data = make_data()
    saver = Checkpoint(tmp_path)
    watch = Watch(saver)
    settings = {"metrics": {"acc": Accuracy()}, "log_every": 3, **settings}
    trainer = make_trainer(callbacks=[Progress(), *more, saver, watch], **settings)
    val = val or DeviceLoader(data, "val", 7)
    trainer.fit(DeviceLoader(data, "train", 8, shuffle=True), val)
    return watch


def test_epochs_are_rows_of_a_table_with_a_mark_at_a_new_best(monkeypatch, tmp_path):
    screen = open_screen(monkeypatch)
    watch = fit(tmp_path, epochs=4)
    text = screen.getvalue()
    assert "\033" not in text  # NO_COLOR
    lines = left(screen)
    (start,) = [i for i, line in enumerate(lines) if line.startswith(" epoch ")]
    names = lines[start].split()
    assert names == ["epoch", "loss", "val/loss", "val/acc", "samples/s", "best"]
    ends = [match.end() for match in re.finditer(r"\S+", lines[start])]
    for epoch, line in enumerate(lines[start + 1 : start + 5], 1):
        cells = [line[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)]
        cell = dict(zip(names, cells, strict=True))
        (row,) = [row for row in watch.rows if row["step"] == 8 * epoch and "val/acc" in row]
        assert cell["epoch"] == f"{epoch}/4"
        assert cell["val/acc"] == f"{row['val/acc']:.4f}"
        assert cell["val/loss"] == f"{row['val/loss']:.4f}"
        of_epoch = [row for row in watch.rows if 8 * epoch - 8 < row["step"] <= 8 * epoch]
        trained = [row for row in of_epoch if "train/loss" in row]
        total = sum(row["train/samples"] for row in trained)
        mean = sum(row["train/loss"] * row["train/samples"] for row in trained) / total
        assert cell["loss"] == f"{mean:.4f}"
        assert cell["best"] == ("*" if 8 * epoch in watch.best else "")
    assert all(len(line) <= 80 for line in lines)
    # The line of the current step is aligned with the table, and has the best so far and a time left.
    best = max(row["val/acc"] for row in watch.rows if row["step"] <= 16 and "val/acc" in row)
    drawn = [one for one in text.split("\r") if re.match(r" *2/4 .* left$", one)]
    assert any(one[: ends[-1]].endswith(f" {best:.4f}") for one in drawn)
    assert all(re.search(r" step 16/32 +\d\d:\d\d left$", one) for one in drawn)


def test_a_shorter_line_leaves_nothing_of_a_longer_one(monkeypatch):
    screen = open_screen(monkeypatch)
    table = Table(0, 100)
    for step, rate in ((9, "0.0030 or so"), (10, "0.1")):
        table.draw(step, {"step": f"{step}/100"}, {"lr": rate})
    assert re.fullmatch(r"  step 10/100  lr 0\.1 +\S+ left", left(screen)[-1])
    table.close()


def test_a_row_may_be_as_wide_as_the_terminal(monkeypatch):
    """Then the live line, which also has the time left, shows names and values instead."""
    screen = open_screen(monkeypatch)
    table = Table(0, 100)
    cells = {f"val/metric{i}": "0.5" for i in range(6)}
    assert table.row(10, cells)
    table.draw(11, cells, {"lr": "0.1"})
    *_, header, row, line = left(screen)
    assert header.split() == list(cells) and row.split() == ["0.5"] * 6 and len(row) == 76
    assert line.startswith("  val/metric0 0.5  val/metric1 0.5") and len(line) <= 80
    assert not table.row(12, {**cells, "val/more": "0.5"})
    table.close()


def test_a_typed_ctrl_c_does_not_leave_the_live_line_behind(monkeypatch, tmp_path):
    screen = open_screen(monkeypatch)

    class Type(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 12:
                screen.write("^C")  # the terminal echoes it at the cursor

    fit(tmp_path, Type(), epochs=2)
    before, _, after = screen.getvalue().partition("^C")
    assert before.endswith("\r") and after.startswith("\r")  # else it may end on the next line


def test_a_header_is_printed_again_where_a_column_grows(monkeypatch, tmp_path):
    screen = open_screen(monkeypatch)
    fit(tmp_path, epochs=150, eval_every=1001)  # 8 steps an epoch
    rows = [line for line in left(screen) if re.match(r" *(epoch|\d|1,\d)", line)]
    number = next(i for i, line in enumerate(rows) if line.startswith("125.12/150 "))
    header = rows[number - 1]
    assert rows[number - 2].split()[0] == "125/150" and header.split()[:2] == ["epoch", "loss"]
    assert header.index("epoch") + 5 == len("125.12/150")


def test_a_table_that_is_too_wide_becomes_lines_of_names_and_values(monkeypatch, tmp_path):
    screen = open_screen(monkeypatch, 40)
    data = make_data()
    name = "a_long_name_here"
    val = {"clean": DeviceLoader(data, "val", 7), "noisy": DeviceLoader(data, "val", 5)}
    watch = fit(tmp_path, val=val, epochs=2, metrics={name: Accuracy()})
    lines = left(screen)
    assert all(len(line) <= 40 for line in lines)
    text = " ".join(" ".join(lines).split())
    for split in val:
        for row in watch.rows:
            if f"{split}/loss" in row:
                assert f"{split}/loss {row[f'{split}/loss']:.4f}" in text
                assert f"{split}/{name} {row[f'{split}/{name}']:.4f}" in text
    model = lines.index(next(line for line in lines if line.startswith("plan ")))
    assert all(line.startswith(" " * 9) for line in lines[model + 1 : model + 3])


def test_a_warning_begins_on_a_line_of_its_own_and_a_new_name_makes_one_new_header(
    monkeypatch, tmp_path
):
    class Own(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 3:
                log.warning("odd")
            if trainer.step in (12, 28):
                trainer.log({"my/number": 0.5})

    screen = open_screen(monkeypatch)
    handler = logging.StreamHandler(screen)
    log.addHandler(handler)
    fit(tmp_path, Own(), max_steps=32, eval_every=4)
    log.removeHandler(handler)
    lines = left(screen)
    assert "odd" in lines
    headers = [line.split() for line in lines if "val/acc" in line]
    assert ["my/number" in names for names in headers] == [False, True]
    rows = [line.split()[0] for line in lines if re.match(r" *[\d.]+/4 ", line)]
    assert rows == ["0.5/4", "1/4", "1.5/4", "2/4", "2.5/4", "3/4", "3.5/4", "4/4"]


def test_text_is_wrapped_at_words_and_commands_are_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert terminal.wrapped("model    MLP, 85,002 parameters and more") == (
        "model    MLP, 85,002\n         parameters and more"
    )
    assert terminal.wrapped(" 1/12  val/acc 0.7486  job 0 model=linear") == (
        " 1/12  val/acc 0.7486  job 0\n         model=linear"
    )
    for command in (
        "evaluate python train.py evaluate run=x",
        "resume   python train.py run_dir=x",
        "Do: python3.12 train.py x=1234",
        "run      runs/the_name_of_a_long_run",
        "To replay the step: python3.12 train.py x=1 and=more",
        "Do: stoker evaluate run=x split=y",
    ):
        assert terminal.wrapped(command) == command
    assert terminal.wrapped("mode=a: stoker cannot do it because of b=1", indent="  ") == (
        "mode=a: stoker cannot do it\n  because of b=1"
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.styled("x", "bold") == "\033[1mx\033[0m"


def test_a_number_in_a_message_has_no_exponent_unless_it_is_huge_or_tiny():
    values = [0.003, 3.2e-5, 999.9, 5450, 54321.0, -5450, 3.17e28]
    shown = ["0.003", "3.2e-05", "1,000", "5,450", "54,321", "-5,450", "3.17e28"]
    assert [number_format.brief(value) for value in values] == shown


def test_a_size_is_never_zero():
    sizes = [1, 7200, 100_000, 2**20 // 10 + 1, 2.44 * 2**20, 20_004 * 2**20]
    shown = ["1 KiB", "8 KiB", "98 KiB", "0.1 MiB", "2.4 MiB", "20,004 MiB"]
    assert [number_format.size_of(size) for size in sizes] == shown


def test_large_counts_of_epochs_have_separators():
    place = types.SimpleNamespace(total_steps=6000, steps_per_epoch=4, max_steps=None, step=4800)
    assert progress.place(place) == ({"epoch": "1,200/1,500"}, {"step": "4,800/6,000"})


def test_a_run_that_ends_within_an_epoch_counts_a_part_of_it():
    place = types.SimpleNamespace(total_steps=150, steps_per_epoch=4, max_steps=150, step=1)
    shown = []
    for place.step in (1, 148, 150):
        shown.append(progress.place(place)[0]["epoch"])
    assert shown == ["0.25/37.5", "  37/37.5", "37.5/37.5"]


@pytest.mark.slow
def test_a_run_on_a_terminal_of_80_columns(tmp_path):
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, ROOT / "train.py", f"run_dir={tmp_path / 'run'}", "report=false"]
    process = subprocess.Popen(
        [*command, "epochs=2", "model_summary=true"],
        cwd=ROOT,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end on Linux
        while part := os.read(ours, 4096):
            text += part
    assert process.wait() == 0
    lines = text.decode().replace("\r\n", "\n")
    assert "layers.1  Linear " in lines
    assert "\033[1mbest     val/acc" in lines and "\033[1mtest     loss" in lines
    assert re.search(r"epoch +loss +val/loss +val/acc +samples/s +best", lines)
    assert re.search(r"\n *\r*2/2 +0\.", lines.replace("\r", "\n"))
    plain = re.sub(r"\033\[\d+m", "", lines)
    widths = [len(one) for one in re.split(r"[\n\r]", plain) if str(tmp_path) not in one]
    assert max(widths) <= 80
