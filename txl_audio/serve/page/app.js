// The page: what is pressed and what is shown.

import { Picture } from "./picture.js";
import { isSlow } from "./player.js";
import { PromptError, Recording, readPrompt } from "./prompt.js";
import { SoundSession, TextSession } from "./session.js";
import { listModels, ServerError } from "./stream.js";
import { encodeWav } from "./wav.js";
import { clock, errorWords, stateWords } from "./words.js";

const TOP_K = [1, 2, 5, 10, 20, 40, 80, 160, 320]; // and one step more for all
const ALL_SYMBOLS = 1_000_000;

const $ = (id) => document.getElementById(id);
const picture = new Picture($("wave"), $("spectrum"));

let server; // what /v1/models says
let model;
let session = null;
let prompt = null; // {samples, name}
let recording = null;

// ---- Words and figures

function say(words, warn = false) {
  const status = $("status");
  status.classList.toggle("warn", warn);
  if (status.textContent !== words) status.textContent = words;
}

/** A button that is off keeps the focus, unlike one that is disabled. */
function enable(id, on) {
  $(id).setAttribute("aria-disabled", !on);
}

function isOn(id) {
  return $(id).getAttribute("aria-disabled") !== "true";
}

function render() {
  const active = Boolean(session?.active);
  const state = session?.state;
  $("play").textContent = state === "paused" ? "Resume" : active ? "Pause" : "Play";
  enable("play", Boolean(model) && state !== "connecting" && state !== "queued");
  enable("stop", active);
  enable("download", heardAnything());
  showModel();
  if (!session) return;
  say(stateWords(session, server.limits.idle_s), Boolean(session.error) || (active && isSlow(session.factor)));
  if (session instanceof TextSession) return;
  $("played").textContent = clock(session.played_s);
  $("buffer").textContent = `${session.buffered_s.toFixed(1)} s`;
  $("lag").textContent = `${session.lag_s.toFixed(1)} s`;
  $("factor").textContent = session.factor.toFixed(2);
  $("underruns").textContent = session.report.underruns;
}

/** Another one has another rate, for what plays and for what is recorded. */
function showModel() {
  $("model").disabled = Boolean(session?.active || recording || !isOn("record"));
}

function heardAnything() {
  if (session instanceof TextSession) return $("text").textContent !== "";
  return session !== null && session.report.played > 0;
}

function changed(of) {
  if (of !== session) return;
  render();
  if (session.error?.code === "unauthorised") askToken();
}

function animate() {
  if (!(session instanceof SoundSession)) return;
  picture.draw(session.position());
  if (session.active) requestAnimationFrame(animate);
}

// ---- Play, Pause, Stop, Download

async function play() {
  if (!isOn("play")) return;
  if (session?.active) {
    if (session.state === "paused") session.resume();
    else session.pause();
    return;
  }
  const faulty = [...document.querySelectorAll("input[type=number]")].find((field) => !field.checkValidity());
  if (faulty) {
    faulty.reportValidity();
    return;
  }
  if (model.kind === "text") playText();
  else await playSound();
}

function startMessage() {
  return {
    model: model.name,
    seed: $("seed").valueAsNumber,
    token: sessionStorage.getItem("token"),
    ...drawing(),
  };
}

async function playSound() {
  if (!window.isSecureContext) {
    say("Browsers play streams on https pages and on localhost only. Open this page there, through an SSH tunnel " +
      "for example: ssh -L 8000:localhost:8000 HOST", true);
    return;
  }
  const seconds = $("endless").checked ? null : $("seconds").valueAsNumber;
  const wav = prompt && encodeWav(prompt.samples, model.sample_rate_hz);
  const text = model.takes_text ? $("words").value : null;
  const request = { prompt: prompt?.samples, wav, start: { ...startMessage(), seconds, text } };
  const own = (session = new SoundSession(model, request, changed));
  const total_s = seconds === null ? null : seconds + (prompt?.samples.length ?? 0) / model.sample_rate_hz;
  $("length").textContent = total_s === null ? "" : `of ${clock(total_s)}`;
  picture.show(own.history);
  $("empty").hidden = true;
  render();
  try {
    await own.begin();
  } catch (error) {
    if (!own.active) return; // stopped while it began
    own.error = new ServerError("sound", `the browser cannot play sound (${error.message}); try another one`);
    own.stop();
  }
  requestAnimationFrame(animate);
}

function playText() {
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = $("words").value;
  const made = document.createTextNode("");
  $("text").replaceChildren(given, made);
  const tokens = $("endless").checked ? null : $("tokens").valueAsNumber;
  const start = { ...startMessage(), tokens, text: $("words").value };
  session = new TextSession(model, start, changed, (text) => {
    const box = $("text");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    made.appendData(text);
    if (atEnd) box.scrollTop = box.scrollHeight;
  });
  render();
}

function download() {
  if (!isOn("download")) return;
  const text = session instanceof TextSession;
  const data = text
    ? $("text").textContent
    : encodeWav(session.history.heard(session.report.played), session.rate_hz);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data], { type: text ? "text/plain" : "audio/wav" }));
  link.download = `${session.model.name}-seed${session.start.seed}.${text ? "txt" : "wav"}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// ---- Sliders

function drawing() {
  const p = $("top-p").valueAsNumber;
  const k = TOP_K[$("top-k").valueAsNumber];
  // null is the model's own setting; where that is not "all", all has to be said.
  return {
    temperature: $("temperature").valueAsNumber,
    top_p: p < 1 ? p : model.top_p && 1,
    top_k: k ?? (model.top_k && ALL_SYMBOLS),
  };
}

function showDrawing() {
  const p = $("top-p").valueAsNumber;
  $("temperature-value").textContent = $("temperature").valueAsNumber.toFixed(2);
  $("top-p-value").textContent = p < 1 ? p.toFixed(2) : "all";
  $("top-k-value").textContent = TOP_K[$("top-k").valueAsNumber] ?? "all";
  for (const id of ["top-p", "top-k"]) $(id).setAttribute("aria-valuetext", $(`${id}-value`).textContent);
}

function drawingMoved() {
  showDrawing();
  if (session?.active) session.set(drawing());
}

function resetDrawing() {
  const nearest = TOP_K.findIndex((k) => model.top_k !== null && k >= model.top_k);
  $("temperature").value = model.temperature;
  $("top-p").value = model.top_p ?? 1;
  $("top-k").value = nearest < 0 ? TOP_K.length : nearest;
  drawingMoved();
}

// ---- The prompt

async function usePrompt(file) {
  try {
    const samples = await readPrompt(file, {
      rate_hz: model.sample_rate_hz,
      most_s: server.limits.prompt_s,
      most_bytes: server.limits.upload_bytes,
    });
    setPrompt({ samples, name: file.name });
  } catch (error) {
    if (!(error instanceof PromptError)) throw error;
    say(error.message, true);
  }
}

function setPrompt(value) {
  prompt = value;
  const seconds = prompt && (prompt.samples.length / model.sample_rate_hz).toFixed(1);
  const words = prompt ? `${prompt.name}, ${seconds} s` : "No prompt: it begins from nothing.";
  $("prompt-name").textContent = words;
  $("clear").hidden = $("prompt-key").hidden = !prompt;
  if (prompt && !session?.active) say(`The model will go on from ${words}.`);
}

async function record() {
  if (!isOn("record")) return;
  if (recording) {
    const file = recording.end();
    recording = null;
    showRecording();
    await usePrompt(file);
    return;
  }
  enable("record", false); // until the microphone is there: a second one would stay on
  showModel();
  try {
    recording = await Recording.begin((peak, seconds) => {
      $("level").value = Math.max(peak, 0.9 * $("level").value);
      $("prompt-name").textContent = `Recording, ${Math.floor(seconds)} s`;
      if (seconds >= server.limits.prompt_s && recording) record();
    });
    say("Recording. Press Done when you have spoken.");
  } catch (error) {
    if (!(error instanceof PromptError)) throw error;
    say(error.message, true);
  }
  enable("record", true);
  showRecording();
}

function showRecording() {
  $("record").textContent = recording ? "Done" : "Record";
  $("record").classList.toggle("recording", Boolean(recording));
  $("level").hidden = !recording;
  $("choose").disabled = Boolean(recording);
  showModel();
}

// ---- Models and the token

function chooseModel() {
  model = server.models.find(({ name }) => name === $("model").value);
  const text = model.kind === "text";
  document.querySelectorAll(".sound-only").forEach((element) => (element.hidden = text));
  document.querySelectorAll(".text-only").forEach((element) => (element.hidden = !text));
  $("words-field").hidden = !model.takes_text;
  $("words-label").textContent = text ? "Text to go on from" : "What to say";
  $("seconds").max = server.limits.stream_s;
  $("tokens").max = server.limits.stream_tokens;
  $("top-frequency").textContent = `${model.sample_rate_hz / 2000} kHz`;
  session = null;
  setPrompt(null); // it has the rate of the model before
  resetDrawing();
  const factor = model.real_time_factor;
  const speed = factor ? `, ${(1 / factor).toFixed(1)} times real time on this server` : "";
  say(`Ready: ${model.name}, ${(model.parameters / 1e6).toFixed(1)} million parameters${speed}.`);
  render();
}

function askToken() {
  $("token-form").hidden = false;
  $("token").focus();
}

function takeToken(event) {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  $("token-form").hidden = true;
  $("play").focus();
}

async function load() {
  try {
    server = await listModels();
  } catch (error) {
    say(errorWords(error), true);
    return;
  }
  $("model").replaceChildren(...server.models.map(({ name }) => new Option(name)));
  chooseModel();
  if (server.token_needed && !sessionStorage.getItem("token")) askToken();
}

function filesOnly(handler) {
  return (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    handler(event);
  };
}

$("play").onclick = play;
$("stop").onclick = () => session?.stop();
$("download").onclick = download;
$("model").onchange = chooseModel;
$("reset").onclick = resetDrawing;
for (const id of ["temperature", "top-p", "top-k"]) $(id).oninput = drawingMoved;
$("record").onclick = record;
$("choose").onclick = () => $("file").click();
$("file").onchange = () => {
  if ($("file").files.length) usePrompt($("file").files[0]);
  $("file").value = ""; // the same file may be chosen again
};
$("clear").onclick = () => {
  setPrompt(null);
  $("choose").focus();
};
$("endless").onchange = () => {
  $("seconds").disabled = $("tokens").disabled = $("endless").checked;
};
$("dice").onclick = () => {
  $("seed").value = Math.floor(Math.random() * 100_000);
};
$("token-form").onsubmit = takeToken;
// Anywhere on the page: a file that misses the field would replace the page.
document.ondragover = filesOnly(() => $("drop").classList.add("over"));
document.ondragleave = () => $("drop").classList.remove("over");
document.ondrop = filesOnly(({ dataTransfer }) => {
  $("drop").classList.remove("over");
  if (model && model.kind === "audio" && dataTransfer.files.length) usePrompt(dataTransfer.files[0]);
});

load();
