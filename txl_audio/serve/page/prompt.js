// What the model goes on from: a file or a recording.

import { decodeAudio, encodeWav, toInt16 } from "./wav.js";

export class PromptError extends Error {}

/** A file as Int16Array at `rate_hz`: its last `most_s` seconds. Throws PromptError. */
export async function readPrompt(file, { rate_hz, most_s, most_bytes }) {
  if (file.size > most_bytes) {
    throw new PromptError(
      `That file has ${megabytes(file.size)}, at most ${megabytes(most_bytes)} are taken. Choose a shorter one.`,
    );
  }
  let samples;
  try {
    samples = await decodeAudio(await file.arrayBuffer(), rate_hz);
  } catch {
    throw new PromptError("That file cannot be read as audio. Choose a WAV, FLAC, OGG or MP3 file.");
  }
  if (!samples.length) throw new PromptError("That file has no sound in it. Choose another one.");
  return samples.slice(-Math.floor(most_s * rate_hz));
}

function megabytes(bytes) {
  return `${(bytes / 2 ** 20).toFixed(1)} MB`;
}

/** Records the microphone. `onLevel(peak 0..1, seconds)` is called as it comes. Throws PromptError. */
export class Recording {
  static async begin(onLevel) {
    if (!navigator.mediaDevices) {
      throw new PromptError("The browser gives the microphone to https pages and to localhost only.");
    }
    let media;
    try {
      media = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: false } });
    } catch (error) {
      throw new PromptError(
        error.name === "NotFoundError"
          ? "No microphone was found. Connect one, or choose a file."
          : "The microphone was not allowed. Allow it for this page in the browser, or choose a file.",
      );
    }
    let context;
    try {
      // Of the device's rate: Firefox does not connect a microphone to a context of another one.
      context = new AudioContext();
      await context.audioWorklet.addModule("/page/worklet.js");
      const node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0, channelCount: 1 });
      context.createMediaStreamSource(media).connect(node);
      return new Recording(media, context, node, onLevel);
    } catch (error) {
      media.getTracks().forEach((track) => track.stop()); // the microphone does not stay on
      context?.close();
      throw new PromptError(`The browser cannot record (${error.message}); choose a file.`);
    }
  }

  constructor(media, context, node, onLevel) {
    this.media = media;
    this.context = context;
    this.blocks = [];
    let samples = 0;
    node.port.onmessage = ({ data }) => {
      this.blocks.push(data);
      samples += data.length;
      const peak = data.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
      onLevel(peak, samples / context.sampleRate);
    };
  }

  /** Ends it and lets the microphone go; returns a WAV file of the device's rate. */
  end() {
    this.media.getTracks().forEach((track) => track.stop());
    this.context.close();
    const blocks = this.blocks.map(toInt16);
    const samples = new Int16Array(blocks.reduce((sum, block) => sum + block.length, 0));
    blocks.reduce((at, block) => (samples.set(block, at), at + block.length), 0);
    return new File([encodeWav(samples, this.context.sampleRate)], "recording.wav");
  }
}
