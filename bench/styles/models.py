"""Small language models in the calling habits of other libraries, correct as they stand.

Each class is called as its library calls it: no mask, `input_pos`, `inference_params`, `mems`,
`hx`, (T, B) layouts, a mask whose True is PAD, a loss first.
`bench/styles/mistakes.txt` breaks them.
"""

import math
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B batch, T length, S key length, D width, N heads, K key-value heads, H head width, V vocabulary

V, D, N, H, LONG = 53, 32, 4, 8, 320


# --- a GPT that gives the last position, or a loss ------------------------------------------------


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.c_fc, self.c_out = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(D, dim=2)
        q, k, v = (one.view(B, T, N, H).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(LONG, D)
        self.h = nn.ModuleList(NanoBlock() for _ in range(2))
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, T = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, V), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -LONG:])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


# --- rotary models whose cache is a buffer of the module ------------------------------------------


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of [B, N, T, H] by positions [T] or [B, 1, T]."""
    angle = positions[..., None] * 10_000.0 ** (-torch.arange(H // 2) / (H // 2))
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class KVCache(nn.Module):
    def __init__(self, rows: int, length: int, heads: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(rows, heads, length, H), persistent=False)
        self.register_buffer("v", torch.zeros(rows, heads, length, H), persistent=False)

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(k)
        self.k[:rows, :, input_pos] = k
        self.v[:rows, :, input_pos] = v
        return self.k[:rows], self.v[:rows]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.fc_1, self.fc_2, self.down = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.kv_cache: KVCache | None = None

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        normed = self.norm_1(x)
        q = self.q(normed).view(B, T, N, H).transpose(1, 2)
        k, v = self.kv(normed).view(B, T, 2, N // 2, H).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, positions), rotated(k, positions)
        if mask is not None and self.kv_cache is not None:
            k, v = self.kv_cache.update(positions, k, v)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.fc_1(normed)) * self.fc_2(normed))


class LitGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.max_seq_length = LONG
        self.wte, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.h, self.ln_f = nn.ModuleList(LitBlock() for _ in range(2)), RMSNorm()
        self.mask_cache: Tensor | None = None

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        length = max_seq_length or self.max_seq_length
        for block in self.h:
            block.kv_cache = KVCache(batch_size, length, N // 2)
        self.mask_cache = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

    def clear_kv_cache(self) -> None:
        self.mask_cache = None
        for block in self.h:
            block.kv_cache = None

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        T = idx.size(1)
        if self.max_seq_length < T:
            raise ValueError(f"Cannot forward {T} tokens, max is {self.max_seq_length}.")
        if input_pos is None:
            positions, mask = torch.arange(T), None
        else:
            if self.mask_cache is None:
                raise TypeError("You need to call `gpt.set_kv_cache()`")
            positions, mask = input_pos, self.mask_cache[:, :, input_pos]
        x = self.wte(idx)
        for block in self.h:
            x = block(x, positions, mask)
        return self.lm_head(self.ln_f(x))


class TuneAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.kv_cache: KVCache | None = None
        self.cache_pos = 0

    def forward(self, x: Tensor, mask: Tensor | None, input_pos: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        places = torch.arange(T) if input_pos is None else input_pos[:, None, :]
        q, k, v = (
            proj(x).view(B, T, N, H).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, places), rotated(k, places)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(torch.arange(self.cache_pos, self.cache_pos + T), k, v)
            self.cache_pos += T
        allow = None if mask is None else mask[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allow, is_causal=mask is None)
        return self.output_proj(y.transpose(1, 2).reshape(B, T, D))


class TuneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.mlp_norm, self.attn = RMSNorm(), RMSNorm(), TuneAttention()
        self.w1, self.w2, self.w3 = nn.Linear(D, 48), nn.Linear(48, D), nn.Linear(D, 48)

    def forward(self, x: Tensor, mask: Tensor | None, input_pos: Tensor | None) -> Tensor:
        h = x + self.attn(self.sa_norm(x), mask, input_pos)
        normed = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class TuneDecoder(nn.Module):
    """`mask` is [B, T, S], True where a token may attend; `input_pos` is [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_len = LONG
        self.tok_embeddings, self.output = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers, self.norm = nn.ModuleList(TuneLayer() for _ in range(2)), RMSNorm()
        self.causal_mask: Tensor | None = None

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, decoder_max_seq_len: int | None = None
    ) -> None:
        length = decoder_max_seq_len or self.max_seq_len
        for layer in self.layers:
            layer.attn.kv_cache = KVCache(batch_size, length, N).to(dtype)
            layer.attn.cache_pos = 0
        self.causal_mask = torch.ones(length, length, dtype=torch.bool).tril()

    def caches_are_enabled(self) -> bool:
        return self.causal_mask is not None

    def reset_caches(self) -> None:
        for layer in self.layers:
            layer.attn.kv_cache.k.zero_()
            layer.attn.kv_cache.v.zero_()
            layer.attn.cache_pos = 0

    def forward(
        self, tokens: Tensor, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        if self.causal_mask is not None:
            if input_pos is None:
                raise ValueError("caches are set up: pass input_pos")
            mask = self.causal_mask[input_pos] if mask is None else mask
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask, input_pos)
        return self.output(self.norm(x)).float()


class FastAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.kv_cache: KVCache | None = None

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.wqkv(x).split(D, dim=-1)
        q, k, v = (one.view(B, T, N, H).transpose(1, 2) for one in (q, k, v))
        q, k = rotated(q, input_pos), rotated(k, input_pos)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, D))


class GPTFast(nn.Module):
    """Cannot be called without `setup_caches` and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.attention = nn.ModuleList(FastAttention() for _ in range(2))
        self.norms, self.norm = nn.ModuleList(RMSNorm() for _ in range(2)), RMSNorm()
        self.causal_mask: Tensor | None = None
        self.max_batch_size = self.max_seq_length = -1

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        if self.max_seq_length >= max_seq_length and self.max_batch_size >= max_batch_size:
            return
        self.max_seq_length, self.max_batch_size = max_seq_length, max_batch_size
        for part in self.attention:
            part.kv_cache = KVCache(max_batch_size, max_seq_length, N)
        self.causal_mask = torch.ones(max_seq_length, max_seq_length, dtype=torch.bool).tril()

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        assert self.causal_mask is not None, "Caches must be initialized first"
        mask = self.causal_mask[None, None, input_pos]
        x = self.tok_embeddings(idx)
        for norm, part in zip(self.norms, self.attention, strict=True):
            x = x + part(norm(x), input_pos, mask)
        return self.output(self.norm(x))


# --- recurrent models -----------------------------------------------------------------------------


class WordLSTM(nn.Module):
    """Tokens are [T, B], a hidden state must be given, as in a well-known example."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(V, D)
        self.rnn = nn.LSTM(D, D, 2, dropout=0.2)
        self.decoder = nn.Linear(D, V)
        self.decoder.weight = self.encoder.weight

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        zeros = self.decoder.weight.new_zeros(2, bsz, D)
        return zeros, zeros.clone()

    def forward(
        self, input: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded, dim=-1), hidden


class GRUModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(V, D), nn.Linear(D, V)
        self.cells = nn.ModuleList(nn.GRUCell(D, D) for _ in range(2))
        self.norm = nn.LayerNorm(D)

    def forward(self, tokens: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        B, T = tokens.shape
        state = torch.zeros(2, B, D) if hx is None else hx
        x, outs = self.embedding(tokens), []
        layers = [state[0], state[1]]
        for t in range(T):
            h = x[:, t]
            for i, cell in enumerate(self.cells):
                layers[i] = cell(h, layers[i])
                h = h + layers[i]
            outs.append(self.norm(h))
        return self.out(torch.stack(outs, 1)), torch.stack(layers)


@dataclass
class InferenceParams:
    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)


class MambaMixer(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.width = layer_idx, 4
        self.in_proj, self.out_proj = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.conv1d = nn.Conv1d(D, D, self.width, groups=D, padding=self.width - 1)
        self.x_proj = nn.Linear(D, 1 + 2 * 8)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, 9.0)).repeat(D, 1))
        self.skip, self.dt_bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D) - 1)

    def forward(self, hidden: Tensor, inference_params: InferenceParams | None) -> Tensor:
        B, T, _ = hidden.shape
        x, z = self.in_proj(hidden).chunk(2, -1)
        window = state = None
        if inference_params is not None and inference_params.seqlen_offset > 0:
            window, state = inference_params.key_value_memory_dict[self.layer_idx]
        if window is None:
            window = x.new_zeros(B, self.width - 1, D)
            state = x.new_zeros(B, D, 8)
        padded = torch.cat((window, x), 1)
        kernel = self.conv1d.weight.squeeze(1)
        mixed = sum(padded[:, i : i + T] * kernel[:, i] for i in range(self.width))
        mixed = F.silu(mixed + self.conv1d.bias)
        dt, b, c = self.x_proj(mixed).split((1, 8, 8), -1)
        dt = F.softplus(dt + self.dt_bias)
        decay = torch.exp(-dt[..., None] * self.A_log.exp())
        outs = []
        for t in range(T):
            state = state * decay[:, t] + (dt * mixed)[:, t, :, None] * b[:, t, None]
            outs.append((state * c[:, t, None]).sum(-1))
        if inference_params is not None:
            kept = (padded[:, -(self.width - 1) :], state)
            inference_params.key_value_memory_dict[self.layer_idx] = kept
        y = torch.stack(outs, 1) + self.skip * mixed
        return self.out_proj(y * F.silu(z))


CausalLMOutput = namedtuple("CausalLMOutput", ["logits"])


class MambaLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm_f = nn.Embedding(V, D), RMSNorm()
        self.layers = nn.ModuleList(MambaMixer(i) for i in range(2))
        self.norms = nn.ModuleList(RMSNorm() for _ in range(2))
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        num_last_tokens: int = 0,
    ) -> CausalLMOutput:
        x = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), inference_params)
        x = self.norm_f(x)
        if num_last_tokens > 0:
            x = x[:, -num_last_tokens:]
        return CausalLMOutput(logits=self.lm_head(x))


class LinearRNN(nn.Module):
    """A linear attention with a decay for each head, chunks of 16 in training, `state` in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.decay = nn.Parameter(torch.linspace(0.5, 3.0, N))
        self.chunk = 16

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outs, rate = [], torch.sigmoid(self.decay)[:, None, None]
        for begin in range(0, q.shape[2], self.chunk):
            part = slice(begin, begin + self.chunk)
            qc, kc, vc = q[:, :, part], k[:, :, part], v[:, :, part]
            T = qc.shape[2]
            t = torch.arange(T)
            ahead = t[:, None] - t[None]
            within = torch.where(ahead >= 0, rate ** ahead.clamp(min=0), 0.0)
            inner = ((qc @ kc.mT) * within) @ vc
            across = (qc * rate ** (t + 1)[:, None]) @ state
            outs.append(inner + across)
            weights = rate ** (T - 1 - t)[:, None]
            state = state * rate**T + (kc * weights).mT @ vc
        return torch.cat(outs, 2), state

    def forward(
        self, tokens: Tensor, state: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        B, T = tokens.shape
        x, new = self.emb(tokens), []
        for i, (norm, qkv, out) in enumerate(zip(self.norms, self.qkv, self.out, strict=True)):
            q, k, v = qkv(norm(x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            before = x.new_zeros(B, N, H, H) if state is None else state[i]
            y, after = self.mix(q / H, k, v, before)
            new.append(after)
            x = x + out(y.transpose(1, 2).reshape(B, T, D))
        return self.head(x), new


# --- memories of segments, incremental state, encoder and decoder ---------------------------------


@dataclass
class XLOutput:
    prediction_scores: Tensor
    mems: list[Tensor]
    losses: Tensor | None = None


class TransformerXL(nn.Module):
    """Hidden states of earlier segments are `mems` [S, B, D]; distances are relative."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.q, self.kv, self.o = (
            nn.ModuleList(nn.Linear(D, width) for _ in range(2)) for width in (D, 2 * D, D)
        )
        self.slopes = nn.Parameter(torch.linspace(0.05, 0.5, N))
        self.mem_len = 400

    def forward(
        self, input_ids: Tensor, mems: list[Tensor] | None = None, labels: Tensor | None = None
    ) -> XLOutput:
        B, T = input_ids.shape
        x, new = self.word_emb(input_ids), []
        for i in range(2):
            past = x.new_zeros(0, B, D) if mems is None else mems[i]
            whole = torch.cat((past.transpose(0, 1), x), 1)
            new.append(whole.transpose(0, 1)[-self.mem_len :].detach())
            S = whole.shape[1]
            q = self.q[i](self.norms[i](x)).view(B, T, N, H).transpose(1, 2)
            k, v = self.kv[i](self.norms[i](whole)).view(B, S, 2, N, H).permute(2, 0, 3, 1, 4)
            distance = torch.arange(S - T, S)[:, None] - torch.arange(S)[None]
            scores = q @ k.mT / math.sqrt(H) - self.slopes[:, None, None] * distance
            scores = scores.masked_fill(distance < 0, -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
            x = x + self.o[i](y)
        logits = self.head(x)
        losses = None
        if labels is not None:
            losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return XLOutput(logits, new, losses)


class IncrementalDecoder(nn.Module):
    """Reads `prev_output_tokens`; padding is the token 1; a step passes `incremental_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.padding_idx = 1
        self.embed_tokens = nn.Embedding(V, D, padding_idx=1)
        self.embed_positions = nn.Embedding(LONG + 2, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.final = nn.LayerNorm(D)

    def forward(
        self, prev_output_tokens: Tensor, incremental_state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        B, S = prev_output_tokens.shape
        real = prev_output_tokens != self.padding_idx
        places = real.cumsum(1) * real + self.padding_idx
        x = self.embed_tokens(prev_output_tokens) * math.sqrt(D) + self.embed_positions(places)
        if incremental_state is not None:
            x = x[:, incremental_state.get("seen", torch.tensor(0)) :]
            incremental_state["seen"] = torch.tensor(S)
        T = x.shape[1]
        for i, (norm, qkv, out) in enumerate(zip(self.norms, self.qkv, self.out, strict=True)):
            q, k, v = qkv(norm(x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            if incremental_state is not None:
                held = incremental_state.get(f"{i}")
                kv = torch.stack((k, v))
                kv = kv if held is None else torch.cat((held, kv), 3)
                incremental_state[f"{i}"] = kv
                k, v = kv[0], kv[1]
            allow = torch.arange(S) <= torch.arange(S - T, S)[:, None]
            allow = allow & (real[:, None, None, :] | torch.eye(S, dtype=torch.bool)[S - T :])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
            x = x + out(y.transpose(1, 2).reshape(B, T, D))
        return self.final(x) @ self.embed_tokens.weight.T, {"attn": None}


class Annotated(nn.Module):
    """Encoder and decoder of torch's own layers: `src`, `tgt`; masks whose True is PAD."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(V, D), nn.Embedding(LONG, D)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, N, 48, 0.1, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(D, N, 48, 0.1, batch_first=True, norm_first=True), 2
        )
        self.generator = nn.Linear(D, V)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(D) + self.places(torch.arange(tokens.shape[1]))

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        T = tgt.shape[1]
        memory = self.encoder(self.embed(src), src_key_padding_mask=src_key_padding_mask)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        out = self.decoder(
            self.embed(tgt),
            memory,
            tgt_mask=future,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.generator(out)


class TorchBert(nn.Module):
    """Both ways; `src_key_padding_mask` is True at PAD; the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D, padding_idx=0), nn.Embedding(LONG, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)

    def forward(
        self,
        input_ids: Tensor,
        src_key_padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        B, T = input_ids.shape
        x = self.tokens(input_ids) + self.places(torch.arange(T))
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(H)
        if src_key_padding_mask is not None:
            scores = scores.masked_fill(src_key_padding_mask[:, None, None, :], -1e9)
        y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        logits = self.head(x + self.down(F.relu(self.up(x))))
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss, logits


# --- results in other clothes, positions that must be given ---------------------------------------


class PackedLM(nn.Module):
    """`position_ids` are required; `segment_ids` keep packed texts apart; returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(V, D), nn.Linear(D, V)
        self.norms = nn.ModuleList(RMSNorm() for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        B, T = input_ids.shape
        x = self.embed(input_ids)
        allow = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
        if segment_ids is not None:
            allow = allow & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = qkv(norm(x)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            q, k = rotated(q, position_ids[:, None]), rotated(k, position_ids[:, None])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
            x = x + out(y.transpose(1, 2).reshape(B, T, D))
        result = {"hidden": x, "scores": self.unembed(x)}
        if labels is not None:
            each = F.cross_entropy(
                result["scores"][:, :-1].flatten(0, 1),
                labels[:, 1:].flatten(),
                ignore_index=-100,
                reduction="none",
            )
            result["loss"] = each.sum() / (labels[:, 1:] != -100).sum()
        return result


class MoE(nn.Module):
    """Two of four experts for each token; a loss of balance beside; `y` are the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.norm, self.ln = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.router = nn.Linear(D, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, D, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 24, D) * 0.2)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        share = self.router(flat).softmax(-1)
        weight, chosen = share.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for e in range(4):
            row, place = torch.where(chosen == e)
            done = F.relu(flat[row] @ self.up[e]) @ self.down[e]
            total = total.index_add(0, row, done * weight[row, place, None])
        return total.view_as(x), (share.mean(0) ** 2).sum() * 4

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor | None]:
        B, T = x.shape
        h = self.embed(x)
        q, k, v = self.qkv(self.norm(h)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
        bias = -0.1 * (torch.arange(T)[:, None] - torch.arange(T)).float()
        bias = bias.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        h = h + self.out(a.transpose(1, 2).reshape(B, T, D))
        done, balance = self.experts(self.ln(h))
        logits = self.head(h + done)
        loss = None
        if y is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        return {"loss": loss, "balance": balance, "logits": logits}


class BlockLocal(nn.Module):
    """Attention within a window of 32, computed in blocks of 32; lengths are padded to blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.to_logits = nn.Embedding(V, D), nn.Linear(D, V)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.window = 32

    def local(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        B, _, T, _ = q.shape
        W = self.window
        blocks = T // W
        q, k, v = (one.view(B, N, blocks, W, H) for one in (q, k, v))
        real = real.view(B, 1, blocks, W)
        k, v = (torch.cat((F.pad(o, (0, 0, 0, 0, 1, 0))[:, :, :-1], o), 3) for o in (k, v))
        seen = torch.cat((F.pad(real, (0, 0, 1, 0))[:, :, :-1], real), 3)
        distance = torch.arange(W)[:, None] + W - torch.arange(2 * W)
        allow = (distance >= 0) & (distance < W) & seen[:, :, :, None, :]
        scores = (q @ k.mT / math.sqrt(H)).masked_fill(~allow, -1e9)
        return (scores.softmax(-1) @ v).view(B, N, T, H)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T = x.shape
        extra = -T % self.window
        real = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
        real = F.pad(real, (0, extra), value=False)
        h = F.pad(self.token_emb(x), (0, 0, 0, extra))
        S = T + extra
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = qkv(norm(h)).view(B, S, 3, N, H).permute(2, 0, 3, 1, 4)
            y = self.local(q, k, v, real)
            h = h + out(y.transpose(1, 2).reshape(B, S, D))
        return self.to_logits(h[:, :T])


class LongConv(nn.Module):
    """A causal convolution as long as the text, through a Fourier transform; no mask at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(2))
        self.filters = nn.Parameter(torch.randn(2, D, LONG) * 0.2)
        self.rate = nn.Parameter(torch.linspace(0.01, 0.3, D))

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        T = x.shape[1]
        kernel = kernel[:, :T] * torch.exp(-self.rate.abs()[:, None] * torch.arange(T))
        size = 2 * T
        product = torch.fft.rfft(x.mT, n=size) * torch.fft.rfft(kernel, n=size)
        return torch.fft.irfft(product, n=size)[..., :T].mT

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for norm, gate, kernel in zip(self.norms, self.gate, self.filters, strict=True):
            a, b = gate(norm(x)).chunk(2, -1)
            x = x + torch.sigmoid(a) * self.convolve(b, kernel)
        return self.head(x)


class KeyValueCache:
    """What a hooked model keeps: one entry for each layer, and the mask of what was read."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor] | None] = [None, None]
        self.previous_attention_mask: Tensor | None = None


class Hooked(nn.Module):
    """`return_type` chooses the result; `attention_mask` is 1 at real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.W_E, self.W_U = nn.Parameter(torch.randn(V, D)), nn.Parameter(torch.randn(D, V) * 0.3)
        self.W_pos = nn.Parameter(torch.randn(LONG, D) * 0.3)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))

    def get_input_embeddings(self) -> nn.Embedding:
        return nn.Embedding.from_pretrained(self.W_E, freeze=False)

    def forward(
        self,
        input: Tensor,
        return_type: str = "logits",
        attention_mask: Tensor | None = None,
        past_kv_cache: KeyValueCache | None = None,
    ) -> Any:
        B, T = input.shape
        mask = torch.ones(B, T) if attention_mask is None else attention_mask[:, -T:]
        if past_kv_cache is not None:
            before = past_kv_cache.previous_attention_mask
            mask = mask if before is None else torch.cat((before, mask), 1)
            past_kv_cache.previous_attention_mask = mask
        places = (mask.cumsum(1) - 1).clamp(min=0).long()[:, -T:]
        resid = self.W_E[input] + self.W_pos[places]
        S = mask.shape[1]
        for i in range(2):
            q, k, v = self.qkv[i](self.ln[i](resid)).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)
            if past_kv_cache is not None:
                held = past_kv_cache.entries[i]
                if held is not None:
                    k, v = torch.cat((held[0], k), 2), torch.cat((held[1], v), 2)
                past_kv_cache.entries[i] = (k, v)
            allow = torch.arange(S - T, S)[:, None] >= torch.arange(S)
            allow = allow & mask.bool()[:, None, None, :]
            pattern = (q @ k.mT / math.sqrt(H)).masked_fill(~allow, -1e5).softmax(-1)
            resid = resid + self.out[i]((pattern @ v).transpose(1, 2).reshape(B, T, D))
        logits = resid @ self.W_U
        if return_type == "loss":
            at = logits[:, :-1].log_softmax(-1).gather(-1, input[:, 1:, None])[..., 0]
            return -at.mean()
        return logits


# --- factories ------------------------------------------------------------------------------------


def nanogpt() -> nn.Module:
    return NanoGPT()


def litgpt() -> nn.Module:
    return LitGPT()


def torchtune() -> nn.Module:
    return TuneDecoder()


def gptfast() -> nn.Module:
    model = GPTFast()
    model.setup_caches(16, LONG)
    return model


def wordlstm() -> nn.Module:
    return WordLSTM()


def gru() -> nn.Module:
    return GRUModel()


def mamba() -> nn.Module:
    return MambaLM()


def linear() -> nn.Module:
    return LinearRNN()


def xl() -> nn.Module:
    return TransformerXL()


def fairseq() -> nn.Module:
    return IncrementalDecoder()


def annotated() -> nn.Module:
    return Annotated()


def torchbert() -> nn.Module:
    return TorchBert()


def packed() -> nn.Module:
    return PackedLM()


def moe() -> nn.Module:
    return MoE()


def local() -> nn.Module:
    return BlockLocal()


def longconv() -> nn.Module:
    return LongConv()


def hooked() -> nn.Module:
    return Hooked()
