"""The index of 1,000 runs in a browser: sorted, filtered and compared."""

import json
import re
import time

import pytest
from made_runs import make_run

from stoker.runs import index, lock

RATES = (0.1, 0.02, 0.005)
BAD = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A thousand runs, which begin one hour after another; each 20th failed, and one is odd."""
    folder = tmp_path_factory.mktemp("index")
    for i in range(1000):
        model, data = ("mlp.MLP", "digits") if i % 2 else ("cnn.CNN", "mnist")
        typed = [f"optimizer.lr={RATES[i % 3]}", f"seed={i}", "epochs=5"]
        status = "failed" if i % 20 == 7 else "done"
        start = 1_700_000_000 + 3600 * i
        make_run(folder / f"run {i}", typed, status, data, model, RATES[i % 3], start, epochs=5)
    make_run(folder / BAD.replace("/", "\\"), [f"note={BAD}"], at=1_600_000_000, epochs=5)
    index.write(folder)
    return folder


def names(opened):
    """Return the names of the rows that can be seen, in order."""
    visible = (
        "rows => rows.filter(row => !row.hidden).map(row => row.querySelector('.name').innerText)"
    )
    return opened.page.locator("#list tbody tr").evaluate_all(visible)


def sorted_by(opened, column):
    opened.page.locator("#list th button", has_text=re.compile(f"^{column}$")).click()
    return names(opened)


def test_a_thousand_runs_are_sorted_filtered_and_compared(open_page, serve, folder):
    address = f"{serve(folder)}/index.html"
    opened = open_page(address)
    page = opened.page
    newest_first = [f"run {i}" for i in reversed(range(1000))] + [BAD]
    assert names(opened) == newest_first
    assert "1,001 runs" in page.locator("#counts").inner_text()
    assert "50 failed" in page.locator("#counts").inner_text()

    assert sorted_by(opened, "started") == newest_first[::-1]
    by_name = sorted_by(opened, "name")
    assert by_name == [BAD] + newest_first[:-1][::-1]  # run 2 before run 10
    best = sorted_by(opened, "best")  # the failed ones last
    rates = [RATES[int(name.split()[1]) % 3] for name in best[1:951] if name != BAD]
    assert rates == sorted(rates, reverse=True)
    assert {int(name.split()[1]) % 20 for name in best[-50:]} == {7}
    head = page.locator("#list th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending" and head.inner_text() == "best"

    page.fill("#filter", "mnist optimizer.lr=0.02")
    expected = [f"run {i}" for i in range(1000) if i % 2 == 0 and i % 3 == 1]
    assert sorted(names(opened)) == sorted(expected)
    assert page.locator("#shown").inner_text() == f"{len(expected)} of 1,001"
    page.fill("#filter", "nothing like it")
    assert names(opened) == [] and page.locator("#none").is_visible()
    page.fill("#filter", "")

    for name in ("run 10", "run 12", "run 14"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    assert page.locator("#overlays figcaption").all_inner_texts() == [
        "val/acc",
        "val/loss",
        "train/loss",
    ]
    for figure in page.locator("#overlays figure").all():
        assert figure.locator("path.run").count() == 3
    table = page.locator("#differences tr")
    rows = [re.split(r"\s*\t\s*", text.strip()) for text in table.all_inner_texts()]
    assert rows[0] == ["run 10", "run 12", "run 14"]
    assert [row[0] for row in rows[1:]] == ["best", "optimizer.lr", "seed"]  # not data, not epochs
    assert rows[2][1:] == ["0.02", "0.1", "0.005"] and rows[3][1:] == ["10", "12", "14"]
    page.locator("#overlays svg").first.hover(position={"x": 70, "y": 60})
    assert "at step 20: run 12" in page.locator(".tip").inner_text()
    colours = page.locator("path.run").evaluate_all(
        "paths => paths.map(path => getComputedStyle(path).stroke)"
    )
    assert len(set(colours[:3])) == 3
    page.get_by_label("Compare run 12", exact=True).uncheck()
    assert page.locator("path.run").count() == 6
    page.get_by_role("button", name="Clear selection").click()
    assert page.locator("path.run").count() == 0 and page.locator("#compared").is_hidden()

    assert opened.requests == [address] and opened.complaints == []
    page.get_by_role("link", name="run 998", exact=True).click()
    assert page.url == f"{address.rpartition('/')[0]}/run%20998/report.html"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "dark")])
def test_it_can_be_read(open_page, folder, width, scheme):
    opened = open_page(folder / "index.html", width=width, scheme=scheme)
    for i in range(9):  # one more than there are colours
        opened.page.locator("#list input").nth(i).check()
    assert opened.overflowing() == [] and opened.pale() == []
    table = opened.page.locator("#list")
    assert table.locator("tbody .test").first.is_visible()
    assert table.bounding_box()["width"] <= width  # nothing has to be scrolled to
    assert opened.page.locator("#overlays").bounding_box()["width"] > 0.8 * min(width, 1440)
    lines = opened.page.locator("#overlays figure").first.locator("path.run")
    assert lines.nth(8).evaluate("line => getComputedStyle(line).strokeDasharray") != "none"
    assert opened.complaints == []


def test_it_opens_with_few_layouts(open_page, folder):
    """A layout per row would make a large index slow; the time itself depends on the machine."""
    opened = open_page("about:blank")
    session = opened.page.context.new_cdp_session(opened.page)
    session.send("Performance.enable")
    opened.page.goto((folder / "index.html").as_uri())
    values = session.send("Performance.getMetrics")["metrics"]
    counts = {value["name"]: value["value"] for value in values}
    assert counts["LayoutCount"] <= 5 and counts["RecalcStyleCount"] <= 10


def test_the_settings_of_a_row_repeat_nothing_and_a_run_in_progress_has_a_time(open_page, tmp_path):
    typed = ["dataset=csv", "dataset.path=data/houses.csv", "model=mlp", "seed=3"]
    make_run(tmp_path / "a", typed, data="csv, path: data/houses.csv", rate=97.5 / 60)
    make_run(tmp_path / "b", status="stopped")
    times = {"started": 1, "resumed": time.time() - 600}
    overrides = ["model=cnn,mlp", "hydra.sweep.dir=runs/b"]
    (tmp_path / "b/status.json").write_text(json.dumps({**times, "overrides": overrides}))
    with lock.held(tmp_path / "b"):
        index.write(tmp_path)
    page = open_page(tmp_path / "index.html").page
    settings = page.locator("#list td.settings")
    by_name = dict(
        zip(
            page.locator("#list td.name").all_inner_texts(), settings.all_inner_texts(), strict=True
        )
    )
    assert by_name == {"a": "seed=3", "b": "model=cnn,mlp"}
    assert " ".join(typed) in settings.evaluate_all("cells => cells.map(cell => cell.title)")
    assert sorted(page.locator("#list td.seconds").all_inner_texts()) == ["10 min 0 s", "97.5 s"]
    page.fill("#filter", "dataset=csv")
    assert page.locator("#list tbody tr:not([hidden]) .name").all_inner_texts() == ["a"]
    assert page.locator("#hint").inner_text() == "Select runs to compare their curves and settings."
    place = page.locator("#list").bounding_box()
    page.get_by_label("Compare a", exact=True).check()
    assert page.locator("#list").bounding_box() == place
    assert page.locator("#hint").is_hidden()
    assert page.get_by_role("link", name="Comparison of 1 run").is_visible()
    assert page.locator("#legend .key").all_inner_texts() == ["a"]


def test_names_stay_whole_and_a_run_without_an_evaluation_has_no_curve(open_page, tmp_path):
    """At 1280 pixels, and among runs that were evaluated."""
    typed = ["epochs=3", "optimizer.lr=2e-3"]
    names = ["2026-11-24_13-22-15_transformer-on-wikitext", "again", "new"]
    make_run(tmp_path / names[0], typed, data="tinyshakespeare")
    make_run(tmp_path / names[1], ["epochs=3", "optimizer.lr=0.002", "seed=1"])
    make_run(tmp_path / names[2], status="stopped")
    rows = [{"step": step, "epoch": 0.1, "train/loss": 1.0 / step} for step in (1, 2, 3)]
    (tmp_path / "new" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for job in ("0", "1"):
        make_run(tmp_path / "sweep" / job, typed)
    best = {"name": "val/acc", "mode": "max", "step": None, "value": 0.9}
    record = {"typed": ["-m"], "jobs": 2, "best_jobs": ["0", "1"], "best": best}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(record))
    index.write(tmp_path)
    opened = open_page(tmp_path / "index.html", width=1280)
    page = opened.page
    lines = "links => links.map(link => link.getBoundingClientRect().height / parseFloat(getComputedStyle(link).lineHeight))"
    assert set(map(round, page.locator("#list td.name > *").evaluate_all(lines))) == {1}
    assert page.locator("#list").bounding_box()["width"] <= 1240
    assert page.locator("#list td.settings").first.bounding_box()["width"] >= 150
    assert page.locator("#list tbody tr svg").count() == 3
    head = page.locator("#list th.best")
    assert head.locator("button").bounding_box()["width"] > head.bounding_box()["width"] - 20
    for name in names[:2]:
        page.get_by_label(f"Compare {name}", exact=True).check()
    rows = page.locator("#differences td:first-child").all_inner_texts()
    assert rows == ["best", "data", "seed"]  # neither epochs nor optimizer.lr
    shown = page.evaluate("[0.975, 1, 19.3, 12517.4, 0, 2e-5, 0.00123].map(number)")
    expected = ["0.9750", "1.0000", "19.3000", "12,517", "0.0000", "0.00002", "0.0012"]
    assert shown == expected
