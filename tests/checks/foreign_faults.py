"""Planted faults for the rows of other libraries' models: what is damaged, and the row that sees it.

Some are mistakes of `bench.faults` in a small model; the others damage transformers or peft itself.
"""

from tests.planting import Binary, Call, Compare, Fault, Keyword, Name, Return, mutate

#: A row, and a mistake of `bench.faults` (model: name) that turns it red.
IN_MODELS = {
    "more padding on the right changes nothing": "bert: positions counted from the end",
    "saved and loaded, same bits": "llama: a random table that is not saved",
    "source PAD changes nothing": "seq2seq: source padding attended to",
    "encoded once = encoded anew": "seq2seq: given encoder outputs normalised again",
    "past the sliding window, cached = uncached": "llama: fused kernel ignores the window",
    "past the stated context, cached = uncached": "llama: cache cut to the window, positions too",
    "loss of a padded batch = its rows'": "llama: long rows see their future",
    "gradients accumulated = one batch's": "llama: norm over the batch",
    "gradients = central differences": "llama: a wrong derivative written by hand",
    "gradient checkpointing on = off": "llama: checkpointing cuts the gradient",
    "tied weights are one tensor": "llama: a copy instead of a tied head",
}

LLAMA = "transformers.models.llama.modeling_llama:"
CACHE = "transformers.cache_utils:DynamicLayer.update"
GENERATE = "transformers.generation.utils:GenerationMixin."
#: `preset` is the factory of `tests.checks.foreign`.
IN_LIBRARIES = (
    Fault("another scale where attention is eager", mutate(f"{LLAMA}eager_attention_forward", Name("scaling"), to="1.1 * {it}"), "fused attention = eager attention", "llama"),
    Fault("not finite in bfloat16", mutate(f"{LLAMA}LlamaRMSNorm.forward", Return(), to="{it} * (1.0 if input_dtype != torch.bfloat16 else float('inf'))"), "bfloat16, float16 = float32, within their bits", "llama"),
    Fault("louder in training", mutate(f"{LLAMA}LlamaMLP.forward", Return(), to="{it} * (1.1 if self.training else 1.0)"), "training mode without dropout = eval mode", "llama"),
    Fault("what is read from the source is dropped", mutate("transformers.models.t5.modeling_t5:T5LayerCrossAttention.forward", Binary("+"), to="{left}"), "every position reads the source", "t5"),
    Fault("rows stay where they are", mutate("transformers.cache_utils:CacheLayerMixin.reorder_cache", Compare(">"), to="False"), "cache reordered = those rows uncached", "llama"),
    Fault("the second likeliest", mutate(f"{GENERATE}_sample", Call("argmax"), to="{args[0]}.argsort(-1)[:, -2]"), "generate = the likeliest token of each forward", "llama"),
    Fault("keys grow in the cache", mutate(CACHE, Call("cat"), to="-8 * {it}"), "generate: cache on = off", "llama"),
    Fault("beams on mixed caches", mutate("transformers.cache_utils:CacheLayerMixin.reorder_cache", Compare(">"), to="False"), "generate: beams, cache on = off", "llama"),
    Fault("a growing cache that grows at the front", mutate(CACHE, Call("cat"), arg=0, to="[key_states, self.keys]"), "generate: static cache = growing cache", "llama"),
    Fault("padding is attended to", mutate(f"{LLAMA}LlamaModel.forward", Keyword("attention_mask"), to="None"), "generate: a batch = each prompt alone", "llama"),
    Fault("keys are doubled at each step", mutate(CACHE, Call("cat"), to="2 * {it}"), "generate: a second turn = from the start", "llama"),
    Fault("neighbours in a row are seen", mutate("transformers.masking_utils:find_packed_sequence_indices", Return(nth=1), to="torch.zeros_like({it})"), "packed = each sequence alone", "llama"),
    Fault("read a little too large", mutate("transformers.modeling_utils:PreTrainedModel._finalize_model_loading", Return(), to="[p.data.mul_(1.01) for p in model.parameters()] and {it}"), "save_pretrained and back, same bits", "llama"),
    Fault("merged twice", mutate("peft.tuners.lora.layer:Linear.get_delta_weight", Return(), to="2 * {it}"), "adapters merged = beside the weights", "adapted"),
)  # fmt: skip

#: Rows without a fault here, and where one is.
ELSEWHERE = {
    "logits = the reference's": "a changed folder, tests/cli/test_convert.py",
    "quantized layers = their dequantized weights": "rounded otherwise, tests/checks/test_foreign.py",
    "trained together = trained alone, every preset": "the same claim of more models",
    "beams of many random models = brute force": "the same claim of more models",
    "GPU = CPU": "it needs a GPU",
    "compiled = eager": "it compiles for minutes, as the next two do",
    "a compiled module = the module": "",
    "flexible attention = eager attention": "",
}
