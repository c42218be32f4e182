// What came lately, in memory of one size however long a stream is.

export const KEPT_S = 600;

export class History {
  /** ahead_s: how much may have come and not been heard yet; it does not take from what is kept. */
  constructor(rate_hz, ahead_s) {
    this.rate_hz = rate_hz;
    this.ring = new Int16Array(Math.ceil((KEPT_S + ahead_s) * rate_hz));
    this.written = 0;
    this.promptSamples = 0;
  }

  append(samples) {
    const at = this.written % this.ring.length;
    const first = samples.subarray(0, this.ring.length - at);
    this.ring.set(first, at);
    this.ring.set(samples.subarray(first.length), 0);
    this.written += samples.length;
  }

  /** Sample number `at` since the beginning; 0 where there is none. */
  sample(at) {
    return at >= 0 && at < this.written ? this.ring[at % this.ring.length] : 0;
  }

  /** The last ten minutes before sample number `end`. */
  heard(end) {
    const begin = Math.max(0, end - KEPT_S * this.rate_hz);
    return Int16Array.from({ length: end - begin }, (_, i) => this.sample(begin + i));
  }
}
