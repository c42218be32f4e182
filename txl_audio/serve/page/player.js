// Plays a stream of samples, and decides how much of it is collected.

const LEAST_S = 0.4; // collected before it plays in any case: what a busy machine may be late by
const MOST_LEAST_S = 4;
const CLOSE_FACTOR = 0.5; // from here on it may turn out slow,
const CLOSE_S = 1.5; // so it collects until the server's first figures have come
const MARGIN = 1.1; // a machine that was slow may get slower

/** Collected at most: what needs more, as a stream without end does, comes in stretches. */
export const MOST_S = 30;

/** What the server may make ahead of playing; more would let sliders act later. */
export const AHEAD_S = 1.2;

const SLACK_S = 0.8; // over what should wait; with more, the server is told to pause
const STEP_S = 0.4;

/** Whether a second of sound takes more than a second. */
export function isSlow(factor) {
  return factor > 1;
}

/**
 * Seconds to collect before playing, so that the rest can be made while it plays.
 *
 * A second of sound takes `factor` seconds. While `remaining_s` seconds play, remaining_s / factor are made; the
 * difference has to be there before. remaining_s is Infinity for a stream without end.
 */
export function collectSeconds(factor, remaining_s, least_s = LEAST_S) {
  const missing_s = isSlow(factor) ? remaining_s * (1 - 1 / (factor * MARGIN)) : 0;
  const sure_s = factor > CLOSE_FACTOR ? Math.max(least_s, CLOSE_S) : least_s;
  return Math.min(sure_s + missing_s, remaining_s, MOST_S);
}

export class Player {
  /**
   * extra_s: sound that is there at the beginning.
   * onReport({buffered, played, playing, underruns, finished}), in samples, every 40 ms.
   * onInterrupted: the system took the sound away, as a phone does at a call.
   */
  constructor(rate_hz, { extra_s, onReport, onInterrupted }) {
    this.rate_hz = rate_hz;
    this.capacity_s = extra_s + 4 * MOST_S;
    this.least_s = LEAST_S;
    this.most_s = AHEAD_S + SLACK_S;
    this.underruns = 0;
    this.full = false;
    this.suspended = false;
    this.onReport = onReport;
    // A context of the model's rate: the browser brings it to the device's rate, better than code here would.
    this.context = new AudioContext({ sampleRate: rate_hz, latencyHint: "interactive" });
    this.context.onstatechange = () => {
      if (this.node && !this.suspended && this.context.state !== "running") onInterrupted();
    };
  }

  async open() {
    await this.context.audioWorklet.addModule("/page/worklet.js");
    await this.context.resume();
    this.node = new AudioWorkletNode(this.context, "player", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { capacitySamples: Math.ceil(this.capacity_s * this.rate_hz) },
    });
    this.node.port.onmessage = ({ data }) => this.reported(data);
    this.node.connect(this.context.destination);
  }

  reported(report) {
    // What came too late once is likely to do so again.
    if (report.underruns > this.underruns) this.least_s = Math.min(2 * this.least_s, MOST_LEAST_S);
    this.underruns = report.underruns;
    const buffered_s = report.buffered / this.rate_hz;
    this.full = buffered_s > this.most_s - (this.full ? STEP_S : 0);
    this.onReport(report);
  }

  /** Seconds between the audio thread and the ear. */
  get latency_s() {
    return this.context.outputLatency || this.context.baseLatency || 0;
  }

  push(samples) {
    this.node.port.postMessage({ samples });
  }

  /** Says how much to collect before it plays (again); returns it in seconds. */
  collect(factor, remaining_s) {
    const seconds = collectSeconds(factor, remaining_s, this.least_s);
    // Of a slow machine everything that can be made early helps.
    this.most_s = isSlow(factor) ? this.capacity_s - MOST_S : Math.max(AHEAD_S, seconds) + SLACK_S;
    this.node.port.postMessage({ threshold: Math.round(seconds * this.rate_hz) });
    return seconds;
  }

  /** No more samples come. */
  end() {
    this.node.port.postMessage({ ended: true });
  }

  async pause() {
    this.suspended = true;
    await this.context.suspend();
  }

  async resume() {
    await this.context.resume();
    this.suspended = false;
  }

  close() {
    this.suspended = true;
    if (this.context.state !== "closed") this.context.close();
  }
}
