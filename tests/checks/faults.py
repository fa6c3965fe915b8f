"""Planted faults: a mistake at one node of the package, and the row of `glass verify` that sees it."""

from tests.planting import (
    Assign,
    Binary,
    Call,
    Choice,
    Compare,
    Fault,
    If,
    Keyword,
    Name,
    Return,
    Subscript,
    mutate,
)

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
MUON = "native Muon = a polynomial of singular values"
LOW_RANK = "native LoRA = plain torch with the sum in its weights"
WIDE_STEPS = "every decoding step = uncached, float64"
BATCHES = "a batch decodes as its rows, padded left or right"
EVERYTHING = "top-k of everything = plain sampling"
WIDEST = "the widest beams = brute force"
SEARCHES = "beams of random models = brute force"
ROWS = "attention rows sum to 1, none to PAD or future"

ATTEND = "nn.attention:_attend_explicitly"
SCORES = "nn.attention:_masked_scores"
BIAS = "nn.mask:Mask.added"
FORWARD = "nn.block:TransformerBlock.forward"

FAULTS = (
    # attention
    Fault("scale missing", mutate(SCORES, Binary("/"), to="1.0"), EXPLICIT),
    Fault("mask sign turned", mutate(BIAS, Call("where"), to="{func}({args[0]}, {args[2]}, {args[1]})"), EXPLICIT),
    Fault("softmax over queries", mutate(ATTEND, Keyword("dim"), to="-2"), EXPLICIT),
    Fault("weights of empty rows shown", mutate(ATTEND, If("empty"), to="False"), ROWS, "core"),
    Fault("fused path ignores the mask", mutate("nn.operations:attention", Keyword("attn_mask"), part="body", to="None"), FUSED),
    Fault("empty rows not erased", mutate("nn.attention:attend", Choice(of="empty"), part="orelse", to="out_BNTH"), EMPTY),
    Fault("group order", mutate("nn.operations:per_query_head", Choice(), part="orelse", to="kv_BKSH.repeat(1, {args[0]}, 1, 1)"), "grouped heads = one head at a time"),
    Fault("heads split across", mutate("nn.attention:split_heads", Return(), to="x_BTD.unflatten(-1, (d_head, -1)).permute(0, 3, 1, 2)"), MULTI_HEAD),
    Fault("norm after rotation", mutate("nn.attention:MultiHeadAttention.__init__", Assign("norm_last"), to="True"), "q/k-norm, then rotation = by hand"),
    Fault("weights shown without their scale", mutate(SCORES, Binary("/"), to="1.0"), "attention weights = nn.MultiheadAttention's"),
    Fault("values of the position before", mutate("nn.attention:MultiHeadAttention.keys_values", Call("v_proj"), arg=0, to="{it}.roll(1, 1)"), "cross-attention = nn.MultiheadAttention"),
    Fault("softmax without its maximum", mutate(ATTEND, Call("softmax"), to="{args[0]}.exp() / {args[0]}.exp().sum(-1, keepdim=True)"), "scores of 1e4 stay finite"),
    # masks
    Fault("one token of the future", mutate("nn.mask:causal_allow", Name("q_T1"), to="{it} + 1"), CAUSALITY, "qwen-sliding"),
    Fault("triangle not moved with the past", mutate("nn.mask:causal_allow", Call("arange"), to="{func}(queries, device=device)"), GROWING, "core"),
    Fault("window one too wide", mutate("nn.mask:causal_allow", Compare("<"), op="<="), "sliding window = one query at a time"),
    Fault("PAD attends", mutate("nn.mask:padding_allow", Return(), to="{right}"), PATTERN, "core"),
    Fault("PAD is attended to", mutate("nn.mask:padding_allow", Return(), to="{left}"), PAD_HOLDS, "core"),
    Fault("PAD on the right is attended to", mutate("nn.mask:padding_allow", Return(), to="{left}"), "more padding on the right changes nothing", "digits"),
    # positions
    Fault("positions count PAD", mutate("nn.position:positions_of", Binary("-"), to="torch.arange(valid_BS.shape[1]).expand(valid_BS.shape)"), PAD_LEFT, "core"),
    Fault("positions start anew with a cache", mutate("nn.position:positions_of", Return(), to="{func}(0, length)"), CACHED, "core"),
    Fault("rotary interleaved", mutate("nn.operations:rotate", Call("chunk"), to="(x_BNTH[..., ::2], x_BNTH[..., 1::2])"), ROTARY),
    Fault("slopes halved beyond a power of two", mutate("spec.position:alibi_slopes", Assign("between"), to="{func}(2, 1 + {args[1]}, 2)"), ALIBI),
    Fault("read scores without their bias", mutate(ATTEND, If("bias"), to="False"), READ, "alibi-lm"),
    Fault("derived step without its bias", mutate("gpu.derived_step:FastAttention.heads", If("slopes_N"), to="False"), STEPS, "alibi-lm"),
    Fault("rotated and mirrored", mutate("nn.operations:rotate", Binary("+"), op="-"), "rotary scores depend on distance only"),
    Fault("biased by half the position", mutate("nn.position:ALiBiPosition.bias", Binary("-"), to="{left} - 0.5 * {right}"), "ALiBi depends on distance only"),
    Fault("near distances share a bucket", mutate("spec.position:relative_buckets", Assign("exact"), part="right", to="4"), RELATIVE),
    Fault("sinusoid sin and cos swapped", mutate("kernels.tables:sinusoids", Name("sin", nth=1), to="np.cos"), SINUSOIDS),
    # norms, feed-forward, blocks
    Fault("LayerNorm eps 1e-6 for 1e-5", mutate("nn.norm:build_norm", Name("eps"), to="1e-06"), "LayerNorm = nn.LayerNorm"),
    Fault("RMSNorm takes the mean off", mutate("nn.norm:RMSNorm.forward", Call("mean"), to="wide.var(-1, keepdim=True, correction=0)"), "RMSNorm = nn.RMSNorm"),
    Fault("SwiGLU gates the wrong half", mutate("nn.ffn:SwiGLU.forward", Call("gate"), to="{func}(up_BTF, gate_BTF, self.activation)"), "feed-forward = formula"),
    Fault("gain without its 1", mutate("nn.norm:RMSNorm.forward", Binary("+", of="weight"), to="{right}"), HAND, "gemma"),
    Fault("norm on the wrong side", mutate(FORWARD, Binary("+"), to="self.attn_norm(x + mix(x))"), ENCODER),
    Fault("norms exchanged", mutate(FORWARD, Call("cross_norm"), to="self.ffn_norm(x)"), DECODER),
    Fault("K and V from the decoder", mutate(FORWARD, Call("cross"), arg="context_BSD", to="x"), "cross-attention reads the encoder in every layer", "seq2seq"),
    Fault("feed-forward detached", mutate(FORWARD, Call("ffn", nth=1), to="{it}.detach()"), GRADIENTS, "core"),
    # embeddings and heads
    Fault("sqrt(d_model) missing", mutate("nn.embedding:TokenEmbedding.forward", Binary("*"), to="{left}"), WHOLE),
    Fault("L1 without l1", mutate("nn.embedding:FactorizedTokenEmbedding.penalty", Return(), to="{right}"), "factorized embedding = U @ V"),
    Fault("untied copy", mutate("nn.heads:build_heads", Call("TiedHead"), to="Linear(model.d_model, {args[0]}, bias=head.bias)"), MANIFEST, "qwen"),
    Fault("logits of another table", mutate("nn.heads:TiedHead.forward", Call("as_linear"), to="1.01 * {it}"), "tied head shares the embedding", "qwen"),
    Fault("answer read at the last column", mutate("nn.heads:read_out", Binary("-"), to="torch.full((len(x_BTD),), {left})"), "a batch = each sequence alone", "digits"),
    # cache
    Fault("every sequence in the first slot", mutate("generation.slots:NativeSlots._taken_back", Name("slot", nth=1), to="0"), COMPANY, "qwen"),
    Fault("wrong guesses stay in the cache", mutate("generation.speculative:SpeculativePast.forget", Call("len"), drop=True), AHEAD, "qwen"),
    Fault("a kept prompt is taken whole", mutate("generation.native.prompt_cache:PromptCache.longest", Assign("shared"), to="min(len({args[0]}), len(prompt) - 1)"), KEPT, "qwen"),
    Fault("cache one short", mutate("spec.state:Columns.extend", Return(), to="tuple(held[:, :, 1:end] for held in self.held)"), CACHED, "core"),
    Fault("scales stay where codes are moved", mutate("spec.state:Columns.take", Call("zip"), to="zip(self.held[::2], moved[::2], strict=True)"), ROUNDED, "core"),
    Fault("codes without their signs", mutate("nn.cache:from_int8", Binary("*"), part="left", to="{it}.abs()"), NATIVE_ROUNDED, "core"),
    # experts
    Fault("experts' weights not normalized", mutate("nn.experts:route", Binary("/"), to="{left} * 1.0"), GROUPED_EXPERTS),
    Fault("the second to third likeliest", mutate("nn.experts:route", Subscript("order_E"), to="{value}[..., 1:chosen + 1]"), "every token goes to its experts", "moe"),
    Fault("balance loss counts padding", mutate("nn.experts:balance_loss", Subscript("valid_BT"), part="value", to="{it} | True"), BALANCE),
    Fault("balance loss has no slope", mutate("nn.experts:balance_loss", Return(), to="E * {right}.detach()"), "by hand: every gradient = autograd's", "moe"),
    Fault("at most eight tokens an expert", mutate("nn.experts:MixtureOfExperts._experts_of", Call("expert"), to="torch.nn.functional.pad({func}(x[:8]), (0, 0, 0, max(0, len(x) - 8)))"), "no token is dropped"),
    # models trained as one
    Fault("gradients are not clipped", mutate("training.torch_engine:TorchEngine.apply", If("clip"), to="False"), "a training step = plain torch, its update the formula", "core"),
    Fault("mixed-up seeds", mutate("training.stacked_step:StackedSteps.submit_all", Call("manual_seed"), arg=0, to="every[0].seed"), TOGETHER),
    Fault("one model's NaN stops the others", mutate("training.stacked_step:StackedSteps._update", Call("isfinite"), to="{it}.all()"), TOGETHER),
    # dropout, init, files, taps
    Fault("dropout in eval", mutate("nn.block:TransformerBlock.drop", Call("dropout"), to="nn.functional.dropout({args[0]}, {func}.p)"), DETERMINISM, "seq2seq"),
    Fault("no residual dropout", mutate("nn.block:TransformerBlock.drop", Call("dropout"), to="{args[0]}"), DROPOUT, "core"),
    Fault("std squared", mutate("nn.initialise:initialise", Name("std"), to="{it} ** 2"), "initial weights follow their rule"),
    Fault("torch's own generator", mutate("nn.initialise:initialise", Keyword("generator", nth=1), to="None"), "same seed, same weights", "core"),
    Fault("weights transposed on disk", mutate("store.tensors:tensor_chunks", Call("array_of"), to="{it}.T"), "saved and loaded, same bits", "core"),
    Fault("edits ignored", mutate("nn.taps:Taps._edit", Choice(), to="{orelse}"), TAPS, "core"),
    # by hand
    Fault("a hand-made gradient a little too large", mutate("byhand.linear:linear_products", Name("T"), to="{it} * 1.0001"), "by hand: gradients = central differences", "core"),
    Fault("a softmax's slope by hand a little too large", mutate("byhand.attention:softmax_backward", Assign("dx", nth=1), to="1.0001 * {it}"), "by hand: every gradient = autograd's", "core"),
    # corrections of low rank in the native step
    Fault("corrections at twice their scale", mutate("spec.program:_Writer.linear", Keyword("scale"), to="2 * {it}"), LOW_RANK, "core"),
    Fault("a correction's gradient without its scale", mutate("byhand.c_table:_add_scaled_backward", Keyword("scale"), to="1.0"), LOW_RANK, "core"),
    Fault("a rate that knows no shape", mutate("byhand.updates:muon_update", Call("sqrt"), to="1.0"), MUON, "core"),
    Fault("a mean of four singular steps", mutate("byhand.updates:orthogonalized", Call("range"), arg=0, to="TIMES - 1"), MUON, "core"),
    Fault("a first step that is not corrected", mutate("byhand.updates:adam_update", Binary("/"), to="{left}"), "by hand: weights after Adam steps = torch's", "core"),
    # quantized
    Fault("training with other weights", mutate("quant.layers:fake_quantize", Return(), to="1.001 * {it}"), "quantized = rounded weights, every bit", "core"),
    Fault("dequantized a little too large", mutate("quant.layers:QuantizedWeight.weights", Return(), to="1.001 * {it}"), "dequantized = the weights that were used", "core"),
    Fault("a batch is centred", mutate("quant.layers:QuantizedWeight.times", Call("product"), arg=0, to="{it} - 0.01 * {it}.mean(0)"), "quantized: a row is the same in any batch", "core"),
    Fault("levels transposed on disk", mutate("store.tensors:tensor_chunks", Call("array_of"), to="{it}.T"), "quantized: saved and loaded, same bits", "core"),
    # decoding
    Fault("cached values are not written", mutate("spec.state:Columns.extend", Call("zip", nth=1), to="zip({args[0]}[:1], new, strict=False)"), DECODING, "core"),
    Fault("every token read twice", mutate("generation.stepper:TorchStepper._hidden", Subscript("shape"), to="2 * {it}"), ONE_TOKEN, "seq2seq"),
    Fault("logits a little too large", mutate("generation.stepper:TorchStepper._read", Return(), arg=0, to="1.0001 * {it}"), STEPS, "core"),
    Fault("a program without its final norm", mutate("generation.native.lowering:NativeProgram.head", Assign("at", nth=1), drop=True), NATIVE, "core"),
    Fault("a derived step in the wrong place", mutate("gpu.recorded_stepper:RecordedStepper.step", Binary("+"), to="max(1, {left})"), STEPS, "core"),
    Fault("float64 through float32", mutate("generation.stepper:TorchStepper._read", Return(), arg=0, to="{it}.float().to({value}.dtype)"), WIDE_STEPS, "qwen"),
    Fault("draws by the place in the batch", mutate("generation.samplers:draw", Call("uniforms"), arg=1, to="range(len({it}))"), BATCHES, "core"),
    Fault("the same chance at every step", mutate("generation.samplers:draw", Name("step"), to="0"), EVERYTHING, "core"),
    Fault("the wrong rows go on", mutate("generation.beam:_search", Call("reorder"), to="{func}(torch.arange(len(order)) % len(logits_RV))"), WIDEST, "seq2seq"),
    Fault("long ones punished", mutate("spec.decoding:BeamSpec.length_penalty", Name("alpha"), to="-{it}"), SEARCHES),
)  # fmt: skip
