"""Planted faults in roles, positions and probes: one line of damage, and the check that turns red."""

from tests.checks.faults import Fault

PLACES, CUT, PROBING = (
    "lens.positional:right_places",
    "lens.positional:cut_accuracy",
    "lab.runs.probing",
)
ROUTE, LOSSES = "lens.positional:_best_route", "lens.measure.snapshot:_losses"

FAULTS = (
    # roles
    Fault("one place too far", "lens.measure.roles:previous_token", "q_BT1 - 1", "q_BT1 - 2", "maps"),
    Fault("chance of a head that sees all", "lens.measure.batch_attention:Maps.uniform", "allow.sum(-1, keepdim=True)", "torch.tensor(float(allow.shape[-1]))", "maps"),
    Fault("the earlier copy itself", "lens.measure.roles:induction", "q_BT1 - half + 1", "q_BT1 - half", "induction"),
    Fault("both halves asked", "lens.measure.roles:induction", ">= half)", ">= 0)", "induction"),
    Fault("the end counted with padding", "lens.measure.roles:fixed_position", "place_BS.max(1, keepdim=True).values + 1", "place_BS.shape[1]", "padding"),
    Fault("padded queries asked", "lens.measure.roles:asked_queries", "place_BT >= FROM", "place_BT >= -1", "padding"),
    Fault("chance without shuffling", "lens.measure.roles:of_groups", "if shuffled else labels", "if False else labels", "groups"),
    Fault("differences counted twice", "lens.measure.roles:_apart", ".mean()) / 2", ".mean())", "groups"),
    Fault("the lowest lift wins", "lens.measure.roles:HeadRoles.role", "best = max(", "best = min(", "induction model"),
    # positions
    Fault("SECOND from 0", PLACES, "place_1T == 2", "place_1T == 1", "places"),
    Fault("LAST is SEP", PLACES, "place_1T == last_B1 - 1", "place_1T == last_B1", "places"),
    Fault("MAX of the tokens", PLACES, "np.where(digit_BT, tokens_BT, -1).max(1)", "tokens_BT.max(1)", "places"),
    Fault("asked at the padding's end", "lens.positional:_measure", "torch.from_numpy(lengths_B) - 1", "torch.full((len(rows),), batch.tokens.shape[1] - 1)", "mass"),
    Fault("the way through the right place itself", ROUTE, ".masked_fill(right_BT, 0.0)", "", "mass"),
    Fault("ways from later to earlier", ROUTE, "later.layer > earlier.layer", "later.layer >= earlier.layer", "one layer"),
    Fault("the wrong place closed", CUT, '"answer": place_1T == lengths_B1 - 1', '"answer": place_1T == lengths_B1', "cuts"),
    Fault("nothing closed", CUT, "taps=Taps(edit=edit)", "taps=None", "cuts"),
    # probes
    Fault("bytes cut off, not rounded", "lens.measure.snapshot:_maps", "np.rint(weights_BNTS * FULL)", "(weights_BNTS * FULL)", "numbers"),
    Fault("masked cells as weights", "lens.measure.snapshot:_maps", "np.uint8(MASKED)", "np.uint8(0)", "numbers"),
    Fault("the lens without the final norm", "lens.measure.snapshot:snapshot", "seen.normed(seen.taps[tap])", "seen.taps[tap]", "numbers"),
    Fault("losses where nothing is asked", LOSSES, "asked & (weights > 0)", "asked", "numbers"),
    Fault("a loss of what was cut", LOSSES, "counted_BT &= whole_B[:, None]", "pass", "cut"),
    Fault("the newest is thinned", f"{PROBING}:_kept", "return {step}.union(", "return set().union(", "thinning"),
    Fault("one too many", f"{PROBING}:kept_steps", "<= most", "<= most + 1", "thinning"),
    Fault("later ones not forgotten", "lab.runs.run:TrainingRun.resume", "forget_probes(self.directory, after=self.progress.step)", "pass", "resumed"),
    Fault("other examples each time", f"{PROBING}:take_probes", "np.arange(count) * size // count", "(np.arange(count) * size // count + step) % size", "fixed"),
)  # fmt: skip
