"""Planted faults in roles, positions and probes: one line of damage, and the check that turns red."""

from tests.checks.faults import Fault

PLACES, CUT, PROBING = (
    "bench.findings.positional:right_places",
    "bench.findings.positional:cut_accuracy",
    "lab.runs.artifacts",
)
ROUTE, LOSSES = "bench.findings.positional:_best_route", "lens.measure.snapshot:_losses"

FAULTS = (
    # roles
    Fault("one place too far", "lens.measure.roles:previous_token", "q_BT1 - 1", "q_BT1 - 2", "maps"),
    Fault("chance of a head that sees all", "lens.measure.attention:BatchAttention.uniform", "allow.sum(-1, keepdim=True)", "torch.tensor(float(allow.shape[-1]))", "maps"),
    Fault("the earlier copy itself", "lens.measure.roles:induction", "q_BT1 - half + 1", "q_BT1 - half", "induction"),
    Fault("both halves asked", "lens.measure.roles:induction", ">= half)", ">= 0)", "induction"),
    Fault("the end counted with padding", "lens.measure.roles:fixed_position", "position_BS.max(1, keepdim=True).values + 1", "position_BS.shape[1]", "padding"),
    Fault("padded queries asked", "lens.measure.roles:scored_queries", "position_BT >= FROM", "position_BT >= -1", "padding"),
    Fault("chance without shuffling", "lens.measure.roles:group_difference", "if shuffled else labels", "if False else labels", "groups"),
    Fault("differences counted twice", "lens.measure.roles:_mean_difference", ".mean()) / 2", ".mean())", "groups"),
    Fault("the lowest lift wins", "lens.measure.roles:HeadRoles.role", "best = max(", "best = min(", "induction model"),
    # positions
    Fault("SECOND from 0", PLACES, "place_1T == 2", "place_1T == 1", "places"),
    Fault("LAST is SEP", PLACES, "place_1T == last_B1 - 1", "place_1T == last_B1", "places"),
    Fault("MAX of the tokens", PLACES, "np.where(digit_BT, tokens_BT, -1).max(1)", "tokens_BT.max(1)", "places"),
    Fault("asked at the padding's end", "bench.findings.positional:_measure", "torch.from_numpy(lengths_B) - 1", "torch.full((len(rows),), batch.tokens.shape[1] - 1)", "mass"),
    Fault("the way through the right place itself", ROUTE, ".masked_fill(right_BT, 0.0)", "", "mass"),
    Fault("ways from later to earlier", ROUTE, "later.layer > earlier.layer", "later.layer >= earlier.layer", "one layer"),
    Fault("the wrong place closed", CUT, '"answer": place_1T == lengths_B1 - 1', '"answer": place_1T == lengths_B1', "cuts"),
    Fault("nothing closed", CUT, "taps=Taps(edit=edit)", "taps=None", "cuts"),
    # probes
    Fault("bytes cut off, not rounded", "lens.measure.snapshot:_maps", ".round()", "", "numbers"),
    Fault("masked cells as weights", "lens.measure.snapshot:_maps", ", MASKED)", ", 0)", "numbers"),
    Fault("the lens without the final norm", "lens.measure.snapshot:snapshots", "*map(passed.normed, residual)", "*residual", "numbers"),
    Fault("losses where nothing is asked", "lens.measure.snapshot:_targeted", "targeted & (weights > 0)", "targeted", "numbers"),
    Fault("a loss of what was cut", LOSSES, "counted_BT &= complete_B[:, None]", "pass", "cut"),
    Fault("the newest is thinned", f"{PROBING}:_kept", "return {step}.union(", "return set().union(", "thinning"),
    Fault("one too many", f"{PROBING}:kept_steps", "<= most", "<= most + 1", "thinning"),
    Fault("later ones not forgotten", "lab.runs.run:TrainingRun.resume", "forget_probes(self.directory, after=self.progress.step)", "pass", "resumed"),
    Fault("other examples each time", f"{PROBING}:probe_models", "np.arange(count) * size // count", "(np.arange(count) * size // count + step) % size", "fixed"),
)  # fmt: skip
