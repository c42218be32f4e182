// What the page says about where a stream is.

import { isSlow, MOST_S } from "./player.js";

const ADVICE = {
  unreachable: "Check that it is running, then press Play again.",
  busy: "Press Play again in a moment.",
  limit: "Stop another stream of yours, in another tab perhaps.",
  unauthorised: "Enter the token that the server was started with.",
  bad_audio: "Choose another recording.",
  too_large: "Choose a shorter recording or text.",
  too_long: "Choose a smaller length.",
  idle: "Press Play to begin a new one.",
  shutdown: "Press Play when it is back.",
  unknown_model: "Load this page again.",
};

/** The server's line and what to do. */
export function errorWords({ code, message }) {
  const line = message[0].toUpperCase() + message.slice(1).replace(/\.$/, "");
  return `${line}. ${ADVICE[code] ?? ""}`.trim();
}

export function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

/** One sentence or two on a session. `idle_s` is how long the server bears a pause. */
export function stateWords(session, idle_s) {
  if (session.error) return errorWords(session.error);
  const heard = session.played_s === undefined ? "" : ` after ${clock(session.played_s)}`;
  switch (session.state) {
    case "connecting":
      return session.prompt?.length ? "The model listens to your prompt…" : "The model gets ready…";
    case "queued":
      return `All places are taken; you are number ${session.place} in the queue.`;
    case "collecting":
      if (!isSlow(session.factor)) return "Collecting a little sound…";
      return `${slowWords(session)} ${collectingWords(session)}`;
    case "playing":
      return isSlow(session.factor) ? `Playing. ${slowWords(session)}` : "Playing.";
    case "paused":
      return `Paused. The server keeps the place for ${idle_s} seconds.`;
    default:
      return session.complete ? `Finished${heard}.` : `Stopped${heard}.`;
  }
}

function slowWords({ factor }) {
  return `This machine is slower than real time: a second of sound takes it ${factor.toFixed(1)} seconds.`;
}

function collectingWords({ collect_s, buffered_s, factor }) {
  const missing_s = Math.max(0, collect_s - buffered_s) * factor;
  const wait_s = Math.max(5, 5 * Math.ceil(missing_s / 5)); // in fives, so that it is not read out all the time
  const then = collect_s < MOST_S ? "play without a break" : "play in stretches";
  return `So it collects ${Math.ceil(collect_s)} seconds first, to ${then}; about ${wait_s} seconds to go.`;
}
