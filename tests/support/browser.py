"""Pages of a folder, looked at in a real browser: one process, a frame for each page, at several widths.

The browser needs no driver and no package: it loads a page of ours, which measures the others in a frame of
the width asked for and sends back what it found.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no chromium, chromium-browser or google-chrome on the PATH"
#: For a machine without a screen, and without connections to other hosts.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--window-size=1400,1000"),
)
SECONDS = 240

#: Measures the pages one after the other. An element is too wide if it ends outside of the page, or of a box
#: that hides what is outside of it, and no box around it scrolls.
PROGRAM = """
<!doctype html><body style="margin: 0"><script>
const jobs = JOBS;
const SKIPPED =
  "script, style, noscript, .md-search, .md-sidebar, .md-header, .md-skip, .md-top, .md-clipboard";
const SEEN = {opacityProperty: true, visibilityProperty: true};

function tooWide(page, width) {
  const found = [];
  if (page.documentElement.scrollWidth > width) found.push(`the page: ${page.documentElement.scrollWidth}`);
  for (const each of page.body.querySelectorAll("*")) {
    const box = each.getBoundingClientRect();
    if (!box.width || !box.height || each.closest(SKIPPED) || each.closest("svg > *")) continue;
    let [left, right] = [0, width];
    let scrolls = false;
    for (let up = each.parentElement; up && up !== page.body && !scrolls; up = up.parentElement) {
      const overflow = getComputedStyle(up).overflowX;
      scrolls = overflow === "auto" || overflow === "scroll";
      if (overflow !== "visible") right = Math.min(right, up.getBoundingClientRect().right);
    }
    if (!scrolls && (box.left < left - 1 || box.right > right + 1))
      found.push(`${each.tagName} ${each.className} ${each.textContent.trim().slice(0, 60)}: ${box.right}`);
  }
  return found;
}

/* Boxes whose contents are wider than themselves: a reader has to move them to read a line. */
function scrolling(page) {
  const found = [];
  for (const each of page.querySelectorAll(".md-content *")) {
    const more = each.scrollWidth - each.clientWidth;
    if (more > 1 && /auto|scroll/.test(getComputedStyle(each).overflowX))
      found.push(`${kind(each)} ${more}: ${each.textContent.trim().slice(0, 60)}`);
  }
  return found;
}

function kind(box) {
  if (box.closest(".cards")) return "cards";
  return box.closest(".ruled") ? "printed table" : box.querySelector("table") ? "table" : box.tagName;
}

/* Text that a reader sees without scrolling. */
function firstScreen(page, width, height) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  let text = "";
  while (walker.nextNode()) {
    const range = page.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    const seen = walker.currentNode.parentElement;
    if (seen.closest(SKIPPED) || !seen.checkVisibility(SEEN)) continue;
    if (box.width && box.left >= 0 && box.right <= width && box.top >= 0 && box.bottom <= height)
      text += walker.currentNode.data;
  }
  return text;
}

async function look() {
  const views = [];
  for (const [path, sizes] of jobs) {
    const frame = document.createElement("iframe");
    frame.style.border = "0";
    [frame.width, frame.height] = sizes[0];
    const loaded = new Promise(done => frame.onload = done);
    frame.src = `/${path}`;
    document.body.append(frame);
    await loaded;
    const style = frame.contentDocument.createElement("style");
    style.textContent = "* { transition: none !important; animation: none !important }";
    frame.contentDocument.head.append(style);
    for (const [width, height] of sizes) {
      [frame.width, frame.height] = [width, height];
      await new Promise(done => setTimeout(done, 60));  // the theme wraps tables when the page is there
      const page = frame.contentDocument;
      if (page.title === "Error response") throw `${path} is not there`;
      const text = firstScreen(page, width, height);
      views.push({path, width, wide: tooWide(page, width), scrolling: scrolling(page), text});
    }
    frame.remove();
  }
  return views;
}
const send = views => fetch("/-/views", {method: "POST", body: JSON.stringify(views)});
look().catch(String).then(send);
</script>
"""


@dataclass(frozen=True)
class View:
    """A page at a width.

    Attributes:
        path: path of the page in its folder.
        width: width of the window, in CSS pixels.
        wide: elements that are cut, or wider than the page, and that no box around them scrolls.
        scrolling: boxes that scroll sideways: what they hold, by how many pixels, and the first words.
        text: text of the first screen.
    """

    path: str
    width: int
    wide: list[str]
    scrolling: list[str]
    text: str


class _Handler(SimpleHTTPRequestHandler):
    """A folder's files, and the program at /-/program, which posts what it found."""

    def __init__(self, *args: Any, program: str, views: queue.Queue[Any], **options: Any) -> None:
        self.program, self.views = program.encode(), views
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path != "/-/program":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.program)

    def do_POST(self) -> None:
        self.views.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def look(folder: Path, paths: Sequence[str], sizes: Sequence[tuple[int, int]]) -> list[View]:
    """Return the views of pages of a folder, at windows of several widths and heights."""
    assert BROWSER is not None, NO_BROWSER
    views: queue.Queue[Any] = queue.Queue()
    program = PROGRAM.replace("JOBS", json.dumps([(path, list(sizes)) for path in paths]))
    handler = partial(_Handler, directory=str(folder), program=program, views=views)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/-/program"
        process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = views.get(timeout=SECONDS)
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    assert isinstance(found, list), found
    return [View(**each) for each in found]
