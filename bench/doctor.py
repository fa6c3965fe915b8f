"""`gf.doctor` on planted mistakes: twenty kinds, five of each; and on set-ups that are healthy.

A mistake is found if the doctor names its kind. Healthy are all of our recipes and seven set-ups of
others: a bare GPT, Llama on padded dialogues, BERT, an encoder with classes, T5, LoRA, a trained
model; any mistake or warning there is an alarm.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.clock import Row, said
from glasscheck.setups import Setup
from glassformer.checks.doctor import Diagnosis, doctor
from glassformer.lab.recipes import RECIPES

PARTS = Path(__file__).with_name("doctor_parts.py")
PAD, BOS, EOS, UNK, MASK = range(5)
V, D, N, LAYERS, LENGTH = 41, 32, 4, 3, 32
STEPS = 400

# --- data: a text in which each word has four that may follow it ---------------------------------


def words(rows: int, length: int, *, seed: int) -> Tensor:
    """Return rows of a Markov chain with an entropy of ln 4 a word."""
    g = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(V - 5, generator=torch.Generator().manual_seed(i))[:4]
                         for i in range(V - 5)])  # fmt: skip
    columns = [torch.randint(V - 5, (rows,), generator=g)]
    for _ in range(length - 1):
        columns.append(table[columns[-1], torch.randint(4, (rows,), generator=g)])
    return 5 + torch.stack(columns, 1)


def documents(rows: int, *, seed: int, low: int = 10, high: int = 24) -> list[list[int]]:
    """Return texts of different lengths, with a beginning and an end."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (rows,), generator=g).tolist()
    texts = words(rows, high, seed=seed).tolist()
    return [[BOS, *text[:n], EOS] for text, n in zip(texts, lengths, strict=True)]


class Names:
    """A tokenizer as libraries offer it: ids by name, a length, decode."""

    def __init__(self, size: int = V, **ids: int) -> None:
        self.size = size
        self.pad_token_id, self.bos_token_id, self.eos_token_id, self.unk_token_id = range(4)
        vars(self).update(ids)

    def __len__(self) -> int:
        return self.size

    def decode(self, ids: Sequence[int]) -> str:
        """Words are w5, w6, ..."""
        return " ".join(f"w{i}" for i in ids)


# --- a bare GPT, damaged on request --------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward, each on a normed residual stream."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.drop = nn.Dropout(0.95 if fault == "dropout 0.95" else 0.1)
        if fault == "unused part":
            self.gate = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        if self.fault == "no residual":
            return torch.sigmoid(self.down(torch.sigmoid(self.up(x))))
        y = x if self.fault == "no norm" else self.norm(x)
        q, k, v = self.qkv(y).reshape(B, T, 3, N, D // N).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(B, T, D)))
        if self.fault == "F.dropout":
            x = F.dropout(x, 0.1)
        if self.fault == "detach":
            x = x.detach()
        y = x if self.fault == "no norm" else self.norm2(x)
        return x + self.drop(self.down(F.gelu(self.up(y))))


class Gpt(nn.Module):
    """A small GPT; `fault` names what is wrong with it."""

    def __init__(self, fault: str = "", *, vocab: int = V, layers: int = LAYERS) -> None:
        super().__init__()
        self.fault, self.max_seq_len = fault, LENGTH
        self.embed, self.position = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, vocab, bias=False)
        torch.manual_seed(1)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)
                if getattr(part, "bias", None) is not None:
                    nn.init.zeros_(part.bias)
        damage = {
            "large head": lambda: nn.init.normal_(self.head.weight, std=1.0),
            "large embedding": lambda: nn.init.normal_(self.embed.weight, std=30.0),
            "one loud block": lambda: [w.data.mul_(60) for w in (self.blocks[1].up.weight,
                                                                self.blocks[1].down.weight)],
            "no norm": lambda: [nn.init.normal_(q, std=0.6) for b in self.blocks
                                for q in b.parameters() if q.ndim > 1],
            "faint blocks": lambda: [q.data.mul_(1e-3) for q in self.blocks[0].parameters()],
        }  # fmt: skip
        damage.get(fault, lambda: None)()

    def train(self, mode: bool = True) -> "Gpt":
        if self.fault == "eval not passed on":
            self.training = mode
            return self
        return super().train(mode)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        _B, T = tokens.shape
        x = self.embed(tokens.long())
        if self.fault == "input lost":
            x = torch.zeros_like(x) + self.embed.weight.mean(0)
        x = x + self.position.weight[:T]
        if self.fault == "dropout 0.95":
            x = F.dropout(x, 0.95, self.training)
        if self.fault == "reads ahead":
            x = x + torch.roll(x, -1, 1)
        if self.fault == "noise":
            x = x + 0.05 * torch.randn_like(x)
        if self.fault == "no_grad below":
            x = x.detach()
        allow = torch.ones(T, T, dtype=torch.bool).tril()
        allow = {
            "not causal": torch.ones_like(allow),
            "causal mask inverted": allow.T,
            "everything masked": torch.eye(T, dtype=torch.bool),
        }.get(self.fault, allow)[None, None]
        if mask is not None and self.fault != "mask ignored":
            keys = mask.bool() if self.fault != "mask inverted" else ~mask.bool()
            allow = allow & keys[:, None, None] | torch.eye(T, dtype=torch.bool)
        for block in self.blocks:
            x = block(x, allow)
        logits = self.head(self.norm(x))
        if self.fault == "softmax":
            return logits.softmax(-1)
        return logits * (30.0 if self.fault == "hot" else 1.0)


def next_word(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of the next word."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def grouped(model: nn.Module, *, lr: float = 2e-3, decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW without decay on vectors."""
    named = [q for q in model.parameters() if q.requires_grad]
    groups = [
        {"params": [q for q in named if q.ndim > 1], "weight_decay": decay},
        {"params": [q for q in named if q.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def cosine(optimizer: Any, *, warmup: int = 20, steps: int = STEPS) -> Any:
    """A warmup and half a cosine."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def windows(texts: Tensor, *, ahead: int = 1, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a window and what it must predict."""
    T = texts.shape[1] - 3
    pairs = (texts[:, 1 : 1 + T], texts[:, 1 + ahead : 1 + ahead + T])
    return list(zip(*(side.split(rows) for side in pairs), strict=True))


def gpt(fault: str = "", *, ahead: int = 1, layers: int = LAYERS, **changes: Any) -> Setup:
    """The GPT on windows of a text."""
    model = Gpt(fault, layers=layers)
    made = Setup(
        model=model,
        batches=windows(words(192, 27, seed=1), ahead=ahead),
        val_batches=windows(words(64, 27, seed=2), ahead=ahead),
        loss=next_word,
        steps=STEPS,
        entropy=math.log(4),
        tokenizer=Names(),
    )
    made.optimizer = changes.pop("optimizer", grouped)(model)
    made.schedule = changes.pop("schedule", cosine)(made.optimizer)
    return replace(made, **changes)


# --- transformers' models on padded texts --------------------------------------------------------


def padded(
    texts: Sequence[Sequence[int]],
    *,
    rows: int = 8,
    fault: str = "",
    pad: int = PAD,
    eos: int = EOS,
) -> list[dict[str, Tensor]]:
    """Return batches of texts with a mask, labels, and which part is the answer."""
    batches = []
    for i in range(0, len(texts), rows):
        some = [[eos if t == EOS else t for t in text] for text in texts[i : i + rows]]
        T = max(map(len, some))
        ids = torch.tensor([text + [pad] * (T - len(text)) for text in some])
        length = torch.tensor([len(text) for text in some])
        at = torch.arange(T)
        mask = (at < length[:, None]).long()
        begin = torch.tensor([[5]] * len(some))
        if fault == "answers cut":  # prompts of 6 to 20 tokens, at most 16 are kept
            begin = torch.tensor([[6 + 5 * row % 15] for row in range(i, i + len(some))])
            ids, mask, at = ids[:, :16], mask[:, :16], at[:16]
        answer = mask * (at >= begin)
        labels = torch.where(answer.bool(), ids, -100)
        if fault == "padding counts":
            labels = ids.clone()
        if fault == "prompt counts":
            labels = torch.where(mask.bool(), ids, -100)
        if fault == "end by id":
            labels = torch.where((ids == pad) | (answer == 0), -100, ids)
        if fault == "shifted twice":
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if fault == "mask inverted":
            mask = 1 - mask
        batches.append(
            {"input_ids": ids, "attention_mask": mask, "labels": labels, "completion_mask": answer}
        )
    return batches


def tokenwise(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """The loss of a step: every token weighs the same."""
    counts = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    return sum(
        F.cross_entropy(
            model(input_ids=b["input_ids"], attention_mask=b["attention_mask"])
            .logits[:, :-1].flatten(0, 1),
            b["labels"][:, 1:].flatten(), reduction="sum",
        ) for b in batches
    ) / counts  # fmt: skip


def causal(kind: str = "Llama", *, std: float = 0.02, vocab: int = V, **options: Any) -> nn.Module:
    """A tiny Llama or GPT-2 of transformers."""
    import transformers as hf

    torch.manual_seed(3)
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    if kind == "GPT2":
        config = hf.GPT2Config(
            vocab_size=vocab, n_embd=D, n_layer=2, n_head=N, n_positions=64, **{**ids, **options}
        )
        return hf.GPT2LMHeadModel(config)
    config = hf.LlamaConfig(
        vocab_size=vocab, hidden_size=D, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=N, num_key_value_heads=2, initializer_range=std,
        **{"max_position_embeddings": 64, **ids, **options},
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def llama(
    data: str = "", *, model: nn.Module | None = None, texts: Any = None, **changes: Any
) -> Setup:
    """Llama on padded dialogues; the prompt does not count."""
    model = causal() if model is None else model
    pad, eos = (EOS, EOS) if data == "end by id" else (PAD, EOS)
    options = {"fault": data, "pad": pad, "eos": eos}
    made = Setup(
        model=model,
        batches=padded(documents(96, seed=3) if texts is None else texts, **options),
        val_batches=padded(documents(32, seed=4), **options),
        steps=STEPS,
        tokenizer=Names(pad_token_id=pad),
        accumulate=4,
        step_loss=tokenwise,
    )
    made.optimizer = changes.pop("optimizer", grouped)(model)
    made.schedule = changes.pop("schedule", cosine)(made.optimizer)
    return replace(made, **changes)


def bert(fault: str = "", **changes: Any) -> Setup:
    """BERT, with 15 % of the words hidden."""
    import transformers as hf

    torch.manual_seed(3)
    config = hf.BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=N,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model = hf.BertForMaskedLM(config)
    batches = []
    for i, batch in enumerate(padded(documents(160, seed=5))):
        ids, g = batch["input_ids"], torch.Generator().manual_seed(i)
        hidden = (torch.rand(ids.shape, generator=g) < 0.15) & (ids > 4)
        labels = torch.where(hidden, ids, -100)
        if fault == "nothing hidden":
            hidden, labels = torch.zeros_like(hidden), torch.where(ids > 0, ids, -100)
        if fault == "labels of all":
            labels = torch.where(ids > 0, ids, -100)
        mask = batch["attention_mask"] if fault != "mask inverted" else 1 - batch["attention_mask"]
        batches.append(
            {
                "input_ids": torch.where(hidden, MASK, ids),
                "attention_mask": mask,
                "labels": labels,
            }
        )
    made = Setup(model=model, batches=batches[:12], val_batches=batches[12:], steps=STEPS)
    made.optimizer = grouped(model)
    made.schedule = cosine(made.optimizer)
    return replace(made, **changes)


class Sentiment(nn.Module):
    """torch's own encoder, with one answer a text."""

    def __init__(self, fault: str = "", *, classes: int = 3, vocab: int = V) -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(5)
        self.embed, self.position = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D)
        layer = nn.TransformerEncoderLayer(D, N, 64, batch_first=True, norm_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        pads = tokens == PAD
        if self.fault == "mask inverted":
            pads = ~pads
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        given = None if self.fault == "mask ignored" else pads
        x = self.norm(self.encoder(x, src_key_padding_mask=given))
        keep = (tokens != PAD)[..., None]
        return self.head((x * keep).sum(1) / keep.sum(1))


def labelled(rows: int, *, seed: int, fault: str = "") -> list[tuple[list[int], int]]:
    """Return texts and what they are about: 0, 1 or 2 by the words that they have most of."""
    made = []
    g = torch.Generator().manual_seed(seed)
    for text in documents(rows, seed=seed, low=10, high=24 if fault != "cut" else 40):
        third = [sum((w - 5) % 3 == c for w in text[1:-1]) for c in range(3)]
        label = third.index(max(third))
        if "rare" in fault:
            label = 2 if torch.rand((), generator=g) < 0.01 else label % 2
        if fault == "label in the text":
            text = [*text[:-1], 5 + label, EOS]
        if fault == "label's name":
            text = [*text[:4], 38 + label, *[w if w < 38 else 20 for w in text[4:]]]
        if fault == "cut":
            text = text[1:-1][:20]
        made.append((text, label))
    if fault == "sorted":
        made.sort(key=lambda pair: pair[1])
    if fault == "class missing":
        made = [pair for pair in made if pair[1] != 2 or seed != 7]
    if fault == "two answers":
        made = [pair for pair in made for pair in (pair, (pair[0], (pair[1] + 1) % 3))]
    return made


def collated(pairs: list[tuple[list[int], int]], *, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of padded texts and labels."""
    batches = []
    for i in range(0, len(pairs), rows):
        some = pairs[i : i + rows]
        T = max(len(text) for text, _ in some)
        ids = torch.tensor([text + [PAD] * (T - len(text)) for text, _ in some])
        batches.append((ids, torch.tensor([label for _, label in some])))
    return batches


def labels_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of the labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def classifier(fault: str = "", *, rows: int = 16, data: str = "", **changes: Any) -> Setup:
    """An encoder that says what a text is about."""
    model = changes.pop("model", None) or Sentiment(fault)
    made = Setup(
        model=model,
        batches=collated(labelled(480, seed=7, fault=data), rows=rows),
        val_batches=collated(labelled(96, seed=8, fault=data), rows=rows),
        loss=labels_loss,
        steps=STEPS,
        tokenizer=Names(),
    )
    made.optimizer = changes.pop("optimizer", grouped)(model)
    made.schedule = cosine(made.optimizer)
    return replace(made, **changes)


def t5(**changes: Any) -> Setup:
    """T5: a text and its reverse."""
    import transformers as hf

    torch.manual_seed(3)
    config = hf.T5Config(
        vocab_size=V, d_model=D, d_kv=8, d_ff=64, num_layers=2, num_heads=N, pad_token_id=PAD,
        eos_token_id=EOS, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    batches = []
    for batch in padded(documents(128, seed=9)):
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        turned = torch.stack([
            torch.cat((row[keep].flip(0)[1:], row[keep][-1:], row[~keep]))
            for row, keep in zip(ids, real, strict=True)
        ])  # fmt: skip
        labels = torch.where(real, turned, -100 if not changes.get("pads") else turned)
        batches.append(
            {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}
        )
    made = Setup(model=model, batches=batches[:12], val_batches=batches[12:], steps=STEPS)
    made.optimizer = grouped(model)
    made.schedule = cosine(made.optimizer)
    changes.pop("pads", None)
    return replace(made, **changes)


def lora() -> Setup:
    """GPT-2 that knows the language, with LoRA by peft."""
    from peft import LoraConfig, get_peft_model

    base = causal("GPT2")
    quick = grouped(base, lr=5e-3)
    for batch in padded(documents(96, seed=21)) * 8:
        quick.zero_grad()
        base(
            **{key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        ).loss.backward()
        quick.step()
    base.zero_grad()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return llama(model=model, optimizer=lambda m: grouped(m, lr=1e-2))


def trained() -> Setup:
    """A GPT that has learned the text already, to be trained on."""
    made = gpt(optimizer=lambda m: grouped(m, lr=3e-4))
    quick = grouped(made.model, lr=3e-3)
    torch.manual_seed(0)
    for batch in [*made.batches] * 12:  # type: ignore[misc]
        quick.zero_grad()
        next_word(made.model, batch).backward()
        quick.step()
    made.batches = windows(words(192, 27, seed=31))
    return made


HEALTHY: dict[str, Callable[[], Setup]] = {
    "a bare GPT": gpt,
    "Llama, padded dialogues": llama,
    "BERT": bert,
    "an encoder with classes": classifier,
    "T5": t5,
    "GPT-2 with LoRA": lora,
    "a trained GPT": trained,
}


# --- the mistakes --------------------------------------------------------------------------------


#: Seconds for one set-up: so many that a busy machine leaves no kind unexamined.
PATIENCE = 1200.0


@dataclass(frozen=True)
class Plant:
    """A mistake: its kind, what was done, and the set-up; or a task of ours and its overrides."""

    kind: str
    what: str
    make: Callable[[], Any]

    def examine(self, **options: Any) -> Diagnosis:
        """Let the doctor look at it."""
        made = self.make()
        if isinstance(made, list):
            return doctor(made[0], overrides=made[1:], seconds=PATIENCE, **options)
        return doctor(made, seconds=PATIENCE, **options)


def ours(task: str, *overrides: str) -> Callable[[], list[str]]:
    """A task of ours, or of a user's file, with overrides."""
    name = f"{PARTS}:{task}" if task[0].isupper() else task
    return lambda: [name, *overrides]


def _edited(made: Setup, edit: Callable[[Setup], Any]) -> Setup:
    edit(made)
    return made


def _frozen(made: Setup, beginning: str, *, keep: bool = False) -> Setup:
    for name, q in made.model.named_parameters():
        if beginning in name:
            q.requires_grad_(False)
    if not keep:
        made.optimizer = grouped(made.model)
    return made


def _named(model: nn.Module, *without: str) -> Any:
    wanted = [q for n, q in model.named_parameters() if not any(w in n for w in without)]
    return torch.optim.AdamW(wanted, lr=2e-3, weight_decay=0.0)


def _by_wrong_name(model: nn.Module) -> Any:
    no_decay = ("bias", "LayerNorm.weight")
    groups: list[dict[str, Any]] = [
        {"params": [q for n, q in model.named_parameters() if not n.endswith(no_decay)],
         "weight_decay": 0.1},
        {"params": [q for n, q in model.named_parameters() if n.endswith(no_decay)],
         "weight_decay": 0.0},
    ]  # fmt: skip
    return torch.optim.AdamW(groups, lr=2e-3)


def _resized() -> Setup:
    made = llama()
    made.model.resize_token_embeddings(64)  # type: ignore[operator]
    made.tokenizer = Names(64)
    return made


def _still_head(model: nn.Module) -> Any:
    head = list(model.head.parameters())  # type: ignore[union-attr]
    rest = [q for n, q in model.named_parameters() if not n.startswith("head")]
    return torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 0.0}], lr=2e-3,
                             weight_decay=0.0)  # fmt: skip


def _ignores_batch(made: Setup) -> Setup:
    first = next(iter(made.batches))  # type: ignore[arg-type]
    twin = copy.deepcopy(made.model).eval()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        still = next_word(twin, first).detach()
        return still + 0.0 * sum(q.sum() for q in model.parameters())

    return replace(made, loss=loss)


def _guessed_targets(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), torch.randint(5, V, (y.numel(),)))


def _leaked_windows() -> Setup:
    texts = words(192, 27, seed=1)
    long = words(64, 48, seed=11)
    train = torch.cat((texts, long[:, :27]))
    return gpt(batches=windows(train), val_batches=windows(long[:, 6:33]))


def _unknown() -> Setup:
    made = gpt()
    pairs = [(torch.where(torch.rand(x.shape) < 0.4, UNK, x), y) for x, y in made.batches]  # type: ignore[union-attr]
    return replace(made, batches=pairs)


def _mean_of_means(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    return sum(model(**{k: b[k] for k in ("input_ids", "attention_mask", "labels")}).loss
               for b in batches) / len(batches)  # fmt: skip


def _uneven() -> Setup:
    parts = words(64, 27, seed=1).split([14, 2, 12, 4, 14, 2, 12, 4])
    return gpt(batches=[(part[:, :-1], part[:, 1:]) for part in parts], accumulate=4)


def _half(fault: str = "", **changes: Any) -> Setup:
    made = gpt(fault, **changes)
    made.model.half()
    made.optimizer = grouped(made.model)
    made.schedule = None
    return made


def _int8() -> Setup:
    made = gpt()
    made.model = Gpt(vocab=300)
    made.optimizer, made.schedule, made.tokenizer = grouped(made.model), None, None
    pairs = [(x.to(torch.int8), y) for x, y in made.batches]  # type: ignore[union-attr]
    return replace(made, batches=pairs)


def _log_of_half(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    p = (60 * model(x)).softmax(-1).half()
    return F.nll_loss(p.log().float().flatten(0, 1), y.flatten())


def _bf16() -> Setup:
    return llama(optimizer=lambda m: grouped(m.bfloat16(), lr=1e-5), accumulate=1, step_loss=None)


def _tagged(rare: float, rows: int) -> Setup:
    torch.manual_seed(2)
    texts = words(160, 24, seed=1)
    tags = (texts % 2 == 0).long()
    tags[torch.rand(tags.shape) < rare] = 2
    tags[0, 3] = 2
    model = Gpt(vocab=V)
    model.head = nn.Linear(D, 3)
    pairs = list(zip(texts.split(rows), tags.split(rows), strict=True))
    cut = len(pairs) * 4 // 5
    made = gpt(batches=pairs[:cut], val_batches=pairs[cut:], entropy=None)
    made.model, made.optimizer, made.schedule = model, grouped(model), None
    return made


def _scaled(share: float) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: share * next_word(model, batch)


def _with_mask(fault: str = "") -> Setup:
    """The GPT on texts padded on the left, with a mask."""
    texts = documents(128, seed=3)
    T = max(map(len, texts))
    ids = torch.tensor([[PAD] * (T - len(t)) + t for t in texts])
    mask = ids != PAD

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ids, mask = batch
        logits = model(ids, mask)
        targets = torch.where(mask[:, 1:] & mask[:, :-1], ids[:, 1:], -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())

    pairs = list(zip(ids.split(16), mask.split(16), strict=True))
    return gpt(fault, batches=pairs[:6], val_batches=pairs[6:], loss=loss, entropy=None)


def _evaluates_in_training(model: nn.Module, batch: Any) -> float:
    return float(next_word(model, batch))


class AlwaysOn(nn.Dropout):
    """A dropout that does not listen to eval()."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, True)


def _always_on(made: Setup) -> None:
    for layer in made.model.model.layers:  # type: ignore[union-attr]
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, AlwaysOn(0.1))  # type: ignore[union-attr]


def _climbing(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)


CURVE = [3.7 * 0.9**i + 0.2 for i in range(60)]


def _trainable_probe() -> Setup:
    made = llama()
    for name, q in made.model.named_parameters():
        q.requires_grad_("norm" in name and "layers.1" not in name)
    return made


PLANTS: tuple[Plant, ...] = (
    Plant("initial loss", "output layer of std 1", lambda: gpt("large head")),
    Plant("initial loss", "sum instead of mean", lambda: gpt(loss=lambda m, b: F.cross_entropy(
        m(b[0]).flatten(0, 1), b[1].flatten(), reduction="sum"))),
    Plant("initial loss", "softmax before the loss", lambda: gpt("softmax")),
    Plant("initial loss", "Llama, tied table of std 1", lambda: llama(
        model=causal(std=1.0, tie_word_embeddings=True))),
    Plant("initial loss", "ours: normal init of std 1", ours(
        "lm-modern", "task.length=32", "task.vocab_size=512", "model.init.std=1.0",
        "train.batch_size=4")),

    Plant("target shift", "nothing shifted", lambda: gpt(ahead=0)),
    Plant("target shift", "Llama, labels shifted in the data too", lambda: llama("shifted twice")),
    Plant("target shift", "the word before", lambda: gpt(ahead=-1)),
    Plant("target shift", "ours: own task, not shifted", ours("Rhymes", "task.fault=unshifted")),
    Plant("target shift", "ours: own task, two ahead", ours("Rhymes", "task.fault=two ahead")),

    Plant("loss mask", "Llama, labels = input_ids", lambda: llama("padding counts")),
    Plant("loss mask", "Llama, the prompt counts", lambda: llama("prompt counts")),
    Plant("loss mask", "Llama, PAD is EOS, masked by id", lambda: llama("end by id")),
    Plant("loss mask", "T5, padded labels", lambda: t5(pads=True)),
    Plant("loss mask", "ours: own task, weights on padding", ours(
        "Rhymes", "task.fault=padding counts")),

    Plant("answer in the input", "no causal mask", lambda: gpt("not causal")),
    Plant("answer in the input", "neighbours mixed in from behind", lambda: gpt("reads ahead")),
    Plant("answer in the input", "BERT, nothing hidden", lambda: bert("nothing hidden")),
    Plant("answer in the input", "the label ends the text", lambda: classifier(
        data="label in the text")),
    Plant("answer in the input", "ours: own task, the answer first", ours(
        "Classes", "task.fault=answer first")),

    Plant("frozen or unused", "one layer's output frozen", lambda: _frozen(gpt(), "blocks.1.out")),
    Plant("frozen or unused", "detach between the parts", lambda: gpt("detach")),
    Plant("frozen or unused", "a part that forward leaves out", lambda: gpt("unused part")),
    Plant("frozen or unused", "Llama, frozen and in the optimizer", lambda: _frozen(
        llama(), "q_proj", keep=True)),
    Plant("frozen or unused", "ours: a head of weight 0", ours(
        "parity", 'train.head_weights=[{"head":"class","weight":0.0}]')),

    Plant("optimizer coverage", "the head left out", lambda: gpt(
        optimizer=lambda m: _named(m, "head"))),
    Plant("optimizer coverage", "made before the table was resized", _resized),
    Plant("optimizer coverage", "a group of rate 0", lambda: gpt(optimizer=_still_head)),
    Plant("optimizer coverage", "Llama, one layer left out", lambda: llama(
        optimizer=lambda m: _named(m, "layers.1"))),
    Plant("optimizer coverage", "ours: own optimizer drops a group", ours(
        "copy", f"train.optimizer={PARTS}:Forgetful")),

    Plant("decay on norms", "AdamW's default on everything", lambda: gpt(
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3))),
    Plant("decay on norms", "Llama, 0.1 on everything", lambda: llama(
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3, weight_decay=0.1))),
    Plant("decay on norms", "SGD with decay", lambda: gpt(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=1e-2))),
    Plant("decay on norms", "excluded by a name that nothing has", lambda: llama(
        optimizer=_by_wrong_name)),
    Plant("decay on norms", "ours: own optimizer decays all", ours(
        "copy", f"train.optimizer={PARTS}:DecaysAll")),

    Plant("learning rate", "AdamW at 3", lambda: gpt(optimizer=lambda m: grouped(m, lr=3.0))),
    Plant("learning rate", "Llama at 1e-8", lambda: llama(
        optimizer=lambda m: grouped(m, lr=1e-8))),
    Plant("learning rate", "SGD at 1e-7", lambda: gpt(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-7))),
    Plant("learning rate", "ours: digits at 2", ours("digits", "train.lr=2.0")),
    Plant("learning rate", "ours: reverse at 1e-9", ours("reverse", "train.lr=1e-9")),

    Plant("warmup", "warmup of 1,000 in 400 steps", lambda: gpt(
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1, (s + 1) / 1000)))),
    Plant("warmup", "whole division: rate 0", lambda: gpt(
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1, s // 1000)))),
    Plant("warmup", "Llama, the schedule ends at a quarter", lambda: llama(
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: max(0.0, 1 - s / 100)))),
    Plant("warmup", "ours: warmup of most of the steps", ours(
        "copy", "train.steps=1000", "train.schedule.warmup=900")),
    Plant("warmup", "ours: warmup longer than the training", ours(
        "digits", "train.steps=200", "train.schedule.warmup=2000")),

    Plant("rare class", "1 % in batches of 4", lambda: classifier(rows=4, data="rare")),
    Plant("rare class", "sorted by label", lambda: classifier(data="sorted")),
    Plant("rare class", "a class of the validation is missing", lambda: classifier(
        data="class missing")),
    Plant("rare class", "tags, one row a batch", lambda: _tagged(0.001, 1)),
    Plant("rare class", "ours: own task, 0.4 % in batches of 8", ours(
        "Classes", "task.fault=rare", "train.batch_size=8")),

    Plant("split leak", "the validation is a part of the training", lambda: gpt(
        val_batches=windows(words(192, 27, seed=1)[:64]))),
    Plant("split leak", "overlapping windows", _leaked_windows),
    Plant("split leak", "every text three times", lambda: llama(
        texts=documents(32, seed=3) * 3)),
    Plant("split leak", "one text, two answers", lambda: classifier(data="two answers")),
    Plant("split leak", "ours: own task, val of train", ours("Rhymes", "task.fault=leak")),

    Plant("vocabulary", "the tokenizer has more ids than the model", lambda: gpt(
        tokenizer=Names(50))),
    Plant("vocabulary", "ids that the model does not embed", lambda: llama(model=causal(vocab=30))),
    Plant("vocabulary", "another end in the config", lambda: llama(model=causal(eos_token_id=7))),
    Plant("vocabulary", "40 % unknown words", _unknown),
    Plant("vocabulary", "labels from 1", lambda: classifier(
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1] + 1),
        batches=[(x, y + 1) for x, y in collated(labelled(160, seed=7), rows=16)])),

    Plant("truncation", "Llama, texts cut at 16", lambda: llama(
        texts=[t[:16] for t in documents(96, seed=3)])),
    Plant("truncation", "Llama, answers cut away", lambda: llama("answers cut")),
    Plant("truncation", "classes, texts cut at 20", lambda: classifier(data="cut")),
    Plant("truncation", "longer than the context", lambda: llama(
        model=causal(max_position_embeddings=20))),
    Plant("truncation", "ours: own task, cut at 16", ours("Rhymes", "task.fault=truncated")),

    Plant("mask polarity", "Llama, 1 = padding", lambda: llama("mask inverted")),
    Plant("mask polarity", "True where torch wants padding", lambda: classifier("mask inverted")),
    Plant("mask polarity", "the causal mask transposed", lambda: gpt("causal mask inverted")),
    Plant("mask polarity", "a mask that the model ignores", lambda: _with_mask("mask ignored")),
    Plant("mask polarity", "BERT, 1 = padding", lambda: bert("mask inverted")),

    Plant("dropout in eval", "F.dropout without training=", lambda: gpt("F.dropout")),
    Plant("dropout in eval", "eval() that reaches no part", lambda: gpt("eval not passed on")),
    Plant("dropout in eval", "evaluation in training mode", lambda: gpt(
        evaluate=_evaluates_in_training)),
    Plant("dropout in eval", "Llama, a dropout that is always on", lambda: _edited(
        llama(), _always_on)),
    Plant("dropout in eval", "ours: own position with noise", ours(
        "parity", f"model.position={PARTS}:Noisy")),

    Plant("dtype range", "float16 that overflows", lambda: _half(loss=lambda m, b:
        F.cross_entropy((m(b[0]) * 3e5).flatten(0, 1), b[1].flatten()))),
    Plant("dtype range", "bfloat16 weights at a small rate", _bf16),
    Plant("dtype range", "ids in int8", _int8),
    Plant("dtype range", "the log of a float16 probability", lambda: gpt(loss=_log_of_half)),
    Plant("dtype range", "float16 gradients that vanish", lambda: _half(loss=_scaled(1e-4))),

    Plant("gradient norms", "eight layers without a residual", lambda: gpt(
        "no residual", layers=8)),
    Plant("gradient norms", "one block sixty times as loud", lambda: gpt("one loud block")),
    Plant("gradient norms", "no norms, large weights", lambda: gpt("no norm", layers=6)),
    Plant("gradient norms", "one block a thousandth", lambda: gpt("faint blocks")),
    Plant("gradient norms", "a loss of ten thousand times its size", lambda: gpt(
        loss=_scaled(1e4))),

    Plant("one batch", "dropout of 0.95", lambda: gpt("dropout 0.95", layers=2)),
    Plant("one batch", "the input is lost", lambda: gpt("input lost")),
    Plant("one batch", "targets drawn anew each time", lambda: gpt(loss=_guessed_targets)),
    Plant("one batch", "everything frozen but the norms", _trainable_probe),
    Plant("one batch", "ours: dropout of 0.95", ours(
        "reverse", "model.decoder.dropout.residual=0.97", "model.decoder.dropout.embedding=0.97")),

    Plant("accumulation", "Llama, a mean of means", lambda: llama(step_loss=_mean_of_means)),
    Plant("accumulation", "Llama, loss / 4 each", lambda: llama(step_loss=None)),
    Plant("accumulation", "not divided", lambda: gpt(accumulate=4, step_loss=lambda m, bs: sum(
        next_word(m, b) for b in bs))),
    Plant("accumulation", "divided twice", lambda: gpt(accumulate=4, step_loss=lambda m, bs: sum(
        next_word(m, b) for b in bs) / len(bs) ** 2)),
    Plant("accumulation", "batches of different sizes", _uneven),

    Plant("learning curve", "maximize=True", lambda: gpt(optimizer=_climbing)),
    Plant("learning curve", "a minus before the loss", lambda: gpt(loss=_scaled(-1.0))),
    Plant("learning curve", "losses below the entropy", lambda: gpt(curve=CURVE)),
    Plant("learning curve", "the loss of another model", lambda: _ignores_batch(gpt())),
    Plant("learning curve", "ours: own optimizer climbs", ours(
        "copy", f"train.optimizer={PARTS}:Climbs", "train.lr=0.05")),
)  # fmt: skip


def alarms(found: Diagnosis) -> list[str]:
    """Return the kinds of which the doctor says that something is wrong."""
    return [f.kind for f in found.of("mistake", "warning")]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="part of a row's name: a kind, healthy, seed 0")


def run(*, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Examine every planted mistake, then what is healthy; `quick` takes one mistake of a kind."""
    right = first = extra = 0
    spent: list[float] = []
    plants = [p for p in PLANTS if asked.only in f"{p.kind}: {p.what}"][:: 5 if quick else 1]
    for plant in plants:
        began = time.process_time()
        found = alarms(plant.examine())
        spent.append(time.process_time() - began)
        right += plant.kind in found
        first += found[:1] == [plant.kind]
        extra += len(set(found) - {plant.kind})
        others = [kind for kind in found if kind != plant.kind]
        beside = f"; also {', '.join(others)}" if others else ""
        yield said("doctor", f"{plant.kind}: {plant.what}",
                   ("found" if plant.kind in found else "MISSED") + beside)  # fmt: skip
    wrong = 0
    seeds = (0,) if quick else (0, 1, 2)
    healthy: dict[str, Callable[[], Diagnosis]] = {
        name: (lambda make=make: doctor(make(), seconds=PATIENCE)) for name, make in HEALTHY.items()
    }
    for seed in () if quick else seeds:
        for name in RECIPES if seed == 0 else (name for name in RECIPES if name != "lm-10m"):
            given = SimpleNamespace(name=name, seed=seed)
            healthy[f"{name}, seed {seed}"] = lambda o=given: doctor(
                o.name, overrides=[f"train.seed={o.seed}"], seconds=PATIENCE
            )
    healthy = {name: make for name, make in healthy.items() if asked.only in f"healthy: {name}"}
    for name, examine in healthy.items():
        diagnosis = examine()
        found = alarms(diagnosis)
        wrong += len(found)
        kinds = len(diagnosis.of("passed"))
        yield said("doctor", f"healthy: {name}",
                   f"ALARM: {', '.join(found)}" if found else f"{kinds} kinds passed")  # fmt: skip
    yield said("doctor", "mistakes found", f"{right} of {len(plants)}, {first} of them first, "
               f"{extra} other kinds named beside them")  # fmt: skip
    yield said("doctor", "alarms", f"{wrong} on {len(healthy)} healthy set-ups")
    if spent:
        yield said("doctor", "time", f"median {sorted(spent)[len(spent) // 2]:.1f} CPU s, "
               f"longest {max(spent):.1f} CPU s")  # fmt: skip
