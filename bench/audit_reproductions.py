"""Red rows of docs/audit.md once more, with torch and transformers alone.

`python -m bench.audit_reproductions KIND TYPE` builds the tiny model and prints, for each row, how
far apart the two ways are, relative to the largest logit; for tokens, how many differ. Nothing of
glassformer is imported, so that a disagreement seen twice is the model's.
"""

import copy
import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.tiny_models import build, entries

# B batch, T length

Model = Any


def _tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def _gap(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _is_both(model: Model) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(
        model, "get_encoder"
    )


def _takes(model: Model, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _ask(model: Model, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
    """Call the forward; targets of an encoder-decoder go with one fixed source."""
    if _is_both(model):
        given = {"input_ids": _tokens(1, 7, 9).expand(len(tokens), -1), "decoder_input_ids": tokens}
        if mask is not None:
            given["decoder_attention_mask"] = mask
        return model(**given, **more)
    return model(tokens, **({} if mask is None else {"attention_mask": mask}), **more)


def _padded(left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of 9 and 5 real tokens, PAD 0, the mask, and other content of PAD."""
    tokens, mask = _tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 4) if left else slice(5, None)] = 0
    return torch.where(mask.bool(), tokens, 0), mask, torch.where(mask.bool(), tokens, 50)


def future(model: Model) -> float:
    """Logits before position t, when the tokens from t on change; the worst t."""
    tokens, other = _tokens(2, 9), _tokens(2, 9, 1)
    plain, gaps = _ask(model, tokens).logits, []
    for t in range(1, 9):
        changed = torch.cat((tokens[:, :t], other[:, t:]), 1)
        gaps.append(_gap(_ask(model, changed).logits[:, :t], plain[:, :t]))
    return max(gaps)


def pad_content(model: Model) -> float:
    """Logits of real tokens, when PAD holds other tokens."""
    gaps = []
    for left in (False,) if _is_both(model) else (False, True):
        tokens, mask, other = _padded(left)
        real = mask.bool()
        gaps.append(
            _gap(_ask(model, other, mask).logits[real], _ask(model, tokens, mask).logits[real])
        )
    return max(gaps)


def padded_right(model: Model) -> float:
    """A row padded on the right, and the same row alone."""
    tokens, mask, _ = _padded(left=False)
    alone = _ask(model, tokens[1:, :5]).logits
    return _gap(_ask(model, tokens, mask).logits[1:, :5], alone)


def padded_left(model: Model) -> float:
    """A row padded on the left, with position_ids where they are taken, and the same row alone."""
    tokens, mask, _ = _padded(left=True)
    more = {}
    if _takes(model, "position_ids"):
        more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return _gap(
        _ask(model, tokens, mask, **more).logits[1:, 4:], _ask(model, tokens[1:, 4:]).logits
    )


def _fed(model: Model, tokens: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
    past, at, columns = None, 0, []
    names = ("past_key_values", "cache_params", "state")
    name = next(name for name in names if _takes(model, name))
    for length in pieces:
        seen = None if mask is None else mask[:, : at + length]
        more = {name: past, "use_cache": True}
        if seen is not None and _takes(model, "position_ids"):
            more["position_ids"] = (seen.cumsum(1) - 1).clamp(min=0)[:, at:]
        result = _ask(model, tokens[:, at : at + length], seen, **more)
        past = getattr(result, name)
        columns.append(result.logits)
        at += length
    return torch.cat(columns, 1)


def steps(model: Model) -> float:
    """Token by token through the cache, and all at once."""
    tokens = _tokens(2, 9)
    plain = _gap(_fed(model, tokens, [1] * 9), _ask(model, tokens).logits)
    if _is_both(model):
        return plain
    padded, mask, _ = _padded(left=True)
    more = {}
    if _takes(model, "position_ids"):
        more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    whole = _ask(model, padded, mask, **more).logits[mask.bool()]
    return max(plain, _gap(_fed(model, padded, [6, 1, 1, 1], mask)[mask.bool()], whole))


def chunks(model: Model) -> float:
    """A prompt in two chunks through the cache, and all at once."""
    tokens = _tokens(2, 9)
    return _gap(_fed(model, tokens, [4, 5]), _ask(model, tokens).logits)


def ones(model: Model) -> float:
    """A mask of ones and no mask, at once and through the cache."""
    tokens = _tokens(2, 9)
    mask = torch.ones_like(tokens)
    at_once = _gap(_ask(model, tokens, mask).logits, _ask(model, tokens).logits)
    if not hasattr(model, "generate"):
        return at_once
    pieces = [5, 1, 1, 1, 1]
    return max(at_once, _gap(_fed(model, tokens, pieces, mask), _fed(model, tokens, pieces)))


def attentions(model: Model) -> float:
    """Logits when attentions are asked for, and when not."""
    tokens = _tokens(2, 9)
    return _gap(_ask(model, tokens, output_attentions=True).logits, _ask(model, tokens).logits)


def reorder(model: Model) -> float:
    """A cache whose rows were exchanged, and the exchanged rows."""
    tokens, rows = _tokens(2, 9), torch.tensor([1, 0])
    past = _ask(model, tokens[:, :6], use_cache=True).past_key_values
    past.reorder_cache(rows)
    turned = torch.cat((tokens[rows, :6], tokens[:, 6:]), 1)
    logits = _ask(model, turned[:, 6:7], past_key_values=past, use_cache=True).logits
    return _gap(logits, _ask(model, turned[:, :7]).logits[:, -1:])


def _generate(model: Model, tokens: Tensor, **settings: Any) -> Tensor:
    given = {"input_ids": tokens, "attention_mask": settings.pop("mask", torch.ones_like(tokens))}
    written: Tensor = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=6,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return written[:, -6:]


def _differ(ours: Tensor, theirs: Tensor) -> float:
    return float((ours != theirs).sum())


def likeliest(model: Model) -> float:
    """Tokens of greedy generate that are not the likeliest of a full forward."""
    tokens = _tokens(2, 5)
    written = _generate(model, tokens, use_cache=False)
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)), 1)
    return _differ(written, tokens[:, -6:])


def cache_off(model: Model) -> float:
    """Tokens that differ with and without a cache."""
    tokens = _tokens(2, 5)
    return _differ(_generate(model, tokens), _generate(model, tokens, use_cache=False))


def beams(model: Model) -> float:
    """Tokens of three beams that differ with and without a cache."""
    tokens = _tokens(2, 5)
    on, off = (_generate(model, tokens, num_beams=3, use_cache=cached) for cached in (True, False))
    return _differ(on, off)


def batch_of_prompts(model: Model) -> float:
    """Tokens of a left-padded prompt that differ from the prompt's alone."""
    padded, mask, _ = _padded(left=True)
    return _differ(_generate(model, padded, mask=mask)[1:], _generate(model, padded[1:, 4:]))


def static(model: Model) -> float:
    """Tokens that differ with a static cache."""
    tokens = _tokens(2, 5)
    return _differ(
        _generate(model, tokens, cache_implementation="static"), _generate(model, tokens)
    )


def second_turn(model: Model) -> float:
    """Tokens that differ when generate goes on from a returned cache."""
    tokens = _tokens(2, 5)
    first = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=4,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    said = torch.cat((first.sequences, _tokens(2, 3, 1)), 1)
    going_on = _generate(model, said, past_key_values=first.past_key_values)
    return _differ(going_on, _generate(model, said))


def window(model: Model) -> float:
    """Compare decoding token by token with one pass, with a sliding window of 4."""
    config = copy.deepcopy(model.config)
    name = next(
        n for n in ("sliding_window", "attention_window_size", "window_size") if hasattr(config, n)
    )
    setattr(config, name, 4)
    narrow = type(model)(config).eval()
    narrow.load_state_dict(model.state_dict())
    tokens = _tokens(2, 9)
    return _gap(_fed(narrow, tokens, [1] * 9), _ask(narrow, tokens).logits)


def past_context(model: Model) -> float:
    """Beyond the stated context: prefill and steps, and all at once."""
    length = model.config.max_position_embeddings
    tokens = _tokens(1, length + 3)
    return _gap(_fed(model, tokens, [length, 1, 1, 1]), _ask(model, tokens).logits)


def saved(model: Model) -> float:
    """Saved with save_pretrained and read again."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).eval()
    tokens = _tokens(2, 9)
    return _gap(_ask(again, tokens).logits, _ask(model, tokens).logits)


def embeds(model: Model) -> float:
    """Embeddings given, and token ids."""
    tokens = _tokens(2, 9)
    given = model.get_input_embeddings()(tokens)
    return _gap(model(inputs_embeds=given).logits, model(tokens).logits)


def tie(model: Model) -> float:
    """1 if the config says that the head is tied, and it is not."""
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return float(bool(model.config.tie_word_embeddings) and not shared)


def loss(model: Model) -> float:
    """The loss, and the mean cross entropy of shifted labels."""
    tokens = _tokens(2, 9)
    result = model(tokens, labels=tokens)
    by_hand = torch.nn.functional.cross_entropy(
        result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    return _gap(result.loss, by_hand)


def kernels(model: Model) -> float:
    """Eager attention and the fused kernel."""
    tokens, logits = _tokens(2, 9), []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        logits.append(_ask(model, tokens).logits)
    return _gap(*logits)


#: The reproduction of each row, by the row's name.
ROWS: dict[str, Callable[[Model], float]] = {
    "the future changes no bit of the past": future,
    "what PAD holds changes no bit": pad_content,
    "more padding on the right changes nothing": padded_right,
    "more padding on the left changes nothing": padded_left,
    "a batch = each sequence alone": padded_right,
    "cached = uncached, token by token": steps,
    "a prompt in chunks = at once": chunks,
    "a mask of ones = no mask": ones,
    "attentions, hidden states, a cache read, same logits": attentions,
    "cache reordered = those rows uncached": reorder,
    "generate = the likeliest token of each forward": likeliest,
    "generate: cache on = off": cache_off,
    "generate: beams, cache on = off": beams,
    "generate: a batch = each prompt alone": batch_of_prompts,
    "generate: static cache = growing cache": static,
    "generate: a second turn = from the start": second_turn,
    "past the sliding window, cached = uncached": window,
    "past the stated context, cached = uncached": past_context,
    "save_pretrained and back, same bits": saved,
    "embeddings given = token ids": embeds,
    "tied weights are one tensor": tie,
    "loss = cross entropy by hand": loss,
    "fused attention = eager attention": kernels,
}


def reproduced(kind: str, model_type: str, row: str) -> str:
    """Return the gap of one row in a new model, or why it could not be had."""
    entry = next(e for e in entries() if (e.kind, e.model_type) == (kind, model_type))
    if row not in ROWS:
        return "-"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ROWS[row](build(entry))
    except Exception as error:
        return f"{type(error).__name__}"
    is_count = row.startswith("generate")
    return f"{found:.0f} of 12 tokens" if is_count else f"{found:.1e}"


def main() -> None:
    """Print every row of one model."""
    kind, model_type = sys.argv[1:]
    for row in ROWS:
        print(f"{row:<55}{reproduced(kind, model_type, row)}")


if __name__ == "__main__":
    main()
