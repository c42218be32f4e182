// One press of Play, from the start message to the last sample heard or the last letter read.

import { History } from "./history.js";
import { AHEAD_S, Player } from "./player.js";
import { Stream } from "./stream.js";

/** What both kinds share. States: connecting, queued, collecting, playing, paused, ended. */
class Session {
  constructor(model, start, onChange) {
    this.model = model;
    this.start = start;
    this.onChange = onChange;
    this.state = "connecting";
    this.place = 0;
    this.error = null;
    this.complete = false;
  }

  become(state) {
    if (this.state === "ended") return;
    this.state = state;
    this.onChange(this);
  }

  events() {
    return {
      queued: ({ place }) => {
        this.place = place;
        this.become("queued");
      },
      failed: (error) => {
        this.error = error;
        this.stop();
      },
    };
  }

  get active() {
    return this.state !== "ended";
  }

  set(drawing) {
    this.stream?.set(drawing);
  }

  stop() {
    this.stream?.close();
    this.become("ended");
  }
}

export class SoundSession extends Session {
  /** prompt: Int16Array at the model's rate, heard first, or null; `wav` is the same as a file. */
  constructor(model, { prompt, wav, start }, onChange) {
    super(model, { ...start, ahead_s: AHEAD_S }, onChange);
    this.rate_hz = model.sample_rate_hz;
    this.wav = wav;
    this.prompt = prompt ?? new Int16Array(0);
    this.factor = model.real_time_factor ?? 0;
    this.lag_s = 0;
    this.collect_s = 0;
    this.started = this.paused = this.held = false;
    this.report = { buffered: 0, played: 0, playing: false, underruns: 0, finished: false };
    this.reportedAt_ms = performance.now();
    const extra_s = this.prompt.length / this.rate_hz;
    this.player = new Player(this.rate_hz, {
      extra_s,
      onReport: (report) => this.reported(report),
      onInterrupted: () => this.pause(),
    });
    this.history = new History(this.rate_hz, this.player.capacity_s);
  }

  async begin() {
    await this.player.open();
    if (!this.active) return;
    this.history.promptSamples = this.prompt.length;
    if (this.prompt.length) this.came(this.prompt);
    this.stream = new Stream(this.start, this.wav, {
      ...this.events(),
      started: () => {
        this.started = true;
        this.collect();
        this.become("collecting");
      },
      sound: (samples) => this.came(samples),
      stats: ({ real_time_factor, lag_s }) => {
        this.factor = (this.factor + real_time_factor) / 2;
        this.model.real_time_factor = this.factor; // the next stream begins with what is known now
        this.lag_s = lag_s;
        this.collect();
      },
      finished: () => this.player.end(),
    });
  }

  came(samples) {
    this.history.append(samples);
    this.player.push(samples);
  }

  /** What is not heard yet, Infinity where no end was named. */
  get remaining_s() {
    const { seconds } = this.start;
    return seconds === null ? Infinity : seconds + (this.prompt.length - this.report.played) / this.rate_hz;
  }

  get played_s() {
    return this.report.played / this.rate_hz;
  }

  get buffered_s() {
    return this.report.buffered / this.rate_hz;
  }

  collect() {
    this.collect_s = this.player.collect(this.factor, this.remaining_s);
  }

  reported(report) {
    const ranDry = report.underruns > this.report.underruns;
    this.report = report;
    this.reportedAt_ms = performance.now();
    if (!this.started) return;
    this.hold(this.paused || this.player.full);
    if (ranDry) this.collect();
    if (report.finished) {
      this.complete = true;
      this.player.close();
      this.become("ended");
    } else if (!this.paused) {
      this.become(report.playing ? "playing" : "collecting");
    }
  }

  /** Makes the server wait or go on; its own clock knows neither the prompt nor what was collected. */
  hold(held) {
    if (held === this.held) return;
    this.held = held;
    if (held) this.stream.pause();
    else this.stream.resume();
  }

  /** Sample number that is heard now. */
  position() {
    if (!this.active) return this.report.played;
    const since_s = this.report.playing && !this.paused ? (performance.now() - this.reportedAt_ms) / 1000 : 0;
    const ahead = Math.min(since_s, 0.1) - this.player.latency_s;
    return Math.max(0, Math.min(this.report.played + ahead * this.rate_hz, this.history.written));
  }

  pause() {
    if (!this.started) return this.stop(); // the system took the sound away before there was any
    this.paused = true;
    this.hold(true);
    this.player.pause();
    this.become("paused");
  }

  async resume() {
    await this.player.resume();
    this.paused = false;
    this.become("collecting");
  }

  stop() {
    this.player.close();
    super.stop();
  }
}

export class TextSession extends Session {
  constructor(model, start, onChange, onText) {
    super(model, start, onChange);
    this.stream = new Stream(start, null, {
      ...this.events(),
      started: () => this.become("playing"),
      text: ({ text }) => onText(text),
      finished: () => {
        this.complete = true;
        this.become("ended");
      },
    });
  }

  pause() {
    this.stream.pause();
    this.become("paused");
  }

  resume() {
    this.stream.resume();
    this.become("playing");
  }
}
