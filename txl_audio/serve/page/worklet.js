// What runs on the audio thread: a player that counts, and a recorder.

const REPORT_BLOCKS = 5; // 40 ms at 16 kHz

/**
 * Plays mono samples from a ring buffer.
 *
 * Option: capacitySamples; the page never lets more wait, it pauses the server long before. It is silent until
 * `threshold` samples wait (or no more will come), then plays until none are left; running dry before the end
 * counts as an underrun, and it waits for the next `threshold`.
 * Messages in: {samples: Int16Array}, {threshold: samples}, {ended: true}. Messages out: see `report`.
 */
class Player extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.ring = new Int16Array(processorOptions.capacitySamples);
    this.written = 0;
    this.played = 0;
    this.underruns = 0;
    this.threshold = Infinity;
    this.playing = false;
    this.ended = false;
    this.blocks = 0;
    this.port.onmessage = ({ data }) => {
      if (data.samples) this.write(data.samples);
      if (data.threshold !== undefined) this.threshold = data.threshold;
      if (data.ended) this.ended = true;
    };
  }

  write(samples) {
    const at = this.written % this.ring.length;
    const first = samples.subarray(0, this.ring.length - at);
    this.ring.set(first, at);
    this.ring.set(samples.subarray(first.length), 0);
    this.written += samples.length;
  }

  process(_, [[output]]) {
    const waiting = this.written - this.played;
    if (!this.playing && waiting > 0 && (waiting >= this.threshold || this.ended)) this.playing = true;
    if (this.playing) {
      const count = Math.min(waiting, output.length);
      for (let i = 0; i < count; i++) output[i] = this.ring[(this.played + i) % this.ring.length] / 32768;
      this.played += count;
      if (count < output.length) {
        this.playing = false;
        if (!this.ended) {
          this.underruns++;
          this.threshold = Infinity; // until the page says how much to collect now
          this.report();
        }
      }
    }
    const finished = this.ended && this.played === this.written;
    if (++this.blocks % REPORT_BLOCKS === 0 || finished) this.report(finished);
    return !finished;
  }

  report(finished = false) {
    const { written, played, playing, underruns } = this;
    this.port.postMessage({ buffered: written - played, played, playing, underruns, finished });
  }
}

/** Sends what comes in, as Float32Array, to the page. */
class Recorder extends AudioWorkletProcessor {
  process([[input]]) {
    if (input) this.port.postMessage(input.slice());
    return true;
  }
}

registerProcessor("player", Player);
registerProcessor("recorder", Recorder);
