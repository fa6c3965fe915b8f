"""Tests are tested: one line of damage in the engine, and a named check turns red.

Each fault names the check that must catch it; the check passes without the fault.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from glassformer.byhand.optim import Adam, AdamW
from tests.byhand import (
    test_cached_forward,
    test_extremes,
    test_invariants,
    test_model_parity,
    test_parts,
    test_training,
)
from tests.byhand.parts import PARTS
from tests.byhand.witness import MODERN, PRESETS, T5
from tests.checks.faults import Fault, planted


def steps_like(ours: type[Adam], theirs: type[torch.optim.Optimizer]) -> None:
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    loss_error, weight_error = test_training.trajectories(
        PRESETS["budget-lm"], ours, theirs, settings, 5
    )
    assert loss_error <= 1e-10
    assert weight_error <= 1e-9


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"part {n}": lambda p=p: test_parts.test_numbers_and_gradients_are_torchs(p)
        for n, p in PARTS.items()
    },
    **{
        f"model {n}": lambda s=s: test_model_parity.assert_same_gradients(s)
        for n, s in PRESETS.items()
    },
    "model without a first norm": lambda: test_model_parity.assert_same_gradients(MODERN),
    "model t5": lambda: test_model_parity.assert_same_gradients(T5),
    "segments": lambda: test_model_parity.assert_same_gradients(PRESETS["qwen"], segments=True),
    "padding between": lambda: (
        test_cached_forward.test_padding_between_prompt_and_answer_moves_no_position("alibi-lm")
    ),
    "cached, alibi": lambda: test_cached_forward.test_cached_is_uncached(
        PRESETS["alibi-lm"], "left"
    ),
    "dropout slopes": test_model_parity.test_gradients_are_slopes_with_dropout,
    "accumulation": lambda: test_model_parity.test_accumulation_is_the_sum("core"),
    "repeated tokens": lambda: test_invariants.test_repeated_tokens_accumulate(5),
    "repeated tokens, many rows": lambda: test_invariants.test_repeated_tokens_accumulate(300),
    "permissions": test_invariants.test_permissions,
    "window": lambda: test_invariants.test_a_window_counts_real_tokens_as_torch_does(True, 6),
    "empty rows": test_invariants.test_attention_weights_sum_to_one_and_empty_rows_give_zeros,
    "alone": lambda: test_extremes.test_all_masked_rows_are_finite_and_alone(PRESETS["core"]),
    "padding": lambda: test_extremes.test_what_padding_holds_is_never_read(PRESETS["core"]),
    "huge": lambda: test_extremes.test_huge_logits_stay_finite(PRESETS["core"], np.float32),
    "adam": lambda: steps_like(Adam, torch.optim.Adam),
    "adamw": lambda: steps_like(AdamW, torch.optim.AdamW),
    "clipping": test_training.test_clipping_is_torchs,
    "ties": test_invariants.test_equal_router_logits_choose_the_lowest_index,
    "idle expert": test_invariants.test_an_expert_that_nobody_chose_has_a_gradient_of_zero,
    "cached": lambda: test_cached_forward.test_cached_is_uncached(PRESETS["qwen"], "left"),
    "cached seq2seq": lambda: test_cached_forward.test_cached_is_uncached(
        PRESETS["seq2seq"], "none"
    ),
}


def fault(name: str, where: str, old: str, new: str, caught_by: str) -> Fault:
    return Fault(name, f"byhand.{where}", old, new, caught_by)


FAULTS = [
    fault(
        "bias by distance forgotten",
        "attention:attend_forward",
        "scores += bias",
        "pass",
        "part attend with linear biases",
    ),
    fault(
        "bias grows with distance",
        "embedding:alibi_bias",
        "-slopes_N[:, None, None]",
        "slopes_N[:, None, None]",
        "part attend with linear biases",
    ),
    fault(
        "bias one way only",
        "embedding:alibi_bias",
        "np.abs(apart_BTS)",
        "np.maximum(apart_BTS, 0)",
        "part attend with linear biases",
    ),
    fault(
        "distance counts padding",
        "stack:_Allows._places",
        "valid_BS=self.valid_BS, ",
        "",
        "padding between",
    ),
    fault(
        "queries first instead of last",
        "embedding:alibi_bias",
        "positions_BS[:, -queries:, None]",
        "positions_BS[:, :queries, None]",
        "cached, alibi",
    ),
    fault(
        "the bias's gradient after the scale",
        "attention:attend_backward",
        "dbias += dscores.sum(axis=0, keepdims=True) if len(dbias) == 1 else dscores",
        "dbias += dscores * scale * 0.5 if len(dbias) > 1 else scale * dscores.sum(axis=0)[None]",
        "model t5",
    ),
    fault(
        "the bias of the first layer alone",
        "stack:stack_backward",
        "            dbias=dbias,",
        "            dbias=dbias if block is cache.blocks[0] else None,",
        "model t5",
    ),
    fault(
        "a clamped gate passes a gradient on",
        "ffn:clamped_forward",
        "    slope *= below\n",
        "",
        "part clamped swiglu",
    ),
    fault(
        "a clamped factor passes a gradient on",
        "ffn:swiglu_backward",
        "dup *= cache.inside",
        "pass",
        "part clamped swiglu",
    ),
    fault(
        "the attention's input lost under the sum",
        "block:block_forward",
        "x_BTD = np.add(x_BTD, out, out=out)  # the part keeps its input, x\n"
        '            case "pre_ffn":',
        'x_BTD += out\n            case "pre_ffn":',
        "model without a first norm",
    ),
    fault(
        "a block without its first norm keeps no residual",
        "block:block_backward",
        "d_BTD += dinto\n            case",
        "d_BTD[:] = dinto\n            case",
        "model without a first norm",
    ),
    fault(
        "buckets of the query's side",
        "embedding:relative_buckets_of",
        "np.clip(apart_BTS, -most, most)",
        "np.clip(-apart_BTS, -most, most)",
        "model t5",
    ),
    fault(
        "a bucket's gradient to its neighbour",
        "embedding:relative_backward",
        "buckets_BTS.reshape(-1), weights",
        "np.maximum(buckets_BTS.reshape(-1) - 1, 0), weights",
        "model t5",
    ),
    fault(
        "missing transpose",
        "linear:linear_products",
        "np.matmul(dout_RO, weight_OI, out",
        "np.matmul(dout_RO, weight_OI.T if len(weight_OI) == len(weight_OI.T) else weight_OI, out",
        "model core",
    ),
    fault(
        "bias gradient is a mean",
        "linear:sum_rows",
        "np.ones(len(x_RO), x_RO.dtype)",
        "np.full(len(x_RO), 1 / len(x_RO), x_RO.dtype)",
        "part linear",
    ),
    fault(
        "repeated tokens overwrite",
        "embedding:embedding_backward",
        "dtable_VD[rows] += sums if scale == 1.0 else sums * scale",
        "dtable_VD[tokens_M] = dout_MD",
        "repeated tokens, many rows",
    ),
    fault(
        "tied table not accumulated",
        "embedding:embedding_backward",
        "dtable_VD += np.matmul(chosen_VM, dout_MD)",
        "dtable_VD[...] = np.matmul(chosen_VM, dout_MD)",
        "model fsm-probe",
    ),
    fault(
        "embedding scale forgotten backward",
        "embedding:embedding_backward",
        "np.arange(len(tokens_M))] = scale",
        "np.arange(len(tokens_M))] = 1.0",
        "model seq2seq",
    ),
    fault(
        "factor V overwritten",
        "embedding:factorized_backward",
        "dv_RD += dv.T",
        "dv_RD[...] = dv.T",
        "model fsm-factorized",
    ),
    fault(
        "L1 slope missing",
        "embedding:l1_penalty",
        "du_VR += l1 * np.sign(u_VR)",
        "du_VR += 0.0",
        "model fsm-factorized",
    ),
    fault(
        "norm without the mean term",
        "norm:layer_norm_backward",
        "dx -= mean[..., None]",
        "dx -= 0.0",
        "part layer_norm",
    ),
    fault(
        "norm without the spread term",
        "norm:layer_norm_backward",
        "dx -= work",
        "dx -= 0.0",
        "part layer_norm",
    ),
    fault(
        "rms norm forgets its rstd",
        "norm:rms_norm_backward",
        "dx *= rstd[..., None]",
        "dx *= 1.0",
        "part rms_norm",
    ),
    fault(
        "softmax without the Jacobian's second term",
        "attention:softmax_backward",
        "dx = np.subtract(dout, dot, out=dx)",
        "dx = np.subtract(dout, 0.0, out=dx)",
        "part softmax",
    ),
    fault(
        "empty rows divide by zero",
        "attention:masked_softmax",
        "total_BNT += total_BNT == 0",
        "total_BNT += 0",
        "empty rows",
    ),
    fault(
        "no shift for large scores",
        "attention:masked_softmax",
        "x -= most_BNT1",
        "x -= 0.0",
        "huge",
    ),
    fault(
        "dropped 1/sqrt(d) backward",
        "attention:attend_backward",
        "dscores *= scale",
        "dscores *= 1.0",
        "part attend",
    ),
    fault(
        "dv given to the wrong keys",
        "attention:attend_backward",
        "used.reshape(B, K, M, S).swapaxes(-1, -2), dheads_BKMH",
        "used.reshape(B, K, M, S)[..., ::-1].swapaxes(-1, -2), dheads_BKMH",
        "part attend",
    ),
    fault(
        "groups mixed up",
        "attention:_fold",
        "np.copyto(folded.reshape(B, N, T, H), x_BNTH)",
        "np.copyto(folded.reshape(B, N, T, H), x_BNTH[:, ::-1])",
        "part attend",
    ),
    fault(
        "attention dropout forgotten backward",
        "attention:attend_backward",
        "dweights *= keep",
        "dweights *= 1.0",
        "dropout slopes",
    ),
    fault(
        "rotation turned the same way twice",
        "embedding:rotate_backward",
        "_turn(dout_BNTH, cos, -sin, ws)",
        "_turn(dout_BNTH, cos, sin, ws)",
        "part rotary",
    ),
    fault(
        "sin and cos swapped",
        "embedding:rotations",
        "np.cos(angle) * factor",
        "np.sin(angle) * factor",
        "model qwen",
    ),
    fault(
        "key bias gradient in the query's place",
        "attention:_project_backward",
        'name = f"{letter}_proj.bias"',
        'name = "q_proj.bias"',
        "part multi_head",
    ),
    fault(
        "memory gradient of the last layer only",
        "block:_part_backward",
        "dmemory_BSD += dcontext",
        "dmemory_BSD[...] = dcontext",
        "model seq2seq",
    ),
    fault(
        "residual path cut (pre)",
        "block:block_backward",
        "np.multiply(d_BTD, block.residual_scale, out=ws.take(d_BTD.shape))\n",
        "np.multiply(d_BTD, block.residual_scale, out=ws.take(d_BTD.shape))\n"
        "                dout, d_BTD = dout.copy(), np.multiply(d_BTD, 0.0, out=d_BTD)\n",
        "part block, pre",
    ),
    fault(
        "residual path cut (post)",
        "block:block_backward",
        "d_BTD += back(d_BTD, line)",
        "d_BTD[...] = back(d_BTD, line)",
        "part block, post",
    ),
    fault(
        "norm of the output left out (sandwich)",
        "block:block_backward",
        'unnormed(d_BTD, line.out_norm, f"{name}_post_norm", dx=dout)',
        "np.copyto(dout, d_BTD) or dout",
        "part block, sandwich",
    ),
    fault(
        "residual path cut (output)",
        "block:block_backward",
        "d_BTD += back(unnormed(",
        "d_BTD[...] = back(unnormed(",
        "part block, output",
    ),
    fault(
        "feed-forward reads the sum (parallel)",
        "block:block_forward",
        'into, ffn_norm = normed(x_BTD, "ffn_norm")',
        'into, ffn_norm = normed(x_BTD + outs[0][0], "ffn_norm")',
        "part block, parallel",
    ),
    fault(
        "shared norm without the feed-forward's share",
        "block:block_backward",
        "dattn += dinto",
        "pass",
        "part block, parallel_shared",
    ),
    fault(
        "cap without its slope",
        "attention:attend_backward",
        "dscores *= slope",
        "pass",
        "part attend, capped, with sinks",
    ),
    fault(
        "sink left out of the softmax",
        "attention:masked_softmax",
        "total_BNT += np.exp(sink_BNT1)[..., 0]",
        "pass",
        "part attend, capped, with sinks",
    ),
    fault(
        "sign of the sink's gradient",
        "attention:attend_backward",
        "-left_BNT *",
        "left_BNT *",
        "part attend, capped, with sinks",
    ),
    fault(
        "gain without its 1",
        "norm:norm_forward",
        "1.0 + weight_D if offset",
        "weight_D if offset",
        "model gemma",
    ),
    fault(
        "capped logits without the slope",
        "model:head_backward",
        "dlogits = dlogits * cache.slope",
        "pass",
        "model gemma",
    ),
    fault(
        "layers share one rotary base",
        "stack:stack_forward",
        "turned[rotary, d_head]",
        "next(iter(turned.values()))",
        "model gemma",
    ),
    fault(
        "whole heads rotated",
        "embedding:_turn",
        "half = cos.shape[-1]",
        "half = x_BNTH.shape[-1] // 2; cos = np.resize(cos, (*cos.shape[:-1], half)); "
        "sin = np.resize(sin, (*sin.shape[:-1], half))",
        "model neox",
    ),
    fault(
        "gelu slope without the bell",
        "activation:gelu_forward",
        "np.add(below_P, bell_P, out=slope_P)",
        "np.add(below_P, 0.0, out=slope_P)",
        "part gelu",
    ),
    fault(
        "relu passes everything",
        "activation:relu_backward",
        "cache > 0",
        "cache >= 0",
        "part relu",
    ),
    fault(
        "silu slope without x s (1 - s)",
        "activation:silu_forward",
        "slope_P *= x_P",
        "slope_P *= 0.0",
        "part silu",
    ),
    fault(
        "gate and up swapped",
        "ffn:swiglu_backward",
        "np.multiply(dhidden, cache.opened, out=dboth[..., width:])",
        "np.multiply(dhidden, cache.up, out=dboth[..., width:])",
        "part swiglu",
    ),
    fault(
        "experts' weights not normalized",
        "ffn:moe_forward",
        "weights_MA = weights_MA / total_M1",
        "weights_MA = weights_MA + 0.0",
        "part moe",
    ),
    fault(
        "one expert too many",
        "ffn:moe_forward",
        "[:, : ffn.experts_per_token]",
        "[:, : ffn.experts_per_token + 1]",
        "part moe, not normalized",
    ),
    fault(
        "the unlikeliest experts are chosen",
        "ffn:moe_forward",
        "np.argsort(-logits_ME",
        "np.argsort(logits_ME",
        "part moe",
    ),
    fault(
        "ties go to the highest index",
        "ffn:moe_forward",
        'np.argsort(-logits_ME, axis=-1, kind="stable")',
        'ffn.n_experts - 1 - np.argsort(-logits_ME[:, ::-1], axis=-1, kind="stable")',
        "ties",
    ),
    fault(
        "experts exchanged",
        "ffn:moe_forward",
        'experts[f"experts.{expert}"], inside',
        'experts[f"experts.{ffn.n_experts - 1 - expert}"], inside',
        "part moe",
    ),
    fault(
        "shared expert forgotten",
        "ffn:moe_forward",
        "out_MD += added",
        "out_MD += 0.0",
        "part moe",
    ),
    fault(
        "shared gate's slope without 1 - g",
        "ffn:_shared_backward",
        "dgate_M1 * gate_M1 * (1.0 - gate_M1)",
        "dgate_M1 * gate_M1",
        "part moe",
    ),
    fault(
        "the router gets no gradient",
        "ffn:moe_backward",
        'np.einsum("jd,jd->j", dout_JD, out_JD)',
        "0.0",
        "part moe",
    ),
    fault(
        "normalization has no slope",
        "ffn:moe_backward",
        "dp_MA = dweights_MA - (dweights_MA * cache.weights_MA).sum(-1, keepdims=True)",
        "dp_MA = dweights_MA + 0.0",
        "part moe",
    ),
    fault(
        "an expert's gradient without its weight",
        "ffn:moe_backward",
        "dout_JD *= cache.weights_MA[rows_J, choice_J, None]",
        "dout_JD *= 1.0",
        "part moe",
    ),
    fault(
        "padding counts in the balance loss",
        "ffn:moe_forward",
        "real_M = np.ones(len(x_MD), bool) if valid_BT is None else",
        "real_M = np.ones(len(x_MD), bool) if True else",
        "part moe, balance loss",
    ),
    fault(
        "padding has a slope in the balance loss",
        "ffn:moe_backward",
        "dp_ME[cache.real_M] +=",
        "dp_ME[cache.real_M | True] +=",
        "part moe, balance loss",
    ),
    fault(
        "the balance loss is not differentiated",
        "ffn:moe_backward",
        "dloss * ffn.n_experts / tokens * cache.share_E",
        "0.0 * cache.share_E",
        "model moe",
    ),
    fault(
        "the sum of the layers' balance losses",
        "loss:balance_slopes",
        "/ len(layers)",
        "/ 1",
        "model moe",
    ),
    fault(
        "gradients of an expert that nobody chose left standing",
        "ffn:moe_backward",
        "slot(own, leaf, param.shape, param.dtype).fill(0.0)",
        "slot(own, leaf, param.shape, param.dtype)",
        "idle expert",
    ),
    fault(
        "mean over rows instead of over what counts",
        "loss:_rows_that_count",
        "total = weights_M.sum(dtype=np.float64)",
        "total = float(len(weights_M))",
        "model core",
    ),
    fault(
        "smoothing forgotten backward",
        "loss:cross_entropy_backward",
        "dlogits_MC -= smoothing / dlogits_MC.shape[1]",
        "dlogits_MC -= 0.0",
        "part cross_entropy",
    ),
    fault(
        "answer read at the end of the padding",
        "model:readout_forward",
        "T - 1 - np.argmax(valid[:, ::-1], axis=1)",
        "T - 1",
        "part answer, last",
    ),
    fault(
        "padded keys are read",
        "inputs:allow_of",
        "pairs.append(valid_k_BS[:, None, :])",
        "pairs.append(valid_k_BS[:, None, :] | True)",
        "padding",
    ),
    fault(
        "positions count padding",
        "inputs:positions_of",
        "np.cumsum(valid_BS, axis=1)",
        "np.cumsum(valid_BS | True, axis=1)",
        "model budget-lm",
    ),
    fault(
        "segments see each other",
        "inputs:allow_of",
        "segments_BT[:, :, None] == segments_BT[:, None, :]",
        "segments_BT[:, :, None] >= segments_BT[:, None, :]",
        "segments",
    ),
    fault(
        "window one too wide",
        "inputs:allow_of",
        "ahead_TS >= -before",
        "ahead_TS >= -before - 1",
        "permissions",
    ),
    fault(
        "window one too wide beside padding",
        "inputs:allow_of",
        "apart_BTS <= before",
        "apart_BTS <= before + 1",
        "model qwen-sliding",
    ),
    fault(
        "padding uses up the window",
        "inputs:allow_of",
        "np.cumsum(valid_k_BS, axis=1)",
        "np.cumsum(valid_k_BS | True, axis=1)",
        "window",
    ),
    fault(
        "gradients of the last batch left standing",
        "model:Model._zero_shared",
        'if name.startswith(("embed.", "position.", "token_type.")):',
        'if name.startswith("position."):',
        "accumulation",
    ),
    fault(
        "no bias correction",
        "optim:Adam._update",
        "work *= lr * root / (1.0 - beta1**self.steps)",
        "work *= lr * root",
        "adam",
    ),
    fault(
        "decay added to the gradient",
        "optim:Adam._update",
        "param_P *= 1.0 - lr * decay",
        "grad_P = grad_P + decay * param_P",
        "adamw",
    ),
    fault(
        "norm of norms without the root",
        "optim:global_norm",
        "np.sqrt(np.dot(grads, grads))",
        "np.dot(grads, grads)",
        "clipping",
    ),
    fault(
        "cache off by one",
        "cached_forward:_advance",
        "past=state.length,",
        "past=max(state.length - 1, 0),",
        "cached",
    ),
    fault(
        "beams keep another beam's memory",
        "cached_forward:DecodeState.reorder",
        "(k[rows_B], v[rows_B])",
        "(k, v)",
        "cached seq2seq",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a damaged engine may divide by zero
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    check = CHECKS[fault.caught_by]
    check()
    with planted(fault), pytest.raises((AssertionError, ValueError, IndexError)):
        check()
    check()
