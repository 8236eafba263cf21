"""Opens docs/report.html in a headless Chromium and fails on what a reader would stumble over.

    python3 tests/report/check.py [--page FILE] [--screenshots FOLDER]

At 390 and 1440 pixels, light and dark: the page loads and runs without a word on the console, asks
for nothing but itself, is not wider than the window, has its charts, and paints within a second.
Pages that are wrong in each of these ways must be found out first, so that the check is known to
check. Needs Python's standard library and a `chromium` on the path (or $CHROMIUM). Chromium is
spoken to over its debugging pipe.
"""

import argparse
import base64
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")
LEAST_CHARTS = 20
MOST_BYTES = 2_000_000
MOST_PAINT_MS = 1000
TIMEOUT_S = 60
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class Browser:
    """A Chromium, by its debugging pipe: JSON messages that end in a zero byte."""

    def __init__(self, profile):
        program = os.environ.get("CHROMIUM") or shutil.which("chromium")
        if program is None:
            sys.exit("check.py: no chromium on the path; install one or name it in $CHROMIUM")
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def hand_over():
            # Chromium reads from 3 and writes to 4. Copies above both first: one may be the other.
            reads, writes = os.dup2(to_browser, 100), os.dup2(from_browser, 101)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=hand_over,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.numbers = itertools.count(1)
        self.rest = b""
        self.events = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """The result of a command; events that come before it are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if getattr(self, "session", None):
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def message(self):
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.rest:
            if time.monotonic() > deadline:
                raise RuntimeError("chromium does not answer")
            part = os.read(self.read_end, 1 << 20)
            if not part:
                raise RuntimeError("chromium ended")
            self.rest += part
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def wait_for(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.message())

    def evaluate(self, expression):
        result = self("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def open(self, page, width, scheme):
        """Loads a page; returns what it did that it should not have."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        url = page.resolve().as_uri()
        self("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")
        # What the page still has to say comes before the answer to this.
        pause = "new Promise(done => setTimeout(done, 50))"
        self("Runtime.evaluate", expression=pause, awaitPromise=True)
        return list(complaints(self.events, url))

    def close(self):
        try:
            self("Browser.close")
        except (OSError, RuntimeError):
            pass
        self.process.wait(timeout=TIMEOUT_S)


def complaints(events, url):
    for event in events:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                yield f"exception: {params['exceptionDetails'].get('text')}"
            case "Runtime.consoleAPICalled":
                yield f"console.{params['type']}"
            case "Log.entryAdded":
                yield f"log: {params['entry']['text']}"
            case "Network.requestWillBeSent":
                asked = params["request"]["url"]
                if asked != url and not asked.startswith("data:"):
                    yield f"asks for {asked}"


def faults(browser, page, width, scheme):
    """Everything that is wrong with a page in a window."""
    found = browser.open(page, width, scheme)
    widest = browser.evaluate("document.documentElement.scrollWidth")
    if widest > width:
        found.append(f"is {widest} pixels wide")
    charts = browser.evaluate("document.querySelectorAll('figure svg').length")
    if charts < LEAST_CHARTS:
        found.append(f"has {charts} charts; at least {LEAST_CHARTS} are expected")
    if browser.evaluate("/NaN|undefined|Infinity/.test(document.documentElement.outerHTML)"):
        found.append("shows a number that is none")
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('figure')]"
        ".filter(f => !f.querySelector('figcaption')?.textContent.trim()).length"
    )
    if unnamed:
        found.append(f"has {unnamed} figures without device, date and samples")
    return found


def first_paint(browser, page):
    """Milliseconds to the first paint, the least of three: other work on this machine is no fault
    of the page."""
    times = []
    for _ in range(3):
        browser.open(page, WIDTHS[0], SCHEMES[0])
        entries = "performance.getEntriesByName('first-contentful-paint')"
        for _ in range(40):
            if browser.evaluate(f"{entries}.length"):
                times.append(browser.evaluate(f"{entries}[0].startTime"))
                break
            time.sleep(0.05)
    return min(times, default=float("inf"))


def check_the_check(browser, page, folder):
    """Pages that are wrong must be found out."""
    sound = page.read_text(encoding="utf-8")
    for wrong, expected in [
        ("<script>throw new Error('x')</script>", "exception"),
        ("<script>console.warn('x')</script>", "console.warning"),
        ("<div style='width:2000px'>x</div>", "pixels wide"),
        ("<img src='https://example.invalid/x.png'>", "asks for"),
        ("<figure></figure>", "figures without"),
        ("<p>NaN</p>", "a number that is none"),
    ]:
        broken = folder / "broken.html"
        broken.write_text(sound.replace("</main>", wrong + "</main>"), encoding="utf-8")
        found = faults(browser, broken, WIDTHS[0], SCHEMES[0])
        if not any(expected in fault for fault in found):
            return [f"the check itself: {wrong} was not found out: {found}"]
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "report.html")
    parser.add_argument("--screenshots", type=pathlib.Path, help="folder to put pictures in")
    options = parser.parse_args()
    begun = time.monotonic()
    found = []
    size = options.page.stat().st_size
    if size > MOST_BYTES:
        found.append(f"{size} bytes; at most {MOST_BYTES} are allowed")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        browser = Browser(folder / "profile")
        try:
            found += check_the_check(browser, options.page, folder)
            backgrounds = set()
            for width, scheme in itertools.product(WIDTHS, SCHEMES):
                for fault in faults(browser, options.page, width, scheme):
                    found.append(f"{width} pixels, {scheme}: {fault}")
                backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
                if options.screenshots:
                    shoot(browser, options.screenshots, f"{width}-{scheme}.png")
            if len(backgrounds) != len(SCHEMES):
                found.append(f"light and dark have the backgrounds {backgrounds}")
            paint = first_paint(browser, options.page)
            if paint > MOST_PAINT_MS:
                found.append(f"paints after {paint:.0f} ms; {MOST_PAINT_MS} are allowed")
        finally:
            browser.close()
    for fault in found:
        print(f"{options.page.name}: {fault}", file=sys.stderr)
    seconds = time.monotonic() - begun
    print(f"{options.page.name}: {size} bytes, first paint {paint:.0f} ms, {seconds:.1f} s")
    return 1 if found else 0


def shoot(browser, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    picture = browser("Page.captureScreenshot", captureBeyondViewport=True)["data"]
    (folder / name).write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    sys.exit(main())
