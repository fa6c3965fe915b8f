// Who may answer: only the newest of several calls, and at most one a frame. What is drawn, and of which model.

/** Only the newest call counts: latest(work)(…) aborts the one before it. */
export function latest(work) {
  let abort = null;
  return async (...args) => {
    abort?.abort();
    const mine = new AbortController();
    abort = mine;
    try {
      const answer = await work(mine.signal, ...args);
      return mine.signal.aborted ? undefined : answer;
    } catch (error) {
      if (mine.signal.aborted) return undefined;
      throw error;
    }
  };
}

/** The model that an address is about: a run at a step, in a precision. */
const modelOf = ({ run, step = "best", precision = "float32" }) => JSON.stringify([run, step, precision]);

/** A page's `mount`: the shell must hold the page before it begins, and shows what goes wrong. `prepare()` is done
 *  once, before the first `update(params)`. All that a page has drawn is of the model in its address, or nothing is
 *  drawn: `clear()` takes it down when another model is asked for, before the answer is here, and when none comes. */
export const mounted = (View) => (root, params, context) => {
  const view = new View(root, context, params);
  const ready = Promise.resolve().then(() => view.prepare?.());
  let drawn = null;
  let newest = null;
  const update = async (given) => {
    newest = given;
    const asked = () => (view.model ?? modelOf)({ ...given, run: given.run ?? view.subject });
    try {
      await ready;
      if (given !== newest) return;
      if (drawn !== asked()) view.clear?.();
      drawn = asked();
      await view.update(given);
      if (given === newest) drawn = asked(); // of an address without a run, the page has chosen one by now
    } catch (error) {
      if (given !== newest) return;
      drawn = null;
      view.clear?.();
      throw error;
    }
  };
  const commands = () => (drawn === null && view.clear ? {} : view.commands());
  return { begun: update(params).catch(context.alert), update, commands: view.commands && commands,
    unmount: () => view.unmount?.(), get subject() { return view.subject; } };
};

/** At most one run a frame, with the newest arguments. */
export function perFrame(run) {
  let waiting = null;
  return (...args) => {
    if (!waiting) requestAnimationFrame(() => { const now = waiting; waiting = null; run(...now); });
    waiting = args;
  };
}
