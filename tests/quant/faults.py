"""Planted faults of quantization: one line of damage each, and the check that must notice."""

from tests.checks.faults import Fault
from tests.quant import checks

CHECKS = {
    check.__name__: check
    for check in (
        checks.schemes_are_their_definition,
        checks.errors_are_half_a_step,
        checks.levels_stay_in_range,
        checks.nibbles_keep_their_order,
        checks.least_squares_are_less,
        checks.gptq_keeps_products,
        checks.errors_are_made_up_for,
        checks.turns_keep_answers,
        checks.harm_is_what_rounding_does,
        checks.backends_are_within_their_bound,
        checks.the_reference_has_the_bits_of_c,
        checks.rows_are_alone,
        checks.forms_come_back,
        checks.lookups_are_rows,
        checks.converted_is_rounded,
        checks.gradients_go_straight_through,
        checks.pieces_add_up,
        checks.corrections_learn_over_rounded_weights,
        checks.dequantized_is_what_was_used,
        checks.tied_tables_are_shared,
        checks.arrays_come_back,
    )
}

FAULTS = (
    # schemes
    Fault("scale by column", "quant.schemes:IntegerCodec.grid", "reach_OG = weight_OGE.abs().amax(-1) * shrink", "reach_OG = weight_OGE.abs().amax(0, keepdim=True).amax(-1).expand(len(weight_OI), -1) * shrink", "schemes_are_their_definition"),
    Fault("one scale for everything", "quant.schemes:IntegerCodec.grid", "weight_OGE.abs().amax(-1) * shrink", "weight_OGE.abs().amax().expand(weight_OGE.shape[:2]) * shrink", "schemes_are_their_definition"),
    Fault("scale one level too small", "quant.schemes:IntegerCodec.grid", "(self.highest - self.middle)", "(self.highest - self.middle + 1)", "schemes_are_their_definition"),
    Fault("zero ignored", "quant.schemes:Codec.values", "(levels_OGE - zero_OG[..., None])", "levels_OGE", "errors_are_half_a_step"),
    Fault("stored zero ignored", "quant.schemes:grid_of", "if tensor.zero is None:", "if True:", "errors_are_half_a_step"),
    Fault("0 outside the range", "quant.schemes:IntegerCodec.grid", "weight_OGE.amin(-1).clamp(max=0)", "weight_OGE.amin(-1)", "errors_are_half_a_step"),
    Fault("clip missing", "quant.schemes:IntegerCodec.nearest", "(torch.round(weight / scale) + zero).clamp(self.lowest, self.highest)", "torch.round(weight / scale) + zero", "least_squares_are_less"),
    Fault("rounded down", "quant.schemes:IntegerCodec.nearest", "torch.round(weight / scale)", "torch.floor(weight / scale)", "errors_are_half_a_step"),
    Fault("group boundary off by one", "quant.schemes:Codec.nearest_levels", "self.grouped(weight_OI)", "self.grouped(weight_OI.roll(1, 1))", "errors_are_half_a_step"),
    Fault("nibbles exchanged when packed", "quant.schemes:Int4Codec.pack", "levels[:, 0::2] | (levels[:, 1::2] << 4)", "levels[:, 1::2] | (levels[:, 0::2] << 4)", "nibbles_keep_their_order"),
    Fault("nibbles exchanged when read", "quant.schemes:Int4Codec.unpack", "(qweight & 15, qweight >> 4)", "(qweight >> 4, qweight & 15)", "nibbles_keep_their_order"),
    Fault("the worst grid kept", "quant.schemes:_searched_grid", "better_OG = error_OG < best_OG", "better_OG = error_OG > best_OG", "least_squares_are_less"),
    Fault("a fine zero of whole levels", "quant.schemes:Int4Codec.rounded_zero", "torch.round(zero_OG * SIXTEENTHS).clamp(0, BYTE) / SIXTEENTHS", "torch.round(zero_OG).clamp(0, 15)", "schemes_are_their_definition"),
    Fault("a fine scale rounded down", "quant.schemes:Int4Codec.storable", "torch.ceil(scale_OG / unit_O1)", "torch.floor(scale_OG / unit_O1)", "schemes_are_their_definition"),
    Fault("8-bit floats over a smaller range", "quant.schemes:Float8Codec.grid", "* shrink / self.highest", "* shrink / 240.0", "schemes_are_their_definition"),
    Fault("one scale for all 8-bit floats", "quant.schemes:Float8Codec.grid", "weight_OI.abs().amax(-1, keepdim=True)", "weight_OI.abs().amax().expand(len(weight_OI), 1)", "schemes_are_their_definition"),
    Fault("integers leave their range", "quant.schemes:IntegerCodec.nearest", "(torch.round(weight / scale) + zero).clamp(self.lowest, self.highest)", "torch.round(weight / scale) + zero", "levels_stay_in_range"),
    Fault("8-bit floats of another format", "quant.schemes:Float8Codec.nearest", "bounded.to(self.dtype)", "bounded.to(torch.float8_e5m2)", "errors_are_half_a_step"),
    # GPTQ
    Fault("no correction within a block", "quant.schemes:_corrected", "weight_OI[:, i + 1 : end] -= torch.outer(error_O, factor_II[i, i + 1 : end])", "pass", "gptq_keeps_products"),
    Fault("correction with the wrong sign", "quant.schemes:_corrected", "weight_OI[:, i + 1 : end] -= ", "weight_OI[:, i + 1 : end] += ", "gptq_keeps_products"),
    Fault("columns rounded to the wrong side", "quant.schemes:_rounded_again", "before_O - slope_OI", "before_O + slope_OI", "gptq_keeps_products"),
    Fault("scales by the wrong moment", "quant.schemes:_group_moments", "pull_OI = levels_OE @ moment_EI", "pull_OI = levels_OE @ moment_II[: len(moment_EI)]", "gptq_keeps_products"),
    Fault("the cross moment turned", "quant.schemes:making_up", "(cross_II.double() + extra_II)", "(cross_II.double().T + extra_II)", "errors_are_made_up_for"),
    Fault("behind float layers", "quant.convert:quantize_in_turn", "module.weight.copy_(dequantize(found[module]))", "pass", "turns_keep_answers"),
    Fault("nothing made up for", "quant.convert:_settle_block", "weight_OI = making_up(layer.weight, moment_II=moment_II, cross_II=cross_II)", "weight_OI = layer.weight", "turns_keep_answers"),
    Fault("the moment itself for its inverse", "quant.schemes:_inverse_factor", "torch.cholesky_inverse(torch.linalg.cholesky(damped_II))", "damped_II", "gptq_keeps_products"),
    # mixed precision
    Fault("the likeliest token for a sampled one", "quant.mixed:_backward", "torch.multinomial(chances_MV, 1, generator=generator)", "chances_MV.argmax(-1, keepdim=True)", "harm_is_what_rounding_does"),
    Fault("errors of positions taken one by one", "quant.mixed:_watcher", ".flatten(1).sum(-1)", ".sum(-1)", "harm_is_what_rounding_does"),
    Fault("draws counted once", "quant.mixed:_backward", "count += len(logp_MV)", "count = len(logp_MV)", "harm_is_what_rounding_does"),
    # backends
    Fault("activations scaled by the batch", "quant.backends.routines:FbgemmForm.product", "x_MI.abs().amax(-1, keepdim=True)", "x_MI.abs().amax().expand(len(x_MI), 1)", "rows_are_alone"),
    Fault("activations left as they are", "quant.layers:QuantizedWeight.times", "if self.backend == FLOAT:", "if True:", "the_reference_has_the_bits_of_c"),
    Fault("a head rounded once by the reference", "quant.layers:QuantizedWeight.times", "bias_O, head=self.head", "bias_O", "the_reference_has_the_bits_of_c"),
    Fault("activations of eight bits", "quant.backends.routines:FbgemmForm.product", "1.0 / FBGEMM_STEPS, 64, self.packed", "1.0 / 255, 64, self.packed", "backends_are_within_their_bound"),
    Fault("rows not scaled back", "quant.backends.routines:FbgemmForm.product", "out_MO.mul_(largest_M1)", "out_MO", "backends_are_within_their_bound"),
    Fault("bias forgotten", "quant.backends.routines:FbgemmForm.product", "out_MO if bias_O is None else out_MO.add_(bias_O)", "out_MO", "backends_are_within_their_bound"),
    Fault("asymmetric zeros dropped", "quant.backends.routines:NativeForm.__init__", "tensor.zero,", "None,", "backends_are_within_their_bound"),
    Fault("zeros lost on the way back", "quant.backends.routines:NativeForm.unpack", "scale, zero, self.scheme", "scale, None, self.scheme", "forms_come_back"),
    Fault("the stored form kept too", "quant.layers:QuantizedWeight.ready", "self.qweight = self.scale = self.zero = self.exponent = None", "pass", "forms_come_back"),
    # layers and models
    Fault("lookups unscaled", "quant.layers:QuantizedEmbedding.forward", "x if self.multiplier is None else x * self.multiplier", "x", "lookups_are_rows"),
    Fault("STE gradient missing", "quant.layers:StraightThrough.backward", "return gradient, None", "return torch.zeros_like(gradient), None", "gradients_go_straight_through"),
    Fault("weights not rounded in training", "quant.layers:RoundedLinear.forward", "fake_quantize(self.weight, self.scheme)", "self.weight", "converted_is_rounded"),
    Fault("a table not rounded in training", "quant.layers:RoundedEmbedding.forward", "fake_quantize(self.weight, self.scheme)", "self.weight", "converted_is_rounded"),
    Fault("no gradient through frozen weights", "quant.layers:FrozenProduct.backward", "transposed_product(gradient, ctx.tensor)", "0 * transposed_product(gradient, ctx.tensor)", "corrections_learn_over_rounded_weights"),
    Fault("a gradient by the last piece alone", "quant.backends.routines:transposed_product", "found += y[..., piece]", "found = y[..., piece]", "pieces_add_up"),
    Fault("activations rounded in training", "quant.layers:QuantizedWeight.freeze", "self.use(FLOAT)", 'self.use("reference")', "corrections_learn_over_rounded_weights"),
    Fault("a packed layer left out", "nn.linear:PackedLoRALinear.forward", "full + low", "low", "corrections_learn_over_rounded_weights"),
    Fault("tied table forgotten", "spec.quantization:targets", 'keep_tables = is_factorized(model.embedding) or tied != "share"', "keep_tables = True", "tied_tables_are_shared"),
    Fault("untied head beside a tied spec", "quant.convert:_untie", "model.spec = untied(model.spec)", "pass", "tied_tables_are_shared"),
    Fault("bias lost on the way back", "quant.convert:dequantize_model", "plain.bias = nn.Parameter(layer.bias)", "plain.bias = nn.Parameter(torch.zeros_like(layer.bias))", "dequantized_is_what_was_used"),
    Fault("zero lost on disk", "quant.contents:_layer", 'leaves.get("zero")', "None", "arrays_come_back"),
)  # fmt: skip
