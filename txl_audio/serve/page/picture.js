// The waveform and the spectrogram of what is heard, drawn column by column.

import { Spectrum } from "./spectrum.js";

const COLUMN_S = 0.01; // one CSS pixel
const FFT_SIZE = 512;
const WAVE_EXPONENT = 0.6; // speech is mostly far below full scale, and would be a thin line
const QUIET_DB = -88;
const LOUD_DB = -22;

/**
 * Draws sound of `history` on two canvases. Columns are made once, when the sound in them was heard, and kept on a
 * strip that is written round and round; a frame copies the strip.
 */
export class Picture {
  constructor(waveCanvas, spectrumCanvas) {
    this.canvases = [waveCanvas, spectrumCanvas];
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.history = null;
    this.position = 0;
    const again = () => this.redraw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    this.still.addEventListener("change", again);
    new ResizeObserver(again).observe(waveCanvas);
  }

  /** Begins anew, with sound of another stream. */
  show(history) {
    this.history = history;
    this.hop = Math.round(COLUMN_S * history.rate_hz);
    this.spectrum = new Spectrum(FFT_SIZE);
    this.position = 0;
    this.redraw();
  }

  /** Everything up to `position`, a (fractional) sample number, is drawn as heard. */
  draw(position) {
    if (!this.history) return;
    this.position = position;
    const newest = Math.floor((position - FFT_SIZE / 2) / this.hop);
    for (let column = Math.max(this.next, newest - this.width + 1); column <= newest; column++) {
      this.drawWave(column);
      this.drawSpectrum(column);
    }
    this.next = Math.max(this.next, newest + 1);
    this.copy(newest, position / this.hop - Math.floor(position / this.hop));
  }

  /** After a change of size or colours. */
  redraw() {
    const scale = devicePixelRatio;
    for (const canvas of this.canvases) {
      canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
      canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
    }
    this.width = Math.max(1, this.canvases[0].clientWidth);
    const [wave, spectrum] = this.canvases;
    this.strips = [strip(this.width, wave.height), strip(this.width, FFT_SIZE / 2)];
    const style = getComputedStyle(wave);
    const colour = (name) => parse(style.getPropertyValue(name));
    this.palettes = ["--prompt", "--sound"].map((name) => ({
      line: style.getPropertyValue(name),
      heat: ramp([colour("--canvas"), colour(name), colour("--peak")]),
    }));
    this.next = 0;
    this.draw(this.position);
  }

  palette(column) {
    return this.palettes[column * this.hop < this.history.promptSamples ? 0 : 1];
  }

  drawWave(column) {
    const { height } = this.strips[0].canvas;
    let low = 0;
    let high = 0;
    for (let i = column * this.hop; i < (column + 1) * this.hop; i++) {
      const sample = this.history.sample(i) / 32768;
      low = Math.min(low, sample);
      high = Math.max(high, sample);
    }
    const x = column % this.width;
    const [up, down] = [high ** WAVE_EXPONENT, (-low) ** WAVE_EXPONENT];
    const top = (0.5 - 0.5 * up) * height;
    const size = Math.max(devicePixelRatio, 0.5 * (up + down) * height);
    this.strips[0].clearRect(x, 0, 1, height);
    this.strips[0].fillStyle = this.palette(column).line;
    this.strips[0].fillRect(x, top, 1, size);
  }

  drawSpectrum(column) {
    const levels_db = this.spectrum.levels(this.history, column * this.hop);
    const { heat } = this.palette(column);
    const image = new ImageData(1, levels_db.length);
    levels_db.forEach((level_db, bin) => {
      const part = Math.max(0, Math.min(1, (level_db - QUIET_DB) / (LOUD_DB - QUIET_DB)));
      const colour = heat[Math.round(255 * part)];
      image.data.set(colour, 4 * (levels_db.length - 1 - bin)); // low frequencies below
    });
    this.strips[1].putImageData(image, column % this.width, 0);
  }

  /** The strip with its newest column at the right edge; in pages, where motion is unwelcome. */
  copy(newest, fraction) {
    const pages = this.still.matches;
    const first = pages ? Math.floor(Math.max(0, newest) / this.width) * this.width : newest - this.width + 1;
    const shift = pages ? 0 : fraction;
    this.canvases.forEach((canvas, i) => {
      const context = canvas.getContext("2d");
      const pixels = canvas.width / this.width;
      const { height } = this.strips[i].canvas;
      context.clearRect(0, 0, canvas.width, canvas.height);
      const begin = Math.max(0, first);
      const seam = Math.ceil((begin + 1) / this.width) * this.width; // where the strip begins again
      for (const [from, to] of [[begin, Math.min(seam, newest + 1)], [seam, newest + 1]]) {
        if (to <= from) continue;
        const x = (from - first - shift) * pixels;
        const source = [from % this.width, 0, to - from, height];
        context.drawImage(this.strips[i].canvas, ...source, x, 0, (to - from) * pixels, canvas.height);
      }
    });
  }
}

function strip(width, height) {
  return new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
}

/** #rrggbb as [r, g, b]. */
function parse(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.trim().slice(i, i + 2), 16));
}

/** 256 colours [r, g, b, 255] through three. */
function ramp(stops) {
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[left].map((c, k) => Math.round(c + (at - left) * (stops[left + 1][k] - c)));
    return [...mixed, 255];
  });
}
