// Sound as 16-bit WAV files, and files as sound.

const HEADER_BYTES = 44;

/** A WAV file (ArrayBuffer) of mono Int16Array samples. */
export function encodeWav(samples, rate_hz) {
  const buffer = new ArrayBuffer(HEADER_BYTES + 2 * samples.length);
  const view = new DataView(buffer);
  const word = (at, letters) => [...letters].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, buffer.byteLength - 8, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // length of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate_hz, true);
  view.setUint32(28, 2 * rate_hz, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per frame
  view.setUint16(34, 16, true); // bits
  word(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(HEADER_BYTES + 2 * i, sample, true));
  return buffer;
}

/** Float samples, 1 being full scale, as Int16Array. */
export function toInt16(samples) {
  return Int16Array.from(samples, (x) => Math.max(-32768, Math.min(32767, Math.round(32768 * x))));
}

/** Any audio that the browser can read, as mono Int16Array at `rate_hz`. Throws what decodeAudioData throws. */
export async function decodeAudio(buffer, rate_hz) {
  const sound = await new OfflineAudioContext(1, 1, rate_hz).decodeAudioData(buffer);
  const mono = sound.getChannelData(0).slice();
  for (let c = 1; c < sound.numberOfChannels; c++) sound.getChannelData(c).forEach((x, i) => (mono[i] += x));
  return toInt16(mono.map((x) => x / sound.numberOfChannels));
}
