"""The report of a training in a real browser: it follows the training, and its curves can be read."""

import json
import re
import subprocess
import sys
import time

import pytest
from made_runs import make_run

from stoker.runs import plots, report

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
    assert names == ([""] if width < 500 else ["", "precision", "recall", "n"]) + digits
    matrix = opened.page.locator(".matrix").bounding_box()
    assert matrix["x"] + matrix["width"] <= width  # nothing has to be scrolled to


def test_curves_can_be_read_and_commands_copied(live, open_page, serve):
    process, path = live
    assert process.wait(90) == 0
    opened = open_page(f"{serve(path.parent)}/report.html")
    page = opened.page
    rows = report.inputs.read_run(path.parent).rows
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


TICKS = [
    ((0.91, 0.98), "0.90 0.92 0.94 0.96 0.98"),
    ((0.3, 1), "0.2 0.4 0.6 0.8 1.0"),  # a share ends at 1
    ((1, 1), "1.00 1.05 1.10"),
    ((0, 0), "0 0.5 1.0"),
    ((0, 23_000), "0 10,000 20,000 30,000"),
    ((0, 3e-5), "0 1e-5 2e-5 3e-5"),
    ((-3, 5e6), "-2e6 0 2e6 4e6 6e6"),
    ((1e-200, 2e99), "0 5.0e98 1.0e99 1.5e99 2.0e99"),
    ((0.02, 2.5), "0.01 0.1 1 10"),
    ((1e-6, 1), "1e-6 1e-4 1e-2 1e0"),
    ((1, 31), "1 10 100"),
]


def test_ticks_are_round_and_of_one_notation(open_page, tmp_path):
    make_run(tmp_path / "run")
    page = open_page(report.write(tmp_path / "run")).page
    for values, labels in TICKS:
        code = "numbers => scale(numbers, 4, {margin: 0, log: true}).ticks"
        ticks = page.evaluate(code, list(values))
        assert " ".join(label for _, label in ticks) == labels
        assert (ticks[0][0], ticks[-1][0]) == pytest.approx((0, 1))
    at = "[0.01, 0.1, 10].map(scale([0.02, 2.5], 4, {margin: 0, log: true}).at)"
    assert page.evaluate(at) == pytest.approx([0, 1 / 3, 1])


PATHS = """plot => {
  const place = document.createElement("div");
  place.dataset.plot = JSON.stringify(plot);
  document.body.append(place);
  draw(place);
  return [...place.querySelectorAll("path:not(.grid)")].map(part => [part.getAttribute("class"), part.getAttribute("d")]);
}"""


def test_marks_are_at_their_values(open_page, tmp_path):
    make_run(tmp_path / "run")
    page = open_page(report.write(tmp_path / "run")).page
    left, right, top, foot = page.evaluate("[LEFT, RIGHT, TOP, FOOT]")
    half, quarter = (top + foot) / 2, left + (right - left) / 4
    lines = {"val": [(0, 2), (50, 1), (200, 0)]}
    drawn = plots.figure("loss", "step", lines, end=200, best=(50, 1), warmup=10)
    warm, curve, _, rule, best = page.evaluate(PATHS, drawn)
    assert warm == ["warmup", f"M{left} {foot}V{top}H{left + (right - left) / 20}V{foot}z"]
    places = f"M{left:.1f} {top:.1f}L{quarter:.1f} {half:.1f}L{right:.1f} {foot:.1f}"
    assert curve == ["curve", places]
    assert rule == ["rule", f"M{quarter:g} {foot}V{top}"]
    assert best == ["dots best", f"M{quarter:.1f} {half:.1f}h0"]
    bars = plots.figure("errors", "error", {}, bars=[[-2, -1, 1, 2], [4, 0, 2]])
    first, second, zero = page.evaluate(PATHS, bars)
    assert first == ["histogram", f"M{left} {foot}V{top}H{quarter:g}V{foot}z"]
    assert second[1] == f"M{right - (right - left) / 4:g} {foot}V{half:g}H{right}V{foot}z"
    assert zero == ["rule", f"M{(left + right) / 2:g} {foot}V{top}"]
    dots = plots.figure("a", "true", {}, dots=[(0, 0), (4, 2)], ideal=True)
    diagonal, dots = page.evaluate(PATHS, dots)
    assert diagonal == ["rule", f"M{left} {foot}L{right} {top}"]
    assert dots[1] == f"M{left:.1f} {foot:.1f}h0M{right:.1f} {half:.1f}h0"


def test_labels_of_an_axis_do_not_touch(open_page, tmp_path):
    make_run(tmp_path / "run")
    page = open_page(report.write(tmp_path / "run")).page
    drawn = plots.figure("errors", "error", {}, bars=[[-90_000, 0, 110_000], [4, 2]])
    page.evaluate(PATHS, drawn)
    labels = page.locator("svg").last.locator("text[y='197']")
    assert labels.all_text_contents() == ["-100,000", "0", "100,000"]


def test_names_in_plots_are_text(open_page, tmp_path):
    make_run(tmp_path / "run")
    bad = """'><img src=x onerror="document.title=1">"""
    rows = [{"step": i, "epoch": i, f"{bad}/x": i} for i in (900, 1000)]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    path = report.write(tmp_path / "run")
    opened = open_page(path)
    page = opened.page
    figure = page.locator("figure", has_text="onerror")
    figure.locator("svg.plot").hover()
    assert bad in page.locator(".tip").inner_text()
    with page.expect_download() as download:
        figure.locator("button.csv").click()
    head = download.value.path().read_text().splitlines()[0]
    assert bad.replace('"', '""') in head
    figure.locator("svg.plot").click()
    assert page.locator("dialog svg.plot").count() == 1 and page.locator("img").count() == 0
    assert page.title() == "Run run" and opened.requests == [path.as_uri()]
    assert opened.complaints == []


def test_a_page_without_scripts_has_the_last_values(chromium, tmp_path):
    make_run(tmp_path / "run")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.write(tmp_path / "run").as_uri())
    assert "last value" in page.locator("figure").first.inner_text()
    context.close()
