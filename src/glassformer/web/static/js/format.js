// How numbers are written: one way for every page. A missing number is an en dash, never zero.

const NONE = "–";
export const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** Fixed decimals; a real minus sign, so that columns line up. */
export function fixed(value, digits = 3) {
  return missing(value) ? NONE : value.toFixed(digits).replace("-", "−");
}

/** A difference: always with its sign. */
export function signed(value, digits = 3) {
  return missing(value) ? NONE : (value < 0 ? "" : "+") + fixed(value, digits);
}

/** Three figures, whatever the size: 3.91, 0.220, 3.1e-5. */
export function short(value) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace(/^-/, "−").replace("e+", "e");
  return fixed(value, size < 1 ? 3 : size < 100 ? 2 : 0);
}

/** Three decimals, or two figures where those would be 0.000; for probabilities four. */
export const three = (value) => (missing(value) || Math.abs(value) >= 5e-4 ? fixed(value) : short(value));
export const four = (value) => (missing(value) || Math.abs(value) >= 5e-5 ? fixed(value, 4) : short(value));
/** A loss, a divergence, an entropy. */
export const nats = (value) => (missing(value) ? NONE : `${three(value)} nats`);

export const count = (value) => (missing(value) ? NONE : Math.round(value).toLocaleString("en"));
export const percent = (value, digits = 1) => (missing(value) ? NONE : `${fixed(100 * value, digits)} %`);

/** 411,648 -> 0.41 M */
export function size(value) {
  if (missing(value)) return NONE;
  const [unit, letter] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([each]) => value >= each) ?? [1, ""];
  return unit === 1 ? String(value) : (value / unit).toPrecision(3) + letter;
}
