"""The page in a real browser: headless Chromium, found as $TXL_AUDIO_CHROMIUM or `chromium` on PATH."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.serve.conftest import Server
from tests.serve.models import expected
from txl_audio.sampling.sound import symbols_of

RATE_HZ = 16_000

expect.set_options(timeout=20_000)  # a busy machine is no failure


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = os.environ.get("TXL_AUDIO_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium, or set TXL_AUDIO_CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=[
                "--no-sandbox",  # which Chromium does not have for root
                "--autoplay-policy=no-user-gesture-required",
                "--use-fake-ui-for-media-stream",
                "--use-fake-device-for-media-stream",
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`visit(server, **options)`: its page, loaded. Every error in the page fails the test."""
    faults: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(server: Server, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.goto(server.url)
        expect(page.get_by_role("status")).to_contain_text("Ready")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def status(page: Page, words: str) -> None:
    expect(page.get_by_role("status")).to_contain_text(words)


def download(page: Page) -> bytes:
    with page.expect_download() as waiting:
        press(page, "Download")
    return Path(waiting.value.path()).read_bytes()


def samples(wav: bytes) -> np.ndarray:
    pcm, rate_hz = soundfile.read(io.BytesIO(wav), dtype="int16")
    assert rate_hz == RATE_HZ
    return pcm


def wav(pcm: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, pcm, RATE_HZ, format="WAV", subtype="PCM_16")
    return file.getvalue()


def loudness(pcm: np.ndarray) -> float:
    return float(np.sqrt(np.mean((pcm / 32768) ** 2)))


def ink(page: Page, canvas: str, colour: str) -> int:
    """How many pixels of a canvas are of a colour of the style sheet, nearly."""
    return page.evaluate(
        """([id, name]) => {
            const canvas = document.getElementById(id);
            const style = getComputedStyle(canvas).getPropertyValue(name).trim();
            const wanted = [1, 3, 5].map((i) => parseInt(style.slice(i, i + 2), 16));
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] > 200 && wanted.every((c, k) => Math.abs(data[i + k] - c) < 12)) count++;
            }
            return count;
        }""",
        [canvas, colour],
    )


def test_all_of_a_stream_is_heard_and_downloaded(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.get_by_label("Seconds").fill("2")
    page.get_by_label("Seed", exact=True).fill("7")
    page.evaluate(
        """() => {  // presses Pause as soon as it plays, however busy the machine is
            const status = document.querySelector("[role=status]");
            const observer = new MutationObserver(() => {
                if (!status.textContent.startsWith("Playing")) return;
                observer.disconnect();
                document.getElementById("play").click();
            });
            observer.observe(status, { childList: true });
        }"""
    )
    press(page, "Play")
    status(page, "Paused")
    page.wait_for_timeout(300)  # for what the audio thread reported before
    at = page.locator("#played").inner_text(), page.locator("#buffer").inner_text()
    page.wait_for_timeout(300)
    assert (page.locator("#played").inner_text(), page.locator("#buffer").inner_text()) == at
    press(page, "Resume")
    status(page, "Finished after 0:02")  # said by the worklet when it played the last sample
    assert ink(page, "wave", "--sound") > 500 and ink(page, "wave", "--prompt") == 0
    heard = samples(download(page))
    np.testing.assert_array_equal(heard, expected(7, 2 * RATE_HZ))
    press(page, "Play")  # the same again
    status(page, "Playing")


def test_a_slider_acts_while_it_plays(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.get_by_label("until I stop it").check()
    press(page, "Play")
    status(page, "Playing")
    page.get_by_label("Temperature").fill("0.1")  # of the noise that is served it is the loudness
    expect(page.locator("#played")).to_have_text("0:04")
    press(page, "Stop")
    status(page, "Stopped")
    heard = samples(download(page))
    begin, end = loudness(heard[: RATE_HZ // 4]), loudness(heard[-RATE_HZ // 2 :])
    assert end == pytest.approx(0.1 * begin, rel=0.1)


def test_it_goes_on_from_a_dropped_file(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    prompt = (8000 * np.sin(2 * np.pi * 440 * np.arange(2.5 * RATE_HZ) / RATE_HZ)).astype(np.int16)
    page.evaluate(
        """(bytes) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([new Uint8Array(bytes)], "said.wav"));
            document.getElementById("drop").dispatchEvent(
                new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        list(wav(prompt)),
    )
    status(page, "go on from said.wav, 2.5 s")
    page.get_by_label("Seconds").fill("1")
    press(page, "Play")  # its file is sent in two pieces
    status(page, "Finished after 0:03")
    assert ink(page, "wave", "--prompt") > 500 and ink(page, "wave", "--sound") > 500
    heard = samples(download(page))
    np.testing.assert_array_equal(heard, np.concatenate([prompt, expected(0, RATE_HZ)]))
    (given,) = server.tiny.prompts
    assert given is not None and server.tiny.codec is not None
    np.testing.assert_array_equal(given, symbols_of(prompt.astype(np.float32) / 32768, server.tiny.codec))


def test_it_goes_on_from_the_microphone(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)  # Chromium's device beeps
    press(page, "Record")
    expect(page.locator("#prompt-name")).to_have_text(re.compile("Recording, [1-9]"))
    press(page, "Done")
    status(page, "go on from recording.wav")
    page.get_by_label("Seconds").fill("1")
    press(page, "Play")
    status(page, "Finished")
    heard = samples(download(page))
    recorded = len(heard) - RATE_HZ
    assert recorded >= RATE_HZ and loudness(heard[:recorded]) > 0.01
    (given,) = server.tiny.prompts
    assert given is not None and len(given) == recorded


def test_a_microphone_that_is_not_there_or_not_allowed(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    for name, words in (("NotFoundError", "No microphone was found"), ("NotAllowedError", "Allow it for")):
        page.evaluate(
            """(name) => {
                navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException("", name));
            }""",
            name,
        )
        press(page, "Record")
        status(page, words)
        expect(page.get_by_role("status")).to_have_class(re.compile("warn"))
    press(page, "Play")  # the rest of the page goes on
    status(page, "Playing")


def test_the_microphone_is_let_go(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.evaluate(
        """() => {
            const { mediaDevices } = navigator;
            const open = mediaDevices.getUserMedia.bind(mediaDevices);
            window.media = [];
            mediaDevices.getUserMedia = async (wanted) => {
                const stream = await open(wanted);
                window.media.push(stream);
                return stream;
            };
        }"""
    )
    states = "window.media.flatMap((stream) => stream.getTracks().map((track) => track.readyState))"
    record = page.get_by_role("button", name="Record")
    record.evaluate("(button) => { button.click(); button.click(); }")  # impatient
    expect(page.locator("#prompt-name")).to_contain_text("Recording, ")
    expect(page.get_by_label("Model", exact=True)).to_be_disabled()
    assert page.evaluate(states) == ["live"]
    press(page, "Done")
    status(page, "go on from recording.wav")
    expect(page.get_by_label("Model", exact=True)).to_be_enabled()
    assert page.evaluate(states) == ["ended"]
    page.evaluate('() => { AudioWorkletNode = class { constructor() { throw new Error("no worklet"); } }; }')
    press(page, "Record")
    status(page, "The browser cannot record (no worklet); choose a file.")
    assert page.evaluate(states) == ["ended", "ended"]
    expect(record).to_be_enabled()


def test_stopping_while_it_begins_is_no_error(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.evaluate(
        """() => {
            const { addModule } = AudioWorklet.prototype;
            AudioWorklet.prototype.addModule = async function (url) {
                AudioWorklet.prototype.addModule = addModule; // the next time is as ever
                await new Promise((resolve) => (window.release = resolve));
                return addModule.call(this, url);
            };
        }"""
    )
    press(page, "Play")
    page.wait_for_function("() => Boolean(window.release)")
    press(page, "Stop")
    status(page, "Stopped")
    page.evaluate("() => window.release()")
    page.wait_for_timeout(300)
    status(page, "Stopped")
    expect(page.get_by_role("status")).not_to_have_class(re.compile("warn"))
    assert server.tiny.prompts == []  # nothing is made that nobody hears
    press(page, "Play")
    status(page, "Playing")


def test_only_the_keyboard(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)

    def go_to(label: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "(({ ariaLabel, labels, textContent }) => ariaLabel ?? labels?.[0]?.innerText ?? textContent)"
                "(document.activeElement)"
            )
            if label in (focused, page.evaluate("document.activeElement.innerText")):
                return
        pytest.fail(f"{label} is not reached with the Tab key")

    go_to("until I stop it")
    page.keyboard.press("Space")
    go_to("Play")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    page.keyboard.press("Space")
    status(page, "Playing")
    page.keyboard.press("Space")
    status(page, "Paused")
    go_to("Stop")
    page.keyboard.press("Enter")
    status(page, "Stopped")
    assert page.evaluate("document.activeElement.innerText") == "Stop"  # the focus is not lost
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input:not([type=file]), select, textarea")].filter(
            (e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.id)"""
    )
    assert nameless == []


def test_errors_say_what_to_do(serve: Callable[..., Server], visit: Callable[..., Page]) -> None:
    server = serve(stream_s=60.0, queue=0, slots=1)
    page, other = visit(server), visit(server)
    page.get_by_label("Seconds").fill("90")
    press(page, "Play")
    assert "0:" in page.locator("#played").inner_text()  # the field's own limit is said by the browser
    assert not page.get_by_label("Seconds").evaluate("field => field.checkValidity()")
    page.get_by_label("Seconds").fill("20")
    press(page, "Play")
    status(page, "Playing")
    press(other, "Play")
    status(other, "All 1 slots are taken and 0 streams wait")
    expect(other.get_by_role("status")).to_have_class(re.compile("warn"))
    expect(other.get_by_role("button", name="Play")).to_be_enabled()
    other.locator("#file").set_input_files({"name": "x.wav", "mimeType": "audio/wav", "buffer": b"RIFF"})
    status(other, "cannot be read as audio. Choose a WAV")
    press(page, "Stop")
    press(other, "Play")
    status(other, "Playing")


def test_a_token_is_asked_for(serve: Callable[..., Server], visit: Callable[..., Page]) -> None:
    server = serve(token="word")
    page = visit(server)
    page.get_by_label("This server asks for a token").fill("wrong")
    press(page, "Use it")
    press(page, "Play")
    status(page, "Enter the token that the server was started with")
    page.get_by_label("This server asks for a token").fill("word")
    press(page, "Use it")
    press(page, "Play")
    status(page, "Playing")


def test_a_slow_machine_collects_first(server: Server, visit: Callable[..., Page]) -> None:
    server.tiny.gate.clear()
    server.tiny.real_time_factor = 2.0
    page = visit(server)
    page.get_by_label("Seconds").fill("2")
    press(page, "Play")
    status(
        page, "slower than real time: a second of sound takes it 2.0 seconds. So it collects 2 seconds first"
    )
    assert page.locator("#played").inner_text() == "0:00"
    server.tiny.gate.set()
    status(page, "Finished after 0:02")
    assert page.locator("#underruns").inner_text() == "0"


def test_a_gap_is_counted_and_loses_nothing(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.get_by_label("Seconds").fill("3")
    press(page, "Play")
    status(page, "Playing")
    server.tiny.gate.clear()
    expect(page.locator("#underruns")).to_have_text(re.compile("[1-9]"))
    status(page, "Collecting")
    server.tiny.gate.set()
    status(page, "Finished after 0:03")
    np.testing.assert_array_equal(samples(download(page)), expected(0, 3 * RATE_HZ))


def test_text(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server)
    page.get_by_label("Model", exact=True).select_option("letters")
    expect(page.get_by_label("Waveform")).to_be_hidden()
    page.get_by_label("Text to go on from").fill("abba")
    page.get_by_label("Symbols").fill("100")
    press(page, "Play")
    status(page, "Finished")
    text = page.get_by_label("Text of the model").inner_text()
    assert re.fullmatch("abba[a-j\n]+", text)
    assert download(page).decode().startswith("abba")


def test_a_text_that_is_too_long(serve: Callable[..., Server], visit: Callable[..., Page]) -> None:
    page = visit(serve(message_bytes=1000))
    page.get_by_label("Model", exact=True).select_option("letters")
    page.get_by_label("Text to go on from").fill("a" * 2000)
    press(page, "Play")
    status(page, "Choose a shorter recording or text.")


def test_a_phone(server: Server, visit: Callable[..., Page]) -> None:
    page = visit(server, viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_label("Seconds").fill("1")
    press(page, "Play")
    status(page, "Finished")
    assert ink(page, "wave", "--sound") > 300
    # Nothing scrolls: the picture is filled from the left.
    columns = page.evaluate(
        """() => {
            const canvas = document.getElementById("wave");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const drawn = new Set();
            for (let i = 3; i < data.length; i += 4) if (data[i] > 0) drawn.add(((i - 3) / 4) % width);
            return [Math.min(...drawn), Math.max(...drawn)];
        }"""
    )
    assert columns[0] == 0 and 80 <= columns[1] <= 102
