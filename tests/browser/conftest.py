"""Pages in a real browser: Chromium, driven by Playwright."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SWITCHES = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-quic"
)

# The text that is too pale on its background by WCAG 2: below 4.5, or below 3 if it is large.
PALE = """() => {
  const dot = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    dot.clearRect(0, 0, 1, 1); dot.fillStyle = colour; dot.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = dot.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const back = part => {
    const layers = [];
    for (; part; part = part.parentElement) {
      layers.push(rgba(getComputedStyle(part).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reduceRight((under, top) => over(top, under), [255, 255, 255]);
  };
  const light = colour => {
    const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]) + 0.05;
  };
  const pale = [];
  for (const part of document.body.querySelectorAll("*")) {
    const text = [...part.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim();
    if (!text || !part.checkVisibility({visibilityProperty: true}) || part.closest("[disabled]")) continue;
    const style = getComputedStyle(part), under = back(part);
    const colour = over(rgba(part instanceof SVGElement ? style.fill : style.color), under);
    const [a, b] = [light(colour), light(under)], ratio = Math.max(a / b, b / a);
    const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    if (ratio < (large ? 3 : 4.5)) pale.push(`${ratio.toFixed(2)} ${part.tagName} ${text.slice(0, 40)}`);
  }
  return pale;
}"""

# What sticks out of the window at the right, unless it can be scrolled to inside the page.
OVERFLOWING = """() => {
  const wide = document.documentElement.clientWidth, out = [];
  const is_clipped = part => {
    for (part = part.parentElement; part && part !== document.body; part = part.parentElement)
      if (getComputedStyle(part).overflowX !== "visible") return true;
  };
  for (const part of document.body.querySelectorAll("*")) {
    const right = part.getBoundingClientRect().right;
    if (right > wide + 1 && !is_clipped(part))
      out.push(`${part.tagName}.${part.getAttribute("class")} ends at ${right.toFixed()}`);
  }
  if (document.documentElement.scrollWidth > wide) out.push("the page scrolls sideways");
  return out;
}"""


class Opened:
    """A page in the browser: `page` is Playwright's."""

    def __init__(self, page):
        self.page = page
        self.requests = []  # the URL of each request, but for `data:` and `blob:`
        self.complaints = []  # errors and warnings on the console, and exceptions
        page.on("request", self.add_request)
        page.on("console", self.add_complaint)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def add_request(self, request):
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def add_complaint(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def pale(self):
        """Return the texts whose contrast is too low."""
        return self.page.evaluate(PALE)

    def overflowing(self):
        """Return what does not fit into the width of the window."""
        return self.page.evaluate(OVERFLOWING)


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="install playwright")
    if CHROMIUM is None:
        pytest.skip("install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES.split())
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Open a file (a Path) or a URL: `open_page(path, width=390, scheme="dark")`; see `Opened`.

    What a page copies can be read back with `navigator.clipboard.readText()` if it has a URL.
    """
    contexts = []

    def open_page(address, width=1440, height=900, scheme="light"):
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        if isinstance(address, Path):
            address = address.absolute().as_uri()
        else:
            context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened = Opened(context.new_page())
        opened.page.goto(address)
        return opened

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def serve():
    """Serve a folder as `python -m http.server` does, and return its URL: `serve(folder)`."""
    servers = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    def serve(folder):
        handler = functools.partial(Handler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
