// Numbers as colours: one hue, from nothing to all; two hues where a difference can be negative.
// The square root lets small weights be seen; the legend is drawn with the same ramp.

import { rgb } from "./theme.js";

const mix = (from, to, share) => from.map((value, i) => Math.round(value + (to[i] - value) * share));

/** A weight 0..1 (or a difference -1..1) as [red, green, blue] of the theme in view. */
export function ramp(value) {
  const share = Math.sqrt(Math.min(1, Math.abs(value)));
  return mix(rgb("--heat-low"), rgb(value < 0 ? "--heat-minus" : "--heat-high"), share);
}

const pack = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0; // as ImageData holds them

/** 512 packed colours: index 256 + 255 * value. Painting looks up, it does not compute. */
export function palette() {
  const table = new Uint32Array(512);
  for (let i = 0; i < 512; i += 1) table[i] = pack(ramp((i - 256) / 255));
  return table;
}

export const shade = (value) => 256 + Math.round(255 * Math.max(-1, Math.min(1, value)));
export const ground = () => pack(rgb("--panel"));
export const hatch = () => pack(rgb("--hatch"));
