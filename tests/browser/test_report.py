"""The report of a training in a real browser: it follows the training, and its curves can be read."""

import re
import subprocess
import sys
import time

import pytest
from made_runs import make_run

from stoker.runs import report

# A training of 12 epochs that draws its report as often as it can, and whose page asks as often.
LIVE = """
import sys, time
from stoker.runs import live, report
from stoker.trainer.trainer import Trainer
live.FIRST, live.EVERY, live.SHARE, report.RELOAD = 0, 0, 1, 1

class Slow(Trainer):
    def train_step(self, batch):
        time.sleep(0.03)
        return super().train_step(batch)

sys.modules["slow"] = sys.modules["__main__"]
sys.argv = ["train.py", "trainer._target_=slow.Slow", "epochs=12", "log_every=5", "run_dir=run"]
from stoker.tasks.main import run
run(time.perf_counter())
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A training that has just begun: (its process, its page)."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "slow.py").write_text(LIVE, encoding="utf-8")
    process = subprocess.Popen([sys.executable, "slow.py"], cwd=folder, stdout=subprocess.DEVNULL)
    page = folder / "run" / "report.html"
    until = time.monotonic() + 120
    while not page.exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    yield process, page
    process.kill()
    process.wait()


def test_the_page_follows_the_training_until_its_end(live, open_page):
    process, path = live
    opened = open_page(path, height=400)
    page = opened.page
    state = page.locator(".state")
    first = state.inner_text()
    assert re.match(r"running, step \d+ of 240 \(\d+%\)", first)
    page.evaluate("scrollTo(0, 200)")
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(state).not_to_have_text(first)
    assert page.evaluate("scrollY") == 200
    expect(state).to_contain_text("done", timeout=90_000)
    assert state.inner_text() == "done at step 240"
    assert page.locator("main[data-reload]").count() == 0
    assert set(opened.requests) == {path.as_uri()} and opened.complaints == []
    assert process.wait(60) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_and_stands_out(live, open_page, width, scheme):
    process, path = live
    assert process.wait(90) == 0
    opened = open_page(path, width, scheme=scheme)
    assert opened.pale() == [] and opened.overflowing() == []
    assert opened.requests == [path.as_uri()] and opened.complaints == []
    cut = opened.page.evaluate(
        """() => [...document.querySelectorAll("svg.plot text")].filter(text => {
          const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect();
          return inner.left < outer.left - 1 || inner.right > outer.right + 1
            || inner.bottom > outer.bottom + 1 || inner.top < outer.top - 1;
        }).map(text => text.textContent)"""
    )
    assert cut == []
    names = opened.page.locator(".matrix tr:first-child th:visible").all_inner_texts()
    digits = [str(i) for i in range(10)]
    assert names == (
        ["", "precision", *digits] if width < 500 else ["", "precision", "recall", "n", *digits]
    )


def test_curves_can_be_read_and_commands_copied(live, open_page, serve):
    process, path = live
    assert process.wait(90) == 0
    opened = open_page(f"{serve(path.parent)}/report.html")
    page = opened.page
    rows = report.inputs.read_numbers(path.parent / "metrics.jsonl")
    [row] = [row for row in rows if row["step"] == 240 and "val/loss" in row]
    plot = page.locator("svg.plot").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.97 * box["width"], box["y"] + box["height"] / 2)
    lines = page.locator(".tip").inner_text().split("\n")
    assert lines[0] == "step 240, epoch 12"
    assert float(lines[2].removeprefix("val ")) == pytest.approx(row["val/loss"], rel=1e-4)
    plot_of = page.locator("figure", has_text="calibration").locator("svg")
    plot_of.scroll_into_view_if_needed()
    box_of = plot_of.bounding_box()
    page.mouse.move(box_of["x"] + 0.95 * box_of["width"], box_of["y"] + box_of["height"] / 2)
    lines = page.locator(".tip").inner_text().split("\n")
    assert re.fullmatch(r"correct [\d.]+", lines[1]) and len(lines) == 2
    page.locator("button.copy").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == page.evaluate(
        "document.querySelector('pre.copy').firstChild.data"
    )
    with page.expect_download() as download:
        page.locator("button.csv").first.click()
    table = [line.split(",") for line in download.value.path().read_text().splitlines()]
    assert download.value.suggested_filename == "loss.csv"
    assert table[0] == ['"step"', '"train"', '"val"']
    losses = {int(step): float(value) for step, _, value in table[1:] if value}
    assert losses == pytest.approx(
        {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}, rel=1e-5
    )
    plot.click()
    assert page.locator(".guide").count() == 0 and page.locator(".tip").is_hidden()
    larger = page.locator("dialog svg.plot").bounding_box()
    assert larger["width"] > 2 * box["width"]
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")


def test_a_page_runs_no_script_but_ours(live, open_page, tmp_path):
    process, path = live
    assert process.wait(90) == 0
    text = path.read_text(encoding="utf-8")
    evil = '<main><img src="http://localhost/x.png"><script>document.title = "evil"</script>'
    (tmp_path / "evil.html").write_text(text.replace("<main>", evil), encoding="utf-8")
    opened = open_page(tmp_path / "evil.html")
    assert opened.page.title() == "Run run" and len(opened.complaints) == 2


def test_the_page_of_a_killed_training_says_that_it_is_old(open_page, tmp_path):
    make_run(tmp_path / "run", status="stopped")
    path = report.write(tmp_path / "run", "running")
    text = path.read_text(encoding="utf-8")
    long_ago = f'data-drawn="{round(time.time()) - 600}"'
    path.write_text(re.sub(r'data-drawn="\d+"', long_ago, text), encoding="utf-8")
    page = open_page(path.as_uri()).page
    assert page.locator(".late").text_content() == (
        "not updated for 10 min: the run may have been killed"
    )
