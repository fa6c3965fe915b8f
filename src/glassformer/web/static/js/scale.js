// Where a number lies on an axis, and which numbers are written beside it. Pure: no page, no server.

/** 1, 2 or 5 times a power of ten: about `wanted` round numbers from low to high. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) made.push(i * step);
  return made;
}

/** Powers of ten; between them 2 and 5 where there are few. */
export function logTicks(low, high, wanted) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const within = (value) => value >= low * 0.999 && value <= high * 1.001;
  const made = (factors) => {
    const found = [];
    for (let power = first; power <= last; power += 1) {
      for (const factor of factors) if (within(factor * 10 ** power)) found.push(factor * 10 ** power);
    }
    return found;
  };
  const decades = made([1]);
  if (decades.length > wanted * 1.5) {
    const every = Math.ceil(decades.length / wanted);
    return decades.filter((_, i) => i % every === 0);
  }
  const finer = made([1, 2, 5]);
  if (decades.length >= wanted / 2 && decades.length > 1) return decades;
  return finer.length > 3 ? finer : ticks(low, high, wanted).filter((value) => value > 0);
}

/** {at(value), ticks, from(pixel)} of an axis over pixels start..end. */
export function axis(values, { start, end, log = false, wanted = 6, pad = 0.04 }) {
  const good = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  let [low, high] = good.length ? limits(good) : log ? [1, 10] : [0, 1];
  const [into, out] = log ? [Math.log10, (value) => 10 ** value] : [(value) => value, (value) => value];
  const around = (Math.abs(low) || 1) * 0.1; // of a single number
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - around, high + around];
  const margin = (into(high) - into(low)) * pad;
  const [first, last] = [into(low) - margin, into(high) + margin];
  const scale = (end - start) / (last - first);
  return {
    at: (value) => (log && !(value > 0) ? NaN : start + (into(value) - first) * scale),
    from: (pixel) => out(first + (pixel - start) / scale),
    ticks: (log ? logTicks : ticks)(out(first), out(last), wanted),
  };
}

function limits(values) { // Math.min(...values) has a limit of its own
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

/** Points as an SVG path; a number that is missing or off the axis breaks the line. */
export function path(xs, ys, x, y) {
  let made = "";
  let down = false;
  for (let i = 0; i < xs.length; i += 1) {
    const [px, py] = [x.at(xs[i]), y.at(ys[i] ?? NaN)];
    if (Number.isFinite(px) && Number.isFinite(py)) {
      made += `${down ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
      down = true;
    } else down = false;
  }
  return made;
}

/** The index of the number nearest to `wanted` in an ascending list. */
export function nearest(sorted, wanted) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - wanted) <= Math.abs(sorted[high] - wanted) ? low : high;
}

/** Move labels apart: at least `gap` between neighbours, as near to their places as that allows. */
export function apart(places, gap, low, high) {
  const order = places.map((at, index) => ({ at, index })).sort((a, b) => a.at - b.at);
  for (let i = 1; i < order.length; i += 1) order[i].at = Math.max(order[i].at, order[i - 1].at + gap);
  if (order.length) order[order.length - 1].at = Math.min(order[order.length - 1].at, high);
  for (let i = order.length - 2; i >= 0; i -= 1) order[i].at = Math.min(order[i].at, order[i + 1].at - gap);
  const made = [];
  for (const { at, index } of order) made[index] = Math.max(low, at);
  return made;
}
