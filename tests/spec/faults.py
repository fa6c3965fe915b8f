"""Planted mistakes in the solver and the costs: one line of damage, and the check that notices."""

from tests.verify.faults import Fault

KEY = "spec.preference:Preference."
SEARCH = "spec.search:Search."

FAULTS = (
    # counting
    Fault("a law forgets the second size", "spec.counting:Law.at", "term *= sizes[i]", "term *= sizes[0]", "laws"),
    Fault("a law of the first point alone", "spec.counting:Law.__init__", "(2, False): -1", "(2, False): 0", "laws"),
    Fault("a frame without its base", "spec.counting:Frame.count", "self.base + self.column", "self.column", "laws"),
    Fault("what is tied counts twice", "spec.counting:_size", "if p.tied_to is None", "if p.size", "laws"),
    # hard limits
    Fault("d_ff one too wide", SEARCH + "ffns_of", "(room.high - fixed) // slope", "(room.high - fixed) // slope + 1", "answers"),
    Fault("d_ff one too narrow", SEARCH + "ffns_of", "_up(room.low - fixed, slope)", "(room.low - fixed) // slope", "answers"),
    Fault("multiple of d_ff ignored", SEARCH + "ffns_of", "_up(least, multiple) * multiple", "least", "answers"),
    Fault("deepest model left out", SEARCH + "depths_of", "range(least, most + 1)", "range(least, most)", "answers"),
    Fault("max_layers ignored", SEARCH + "depths_of", "min(most, self.budget.max_layers)", "most", "answers"),
    Fault("the least aspect ignored", SEARCH + "depths_of", "least = max(least, _up(frame.d_model * under, over))", "pass", "answers"),
    Fault("aspect upside down", SEARCH + "depths_of", "frame.d_model * under // over", "frame.d_model * over // under", "answers"),
    Fault("ratio's limit on one side", SEARCH + "room", "high = min(high, covered * under // over)", "pass", "limits"),
    Fault("exact within a whole step", SEARCH + "room", "(2 * covered + frame.step)", "(2 * covered + 2 * frame.step)", "limits"),
    Fault("ratio's limit on the other side", SEARCH + "room", "low = max(low, _up(covered * under, over))", "pass", "limits"),
    Fault("expansion's limit on one side", SEARCH + "room", "narrow = max(narrow, _up(self._least_glu[0] * d_model, self._least_glu[1]))", "pass", "answers"),
    Fault("rotary with odd heads", "spec.widths:width_step", "2 if isinstance(budget.position, Rotary) else 1", "1", "answers"),
    Fault("free heads too free", "spec.widths:heads_of", "math.floor(middle + HEAD_SLACK)", "math.floor(middle + HEAD_SLACK) + 1", "answers"),
    Fault("any heads not grouped", "spec.widths:heads_of", "d_model // h % groups == 0", "True", "grouped"),
    Fault("widest model left out", "spec.widths:Widths.within", "low * self.step + 1", "low * self.step", "answers"),
    # preferences
    Fault("drift of the ratio forgotten", KEY + "key", "level(ratio + glu)", "level(glu)", "answers"),
    Fault("within a point does not come first", KEY + "key", "float(max(ratio, glu) > 1.0)", "0.0", "answers"),
    Fault("shallower depths left out", SEARCH + "_best_of", "(shallower, deeper)", "(deeper,)", "answers"),
    Fault("deeper depths left out", SEARCH + "_best_of", "(shallower, deeper)", "(shallower,)", "answers"),
    Fault("hopeless too early", KEY + "hopeless", "max(narrow - 1.0, 1.0 - wide, 0.0) / GLU_UNIT", "max(narrow - 1.0, 1.0 - wide, 0.0) * 99", "answers"),
    Fault("a bound that is none", KEY + "least_ratio_drift", "return away / RATIO_UNIT", "return away / RATIO_UNIT + 1.0", "answers"),
    # refusals
    Fault("nearest total too far", "spec.reach:nearest_total", "math.ceil(above / (1 + tolerance))", "above", "certificates"),
    Fault("nearest below forgotten", "spec.reach:neighbours", "largest_count(budget, low - 1)", "None", "certificates"),
    Fault("tolerance rounded down", "spec.reach:_rounded_up", "math.ceil(share / unit)", "math.floor(share / unit)", "certificates"),
    Fault("vocabulary only upwards", "spec.reach:_outwards", "(start - away, start + away)", "(start + away,)", "certificates"),
    # costs
    Fault("attention over half the keys", "spec.costs:flops", "4 * rows * rows", "2 * rows * rows", "flops"),
    Fault("the tied head is free", "spec.costs:flops", "products += 2 * rows * head_weights(model, name)", "pass", "flops"),
    Fault("source as long as the target", "spec.costs:flops", "2 * (source - rows) * of_source", "0", "flops"),
    Fault("Adam with one moment", "spec.costs:optimizer_bytes", "return FLOAT * sum(2 * p.size + 1 for p in own)", "return FLOAT * sum(p.size + 1 for p in own)", "optimizers"),
    Fault("Muon with two moments", "spec.costs:optimizer_bytes", "p.size if p.kind", "2 * p.size if p.kind", "optimizers"),
    Fault("SwiGLU keeps three", "spec.activations:_block", "yield 4 * wide", "yield 3 * wide", "activations"),
    Fault("RMSNorm keeps what LayerNorm does", "spec.activations:_norm", "FLOAT * rows * (1 + width)", "FLOAT * rows * 2", "activations"),
    Fault("log-softmax forgotten", "spec.activations:_head", "FLOAT * rows * width + LONG * rows", "LONG * rows", "activations"),
    Fault("the rotated result is not joined", "spec.activations:_attention", "turned or isinstance", "False and isinstance", "activations"),
    Fault("percentages of the target", "spec.allocation:allocation_lines", "count / found.total", "count / 1e6", "table"),
    Fault("one layer's attention for all", "spec.allocation:allocation_lines", "(name, layers * each,", "(name, each,", "table"),
)  # fmt: skip
