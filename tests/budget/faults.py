"""Planted mistakes in the solver and the costs: one line of damage, and the check that notices."""

from tests.checks.faults import Fault

KEY = "budget.search:Ordering."
SEARCH = "budget.search:Search."
LIMITS = "budget.regions:Limits."
REGIONS = "budget.regions:Regions."

FAULTS = (
    # counting
    Fault("a law forgets the second size", "budget.counting:Law.at", "term *= sizes[i]", "term *= sizes[0]", "laws"),
    Fault("a law of the first point alone", "budget.counting:Law.__init__", "(2, False): -1", "(2, False): 0", "laws"),
    Fault("a frame without its base", "budget.counting:Frame.count", "self.base + self.column", "self.column", "laws"),
    Fault("what is tied counts twice", "budget.counting:_size", "if p.tied_to is None", "if p.size", "laws"),
    # hard limits
    Fault("d_ff one too wide", "budget.regions:ffns", "(allowed.high - fixed) // slope", "(allowed.high - fixed) // slope + 1", "answers"),
    Fault("d_ff one too narrow", "budget.regions:ffns", "_ceil_div(allowed.low - fixed, slope)", "(allowed.low - fixed) // slope", "answers"),
    Fault("multiple of d_ff ignored", "budget.regions:ffns", "_ceil_div(least, step) * step", "least", "limits"),
    Fault("deepest model left out", LIMITS + "depths", "range(least, most + 1)", "range(least, most)", "answers"),
    Fault("max_layers ignored", LIMITS + "depths", "min(most, self.budget.max_layers)", "most", "halves"),
    Fault("the least aspect ignored", LIMITS + "depths", "least = max(least, _ceil_div(small.d_model * under, over))", "pass", "answers"),
    Fault("aspect upside down", LIMITS + "depths", "large.d_model * under // over", "large.d_model * over // under", "answers"),
    Fault("ratio's limit on one side", LIMITS + "allowed", "high = min(high, large.covered * under // over)", "pass", "limits"),
    Fault("exact within a whole step", LIMITS + "allowed", "(2 * large.covered + large.step)", "(2 * large.covered + 2 * large.step)", "limits"),
    Fault("ratio's limit on the other side", LIMITS + "allowed", "low = max(low, _ceil_div(small.covered * under, over))", "pass", "limits"),
    Fault("expansion's limit on one side", LIMITS + "allowed", "least_ffn = max(least_ffn, _ceil_div(over * small.d_model, under))", "pass", "halves"),
    Fault("rotary with odd heads", "budget.counting:width_step", "budget.head_step * budget.heads", "budget.heads", "answers"),
    Fault("free heads too free", "budget.counting:heads_of", "math.floor(middle + HEAD_SLACK)", "math.floor(middle + HEAD_SLACK) + 1", "freed"),
    Fault("any heads not grouped", "budget.counting:_any_heads", "d_model // h % groups == 0", "True", "grouped"),
    Fault("widest model left out", "budget.counting:Widths.within", "low * self.step + 1", "low * self.step", "answers"),
    # preferences
    Fault("drift of the ratio forgotten", KEY + "key", "level(ratio + glu)", "level(glu)", "answers"),
    Fault("within a point does not come first", KEY + "key", "float(max(ratio, glu) > 1.0)", "0.0", "answers"),
    Fault("shallower depths left out", REGIONS + "_by_size", "_halves(depths)", "_halves(depths)[1:]", "halves"),
    Fault("deeper depths left out", REGIONS + "_by_size", "_halves(depths)", "_halves(depths)[:1]", "halves"),
    Fault("narrower widths left out", REGIONS + "_by_width", "self.cut(small, self.widths.largest(middle, most), depths=depths)", "()", "answers"),
    Fault("higher ranks left out", REGIONS + "_by_rank", "yield from self.cut(above, large, depths=depths, one_width=region.one_width)", "pass", "ranked"),
    Fault("a rank of another remainder", REGIONS + "_by_count", "small.rank + more", "small.rank + more + 1", "ranked"),
    Fault("the least drift too large", KEY + "_glu_drift", "0.0) / GLU_UNIT", "0.0) * 99", "answers"),
    Fault("a bound that is none", KEY + "bound", "ratio = max(0.0, away / RATIO_UNIT)", "ratio = max(0.0, away / RATIO_UNIT) + 1.0", "halves"),
    Fault("drifts that no count has together", KEY + "_both_drifts", "least = min(least, drift)", "least = drift + 1.0", "answers"),
    Fault("the nearest depth alone", SEARCH + "_around", "(below, below + 1)", "(below,)", "nearest"),
    # refusals
    Fault("nearest total too far", "budget.infeasible:nearest_total", "math.ceil(near.above / (1 + tolerance))", "near.above", "certificates"),
    Fault("nearest below forgotten", "budget.infeasible:counts_around", "below = under.nearest(most)", "pass", "certificates"),
    Fault("tolerance rounded down", "budget.infeasible:rounded", "way(share / unit)", "math.floor(share / unit)", "certificates"),
    Fault("vocabulary only upwards", "budget.infeasible:_outwards", "(start - away, start + away)", "(start + away,)", "certificates"),
    # limits of a search
    Fault("an ended search claims a proof", SEARCH + "_least", "self.is_proven = False", "pass", "limited"),
    Fault("a refusal that was not proven", SEARCH + "first", "self.is_proven = False", "pass", "limited"),
    Fault("the nearest count claims a proof", SEARCH + "nearest", "self.is_proven = False", "pass", "limited"),
    Fault("nothing can drift less than the most", SEARCH + "_least", "least_drift(min(", "least_drift(9 + min(", "limited"),
    Fault("a part that is not taken from the whole", "budget.regions:Effort.spend", "effort = effort._parent", "effort = None", "efforts"),
    Fault("a change that was not proven", "budget.infeasible:Probe.works", "self.is_proven &= search.is_proven", "pass", "certified"),
    Fault("a dive that forgets the rest", "budget.search:Frontier.push", "entries.remove(self._ahead)", "entries.clear()", "dives"),
    Fault("a depth too many for a d_ff", "budget.regions:Region.runs", "(allowed.high - frame.outside) // layer", "(allowed.high - frame.outside) // layer + 1", "runs"),
    Fault("a depth skipped that has a count", "budget.regions:Region.runs", ">= low:", "> low:", "runs"),
    Fault("a width without a d_ff", "budget.regions:Limits.has_ffn", "most // step * step >= least", "most // step * step > least", "sparse"),
    Fault("every second width", REGIONS + "_trimmed", "wide -= step", "wide -= 2 * step", "sparse"),
    Fault("what is outside leaves nothing", "budget.counting:_remainders", "(out + within)", "within", "residues"),
    Fault("even heads alone", "budget.counting:_head_remainders", "range(0, budget.head_step * modulus, budget.head_step)", "range(0, 2 * modulus, 2)", "residues"),
    Fault("a count as near, but drifting", SEARCH + "closest", "found = at_count.best(than=found)", "pass", "ordered"),
    Fault("a token uses every expert", "budget.design:_design", "not active(block, p)", "False", "experts"),
    Fault("one expert too many", "budget.counting:_laws_of", "block.given(experts - 1)", "block.given(experts)", "experts"),
    # costs
    Fault("attention over half the keys", "costs.estimates:flops", "4 * rows[value.rows]", "2 * rows[value.rows]", "flops"),
    Fault("the tied head is free", "costs.estimates:flops", "isinstance(op.kind, Linear)", 'isinstance(op.kind, Linear) and not op.part.startswith("heads.")', "flops"),
    Fault("source as long as the target", "costs.estimates:flops", '"source": source', '"source": length', "flops"),
    Fault("Adam with one moment", "costs.estimates:optimizer_bytes", "return FLOAT * sum(2 * p.size + 1 for p in own)", "return FLOAT * sum(p.size + 1 for p in own)", "optimizers"),
    Fault("Muon with two moments", "costs.estimates:optimizer_bytes", "p.size if p.kind", "2 * p.size if p.kind", "optimizers"),
    Fault("SwiGLU keeps two", "costs.activations:_Body.gate", "self.keep(*op.reads)", "self.keep(op.reads[0])", "activations"),
    Fault("RMSNorm keeps what LayerNorm does", "costs.activations:_Body.norm", '(2 if norm.form == "layer" else 1)', "2", "activations"),
    Fault("log-softmax forgotten", "costs.activations:_Loss.kept", "FLOAT * self.logits + (LONG", "(LONG", "activations"),
    Fault("attention keeps one number of a row", "costs.activations:_Body.attend", "FLOAT * 2 * queries", "FLOAT * queries", "activations"),
    Fault("the gradient of a head's weight forgotten", "costs.activations:_Loss.kept", "(self.d_model + self.biased)", "self.biased", "activations"),
    Fault("percentages of the target", "costs.parameter_table:allocation_lines", "count / counts.total", "count / 1e6", "table"),
    Fault("one layer's attention for all", "costs.parameter_table:allocation_lines", "(name, layers * each,", "(name, each,", "table"),
)  # fmt: skip
