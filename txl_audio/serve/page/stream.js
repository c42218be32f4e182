// The server's side of things: its models, and one stream over a WebSocket.

export class ServerError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

const UNREACHABLE = new ServerError("unreachable", "the server cannot be reached");
const PIECE_BYTES = 65_536; // of a prompt, in one message

/** What /v1/models says. Throws ServerError. */
export async function listModels() {
  let answer;
  try {
    answer = await fetch("/v1/models");
  } catch {
    throw UNREACHABLE;
  }
  const body = await answer.json();
  if (!answer.ok) throw new ServerError(body.error.code, body.error.message);
  return body;
}

/**
 * One stream. `on` has a function for each event of the server, by type (queued, started, stats, text, finished),
 * `sound(Int16Array)`, and `failed(ServerError)`. After `close` none of them is called.
 */
export class Stream {
  constructor(start, prompt, on) {
    const url = new URL("/v1/stream", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this.on = on;
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      this.say("start", { ...start, prompt_bytes: prompt ? prompt.byteLength : 0 });
      if (!prompt) return;
      for (let at = 0; at < prompt.byteLength; at += PIECE_BYTES) this.socket.send(prompt.slice(at, at + PIECE_BYTES));
    };
    this.socket.onmessage = ({ data }) => this.receive(data);
    this.socket.onclose = () => this.fail(UNREACHABLE);
  }

  receive(data) {
    if (typeof data !== "string") return this.on.sound?.(new Int16Array(data));
    const event = JSON.parse(data);
    if (event.type === "error") return this.fail(new ServerError(event.code, event.message));
    const handler = this.on[event.type];
    if (event.type === "finished") this.close();
    handler?.(event);
  }

  fail(error) {
    const { failed } = this.on;
    this.close();
    failed?.(error);
  }

  set(drawing) {
    this.say("set", drawing);
  }

  pause() {
    this.say("pause");
  }

  resume() {
    this.say("resume");
  }

  /** Leaves: the server frees the place at once. */
  close() {
    this.on = {};
    this.socket.onclose = null;
    this.socket.close();
  }

  say(type, fields = {}) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }
}
