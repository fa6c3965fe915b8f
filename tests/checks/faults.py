"""Planted faults: one line of damage each, in the source of one function, and the check that names it."""

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the source of `where` (module:qualified name)."""

    name: str
    where: str
    old: str
    new: str
    caught_by: str
    preset: str = ""  # the preset whose model is examined, for checks of models


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The package with this fault in it, restored afterwards."""
    module_name, _, path = fault.where.partition(":")
    outside = module_name.startswith("bench.")
    module = importlib.import_module(module_name if outside else f"glassformer.{module_name}")
    *owners, leaf = path.split(".")
    owner = module
    for name in owners:
        owner = getattr(owner, name)
    function = vars(owner)[leaf]
    function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) == 1, f"{fault.name}: the line to damage is gone:\n{source}"
    damaged = source.replace(fault.old, fault.new)
    if owners:  # zero-argument super() needs the class around it
        damaged = damaged.replace("super()", f"super({owners[-1]}, self)")
    namespace = dict(vars(module))
    exec(compile(damaged, f"<fault: {fault.name}>", "exec"), namespace)
    twin = inspect.unwrap(namespace[leaf])
    twin = twin if inspect.isfunction(twin) else twin.__wrapped__
    if function.__code__.co_freevars == twin.__code__.co_freevars == ():
        # Swapping the code reaches everyone who imported the function by name.
        before = function.__code__
        function.__code__ = twin.__code__
        try:
            yield
        finally:
            function.__code__ = before
    else:
        original = vars(owner)[leaf]
        setattr(owner, leaf, namespace[leaf])
        try:
            yield
        finally:
            setattr(owner, leaf, original)


EXPLICIT = "explicit attention = F.scaled_dot_product_attention"
FUSED = "explicit attention = fused attention"
MULTI_HEAD = "multi-head = nn.MultiheadAttention"
EMPTY = "rows that may attend to nothing are zero"
ENCODER = "encoder layer = nn.TransformerEncoderLayer"
DECODER = "decoder layer = nn.TransformerDecoderLayer"
WHOLE = "encoder-decoder = nn.Transformer"
ROTARY = "rotary positions = complex numbers"
ALIBI = "ALiBi = one query at a time"
RELATIVE = "relative biases = one query at a time"
HAND = "by hand: every tap = torch's"
READ = "scores or weights read, same logits"
SINUSOIDS = "sinusoids = formula, and no parameter"
PATTERN = "attention falls where the spec allows"
PAD_HOLDS = "what PAD holds changes no bit"
PAD_LEFT = "more padding on the left changes nothing"
CACHED = "cached = uncached, token by token"
GROWING = "growing cache in pieces, reordered = uncached"
DETERMINISM = "same input, same bits; no dropout in eval"
DROPOUT = "dropout acts where the spec says"
TOGETHER = "trained together = trained alone"
GRADIENTS = "every parameter gets a gradient"
MANIFEST = "parameters = manifest"
TAPS = "every tap seen, every edit felt, no hook"
CAUSALITY = "the future changes no bit of the past"
DECODING = "every way of decoding gives the same tokens"
COMPANY = "served in company = alone, bit for bit"
AHEAD = "guesses read ahead change no token"
KEPT = "prompts kept on disk change no bit"
ROUNDED = "8-bit cache = all read again, rounded"
NATIVE_ROUNDED = "8-bit cache: native step = torch step"
ONE_TOKEN = "one token a cached step, one run of the encoder"
GROUPED_EXPERTS, BALANCE = (
    "experts in groups = one token at a time",
    "balance loss = counted over real tokens",
)
STEPS = "every decoding step = uncached"
NATIVE = "native step = plain step"
WIDE_STEPS = "every decoding step = uncached, float64"
BATCHES = "a batch decodes as its rows, padded left or right"
EVERYTHING = "top-k of everything = plain sampling"
WIDEST = "the widest beams = brute force"
SEARCHES = "beams of random models = brute force"
ROTATED = "rotated for quantization = the same function"
ROWS = "attention rows sum to 1, none to PAD or future"

ATTEND = "nn.attention:_attend_explicitly"
SCORES = "nn.attention:_masked_scores"
BIAS = "nn.mask:Mask.added"
MASK_LINES = (
    "_masked_scores(q_BNTH, k_BNSH, added, scale)\n"
    "    if sinks_N is None:\n"
    "        weights_BNTS = torch.softmax(scores_BNTS, dim=-1)\n"
)
MASK_LATE = (
    "_masked_scores(q_BNTH, k_BNSH, 0 * added.exp(), scale)\n"
    "    if sinks_N is None:\n"
    "        weights_BNTS = torch.softmax(scores_BNTS, dim=-1)\n"
    "        weights_BNTS = weights_BNTS.masked_fill(added < 0, 0.0)\n"
)
FORWARD = "nn.block:TransformerBlock.forward"

FAULTS = (
    # attention
    Fault("scale missing", SCORES, "alpha=1 / math.sqrt(H)", "alpha=1.0", EXPLICIT),
    Fault("scale by d_model", SCORES, "math.sqrt(H)", "8.0", EXPLICIT),
    Fault("mask after softmax", ATTEND, MASK_LINES, MASK_LATE, EXPLICIT),
    Fault("mask sign turned", BIAS, "torch.where(self.allow, q_BNTH.new_zeros(()), -math.inf)", "torch.where(self.allow, -math.inf, q_BNTH.new_zeros(()))", EXPLICIT),
    Fault("masked by 0, not -inf", BIAS, "new_zeros(()), -math.inf)", "new_zeros(()), 0.0)", EXPLICIT),
    Fault("a query does not see itself when weights are asked for", BIAS, "triu_(1)", "triu_(0)", EXPLICIT),
    Fault("one token of the future when weights are asked for", BIAS, "triu_(1)", "triu_(2)", EXPLICIT),
    Fault("softmax over queries", ATTEND, "torch.softmax(scores_BNTS, dim=-1)", "torch.softmax(scores_BNTS, dim=-2)", EXPLICIT),
    Fault("weights of empty rows shown", ATTEND, "if mask.empty is not None", "if False", ROWS, "core"),
    Fault("fused path without scale", "nn.attention:_attend_fused", "and mask.bias is None,\n        scale=1 / math.sqrt(H)", "and mask.bias is None,\n        scale=1.0", FUSED),
    Fault("fused path ignores the mask", "nn.attention:_attend_fused", "attn_mask=mask.allow if mask.bias is None", "attn_mask=None if mask.bias is None", FUSED),
    Fault("empty rows not erased", "nn.attention:attend", "out_BNTH.masked_fill(mask.empty, 0.0)", "out_BNTH", EMPTY),
    Fault("empty rows mistaken for full", "nn.mask:close_empty_rows", "~allow.any(", "allow.any(", EMPTY),
    Fault("group order", "nn.attention:per_query_head", "kv_BKSH.repeat_interleave(group, dim=1)", "kv_BKSH.repeat(1, group, 1, 1)", "grouped heads = one head at a time"),
    Fault("heads split across", "nn.attention:split_heads", "return x_BTNH.transpose(1, 2)", "return x_BTD.unflatten(-1, (d_head, -1)).permute(0, 3, 1, 2)", MULTI_HEAD),
    Fault("heads joined without transpose", "nn.attention:join_heads", "x_BNTH.transpose(1, 2).flatten(2)", "x_BNTH.reshape(x_BNTH.shape[0], x_BNTH.shape[2], -1)", MULTI_HEAD),
    Fault("W_O dropped", "nn.attention:MultiHeadAttention.forward", "self.o_proj(join_heads(heads_BNTH))", "join_heads(heads_BNTH)", MULTI_HEAD),
    Fault("keys from the value weights", "nn.attention:MultiHeadAttention.forward", "self.q_proj, self.k_proj", "self.q_proj, self.v_proj", MULTI_HEAD),
    Fault("norm after rotation", "nn.attention:MultiHeadAttention.__init__", "self.norm_last = attention.qk_norm_last", "self.norm_last = True", "q/k-norm, then rotation = by hand"),
    Fault("keys not turned", "nn.attention:MultiHeadAttention.forward", "self._by_head(kv[0], self.k_norm, rotation)", "self._by_head(kv[0], self.k_norm)", "q/k-norm, then rotation = by hand"),
    Fault("wrong projection biased", "nn.attention:MultiHeadAttention.__init__", 'self.k_proj = Linear(d_model, kv_width, bias=attention.bias in ("qkv", "all"))', "self.k_proj = Linear(d_model, kv_width, bias=True)", MANIFEST, "qwen"),
    # masks
    Fault("a query does not see itself", "nn.mask:causal_allow", "k_1S <= q_T1", "k_1S < q_T1", "sliding window = one query at a time"),
    Fault("one token of the future", "nn.mask:causal_allow", "k_1S <= q_T1", "k_1S <= q_T1 + 1", CAUSALITY, "qwen-sliding"),
    Fault("triangle not moved with the past", "nn.mask:causal_allow", "torch.arange(keys - queries, keys, device=device)", "torch.arange(queries, device=device)", GROWING, "core"),
    Fault("window one too wide", "nn.mask:causal_allow", "q_T1 - k_1S < window", "q_T1 - k_1S <= window", "sliding window = one query at a time"),
    Fault("window forgotten", "nn.mask:Masks.of", "window=attention.window", "window=None", PATTERN, "qwen-sliding"),
    Fault("PAD attends", "nn.mask:padding_allow", "valid_q_BT[:, None, :, None] & ", "", PATTERN, "core"),
    Fault("PAD is attended to", "nn.mask:padding_allow", " & valid_k_BS[:, None, None, :]", "", PAD_HOLDS, "core"),
    Fault("source padding ignored", "nn.mask:memory_mask", "valid_k_BS=memory_valid_BS", "valid_k_BS=torch.ones_like(memory_valid_BS)", PATTERN, "seq2seq"),
    # positions
    Fault("positions count PAD", "nn.position:positions_of", "count_BS = valid_BS.cumsum(1) - 1", "count_BS = torch.arange(valid_BS.shape[1]).expand(valid_BS.shape)", PAD_LEFT, "core"),
    Fault("positions start anew with a cache", "nn.position:positions_of", "slice(past, past + length)", "slice(0, length)", CACHED, "core"),
    Fault("rotary interleaved", "nn.position:rotate", "x_BNTH[..., :width].chunk(2, dim=-1)", "(x_BNTH[..., ::2], x_BNTH[..., 1::2])", ROTARY),
    Fault("rotary turns backwards", "nn.position:rotate", "first * cos - second * sin, second * cos + first * sin", "first * cos + second * sin, second * cos - first * sin", ROTARY),
    Fault("rotary sin and cos swapped", "kernels.tables:rotations", "np.cos(angle), np.sin(angle)", "np.sin(angle), np.cos(angle)", ROTARY),
    Fault("slopes halved beyond a power of two", "spec.position:alibi_slopes", "range(1, 2 * (n_heads - power), 2)", "range(2, 1 + 2 * (n_heads - power), 2)", ALIBI),
    Fault("slopes begin at 1", "spec.position:alibi_slopes", "range(1, power + 1)", "range(power)", ALIBI),
    Fault("nearer keys are lowered", "nn.position:ALiBiPosition.bias", "-self.table[:, None, None]", "self.table[:, None, None]", ALIBI),
    Fault("the future is not lowered", "nn.position:ALiBiPosition.bias", "apart_TS.abs()", "apart_TS.clamp(min=0)", ALIBI),
    Fault("bias forgotten in the fused path", "nn.attention:_attend_fused", "mask.allow if mask.bias is None else mask.added(q_BNTH)", "mask.allow", ALIBI),
    Fault("read scores without their bias", ATTEND, "if mask.bias is not None", "if False", READ, "alibi-lm"),
    Fault("a biased score taken for a masked one", ATTEND, "added == -math.inf", "added < 0", READ, "alibi-lm"),
    Fault("distance from the new tokens alone", "nn.mask:Masks._bias", "torch.arange(self.keys, device=self.device)", "torch.arange(self.keys, device=self.device).clamp(min=self.keys - self.queries)", GROWING, "alibi-lm"),
    Fault("fast step without its bias", "generation.fast.block:FastAttention.heads", "mask = bias_1KGS if mask is None else mask + bias_1KGS", "pass", STEPS, "alibi-lm"),
    Fault("fast step with slopes of other heads", "generation.fast.block:FastAttention.bias", "-self.slopes_N[:, None]", "-self.slopes_N.flip(0)[:, None]", STEPS, "alibi-lm"),
    Fault("near distances share a bucket", "spec.position:relative_buckets", "exact = count // 2", "exact = count // 4", RELATIVE),
    Fault("the last bucket is never reached", "spec.position:relative_buckets", "count - 1)", "count - 2)", RELATIVE),
    Fault("keys behind share the buckets of keys before", "spec.position:relative_buckets", "count + number for", "number for", RELATIVE),
    Fault("distance from the key's side", "nn.position:RelativePosition.bias", "positions_S[..., None, :] - positions_S[..., -queries:, None]", "positions_S[..., -queries:, None] - positions_S[..., None, :]", RELATIVE),
    Fault("biases of other heads", "nn.position:RelativePosition.bias", "movedim(-1, -3)", "flip(-1).movedim(-1, -3)", RELATIVE),
    Fault("biases are not learned", "nn.position:RelativePosition.bias", "self.weight)", "self.weight.detach())", RELATIVE),
    Fault("sinusoid sin and cos swapped", "kernels.tables:sinusoids", "table[:, 0::2] = np.sin(angle)", "table[:, 0::2] = np.cos(angle)", SINUSOIDS),
    Fault("sinusoid exponent doubled", "kernels.tables:sinusoids", "kind.base**-powers", "kind.base ** (-2 * powers)", SINUSOIDS),
    Fault("table as a parameter", "nn.position:SinusoidalPosition.__init__", 'self.register_buffer("table", self.first(), persistent=False)', "self.table = nn.Parameter(self.first())", SINUSOIDS),
    Fault("table in the checkpoint", "nn.position:RotaryPosition.__init__", "persistent=False", "persistent=True", MANIFEST, "qwen"),
    # norms, feed-forward, blocks
    Fault("LayerNorm eps 1e-6 for 1e-5", "nn.norm:build_norm", "eps=norm.eps, bias", "eps=1e-6, bias", "LayerNorm = nn.LayerNorm"),
    Fault("RMSNorm eps 1e-5 for 1e-6", "nn.norm:build_norm", "eps=norm.eps, offset", "eps=1e-5, offset", "RMSNorm = nn.RMSNorm"),
    Fault("RMSNorm takes the mean off", "nn.norm:RMSNorm.forward", "wide.square().mean(-1, keepdim=True)", "wide.var(-1, keepdim=True, correction=0)", "RMSNorm = nn.RMSNorm"),
    Fault("a clamped gate has a lower limit", "nn.ffn:clamped_product", "gate_BTF.clamp(max=clamp.limit)", "gate_BTF.clamp(-clamp.limit, clamp.limit)", "feed-forward = formula"),
    Fault("a clamped product without its 1", "nn.ffn:clamped_product", "(up_BTF + 1)", "up_BTF", "feed-forward = formula"),
    Fault("a clamped gate's sigmoid without its slope", "nn.ffn:clamped_product", "clamp.slope * gate_BTF", "gate_BTF", "feed-forward = formula"),
    Fault("SwiGLU gates the wrong half", "nn.ffn:SwiGLU.forward", "activate(gate_BTF, self.activation) * up_BTF", "gate_BTF * activate(up_BTF, self.activation)", "feed-forward = formula"),
    Fault("sigmoid for SiLU", "nn.ffn:activate", "F.silu(x_BTF, inplace=spare)", "F.sigmoid(x_BTF)", "feed-forward = formula"),
    Fault("GELU by tanh for the exact one", "nn.ffn:activate", "else F.gelu(x_BTF)\n", "else F.gelu(x_BTF, approximate='tanh')\n", "feed-forward = formula"),
    Fault("gain without its 1", "nn.norm:RMSNorm.forward", "1.0 + as_float(self.weight)", "as_float(self.weight)", HAND, "gemma"),
    Fault("cap left out", "nn.attention:_attend_explicitly", "if softcap is not None:\n", "if False:\n", HAND, "gemma"),
    Fault("cap after the mask", "nn.heads:finished", "torch.tanh(logits / head.softcap)", "torch.tanh(logits)", HAND, "gemma"),
    Fault("one rotary base for every layer", "models.stack:run_stack", "rotations[turn]", "next(iter(rotations.values()))", HAND, "gemma"),
    Fault("norm of the output left out", FORWARD, "x + self.attn_post_norm(attend(self.attn_norm(x)))", "x + attend(self.attn_norm(x))", HAND, "gemma"),
    Fault("feed-forward after attention", FORWARD, "x + feed(two)", "x + feed(self.ffn_norm(x))", HAND, "neox"),
    Fault("whole heads rotated", "nn.position:rotate", "width = 2 * cos.shape[-1]", "width = x_BNTH.shape[-1]; cos = torch.cat((cos, cos), -1); sin = torch.cat((sin, sin), -1)", HAND, "neox"),
    Fault("norm on the wrong side", FORWARD, "x + attend(self.attn_norm(x))", "self.attn_norm(x + attend(x))", ENCODER),
    Fault("residual dropped", FORWARD, "x + feed(self.ffn_norm(x))", "feed(self.ffn_norm(x))", ENCODER),
    Fault("norms exchanged", FORWARD, "x + read(self.cross_norm(x))", "x + read(self.ffn_norm(x))", DECODER),
    Fault("K and V from the decoder", FORWARD, "context_BSD=memory_BSD", "context_BSD=x", "cross-attention reads the encoder in every layer", "seq2seq"),
    Fault("gradient cut", FORWARD, "return self.drop(self.ffn(x, taps=under(taps, \"ffn.\")))", "return self.drop(self.ffn(x.detach(), taps=under(taps, \"ffn.\")))", ENCODER),
    Fault("feed-forward detached", FORWARD, 'self.ffn(x, taps=under(taps, "ffn."))', 'self.ffn(x, taps=under(taps, "ffn.")).detach()', GRADIENTS, "core"),
    Fault("final norm forgotten", "models.stack:run_stack", "if parts.final_norm is not None", "if False", WHOLE),
    Fault("memory of the encoder's embedding", "models.model:EncoderDecoder.hidden", "self.encode(inputs, taps=taps, recompute=recompute, balance=balance)", "self.encoder.embed(inputs.source_BS)", WHOLE),
    # embeddings and heads
    Fault("sqrt(d_model) missing", "nn.embedding:TokenEmbedding.forward", "x_BTD * self.scale", "x_BTD", WHOLE),
    Fault("tied head from one factor", "nn.embedding:FactorizedTokenEmbedding.as_linear", "linear(linear(x_BTD, self.v), self.u)", "linear(linear(x_BTD, self.v.detach()), self.u.sign())", "factorized embedding = U @ V"),
    Fault("L1 without l1", "nn.embedding:FactorizedTokenEmbedding.penalty", "self.l1 * ", "", "factorized embedding = U @ V"),
    Fault("untied copy", "nn.heads:build_heads", "heads[name] = TiedHead(size, bias=head.bias)", "heads[name] = Linear(model.d_model, size, bias=head.bias)", MANIFEST, "qwen"),
    Fault("answer read at the last column", "nn.heads:read_out", "T - 1 - valid_BT.flip(1).int().argmax(1)", "torch.full((len(x_BTD),), T - 1)", "a batch = each sequence alone", "digits"),
    Fault("mean of the answer over PAD too", "nn.heads:read_out", 'case "last":', 'case "last" if not valid_BT.all(): return x_BTD.mean(1)\n        case "last":', PAD_HOLDS, "digits"),
    # cache
    Fault("every sequence in the first slot", "generation.fast.slots:NativeSlots.read", "[span.slot for span in spans]", "[0 for span in spans]", COMPANY, "qwen"),
    Fault("wrong guesses stay in the cache", "generation.speculative:SpeculativePast.forget", "self.stepper.forget(len(self.guesses), past=self.inner)", "pass", AHEAD, "qwen"),
    Fault("any token takes a guess's logits", "generation.speculative:SpeculativeStepper.step", "if token == past.next_guess:", "if past.guesses:", AHEAD, "qwen"),
    Fault("kept pages in another order", "generation.fast.native:Rows.fill", "] = pages", "] = pages[::-1]", KEPT, "qwen"),
    Fault("a kept prompt is taken whole", "generation.fast.prompt_cache:PromptCache.find", "shared_length(self._tokens(entry), prompt[:-1])", "min(len(self._tokens(entry)), len(prompt) - 1)", KEPT, "qwen"),
    Fault("cache written from the start", "nn.cache:FixedCache.extend", "memory[:, :, self.length : end] = one", "memory[:, :, : end - self.length] = one", CACHED, "qwen"),
    Fault("cache one short", "nn.cache:FixedCache.extend", "memory[:, :, :end] for memory", "memory[:, :, 1:end] for memory", CACHED, "core"),
    Fault("cache forgets padding", "nn.cache:FixedCache.advance", "joined_valid(self.valid_BS, self.length, valid_BT, count)", "None", CACHED, "core"),
    Fault("reorder of nothing", "nn.cache:GrowingCache.reorder", "self._layers[layer] = tuple(one[rows_B] for one in kept)", "pass", GROWING, "core"),
    Fault("scales stay where codes are moved", "nn.cache:FixedCache.reorder", "for one in kept:", "for one in kept[::2]:", ROUNDED, "core"),
    Fault("codes without their signs", "nn.cache:from_int8", "codes_BKTH * scale_BKTH", "codes_BKTH.abs() * scale_BKTH", NATIVE_ROUNDED, "core"),
    Fault("scales of 7 bits", "nn.cache:to_int8", "scale_R1.view(", "(2 * scale_R1).view(", NATIVE_ROUNDED, "qwen"),
    Fault("scales one part in 128 too small", "nn.cache:to_int8", "scale_R1.view(", "(scale_R1 * (127 / 128)).view(", NATIVE_ROUNDED, "core"),
    Fault("codes of the next head", "nn.cache:from_int8", "codes_BKTH * scale_BKTH", "codes_BKTH.roll(1, 1) * scale_BKTH", NATIVE_ROUNDED, "core"),
    Fault("codes of the position before", "nn.cache:from_int8", "codes_BKTH * scale_BKTH", "codes_BKTH.roll(1, 2) * scale_BKTH", NATIVE_ROUNDED, "core"),
    # experts
    Fault("experts' weights not normalized", "nn.experts:route", "weights_A / weights_A.sum(-1, keepdim=True)", "weights_A * 1.0", GROUPED_EXPERTS),
    Fault("one expert too few", "nn.experts:route", "order_E[..., :chosen]", "order_E[..., : max(1, chosen - 1)]", GROUPED_EXPERTS),
    Fault("the second to third likeliest", "nn.experts:route", "order_E[..., :chosen]", "order_E[..., 1 : chosen + 1]", "every token goes to its experts", "moe"),
    Fault("results in the order of experts", "nn.experts:MixtureOfExperts._experts_of", "out_PD[place_J]", "out_PD[place_J[order_J]]", GROUPED_EXPERTS),
    Fault("groups not filled up alike", "nn.experts:MixtureOfExperts._experts_of", "shift_E[experts_J[order_J]]", "shift_E[experts_J[order_J]].clamp(max=0)", GROUPED_EXPERTS),
    Fault("shared expert forgotten", "nn.experts:MixtureOfExperts.forward", "shared_BTD is not None", "False", GROUPED_EXPERTS),
    Fault("shared gate forgotten", "nn.experts:MixtureOfExperts.shared", "if self.shared_expert_gate is None", "if True", GROUPED_EXPERTS),
    Fault("the router gets no gradient", "nn.experts:route", "weights_A = p_E.gather(-1, chosen_A)", "weights_A = p_E.detach().gather(-1, chosen_A)", GROUPED_EXPERTS),
    Fault("balance loss counts padding", "nn.experts:balance_loss", "real_BT1 = valid_BT[..., None]", "real_BT1 = (valid_BT | True)[..., None]", BALANCE),
    Fault("balance loss of the first choice only", "nn.experts:balance_loss", "picked_BTE = torch.zeros_like(p_BTE).scatter_add(-1, chosen_BTA, ones_BTA)", "picked_BTE = torch.zeros_like(p_BTE).scatter_add(-1, chosen_BTA[..., :1], ones_BTA[..., :1])", BALANCE),
    Fault("balance loss has no slope", "nn.experts:balance_loss", "return E * (f_E * P_E).sum()", "return E * (f_E * P_E).sum().detach()", "by hand: every gradient = autograd's", "moe"),
    Fault("at most eight tokens an expert", "nn.experts:MixtureOfExperts._experts_of", "torch.cat([expert(x) for expert, x in zip(self.experts, groups, strict=True)])", "torch.cat([torch.nn.functional.pad(expert(x[:8]), (0, 0, 0, max(0, len(x) - 8))) for expert, x in zip(self.experts, groups, strict=True)])", "no token is dropped"),
    Fault("a step takes the wrong experts", "generation.fast.projection:FastMixtureOfExperts._chosen", "= self.experts[expert](x_BD[rows])", "= self.experts[expert - 1](x_BD[rows])", STEPS, "moe"),
    Fault("a step forgets the shared expert", "generation.fast.projection:FastMixtureOfExperts.onto", "if self.shared is not None", "if False", STEPS, "moe"),
    # models trained as one
    Fault("mixed-up seeds", "training.stacked_step:StackedSteps.submit_all", "for seed in seeds\n", "for seed in reversed(seeds)\n", TOGETHER),
    Fault("a clipping norm for all", "training.stacked_step:StackedSteps._update", "torch.linalg.vector_norm(grad_MP, dim=1)", "torch.linalg.vector_norm(grad_MP).expand(len(grad_MP))", TOGETHER),
    Fault("one model's NaN stops the others", "training.stacked_step:StackedSteps._update", 'applied_M & views["live"]', 'applied_M.all() & views["live"]', TOGETHER),
    Fault("one model's NaN in every loss", "training.stacked_step:StackedSteps._sums", "nll_M = (nll_MR * weights_MR).sum(1)", "nll_M = (nll_MR * weights_MR).sum(1) + 0 * nll_MR.sum()", TOGETHER),
    # dropout, init, files, taps
    Fault("dropout in eval", "nn.block:TransformerBlock.drop", "self.dropout(x_BTD)", "nn.functional.dropout(x_BTD, self.dropout.p)", DETERMINISM, "seq2seq"),
    Fault("attention dropout in eval", "nn.attention:MultiHeadAttention.forward", "self.dropout if self.training else None", "self.dropout", DETERMINISM, "seq2seq"),
    Fault("no residual dropout", "nn.block:TransformerBlock.drop", "self.dropout(x_BTD)", "x_BTD", DROPOUT, "core"),
    Fault("no embedding dropout", "models.stack:run_stack", "parts.dropout(x_BTD)", "x_BTD", DROPOUT, "core"),
    Fault("uniform without its lower half", "nn.initialise:initialise", "uniform_(-bound, bound", "uniform_(0.0, bound", "initial weights follow their rule"),
    Fault("std squared", "nn.initialise:initialise", "normal_(0.0, std,", "normal_(0.0, std**2,", "initial weights follow their rule"),
    Fault("weights transposed on disk", "store.tensors:tensor_chunks", "_memory(array_of(name))", "_memory(array_of(name).T)", "saved and loaded, same bits", "core"),
    Fault("edits ignored", "nn.taps:Taps._edit", "return _replaced(name, x, self.edits[name]) if name in self.edits else x", "return x", TAPS, "core"),
    Fault("a tap renamed", "nn.ffn:MLP.forward", '"hidden"', '"inner"', TAPS, "core"),
    # by hand
    Fault("a hand-made gradient a little too large", "byhand.linear:linear_products", "np.matmul(dout_RO.T, x_RI", "np.matmul(dout_RO.T * 1.0001, x_RI", "by hand: gradients = central differences", "core"),
    Fault("a softmax's slope by hand a little too large", "byhand.attention:softmax_backward", "dx *= cache", "dx *= 1.0001 * cache", "by hand: every gradient = autograd's", "core"),
    # decoding
    Fault("cached values are not written", "nn.cache:FixedCache.extend", "zip(kept, new, strict=True)", "zip(kept[:1], new, strict=False)", DECODING, "core"),
    Fault("the second likeliest token", "generation.stepper:TorchStepper._read", 'self.model.project(hidden_BTD[:, -1], "next")', '-self.model.project(hidden_BTD[:, -1], "next")', DECODING, "seq2seq"),
    Fault("every token read twice", "generation.stepper:TorchStepper._hidden", "self.positions += tokens_BT.shape[1]", "self.positions += 2 * tokens_BT.shape[1]", ONE_TOKEN, "seq2seq"),
    Fault("logits a little too large", "generation.stepper:TorchStepper._read", "hidden_BTD[:, -1]", "1.0001 * hidden_BTD[:, -1]", STEPS, "core"),
    Fault("a native step in the wrong place", "generation.fast.native:ArrayStepper._ready", "self._position[:count] = past.own.length", "self._position[:count] = past.own.length - 1", NATIVE, "core"),
    Fault("a program without its final norm", "generation.fast.program:NativeProgram.head", "at = FINAL", "pass", NATIVE, "core"),
    Fault("a program that forgets the q/k-norm", "generation.fast.program:NativeProgram.projected", "self.norm(chain[step], WIDE, WIDE, row, first=places[name])", "pass", NATIVE, "qwen"),
    Fault("lengths that stay behind their rows", "generation.fast.native:Rows.reorder", "self.length[rows]", "self.length[: len(rows)] if len(rows) <= len(self.length) else self.length[np.arange(len(rows)) % len(self.length)]", NATIVE, "core"),
    Fault("a lean step in the wrong place", "generation.fast.stepper:FastStepper.step", "end = slots.length + 1", "end = max(1, slots.length)", STEPS, "core"),
    Fault("float64 through float32", "generation.stepper:TorchStepper._read", "hidden_BTD[:, -1]", "hidden_BTD[:, -1].float().to(hidden_BTD.dtype)", WIDE_STEPS, "qwen"),
    Fault("prompts at the wrong side", "generation.prompts:padded", "tokens_BT[place, longest - len(row) :] = row", "tokens_BT[place, : len(row)] = row", BATCHES, "core"),
    Fault("padding read as tokens", "generation.prompts:_rows", "row[real] for row, real", "row for row, real", BATCHES, "seq2seq"),
    Fault("draws by the place in the batch", "generation.samplers:draw", "rows, [step]", "range(len(rows)), [step]", BATCHES, "core"),
    Fault("top-k never more than half", "generation.samplers:keep_top_k", "if k >= logits_BV.shape[-1]:\n        return logits_BV", "k = min(k, logits_BV.shape[-1] // 2)", EVERYTHING, "fsm-probe"),
    Fault("the same chance at every step", "generation.samplers:draw", "[step] * len", "[0] * len", EVERYTHING, "core"),
    Fault("log-probabilities not summed", "generation.beam:_totals", "sums[i, : len(beams)] = [beam.total for beam in beams]", "sums[i, : len(beams)] = 0.0", WIDEST, "core"),
    Fault("the wrong rows go on", "generation.beam:_search", "past.reorder(torch.tensor(order))", "past.reorder(torch.arange(len(order)) % len(logits_RV))", WIDEST, "seq2seq"),
    Fault("long ones punished", "spec.decoding:BeamSpec.length_penalty", "base**self.alpha", "base**-self.alpha", SEARCHES),
    Fault("values turned on, not back", "quant.rotate:_rotate_values", "rotation_HH.T.to(columns)", "rotation_HH.to(columns)", ROTATED, "core"),
    Fault("a stream that is written to as before", "quant.rotate:_rotate_stream", "turn_DD @ writer.weight.double()", "writer.weight.double()", ROTATED, "qwen"),
    Fault("the search ends too early", "generation.beam:_Item.settled", "return last >= spec.bound", "return True or last >= spec.bound", SEARCHES),
)  # fmt: skip
