// Who may answer: only the newest of several calls, and at most one a frame.

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

/** A page's `mount`: the shell must hold the page before it begins, and shows what goes wrong. */
export const mounted = (View) => (root, params, context) => {
  const view = new View(root, context, params);
  queueMicrotask(() => (view.start ?? view.update).call(view, params).catch(context.alert));
  return view;
};

/** At most one run a frame, with the newest arguments. */
export function perFrame(run) {
  let waiting = null;
  return (...args) => {
    if (!waiting) requestAnimationFrame(() => { const now = waiting; waiting = null; run(...now); });
    waiting = args;
  };
}
