// What is on the Inspect page, as a command and as Python; how both write texts and models.

export const quoted = (text) => (/^[\w@%+=:,./][\w@%+=:,./-]*$/.test(text) ? text
  : `'${text.replaceAll("'", `'\\''`)}'`);
const python = JSON.stringify; // its texts are texts of Python as well

/** A model as a command names it: models' paths, and the step that is meant. */
export const modelPath = ({ run, step }, paths) => `${paths[run] ?? run}${step === "best" ? "" : `@${step}`}`;

/** start TEXT options; a text that begins like an option stands behind them all. */
export function command(start, text, ...options) {
  const last = text.startsWith("-");
  const parts = [start, !last && quoted(text), ...options, last && `-- ${quoted(text)}`];
  return parts.flat().filter(Boolean).join(" ");
}

/** One of the two models: how a command gets it, and how Python does. */
function opened(model, paths) {
  const path = modelPath(model, paths);
  const loaded = `gf.load(${python(path)})`;
  if (model.precision === "float32") return { name: quoted(path), loaded };
  const name = quoted(`${model.run}${model.step === "best" ? "" : `-${model.step}`}-${model.precision}`);
  return { name,
    before: `glass quantize ${quoted(path)} --scheme ${model.precision} --no-smooth --out ${name}`,
    loaded: `gf.quantize(${loaded}, scheme=${python(model.precision)})` };
}

/** The same from a terminal and from Python; other: the look that is compared, if there is one. */
export function commands(view, look, other, paths) {
  const { kind, layer, head, pos, ablate } = view;
  const [own, beside] = [opened(view, paths), view.other && opened(view.other, paths)];
  const alike = other && String(other.words) === String(look.words);
  const ask = ({ name }, ...more) => command(`glass inspect ${name}`, look.text,
    look.target && `--target ${quoted(look.target)}`, kind !== "self" && `--kind ${kind}`,
    `--layer ${layer} --head ${head} --pos ${pos}`, ...more);
  const mine = ask(own, ablate.map((each) => `--ablate ${each}`), alike && `--against ${beside.name}`);
  const cli = [own.before, beside?.before, mine, beside && !alike && ask(beside)].filter(Boolean).join(" && ");
  const read = ({ loaded }, ...more) => `${loaded}.inspect(${[python(look.text),
    look.target && `target=${python(look.target)}`, ...more].filter(Boolean).join(", ")})`;
  const map = (of) => `${of}.attention${kind === "self" ? "" : `.of("${kind}")`}`
    + (head === "mean" ? `.mean(${layer})` : `[${layer}, ${head}]`);
  const [seen, shown, says] = look.snapshot ? probed(view, look, paths)
    : [`seen = ${read(own, ablate.length && `ablate=${python(ablate)}`)}`, map("seen"),
      `seen.next(${pos}), seen.lens.at(${pos}), seen.loss`];
  const apart = alike && !look.snapshot ? `seen.compare(other, ${pos})`
    : `${map("other")}, other.next(${pos}), other.loss`;
  const lines = ["import glassformer as gf\n", seen, beside && `other = ${read(beside)}`,
    `${shown}${alike ? ` - ${map("other")}` : ""}`, says, beside && apart];
  return { cli: look.snapshot ? "" : cli, python: lines.filter(Boolean).join("\n") };
}

/** A step that left no model: its probes are read, and no command does that. */
function probed({ kind, layer, head, pos, step, run }, { at }, paths) {
  const file = `${paths[run] ?? run}/probes/step-${step.padStart(6, "0")}.safetensors`;
  const read = `from glassformer.lens.measure.probes import read_probes\n\nprobes = read_probes(${python(file)})`;
  const map = head === "mean" ? `mean(${at}, ${layer}, kind="${kind}")` : `map(${at}, "${kind}.L${layer}H${head}")`;
  return [read, `probes.${map}`, `probes.top(${at}, ${pos})`];
}
