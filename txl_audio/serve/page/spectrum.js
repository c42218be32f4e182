// Levels of frequencies: a Hann window and a radix-2 FFT.

export class Spectrum {
  /** size: a power of two. */
  constructor(size) {
    this.size = size;
    this.window = Float64Array.from({ length: size }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / size));
    const bits = Math.log2(size);
    this.reversed = Uint16Array.from({ length: size }, (_, i) => {
      let to = 0;
      for (let bit = 0; bit < bits; bit++) to |= ((i >> bit) & 1) << (bits - 1 - bit);
      return to;
    });
    const angles = Float64Array.from({ length: size / 2 }, (_, i) => (2 * Math.PI * i) / size);
    this.cosines = angles.map(Math.cos);
    this.sines = angles.map(Math.sin);
    this.real = new Float64Array(size);
    this.imaginary = new Float64Array(size);
  }

  /** Levels [size / 2] around sample number `centre`, in dB of a sine at full scale, from 0 Hz up. */
  levels(history, centre) {
    const { size, real, imaginary } = this;
    for (let i = 0; i < size; i++) {
      real[this.reversed[i]] = (this.window[i] * history.sample(centre - size / 2 + i)) / 32768;
    }
    imaginary.fill(0);
    this.transform();
    return Float64Array.from({ length: size / 2 }, (_, k) => {
      const power = (real[k] ** 2 + imaginary[k] ** 2) / (size / 4) ** 2; // a sine at 1 gives size / 4
      return 10 * Math.log10(power + 1e-12);
    });
  }

  /** In place, of samples in bit-reversed order. */
  transform() {
    const { size, real, imaginary } = this;
    for (let half = 1; half < size; half *= 2) {
      const step = size / (2 * half);
      for (let block = 0; block < size; block += 2 * half) {
        for (let k = 0; k < half; k++) {
          const [a, b] = [block + k, block + k + half];
          const [c, s] = [this.cosines[k * step], this.sines[k * step]];
          const re = c * real[b] + s * imaginary[b];
          const im = c * imaginary[b] - s * real[b];
          real[b] = real[a] - re;
          imaginary[b] = imaginary[a] - im;
          real[a] += re;
          imaginary[a] += im;
        }
      }
    }
  }
}
