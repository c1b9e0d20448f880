"""The page of a sweep of 500 jobs: what is hovered, brushed, sorted and copied."""

import itertools
import json
import math
import random

import pytest

from stoker.tasks.redraw import redraw

COUNT = 500
LOWEST, HIGHEST = 1e-4, 1e-1  # learning rates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A search of 500 jobs, every 50th of which failed; every second one has a report."""
    generator = random.Random(0)
    folder = tmp_path_factory.mktemp("jobs") / "search"
    for i in range(COUNT):
        rate = math.exp(generator.uniform(math.log(LOWEST), math.log(HIGHEST)))
        value = 0.95 - 0.05 * (math.log10(rate) + 2.5) ** 2 + generator.gauss(0, 0.01)
        hidden = generator.choice(["[128]", "[256]", "[256,256]"])
        typed = [f"optimizer.lr={rate}", f"model.hidden={hidden}", f"batch_size={32 << i % 2}"]
        best = {"name": "val/acc", "mode": "max", "step": 10, "value": value}
        result = {"overrides": typed, "best": best, "seconds": 1.0, "test/acc": value}
        if i % 50 == 49:
            result = {"overrides": typed, "error": "The loss is nan.", "code": 3}
        job = folder / str(i)
        job.mkdir(parents=True)
        (job / "result.json").write_text(json.dumps(result))
        rows = [{"step": n, "epoch": n, "val/acc": value * n / 10} for n in range(1, 11)]
        (job / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if i % 2:
            (job / "report.html").write_text(f"the report of job {i}")
    keys = ["optimizer.lr", "model.hidden", "batch_size"]
    record = {"typed": ["-m"], "jobs": COUNT, "searched": keys}
    (folder / "sweep.json").write_text(json.dumps(record))
    redraw([str(folder)])
    return folder


def results(folder):
    """{job: its result} of the jobs that are done."""
    read = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    return {name: result for name, result in read.items() if not result.get("error")}


def rate_of(result):
    return float(result["overrides"][0].partition("=")[2])


def test_a_job_is_hovered_and_leads_to_its_report(folder, open_page, serve):
    page = open_page(f"{serve(folder)}/sweep.html").page
    values = {name: result["best"]["value"] for name, result in results(folder).items()}
    best = max(values, key=values.get)
    assert page.locator("#jobs tbody tr").first.locator("td").first.inner_text() == best
    assert page.locator("#curves path.job").count() == COUNT
    shades = page.evaluate("shades")
    assert (shades[0], shades[len(values) - 1]) == (1, 0)
    assert page.locator("#scatter circle.job").count() == len(values)
    for plot, mark in (("#curves", "path"), ("#parallel", "path"), ("#scatter", "circle")):
        # At the right end of its line, or on its dot.
        x, y = page.evaluate(
            """([plot, mark]) => {
              const part = document.querySelector(`${plot} ${mark}.best`);
              part.scrollIntoView({block: "center"});
              const svg = part.ownerSVGElement.getBoundingClientRect(), box = part.getBoundingClientRect();
              if (mark === "circle") return [box.x + box.width / 2, box.y + box.height / 2];
              const end = part.getPointAtLength(part.getTotalLength());
              return [svg.x + end.x, svg.y + end.y];
            }""",
            [plot, mark],
        )
        page.mouse.move(x, y)
        shown = page.locator(".tip").inner_text()
        assert shown.startswith(f"job {best}: val/acc {values[best]:.4f}"), plot
        assert page.locator("#jobs tr.on").count() == 1
        assert page.locator("#jobs tr.on td").first.inner_text() == best
        page.mouse.move(0, 0)
        assert not page.locator(".tip").is_visible()
    links = page.locator("#jobs a")
    assert links.count() == sum(int(name) % 2 for name in map(str, range(COUNT)))
    last = links.last.inner_text()
    links.last.click()
    assert page.locator("body").inner_text() == f"the report of job {last}"


def test_jobs_are_brushed_sorted_and_copied(folder, open_page, serve):
    page = open_page(f"{serve(folder)}/sweep.html").page
    done = results(folder)
    page.locator("#parallel svg").scroll_into_view_if_needed()
    box = page.locator("#parallel .grip").first.bounding_box()
    x = box["x"] + box["width"] / 2
    page.mouse.move(x, box["y"] + 6)
    page.mouse.down()
    page.mouse.move(x, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    count = int(page.locator("#count").inner_text().split()[0])
    assert 150 < count < 350
    shown = page.locator("#jobs tbody tr:not([hidden])")
    assert shown.count() == count == COUNT - page.locator("#curves .off").count()
    rates = page.evaluate(
        "[...document.querySelectorAll('#jobs tbody tr')].map(row => [row.hidden, +row.cells[3].dataset.value])"
    )
    # The upper half of the axis: the larger rates.
    assert max(rate for hidden, rate in rates if hidden) < min(
        r for hidden, r in rates if not hidden
    )
    page.get_by_role("button", name="clear").click()
    assert shown.count() == COUNT and page.locator(".off").count() == 0

    # A part of the lines of one value: all of its jobs.
    box = page.locator("#parallel .grip").nth(1).bounding_box()
    x, middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, middle - 12)
    page.mouse.down()
    page.mouse.move(x, middle - 6, steps=3)
    page.mouse.up()
    chosen = sum('"model.hidden=[256]"' in p.read_text() for p in folder.glob("*/result.json"))
    assert shown.count() == chosen > 100
    page.get_by_role("button", name="clear").click()

    page.locator("#jobs th button", has_text="optimizer.lr").click()
    names = page.locator("#jobs tbody tr td:first-child").all_inner_texts()
    sorted_rates = [rate_of(done[name]) for name in names if name in done]
    assert len(sorted_rates) == len(done) and sorted_rates == sorted(sorted_rates)
    page.locator("#jobs th button", has_text="val/acc").click()
    page.locator("#jobs th button", has_text="val/acc").click()
    names = page.locator("#jobs tbody tr td:first-child").all_inner_texts()
    values = [done[name]["best"]["value"] for name in names[: len(done)]]
    assert [round(v, 4) for v in values] == sorted((round(v, 4) for v in values), reverse=True)

    spread = page.locator("#spread")
    assert spread.inner_text() == ""
    page.select_option("#setting", label="model.hidden")
    assert spread.inner_text() == "Jobs with the same value are spread out sideways."
    ticks = page.locator("#scatter text").all_text_contents()
    places = [ticks.index(name) for name in ("[128]", "[256]", "[256,256]")]
    assert places == sorted(places)

    page.locator("button.copy").first.click()
    best = max(done.values(), key=lambda result: result["best"]["value"])
    copied = page.evaluate("navigator.clipboard.readText()")
    assert f"optimizer.lr={rate_of(best)}" in copied  # with all digits


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_it_stands_alone_and_is_legible(folder, open_page, width, scheme):
    opened = open_page(folder / "sweep.html", width=width, scheme=scheme)
    assert len(opened.requests) == 1 and opened.complaints == []
    assert opened.pale() == [] and opened.overflowing() == []
    inside = "place => place.scrollWidth <= place.clientWidth"
    assert opened.page.locator("#parallel").evaluate(inside)
    outside = """svg => {
      const {left, right} = svg.getBoundingClientRect();
      const boxes = [...svg.querySelectorAll("text, rect.choice")].map(part => part.getBoundingClientRect());
      return boxes.filter(box => box.left < left || box.right > right).length;
    }"""
    assert opened.page.locator("#parallel svg").evaluate(outside) == 0
    # The box of a value covers the ends of the lines of its jobs.
    assert opened.page.locator("rect.choice").count() == 5


def test_labels_of_axes_do_not_touch_and_pruned_jobs_have_their_value(open_page, tmp_path):
    for i in range(4):
        typed = [f"optimizer.weight_decay={10.0**-i}", f"model.hidden=[256,{i % 2}]"]
        typed.append(f"optimizer.some_long_name={i}")
        best = {"name": "val/acc", "mode": "max", "step": 10, "value": 0.75}
        result = {"overrides": typed, "best": best, "seconds": 1.0}
        if i == 3:
            result["stopped"] = {"kind": "pruned", "text": "pruned at evaluation 2"}
            best["value"] = 0.5
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "result.json").write_text(json.dumps(result))
    (tmp_path / "sweep.json").write_text("{}")
    redraw([str(tmp_path)])
    page = open_page(tmp_path / "sweep.html", width=390).page
    boxes = "parts => parts.map(part => part.getBoundingClientRect()).map(({left, right}) => [left, right])"
    for names in ("#parallel .name text:nth-of-type(1)", "#parallel .name .strong"):
        ends = page.locator(names).evaluate_all(boxes)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends) if a[1] > a[0] and b[1] > b[0])
    assert {"[256,0]", "[256,1]"} <= set(page.locator("#parallel text.choice").all_text_contents())
    assert page.evaluate("shades.slice(0, 3)") == [1, 1, 1]  # all of them are the best
    # The cross is at 0.5, below the three dots, which are at 0.75. Two have the same
    # choice and are drawn side by side.
    page.select_option("#setting", label="model.hidden")
    places = page.locator("#scatter circle.job").evaluate_all(
        "parts => parts.map(part => [part.cx.baseVal.value, part.cy.baseVal.value])"
    )
    assert len({y for _, y in places}) == 1 and len({x for x, _ in places}) == 3
    top = page.locator("#scatter circle.job").first.bounding_box()["y"]
    bottom = page.locator("#scatter path.grid").evaluate_all(
        "parts => Math.max(...parts.map(part => part.getBoundingClientRect().bottom))"
    )
    cross = page.locator("#scatter path.cross").bounding_box()["y"]
    assert top < cross < bottom
    row = page.locator("#jobs tbody tr").last
    assert row.locator("td.number.soft").all_inner_texts() == ["0.5000", "1.0"]
    assert page.locator("#parallel path.job.pruned").count() == 1
