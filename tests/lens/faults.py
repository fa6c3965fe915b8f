"""Planted faults of the lens: one line of damage each, and the check that must notice."""

from tests.lens import checks, patch_checks
from tests.verify.faults import Fault

CHECKS = {
    check.__name__: check
    for check in (
        checks.attention_is_softmax_of_scores,
        checks.means_are_means,
        checks.the_final_row_is_the_model,
        checks.every_row_is_the_model_cut_off,
        checks.post_norm_rows_are_read_as_they_stand,
        checks.norms_are_lengths,
        checks.losses_are_of_the_next_token,
        checks.answers_are_read_where_the_head_reads,
        checks.ablation_is_a_head_without_columns,
        checks.ranking_is_every_ablation,
        patch_checks.patching_everything_is_clean_and_nothing_corrupt,
        patch_checks.patching_the_encoder_is_clean,
        patch_checks.patches_are_forwards_by_hand,
        checks.a_look_is_of_the_model_as_it_was,
    )
}

FAULTS = [
    Fault("transposed map", "lens.attention:KindMaps._heat", "Heat(weights_TS,", "Heat(weights_TS.T,", "attention_is_softmax_of_scores"),
    Fault("wrong layer of a map", "lens.attention:KindMaps._layer", "return self.weights[layer]", "return self.weights[layer - 1]", "attention_is_softmax_of_scores"),
    Fault("wrong head of a map", "lens.attention:KindMaps.__getitem__", "weights_NTS[head], layer", "weights_NTS[head - 1], layer", "attention_is_softmax_of_scores"),
    Fault("cross read for self", "lens.headname:part_of", 'kind == "cross"', 'kind == "self"', "attention_is_softmax_of_scores"),
    Fault("window forgotten in the mask", "lens.allowed:allowed_of", "window=attention.window", "window=None", "attention_is_softmax_of_scores"),
    Fault("empty rows called open", "lens.allowed:allowed_of", "allow & ~mask.empty", "allow", "attention_is_softmax_of_scores"),
    Fault("source padding not masked", "lens.allowed:allowed_of", '"tokens" if kind == "self" else "source"', '"tokens" if kind != "encoder" else "source"', "attention_is_softmax_of_scores"),
    Fault("mean over queries", "lens.attention:KindMaps.mean", "self._layer(layer).mean(0)", "self._layer(layer).mean(1)", "means_are_means"),
    Fault("missing final norm", "lens.logit_lens:read_lens", "row if norm is None else norm(row)", "row", "every_row_is_the_model_cut_off"),
    Fault("final norm twice", "lens.logit_lens:read_lens", "for row in rows), seen.hidden_TD]", "for row in [*rows, seen.hidden_TD])]", "the_final_row_is_the_model"),
    Fault("lens of the layer before", "lens.capture:residual_rows", '"L{layer} mlp", f"{here}.resid_post"', '"L{layer} mlp", f"{here}.resid_mid"', "every_row_is_the_model_cut_off"),
    Fault("wrong KL direction", "lens.reading:measure", "divergence(final_TV, logp_TV)", "divergence(logp_TV, final_TV)", "every_row_is_the_model_cut_off"),
    Fault("KL to the first row", "lens.reading:measure", "final_TV = reading.log_probabilities(rows[-1][at])", "final_TV = reading.log_probabilities(rows[0][at])", "every_row_is_the_model_cut_off"),
    Fault("entropy of another base", "lens.reading:entropy_of", "(logp_TV.exp() * logp_TV)", "(logp_TV.exp() * logp_TV / 0.6931471805599453)", "losses_are_of_the_next_token"),
    Fault("logits called log-probabilities", "lens.reading:Reading.log_probabilities", "torch.log_softmax(wide, dim=-1)", "wide", "the_final_row_is_the_model"),
    Fault("softmax over positions", "lens.reading:Reading.log_probabilities", "dim=-1", "dim=0", "the_final_row_is_the_model"),
    Fault("norm of a post-norm model invented", "lens.logit_lens:read_lens", "row if norm is None else norm(row)", "row / row.norm(dim=-1, keepdim=True)", "post_norm_rows_are_read_as_they_stand"),
    Fault("mean square for a norm", "lens.norms:_norm", "wide.norm(dim=-1)", "wide.square().mean(-1).sqrt()", "norms_are_lengths"),
    Fault("attention's norm for the mlp's", "lens.norms:read_norms", 'mlp=layers("ffn.out")', 'mlp=layers("attn.out")', "norms_are_lengths"),
    Fault("off-by-one target", "lens.targets:_next_tokens", "found_T[:-1] = torch.where(follows_T, tokens_T[1:], NONE)", "found_T[1:] = torch.where(follows_T, tokens_T[1:], NONE)", "losses_are_of_the_next_token"),
    Fault("the token itself is asked for", "lens.targets:_next_tokens", "tokens_T[1:], NONE", "tokens_T[:-1], NONE", "losses_are_of_the_next_token"),
    Fault("mean over what was not asked", "lens.reading:mean_of", "asked.mean()", "asked.sum() / len(losses_T)", "losses_are_of_the_next_token"),
    Fault("answer read at the end of the padding", "lens.reading:reading_place", "real[0 if first else -1]", "T - 1", "answers_are_read_where_the_head_reads"),
    Fault("mean readout forgotten", "lens.reading:Reading.rows_of", "readout=kind.readout", 'readout="last"', "answers_are_read_where_the_head_reads"),
    Fault("ablation of the next head", "lens.capture:zeroed", "append(head.head)", "append(head.head - 1)", "ablation_is_a_head_without_columns"),
    Fault("ablation of a position", "lens.capture:zeroed", "x_BNTH[:, places] = 0.0", "x_BNTH[:, :, places] = 0.0", "ablation_is_a_head_without_columns"),
    Fault("ablation by the mean", "lens.capture:zeroed", "x_BNTH[:, places] = 0.0", "x_BNTH[:, places] = x_BNTH.mean()", "ablation_is_a_head_without_columns"),
    Fault("ablation in the wrong layer", "lens.headname:HeadName.tap", "blocks.{self.layer}.", "blocks.{max(0, self.layer - 1)}.", "ablation_is_a_head_without_columns"),
    Fault("encoder's heads taken from the decoder", "lens.headname:prefix_of", '"encoder." if kind == "encoder" else "decoder."', '"decoder."', "ablation_is_a_head_without_columns"),
    Fault("loss change with the wrong sign", "lens.ablation:_change", "after - before", "before - after", "ablation_is_a_head_without_columns"),
    Fault("KL(after || before)", "lens.ablation:_apart", "reading.log_probabilities(before_TD[at]), reading.log_probabilities(after_TD[at])", "reading.log_probabilities(after_TD[at]), reading.log_probabilities(before_TD[at])", "ablation_is_a_head_without_columns"),
    Fault("ranking forgets what is silent", "lens.ablation:_one_each", "for head in seen.ablated:", "for head in ():", "ranking_is_every_ablation"),
    Fault("ranking silences every row", "lens.ablation:_one_each", "append((row, head.head))", "append((slice(None), head.head))", "ranking_is_every_ablation"),
    Fault("ranking by the plain value", "lens.ablation:rank_heads", "-abs(each[2] if each[1] is None else each[1])", "-(each[2] if each[1] is None else each[1])", "ranking_is_every_ablation"),
    Fault("patched at the position before", "lens.experiment:_cleaned", "x[row, index] = clean[index]", "x[row, index] = clean[index - 1]", "patches_are_forwards_by_hand"),
    Fault("patched after the layer", "lens.experiment:site_grid", '"residual": "resid_pre"', '"residual": "resid_post"', "patches_are_forwards_by_hand"),
    Fault("every row patched", "lens.experiment:_cleaned", "x[row, index] = clean[index]", "x[:, index] = clean[index]", "patching_everything_is_clean_and_nothing_corrupt"),
    Fault("clean and corrupt swapped", "lens.experiment:Experiment.measured", "inputs = repeated(self.corrupt.inputs, len(tried))", "inputs = repeated(self.clean.inputs, len(tried))", "patching_everything_is_clean_and_nothing_corrupt"),
    Fault("share not normalised by the gap", "lens.patching:patch", "(next(values) - base) / (best - base)", "(next(values) - base) / best", "patches_are_forwards_by_hand"),
    Fault("wrong answer for the right one", "lens.experiment:Experiment.read", "right_B - logp_BV[:, self.wrong]", "logp_BV[:, self.wrong] - right_B", "patching_everything_is_clean_and_nothing_corrupt"),
    Fault("target positions for the source's", "lens.experiment:site_grid", 'inputs.source_BS if kind == "encoder"', 'inputs.source_BS if kind == "cross"', "patching_the_encoder_is_clean"),
    Fault("a look forgets its weights", "lens.capture:weight_versions", "tensor._version", "1", "a_look_is_of_the_model_as_it_was"),
]
