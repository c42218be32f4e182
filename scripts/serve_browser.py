"""The shipped model in a real browser: its page plays for a minute, and the audio thread counts its gaps.

python scripts/serve_browser.py [--seconds 60] [--screenshot page.png]

Starts `txl-audio serve kathleen` and headless Chromium ($TXL_AUDIO_CHROMIUM, or `chromium` on PATH), presses
Play and prints one JSON object: what the page says at the end, how often the worklet ran dry, and
milliseconds from Play to sound.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import expect, sync_playwright

# The buffer's figure changes at every report of the worklet.
_WATCH = """() => {
    const begun = performance.now();
    const buffer = document.getElementById("buffer");
    new MutationObserver(() => {
        window.firstPlayed_ms ??= document.getElementById("status").textContent.startsWith("Playing")
            ? performance.now() - begun : undefined;
    }).observe(buffer, { childList: true });
    document.getElementById("play").click();
}"""


@contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "txl_audio.cli", "serve", "kathleen", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"listening on (http://\S+),", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--screenshot", default="page.png")
    options = parser.parse_args()
    chromium = os.environ.get("TXL_AUDIO_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no Chromium: apt-get install chromium, or set TXL_AUDIO_CHROMIUM to its path")
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(url)
        expect(page.get_by_role("status")).to_contain_text("Ready")
        page.get_by_label("Seconds").fill(str(options.seconds))
        page.evaluate(_WATCH)
        page.wait_for_timeout(1000 * options.seconds / 2)
        page.screenshot(path=options.screenshot, full_page=True)
        status = page.get_by_role("status")
        expect(status).to_contain_text(re.compile("Finished|Stopped"), timeout=10_000 * options.seconds)
        figures = {
            "status": status.inner_text(),
            "underruns": int(page.locator("#underruns").inner_text()),
            "play_to_sound_ms": round(page.evaluate("window.firstPlayed_ms")),
            "real_time_factor": float(page.locator("#factor").inner_text()),
            "screenshot": options.screenshot,
        }
        browser.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
