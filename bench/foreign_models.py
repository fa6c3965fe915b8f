"""Small models in the habits of other libraries, into whose source `bench.faults` plants mistakes.

A Llama-like decoder (with experts, if asked), a GPT that returns tuples, a BERT, an encoder-decoder
and a gated recurrence. Each promises equalities: a cache, a mask, positions, a loss.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# B batch, T length, S key length, D width, N heads, K key-value heads, H head width, E experts

V, D, N, K, H = 41, 32, 4, 2, 8


@dataclass
class Config:
    """What the models say about themselves."""

    vocab_size: int = V
    hidden_size: int = D
    max_position_embeddings: int = 64
    sliding_window: int = 32
    experts: int = 0
    pad_token_id: int = 0
    tie_word_embeddings: bool = True
    is_encoder_decoder: bool = False
    causal: bool = True


class RMSNorm(nn.Module):
    """A norm without a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def mean_loss(logits: Tensor, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """Return the mean cross entropy over labels that are not -100."""
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    count = (labels != -100).sum() if items is None else items
    return each.sum() / count


# --- a Llama --------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Angles for each position."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(H // 2) / (H // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x_BNTH: Tensor, positions_BT: Tensor) -> Tensor:
        """Rotate pairs of entries."""
        angle = positions_BT[:, None, :, None] * self.frequencies
        a, b = x_BNTH.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped heads, rotary positions, a sliding window, a cache."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.sliding_window
        self.q_proj, self.k_proj = nn.Linear(D, N * H), nn.Linear(D, K * H)
        self.v_proj, self.o_proj = nn.Linear(D, K * H), nn.Linear(N * H, D)
        self.rotary = Rotary()

    def forward(
        self, x_BTD: Tensor, positions_BT: Tensor, valid_BS: Tensor, past: Any, read: bool
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Return the mixed values, the cache, and the weights if they are read."""
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, N, H).transpose(1, 2)
        k = self.k_proj(x_BTD).view(B, T, K, H).transpose(1, 2)
        v = self.v_proj(x_BTD).view(B, T, K, H).transpose(1, 2)
        q, k = self.rotary(q, positions_BT), self.rotary(k, positions_BT)
        if past is not None:
            k = torch.cat((past[0], k), 2)
            v = torch.cat((past[1], v), 2)
        kept = (k, v)
        k, v = k.repeat_interleave(N // K, 1), v.repeat_interleave(N // K, 1)
        S = k.shape[2]
        distance_TS = torch.arange(S - T, S)[:, None] - torch.arange(S)[None]
        near_TS = (distance_TS >= 0) & (distance_TS < self.window)
        allow = near_TS[None, None] & valid_BS[:, None, None, :]
        weights = None
        if read:
            scores = q @ k.transpose(-1, -2) / math.sqrt(H)
            scores = scores.masked_fill(~allow, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            mixed = weights @ v
        else:
            bias = torch.zeros(allow.shape, dtype=q.dtype)
            bias = bias.masked_fill(~allow, torch.finfo(q.dtype).min)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, T, N * H)), kept, weights


class Experts(nn.Module):
    """Two of several small networks for each token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, count)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(count))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add the two best experts' results, weighted by the router."""
        scores_BTE = self.router(x_BTD).softmax(-1)
        best, which = scores_BTE.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        total = torch.zeros_like(x_BTD)
        for e, expert in enumerate(self.experts):
            share = (best * (which == e)).sum(-1, keepdim=True)
            total = total + share * F.silu(expert(x_BTD))
        return total


class _WrongSiLU(torch.autograd.Function):
    """A derivative that forgets a term, for a mistake that uses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x * sigmoid(x)."""
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the first term of the derivative."""
        return gradients[0] * torch.sigmoid(ctx.saved_tensors[0])


class MLP(nn.Module):
    """A gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 48), nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Gate, and project back."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention = Attention(config)
        self.mlp = Experts(config.experts) if config.experts else MLP()
        self.dropout = nn.Dropout(0.1)

    def forward(
        self, x_BTD: Tensor, positions_BT: Tensor, valid_BS: Tensor, past: Any, read: bool
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Add both to the stream."""
        mixed, kept, weights = self.attention(self.norm1(x_BTD), positions_BT, valid_BS, past, read)
        x_BTD = x_BTD + self.dropout(mixed)
        return x_BTD + self.dropout(self.mlp(self.norm2(x_BTD))), kept, weights


class Llama(nn.Module):
    """A decoder with the arguments that transformers' have."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.norm = RMSNorm()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token ids."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def gradient_checkpointing_enable(self) -> None:
        """Compute layers again in the backward pass."""
        self.checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.checkpointing = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return logits and what was asked for."""
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        before = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        valid = torch.ones(B, before + T, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.bool()
        if position_ids is None:
            position_ids = (valid.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        kept, read, states = [], [], [x]
        for i, layer in enumerate(self.layers):
            past = None if past_key_values is None else past_key_values[i]
            given = (x, position_ids, valid, past, output_attentions)
            if self.checkpointing and self.training:
                x, pair, weights = checkpoint(layer, *given, use_reentrant=False)
            else:
                x, pair, weights = layer(*given)
            kept.append(pair)
            read.append(weights)
            states.append(x)
        x = self.norm(x)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.head(x)
        result: dict[str, Any] = {"logits": logits}
        if use_cache:
            result["past_key_values"] = kept
        if output_attentions:
            result["attentions"] = read
        if output_hidden_states:
            result["hidden_states"] = states
        if labels is not None:
            result["loss"] = mean_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return result


# --- a GPT that returns tuples --------------------------------------------------------------------


class GPT(nn.Module):
    """Learned positions, a cache of one tensor a layer, no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 64
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(64, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(D, 48) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(48, D) for _ in range(2))
        self.head = nn.Linear(D, V)
        self.drop = nn.Dropout(0.1)

    def forward(self, idx: Tensor, past: Any = None) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and keys and values so far."""
        B, T = idx.shape
        before = 0 if past is None else past[0].shape[3]
        places = torch.arange(before, before + T)
        x = self.drop(self.wte(idx) + self.wpe(places))
        present = []
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat((past[i][0], k), 2), torch.cat((past[i][1], v), 2)
            present.append(torch.stack((k, v)))
            allow = torch.ones(T, k.shape[2], dtype=torch.bool).tril(before)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
            x = x + self.drop(self.out[i](mixed.transpose(1, 2).reshape(B, T, D)))
            x = x + self.drop(self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x)))))
        return self.head(x), present


# --- a BERT ---------------------------------------------------------------------------------------


class Bert(nn.Module):
    """An encoder of masked words."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.kinds, self.first = nn.Embedding(2, D), nn.LayerNorm(D)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.head = nn.Linear(D, V)
        self.drop = nn.Dropout(0.1)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token ids."""
        return self.words

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool = False,
    ) -> dict[str, Any]:
        """Return logits of every position."""
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        valid = torch.ones(B, T, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.bool()
        if position_ids is None:
            position_ids = torch.arange(T).expand(B, T)
        if token_type_ids is None:
            token_type_ids = torch.zeros(B, T, dtype=torch.long)
        x = self.first(x + self.places(position_ids) + self.kinds(token_type_ids))
        read = []
        for i in range(2):
            q, k, v = self.qkv[i](x).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) / math.sqrt(H)
            scores = scores.masked_fill(~valid[:, None, None, :], -1e9)
            weights = scores.softmax(-1)
            read.append(weights)
            mixed = (weights @ v).transpose(1, 2).reshape(B, T, D)
            x = self.norms[2 * i](x + self.drop(self.out[i](mixed)))
            x = self.norms[2 * i + 1](x + self.drop(self.mlp[i](x)))
        result: dict[str, Any] = {"logits": self.head(x)}
        if output_attentions:
            result["attentions"] = read
        if labels is not None:
            result["loss"] = mean_loss(result["logits"], labels)
        return result


# --- an encoder-decoder ---------------------------------------------------------------------------


class Encoder(nn.Module):
    """Reads the source both ways."""

    def __init__(self, words: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.words, self.places = words, places
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return a vector for each source token."""
        B, S = input_ids.shape
        valid = torch.ones(B, S, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.bool()
        x = self.words(input_ids) + self.places(torch.arange(S))
        q, k, v = self.qkv(x).view(B, S, 3, N, H).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :])
        return self.norm(x + self.out(mixed.transpose(1, 2).reshape(B, S, D)))


class Seq2Seq(nn.Module):
    """A decoder that attends to itself and to an encoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.encoder = Encoder(self.words, self.places)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.query = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.pair = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.head = nn.Linear(D, V)

    def get_encoder(self) -> nn.Module:
        """Return the part that reads the source."""
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the logits of each target position."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        assert decoder_input_ids is not None
        B, T = decoder_input_ids.shape
        S = encoder_outputs.shape[1]
        source = torch.ones(B, S, dtype=torch.bool)
        if attention_mask is not None:
            source = attention_mask.bool()
        before = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        x = self.words(decoder_input_ids) + self.places(torch.arange(before, before + T))
        allow = torch.ones(T, before + T, dtype=torch.bool).tril(before)[None, None]
        if decoder_attention_mask is not None:
            allow = allow & decoder_attention_mask.bool()[:, None, None, :]
        bias = torch.zeros(allow.shape, dtype=x.dtype).masked_fill(~allow, -1e9)
        kept = []
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            if past_key_values is not None:
                k = torch.cat((past_key_values[i][0], k), 2)
                v = torch.cat((past_key_values[i][1], v), 2)
            kept.append((k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + self.out[2 * i](mixed.transpose(1, 2).reshape(B, T, D))
            q = self.query[i](self.norms[2 * i + 1](x)).view(B, T, N, H).transpose(1, 2)
            k, v = self.pair[i](encoder_outputs).view(B, S, 2, N, H).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=source[:, None, None, :])
            x = x + self.out[2 * i + 1](mixed.transpose(1, 2).reshape(B, T, D))
        result: dict[str, Any] = {"logits": self.head(x)}
        if use_cache:
            result["past_key_values"] = kept
        if labels is not None:
            result["loss"] = mean_loss(result["logits"], labels)
        return result


# --- a recurrence ---------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """A short convolution and a gated sum over time, with a state of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_len = 64
        self.embed = nn.Embedding(V, D)
        self.taps = nn.Parameter(torch.randn(3, D) / 2)
        self.decay, self.value, self.gate = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
    ) -> dict[str, Any]:
        """Return logits and the state behind the last token."""
        x = self.embed(input_ids)
        B, T, _ = x.shape
        real = torch.ones(B, T, 1).to(x)
        if attention_mask is not None:
            real = attention_mask[:, -T:, None].to(x)
        x = x * real
        tail = torch.zeros(B, 2, D).to(x) if state is None else state[0]
        total = torch.zeros(B, D).to(x) if state is None else state[1]
        row = torch.cat((tail, x), 1)
        mixed = sum(row[:, i : i + T] * self.taps[i] for i in range(3))
        keep = torch.sigmoid(self.decay(mixed))
        new = self.value(mixed)
        keep = torch.where(real > 0, keep, torch.ones_like(keep))
        new = new * real
        columns = []
        for t in range(T):
            total = keep[:, t] * total + (1 - keep[:, t]) * new[:, t]
            columns.append(total)
        read = torch.stack(columns, 1) * torch.sigmoid(self.gate(mixed))
        result: dict[str, Any] = {"logits": self.head(self.norm(x + read))}
        if use_cache:
            result["state"] = (row[:, -2:], total)
        return result


# --- factories ------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """A dense decoder."""
    torch.manual_seed(0)
    return Llama(Config())


def moe() -> nn.Module:
    """A decoder with four experts."""
    torch.manual_seed(0)
    return Llama(Config(experts=4))


def gpt() -> nn.Module:
    """A decoder that returns tuples."""
    torch.manual_seed(0)
    return GPT()


def bert() -> nn.Module:
    """An encoder."""
    torch.manual_seed(0)
    return Bert(Config(causal=False, tie_word_embeddings=False))


def seq2seq() -> nn.Module:
    """An encoder-decoder."""
    torch.manual_seed(0)
    return Seq2Seq(Config(is_encoder_decoder=True, tie_word_embeddings=False))


def recurrence() -> nn.Module:
    """A recurrence."""
    torch.manual_seed(0)
    return Recurrence()
