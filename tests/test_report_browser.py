"""The report in a real browser: nothing is asked for, nothing is complained of, light and dark,
wide and narrow.
"""

import contextlib
import json
import os
import shutil
import subprocess

import pytest

from stoker.runs import plots, report

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif(
        os.name != "posix", reason="the browser is spoken to through inherited pipes"
    ),
]
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)


class Browser:
    """A headless Chromium, spoken to by the DevTools protocol: JSON and a zero byte, through pipes
    3 and 4.
    """

    def __init__(self, folder):
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()
        for number in (read, write):
            os.set_inheritable(number, True)
        shell = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        command = ["bash", "-c", shell, CHROMIUM, *SWITCHES.split(), f"--user-data-dir={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(read, write), **quiet)
        os.close(read)
        os.close(write)
        self.left, self.number, self.events, self.session = b"", 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {
            "sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """What the browser answers; the events before that are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self.next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next(self):
        while b"\0" not in self.left:
            part = os.read(self.read, 2**16)
            assert part, "the browser has ended"
            self.left += part
        message, _, self.left = self.left.partition(b"\0")
        return json.loads(message)

    def open(self, path, width, scheme="light"):
        """Shows the file to a screen of this width that wants light or dark; gives the events until
        it was there.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="", features=wanted)
        self.events = []
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())
        return self.events

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def close(self):
        with contextlib.suppress(OSError):
            os.write(self.write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)


@pytest.fixture(scope="module")
def page(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert forks.run(folder, "epochs=2", "run_dir=run").code == 0
    return report.write(folder / "run")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_is_whole_and_asks_for_nothing(page, browser, scheme, width):
    events = browser.open(page, width, scheme)
    complaints = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [event for event in events if event["method"] in complaints] == []
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in sent if not url.startswith("data:")] == [page.as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    whole = "[...document.querySelectorAll('.whole, footer code')].map(part => part.getClientRects().length)"
    assert set(browser.value(whole)) == {1} and len(browser.value(whole)) == 33  # none is broken
    cut = "[...document.querySelectorAll('.wide')].filter(part => part.scrollWidth > part.clientWidth)"
    assert browser.value(
        f"{cut}.every(part => getComputedStyle(part).backgroundImage.includes('gradient'))"
    )
    assert browser.value(f"{cut}.length") or width > 390
    assert browser.value(
        "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
    )
    assert browser.value("document.images.length") == 32 and browser.value(
        "document.querySelectorAll('svg').length"
    )
    backs = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 30)"}
    assert browser.value("getComputedStyle(document.body).backgroundColor") == backs[scheme]
    lines = browser.value(
        "getComputedStyle(document.querySelector('svg.plot path[style*=\"--val\"]')).stroke"
    )
    assert lines == {"light": "rgb(10, 92, 196)", "dark": "rgb(108, 176, 255)"}[scheme]


CONTRASTS = """(() => {
  const dot = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = colour => {
    dot.fillStyle = colour; dot.fillRect(0, 0, 1, 1);
    const parts = [...dot.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const contrast = (a, b) => Math.max(light(a) / light(b), light(b) / light(a));
  const page = getComputedStyle(document.body), cell = document.querySelector("td.cell"), cells = [];
  for (const kind of ["right", "wrong"]) for (let share = 0; share <= 100; share += 5) {
    cell.className = `cell ${kind}`; cell.style.setProperty("--share", share);
    cells.push(contrast(getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor));
  }
  const drawn = ["train", "val", "bad", ...[0, 1, 2, 3, 4, 5, 6, 7].map(i => `c${i}`)];
  return [Math.min(...cells), Math.min(...drawn.map(name =>
    contrast(page.getPropertyValue(`--${name}`), page.backgroundColor)))];
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_drawn_and_written_stands_out(page, browser, scheme):
    """By the measures of WCAG 2: 4.5 for text, here in the matrix's cells, and 3 for lines and
    bars.
    """
    browser.open(page, 1000, scheme)
    text, lines = browser.value(CONTRASTS)
    assert text >= 4.5 and lines >= 3


def test_a_request_would_be_noticed(page, browser, tmp_path):
    """What the test above looks for is found, and refused by the page's own policy."""
    text = page.read_text(encoding="utf-8").replace(
        "<main>", '<main><img src="http://localhost/x.png"><script>1</script>'
    )
    (tmp_path / "other.html").write_text(text, encoding="utf-8")
    events = browser.open(tmp_path / "other.html", 1200)
    assert len([event for event in events if event["method"] == "Log.entryAdded"]) == 2


@pytest.mark.parametrize("scale", [2e-3, 3e5])
def test_no_letter_of_a_plot_is_cut(browser, tmp_path, scale):
    points = [(i, scale * (i + 1)) for i in range(4)]
    drawn = (
        plots.curves("a", {"val": points}, points[1], "a"),
        plots.against("b", points, "b"),
        plots.results("c", ["1e-3", "1e-2", "0.1"], [scale, None, 3 * scale], 2, "c"),
        plots.results("d", ["a" * 300, "torch.nn.CrossEntropyLoss", "$x"], [1, 2, scale], 1, "d"),
    )
    (tmp_path / "plots.html").write_text("".join(drawn), encoding="utf-8")
    browser.open(tmp_path / "plots.html", 500)
    boxes = browser.value(
        "[...document.querySelectorAll('text')].map(text => [text, text.closest('svg')].map(part => "
        "(({left, right, top, bottom}) => [left, -right, top, -bottom])(part.getBoundingClientRect())))"
    )
    assert len(boxes) > 15
    assert all(
        inner > outer - 1 for text, frame in boxes for inner, outer in zip(text, frame, strict=True)
    )
