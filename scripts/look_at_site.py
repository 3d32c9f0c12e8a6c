"""Look at every page of the documentation site in headless Chromium, at two widths, light and dark.

    make docs && python scripts/look_at_site.py site [--pictures FOLDER]

Prints the pages whose content is wider than the screen and the errors in the browser's console; exits with 1 if there
are any. A table or a block of code may scroll by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WIDTHS = (1400, 390)
SCHEMES = ("default", "slate")  # light and dark, in Material's words
LOOKER = """<!doctype html><body><script>
const [pages, width, scheme] = %s, found = {};
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const inside = frame.contentDocument;
  inside.body.setAttribute("data-md-color-scheme", scheme);
  await new Promise(done => setTimeout(done, 200));
  found[page] = inside.documentElement.scrollWidth;
  frame.remove();
}
(async () => {
  for (const page of pages) await look(page);
  document.body.dataset.found = JSON.stringify(found);
})();
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def browser(*options: str) -> subprocess.CompletedProcess[str]:
    """Run Chromium with a profile of its own."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sys.exit("no Chromium here: install it, or look at the pages in another browser")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [found, *quiet, f"--user-data-dir={profile}", *options], capture_output=True, text=True, timeout=600
        )


def look(site: Path, address: str, pages: list[str], width: int, scheme: str) -> list[str]:
    """What is wrong with the pages at one width and in one scheme."""
    frame = site / "look-at-site.html"
    frame.write_text(LOOKER % json.dumps([pages, width, scheme]))
    try:
        done = browser(
            "--window-size=1500,1000", "--virtual-time-budget=600000", "--dump-dom", f"{address}/{frame.name}"
        )
    finally:
        frame.unlink()
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    if found is None:
        return [f"Chromium gave no answer: {done.stderr[-500:]}"]
    widths: dict[str, int] = json.loads(found[1].replace("&quot;", '"'))
    wrong = [
        f"{page} is {inside} pixels wide at {width}, {scheme}" for page, inside in widths.items() if inside > width
    ]
    return wrong + [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that make docs has built")
    parser.add_argument("--pictures", type=Path, help="write a picture of every page at every width to this folder")
    given = parser.parse_args()
    pages = sorted(str(page.relative_to(given.site)) for page in given.site.rglob("*.html") if page.name != "404.html")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=given.site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    wrong = [each for width in WIDTHS for scheme in SCHEMES for each in look(given.site, address, pages, width, scheme)]
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
        for page in pages:
            for width in WIDTHS:
                out = given.pictures / f"{page.replace('/', '-')}-{width}.png"
                browser(f"--window-size={width},1600", f"--screenshot={out}", f"{address}/{page}")
    print("\n".join(wrong) or f"{len(pages)} pages fit {WIDTHS} pixels, light and dark, with no error in the console")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
