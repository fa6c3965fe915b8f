"""Decoding: ours with a cache and lean, a loop without a cache, and `transformers.generate`.

Greedy, 100 new tokens, the same weights on both sides. Limits are the bytes of the weights that a
step reads, over this machine's memory bandwidth as a large copy-free sum measures it.
"""

import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from bench.clock import interleave, rows
from glassformer.data.machines import brackets
from glassformer.data.vocab import Vocab
from glassformer.generate.beam import beam_search
from glassformer.generate.constraint import Constraint
from glassformer.generate.decode import generate
from glassformer.generate.decoder import Decoder
from glassformer.generate.prompts import Prompts
from glassformer.generate.stepper import NaiveStepper, TorchStepper
from glassformer.generate.trials import disagreements
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.spec import presets
from glassformer.spec.decoding import BeamSpec, DecodeSpec

NEW = 100
SMALL = ((64, 2), (128, 2), (256, 4))
#: 25 M parameters: layers, d_model, heads, kv heads, d_ff, vocab.
MEDIUM = {"n_layers": 6, "d_model": 512, "n_heads": 8, "n_kv_heads": 2, "d_ff": 1408}
VOCAB, PROMPT = 16_000, 128


def run(device: str = "cpu", rounds: int = 5) -> Iterator[dict[str, object]]:
    """Every comparison in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are slower on two, and much slower on a busy machine
    for d_model, n_layers in SMALL:
        yield from against_naive(d_model, n_layers, device=device, rounds=rounds)
    for batch, width in ((1, 1), (32, 1), (1, 4)):
        yield from against_marian(batch, width, device=device, rounds=rounds)
    yield from constrained(device=device, rounds=rounds)
    torch.set_num_threads(threads)
    for batch in (1, 8):
        yield from against_transformers(batch, device=device, rounds=rounds)
    wrong = len(list(disagreements(1_000)))
    yield said("beam against brute force", f"{1_000 - wrong} of 1000 models exact")


def said(case: str, name: str) -> dict[str, object]:
    """A row that only informs."""
    return {
        "bench": "generate",
        "case": case,
        "name": name,
        "median_ms": None,
        "ratio": None,
        "of_limit": None,
    }


def against_naive(
    d_model: int, n_layers: int, *, device: str, rounds: int
) -> Iterator[dict[str, object]]:
    """One prompt token, batch 1, one thread: ratio = time over the naive loop's."""
    spec = presets.core(d_model=d_model, n_layers=n_layers, d_ff=4 * d_model, max_seq_len=128)
    model = build(spec, generator=torch.Generator().manual_seed(0), device=device)
    sides = {
        "naive loop, no cache": greedy(NaiveStepper(model), [[1]]),
        "glassformer, cached": greedy(TorchStepper(model), [[1]]),
        "glassformer, lean": greedy(Decoder(model), [[1]]),
    }
    case = f"d{d_model} L{n_layers}, 100 tokens, batch 1"
    times = interleave(sides, rounds=rounds, inner=1, warmup=1)
    yield from rows(times, bench="generate", case=case, baseline="naive loop, no cache")


def greedy(stepper, prompts, *, new: int = NEW) -> Callable[[], list]:
    """A call that decodes greedily, without log-probabilities, which the peers do not give."""
    spec = DecodeSpec(max_new_tokens=new)
    return lambda: generate(stepper, prompts, spec=spec, logprobs=False)


def against_transformers(batch: int, *, device: str, rounds: int) -> Iterator[dict[str, object]]:
    """Qwen2's architecture, 25 M, prompt 128: `of_limit` is the share of the bandwidth limit."""
    case = f"Qwen2 25 M, prompt {PROMPT}, {NEW} new, batch {batch}"
    if importlib.util.find_spec("transformers") is None:
        yield said(case, "transformers is not installed")
        return
    model, theirs = qwen_pair(device)
    tokens_BT = torch.randint(VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts = tokens_BT.tolist()
    lean, plain = Decoder(model), TorchStepper(model)
    given_BT = tokens_BT.to(device)

    def peer() -> torch.Tensor:
        return theirs.generate(
            given_BT,
            attention_mask=torch.ones_like(given_BT),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        )

    sides = {
        "transformers": peer,
        "glassformer, cached": greedy(plain, prompts),
        "glassformer, lean": greedy(lean, prompts),
    }
    compiled = Decoder(model, compile=True)
    if device != "cpu" or shutil.which("c++") or shutil.which("g++"):
        sides["glassformer, lean, compiled"] = greedy(compiled, prompts)
    else:
        yield said(case, "compiled: not run, there is no C++ compiler")
    same = [list(g.tokens) for g in sides["glassformer, lean"]()] == peer()[:, PROMPT:].tolist()
    yield said(case, f"the same tokens as transformers: {same}")
    yield said(case, f"routines: {lean.chosen}")
    times = interleave(sides, rounds=rounds, inner=1, warmup=1)
    limit_ms = NEW * weight_bytes(model) / bandwidth(device) * 1e3
    for row in rows(times, bench="generate", case=case, baseline="transformers"):
        yield row | {"of_limit": round(limit_ms / float(str(row["median_ms"])), 3)}


def qwen_pair(device: str) -> tuple[Model, torch.nn.Module]:
    """Our model and transformers' with the same weights, by name."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    spec = presets.qwen(
        vocab_size=VOCAB, d_head=64, max_seq_len=PROMPT + NEW, qk_norm=False, **MEDIUM
    )
    model = build(spec, generator=torch.Generator().manual_seed(0), device=device)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=MEDIUM["d_model"],
        intermediate_size=MEDIUM["d_ff"],
        num_hidden_layers=MEDIUM["n_layers"],
        num_attention_heads=MEDIUM["n_heads"],
        num_key_value_heads=MEDIUM["n_kv_heads"],
        max_position_embeddings=PROMPT + NEW,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    theirs = Qwen2ForCausalLM(config).eval().to(device)
    names = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    own = dict(model.named_parameters())
    foreign = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            other = names.get(name) or "model." + name.replace("blocks.", "layers.").replace(
                ".attn.", ".self_attn."
            ).replace(".ffn.", ".mlp.").replace("attn_norm", "input_layernorm").replace(
                "ffn_norm", "post_attention_layernorm"
            )
            foreign.pop(other).copy_(parameter)
    assert not foreign, f"not copied: {sorted(foreign)}"
    return model, theirs


def against_marian(
    batch: int, width: int, *, device: str, rounds: int
) -> Iterator[dict[str, object]]:
    """d 128, 2 + 2 layers, vocabulary 128, source 20, one thread; Marian has the same sizes.

    Marian's weights are its own: with nothing trained only the time is compared.
    """
    kind = "greedy" if width == 1 else f"beam {width}"
    case = f"encoder-decoder d128 2+2, {NEW} new, {kind}, batch {batch}"
    spec = presets.seq2seq(vocab_size=128, d_model=128, n_heads=4, n_layers=2, max_seq_len=128)
    model = build(spec, generator=torch.Generator().manual_seed(0), device=device)
    source_BS = torch.randint(3, 128, (batch, 20), generator=torch.Generator().manual_seed(1))
    prompts = Prompts.of([[1]] * batch, sources=source_BS.tolist())
    plain, lean = TorchStepper(model), Decoder(model)
    if width == 1:
        sides: dict[str, Callable[[], object]] = {
            "glassformer, cached": greedy(plain, prompts),
            "glassformer, lean": greedy(lean, prompts),
        }
    else:
        beams = BeamSpec(width=width, max_new_tokens=NEW)
        sides = {
            "glassformer, cached": lambda: beam_search(plain, prompts, spec=beams),
            "glassformer, lean": lambda: beam_search(lean, prompts, spec=beams),
        }
    if importlib.util.find_spec("transformers") is None:
        yield said(case, "transformers is not installed")
        return
    times = interleave(
        {"transformers (Marian)": marian(source_BS.to(device), width, device), **sides},
        rounds=rounds,
        inner=1,
        warmup=1,
    )
    yield from rows(times, bench="generate", case=case, baseline="transformers (Marian)")


def marian(source_BS: torch.Tensor, width: int, device: str) -> Callable[[], object]:
    """transformers' encoder-decoder of the same sizes."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=128,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    theirs = MarianMTModel(config).eval().to(device)
    return lambda: theirs.generate(
        source_BS,
        attention_mask=torch.ones_like(source_BS),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=width,
    )


def constrained(*, device: str, rounds: int) -> Iterator[dict[str, object]]:
    """What a constraint costs: brackets, sampled, batch 32; ratio = time over unconstrained."""
    names = Vocab(("PAD", "BOS", "EOS", "(", ")"))
    model = build(
        presets.core(vocab_size=5, max_seq_len=256),
        generator=torch.Generator().manual_seed(0),
        device=device,
    )
    stepper, prompts = Decoder(model), [[1]] * 32
    bound = Constraint(brackets(4), tokenizer=names)
    spec = DecodeSpec(max_new_tokens=NEW + 1, min_new_tokens=NEW, temperature=1.0, eos=(2,))
    sides = {
        "unconstrained": lambda: generate(stepper, prompts, spec=spec),
        "constrained": lambda: generate(stepper, prompts, spec=spec, constraint=bound),
    }
    times = interleave(sides, rounds=rounds, inner=1, warmup=1)
    case = f"brackets-4, sampled, batch 32, {NEW} tokens"
    yield from rows(times, bench="generate", case=case, baseline="unconstrained")
    short, legal = DecodeSpec(max_new_tokens=20, temperature=2.0, eos=(2,)), 0
    for first in range(0, 10_000, 500):
        made = generate(
            stepper,
            [[1]] * 500,
            spec=short,
            constraint=bound,
            rows=range(first, first + 500),
            logprobs=False,
        )
        legal += sum(bound.machine.accepts(names.names[t] for t in g.tokens[:-1]) for g in made)
    yield said("brackets-4, sampled, up to 20 tokens", f"{legal} of 10000 legal")


def weight_bytes(model: Model) -> int:
    """What one step reads: every weight once; of an embedding that is not the head, nothing."""
    tied = model.output_embedding()
    own = {id(p) for p in tied.parameters()}
    head_is_tied = not any(p.ndim > 1 for p in model.heads.parameters())
    return sum(p.nbytes for p in model.parameters() if head_is_tied or id(p) not in own)


def bandwidth(device: str) -> float:
    """Bytes a second, reading: the sum of a large array."""
    data = torch.zeros(1 << 26, device=device)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        float(data.sum())  # reading the result waits for it
        times.append(time.perf_counter() - begin)
    return data.nbytes / statistics.median(times)
