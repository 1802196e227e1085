"""
The whole model: a Llama, OLMo-2 or Qwen, some of whose layers run in a loop.

    e   = prelude(embed(idx))                     a few ordinary layers, once
    s   = s_0                                     small noise
    s   = core(adapter([s, e]))                   r times: the "thinking", same weights each time
    logits = head(norm_f(coda(s)))                a few ordinary layers, once

With n_core = 0 it is an ordinary model without a loop, such as a parent. If you know nanoGPT, three
things are unusual. The depth r is an argument of forward(). Gradients flow through the last k
recurrences only. A KV cache has one slot for every (recurrence, layer) pair.

    model = RecurrentLM.load("assets/tiny")
    logits, _ = model(idx, steps=32)              # idx (B, T) int64 -> logits (B, T, V) float32
    _, losses = model(idx, targets, steps=32)     # targets (B, T) -> losses (B, T) float32

To generate text, see sample.py.

In a bfloat16 model the weights and the matrix products are bfloat16, and so is the sum of a
weight's gradients over the recurrences. The residual stream and the state s stay float32, except
in Huginn's norms, which round them.

Paper: arXiv 2511.07384, section 3.
"""
import functools
import math
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from common import UserError, read_json, reading, say, write_atomically, write_json

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

STATE_STD = 0.008703882797784892   # sqrt(2 / (5 * 5280)), for Huginn's width; the paper keeps it
IGNORE = -100                      # marks a target without loss, as in torch
LOGITS_AT_ONCE = 1 << 26           # the most logits in memory at once: 256 MB in float32
ADAPTERS = "linear", "add"         # how state and prelude output are merged: see run_core()
LLAMA3_ROPE = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


@dataclass
class Config:
    """Everything that determines the forward pass, as stored in a checkpoint's config.json."""
    vocab_size: int
    n_embd: int                       # C, the width
    n_head: int
    n_kv_head: int | None             # None: n_head. Head i uses kv head i * n_kv_head // n_head
    n_ffn: int
    n_prelude: int
    n_core: int = 0                   # 0: an ordinary model, without a loop
    n_coda: int = 0
    head_dim: int | None = None       # None: n_embd / n_head
    # pre: Llama; post: OLMo-2, which also normalizes q and k; sandwich: Huginn
    norm: Literal["pre", "post", "sandwich"] = "pre"
    head_norm: bool = False           # Qwen3: a norm on each head of q and of k
    qkv_bias: bool = False            # Qwen2: biases on q, k and v
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # the "llama3" scaling of config.json, or None
    context: int = 2048               # the longest sequence the model is meant for
    tie_embeddings: bool = False
    adapter: Literal[ADAPTERS] = "linear"  # linear: 2C -> C on [state, e]; add: state + e
    state_std: float = STATE_STD
    embed_scale: float = 1.0          # multiplies the embeddings
    mean_recurrence: int = 32         # default r
    backprop_depth: int = 8           # k: gradients flow through the last k recurrences
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd / self.n_head
        if self.n_head % self.n_kv_head or self.head_dim % 2:  # true for a fraction, too
            raise UserError(f"n_head = {self.n_head} must be a multiple of n_kv_head = "
                            f"{self.n_kv_head}, and head_dim = {self.head_dim} an even number")
        self.head_dim = int(self.head_dim)
        if self.n_coda and not self.n_core:
            raise UserError(f"n_coda = {self.n_coda}, n_core = 0: an ordinary model has no coda, "
                            "because all of its layers are in the prelude")
        scaling = self.rope_scaling
        if scaling and not all(isinstance(scaling.get(key), (int, float)) for key in LLAMA3_ROPE):
            raise UserError(f"rope_scaling = {scaling} needs numbers for {', '.join(LLAMA3_ROPE)}")

    def depth(self, r):
        """How many layers a token passes through at r recurrences, each with its own cache."""
        return self.n_prelude + r * self.n_core + self.n_coda

    @property
    def ends(self):
        """The set of token ids that end a text."""
        ids = self.eos_token_id
        return {ids} if isinstance(ids, int) else set(ids or [])


# ------------------------------------------------------------------------------- the layers

class RMSNorm(nn.RMSNorm):
    """Normalize in float32, cast to the weights' dtype, then scale, as Llama does."""

    def forward(self, x):
        x = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return x.to(self.weight.dtype) * self.weight


class HeadNorm(RMSNorm):
    """Qwen3's norm: normalizes each head of x (B, T, H * D) separately, with shared weights."""

    def forward(self, x):
        heads = x.unflatten(-1, (-1, *self.normalized_shape))
        return super().forward(heads).flatten(-2)


class Linear(nn.Linear):
    """x W^T, plus an optional bias, in the dtype of W."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def rotate(x, rope):
    """
    Apply the rotary embedding to heads x (B, T, H, D). As in Hugging Face's code, channel i of a
    head pairs with channel i + D/2. rope: cos and sin, each (T, 1, D/2) or (B, T, 1, D/2).
    """
    cos, sin = (angle.type_as(x) for angle in rope)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q, k, v, mask=None, is_causal=False):
    """torch's SDPA of queries (B, n_head, T, D) with keys and values (B, n_kv_head, S, D)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype == torch.float32:
        # The only fused kernel for float32 needs one head of k and v for each head of q.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        groups = 1
    if torch.version.hip:  # ROCm 7.0, May 2026: github.com/ROCm/pytorch/issues/3230
        v = v.contiguous()  # views of v gave wrong results
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=groups > 1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        q = c.n_head * c.head_dim
        kv = c.n_kv_head * c.head_dim
        self.split = q, kv, kv
        self.qkv = Linear(c.n_embd, q + 2 * kv, c.qkv_bias)
        self.proj = Linear(q, c.n_embd, bias=False)
        if c.head_norm:
            self.q_norm = HeadNorm(c.head_dim, c.norm_eps)
            self.k_norm = HeadNorm(c.head_dim, c.norm_eps)
        elif c.norm == "post":  # OLMo-2 normalizes all heads together
            self.q_norm = RMSNorm(q, c.norm_eps)
            self.k_norm = RMSNorm(kv, c.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.qk_bias = None
        if c.norm == "sandwich":  # Huginn has as many k heads as q heads
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, c.n_head, c.head_dim))

    def forward(self, x, rope, cache=None):
        """
        x (B, T, C) -> (B, T, C). rope: see rotate().

        Attention is causal. With a cache, cache(q, k, v) stores the new keys and values, each (B,
        n_kv_head, T, D), and lets q (B, n_head, T, D) attend to everything in the cache.
        """
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.view(B, T, -1, self.head_dim) for part in (q, k, v))
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        # Rotate before transposing: SDPA's output has the memory layout of q, so that joining the
        # heads below needs no copy.
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        if cache is None:
            y = attend(q, k, v, is_causal=True)
        else:
            y = cache(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = Linear(c.n_embd, 2 * c.n_ffn, bias=False)  # gate and up, stacked
        self.proj = Linear(c.n_ffn, c.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    """
    Llama: x + f(norm(x)). OLMo-2: x + norm(f(x)). Huginn: norm(x + f(norm(x))). Each is applied
    twice: with attention as f, then with the MLP.
    """

    def __init__(self, c):
        super().__init__()
        self.norm = c.norm
        self.attn = Attention(c)
        self.mlp = MLP(c)
        self.norm_1 = RMSNorm(c.n_embd, c.norm_eps)  # names as in the released models
        self.norm_2 = RMSNorm(c.n_embd, c.norm_eps)
        if c.norm == "sandwich":
            self.norm_3 = RMSNorm(c.n_embd, c.norm_eps)
            self.norm_4 = RMSNorm(c.n_embd, c.norm_eps)

    def forward(self, x, rope, cache=None):
        if self.norm == "pre":
            x = x + self.attn(self.norm_1(x), rope, cache)
            return x + self.mlp(self.norm_2(x))
        if self.norm == "post":
            x = x + self.norm_1(self.attn(x, rope, cache))
            return x + self.norm_2(self.mlp(x))
        x = self.norm_2(x + self.attn(self.norm_1(x), rope, cache))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


def run_blocks(blocks, x, rope, caches=None):
    """Run x (B, T, C) through a list of blocks. caches: one for each block, or None."""
    for block, cache in zip(blocks, caches or [None] * len(blocks)):
        x = block(x, rope, cache)
    return x


# -------------------------------------------------------------------------------- the model

class RecurrentLM(nn.Module):
    """The model described above. folder: the checkpoint that its weights came from, or None."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.folder = None
        # nn.Embedding() draws random values, which on the meta device imports much of torch.
        self.embed = nn.Embedding.from_pretrained(torch.zeros(c.vocab_size, c.n_embd), freeze=False)
        self.prelude = nn.ModuleList(Block(c) for _ in range(c.n_prelude))
        if c.n_core and c.adapter == "linear":
            self.adapter = Linear(2 * c.n_embd, c.n_embd, bias=False)
        self.core = nn.ModuleList(Block(c) for _ in range(c.n_core))
        self.coda = nn.ModuleList(Block(c) for _ in range(c.n_coda))
        self.norm_f = RMSNorm(c.n_embd, c.norm_eps)
        self.head = Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, idx, targets=None, steps=None, state=None):
        """
        idx (B, T) int64: token ids.
        targets (B, T) int64: the next tokens, -100 where there is no loss.
        steps: the number of recurrences r, config.mean_recurrence by default. Only the last
            config.backprop_depth of them carry gradient. Or (n, k): n recurrences without
            gradient, then k with gradient; the output depends only on n + k. An ordinary model
            ignores steps.
        state (B, T, C): s_0; random by default.

        Returns (logits (B, T, V) float32, None), or, given targets, (None, cross-entropy losses
        (B, T) float32), which are 0 where the target is -100.
        """
        n, k = self.split_steps(steps)
        rope = self.rope(idx.shape[1])
        e, s = self.run_prelude(idx, state, rope)
        with torch.no_grad():
            s = self.recur(s, e, rope, n)
        s = self.recur(s, e, rope, k)
        x = self.run_coda(s, rope)
        return (self.logits(x), None) if targets is None else (None, self.losses(x, targets))

    # The parts of forward(). Decoding (sample.py) calls them with its own rope and caches.

    def run_prelude(self, idx, state, rope, caches=None):
        """
        Token ids (B, T) -> the prelude's output e and s_0, both (B, T, C). s_0 is `state`, or
        random if that is None. An ordinary model has no state, so it returns e twice.
        """
        # The embedding is not compiled: on a CPU, its compiled backward pass adds in no fixed
        # order, so a resumed run would not be bit-identical.
        x = self.embed(idx).float() * self.config.embed_scale
        e = run_blocks(self.prelude, x, rope, caches)
        if not self.core:
            return e, e
        if state is None:
            state = self.initial_state(*idx.shape)
        return e, state.type_as(e)

    def run_core(self, s, e, rope, caches=None):
        """One recurrence: state s and prelude output e, both (B, T, C) -> the next state."""
        if self.config.adapter == "linear":
            x = self.adapter(torch.cat((s, e), -1)).type_as(e)
        else:
            x = s + e
        return run_blocks(self.core, x, rope, caches)

    def recur(self, s, e, rope, count, caches=None):
        """
        Apply `count` recurrences to state s (B, T, C). An ordinary model returns s unchanged.
        caches: for each recurrence, a list of the core blocks' caches; or None.
        """
        if not self.core:
            return s
        for i in range(count):
            s = self.run_core(s, e, rope, caches[i] if caches else None)
        return s

    def run_coda(self, s, rope, caches=None):
        """Last state (B, T, C) -> the head's input (B, T, C)."""
        if self.config.norm == "sandwich":
            s = self.norm_f(s)  # Huginn applies its final norm before the coda, too
        return self.norm_f(run_blocks(self.coda, s, rope, caches))

    def logits(self, x):
        """The output (..., C) of run_coda() -> logits (..., V) float32."""
        return self.head(x).float()

    def losses(self, x, targets):
        """
        The output x (B, T, C) of run_coda() -> the cross-entropy (B, T) float32 of each target
        (B, T), which is 0 where the target is -100. Targets may stay on the CPU, where counting
        them does not wait for a GPU.

        The logits (B, T, V) would be the largest tensor of all. So positions with a target are
        sorted to the front and taken in chunks, whose logits the backward pass recomputes. Others
        fill up the last chunk, so that torch.compile sees few shapes.
        """
        x, flat = x.flatten(0, 1), targets.flatten().cpu()
        labelled = flat != IGNORE
        # A chunk has all positions; or a quarter of them if some have no target, so that filling up
        # the last one wastes less than that, but at most LOGITS_AT_ONCE logits.
        size = len(flat) if labelled.all() else math.ceil(len(flat) / 4)
        size = min(size, LOGITS_AT_ONCE // self.config.vocab_size)
        if x.is_cuda and size < len(flat):  # whole tiles; on a CPU, this would change results
            size = 128 * max(1, size // 128)
        count = max(1, math.ceil(labelled.sum().item() / size))
        order = labelled.argsort(descending=True, stable=True)[:count * size]
        flat, order = to_device(flat[order], x.device), to_device(order, x.device)
        chunks = zip(x.index_select(0, order).split(size), flat.split(size))
        losses = torch.cat([checkpoint(self.chunk_losses, *chunk, use_reentrant=False,
                                       preserve_rng_state=False) for chunk in chunks])
        return losses.new_zeros(len(x)).index_copy(0, order, losses).view(targets.shape)

    def chunk_losses(self, x, targets):
        """losses() of a chunk of the head's input (N, C), and of its targets (N,)."""
        return F.cross_entropy(self.logits(x), targets, reduction="none")

    @torch.no_grad()
    def trajectory(self, idx, steps, state=None):
        """
        Run once, up to the largest r in `steps`, such as [1, 2, 4, 8], and yield (r, x) for each r
        in increasing order. x (B, T, C) is the output of run_coda(), so logits(x) and
        losses(x, targets) are those of forward() at that r.
        """
        rope = self.rope(idx.shape[1])
        e, s = self.run_prelude(idx, state, rope)
        done = 0
        for r in sorted(steps):
            s = self.recur(s, e, rope, r - done)
            yield r, self.run_coda(s, rope)
            done = r

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, steps=None):
        """
        Continue one text, a list of ids, at r = `steps` by the likeliest tokens, and return these.
        This is all there is to it; sample.py is faster, with a cache, and can sample.
        """
        idx = torch.tensor([ids], device=self.embed.weight.device)
        for _ in range(max_new_tokens):
            state = self.initial_state(1, idx.shape[1], seed=0)
            logits, _ = self(idx, steps=steps, state=state)
            idx = torch.cat((idx, logits[:, -1:].argmax(-1)), 1)
        return idx[0, len(ids):].tolist()

    def split_steps(self, steps):
        """Turn the `steps` of forward(), which may be r, (n, k) or None, into (n, k)."""
        if steps is None:
            steps = self.config.mean_recurrence
        if isinstance(steps, int):
            assert steps >= 0, f"steps = {steps}"
            k = min(steps, self.config.backprop_depth)
            return steps - k, k
        return steps

    def initial_state(self, B, T, seed=None, row=0):
        """
        Draw s_0 (B, T, C) float32: normal numbers with standard deviation state_std, truncated at 3
        standard deviations (which reduces the standard deviation to 98.7% of state_std).

        With a seed, each number depends only on (seed, index of the row, position, channel). The
        rows have the indices row, row + 1, ...; decoding uses index 0 for every text. Without a
        seed, a random one is drawn.
        """
        c = self.config
        if seed is None:
            seed = torch.randint(2**31, ()).item()
        rows = torch.arange(row, row + B, device=self.embed.weight.device)
        position = torch.arange(T, device=rows.device)
        std = c.state_std * (c.embed_scale if c.norm == "sandwich" else 1)  # Huginn scales s_0, too
        return std * truncated_normal(seed, rows[:, None], position, c.n_embd)

    def rope(self, T):
        """cos and sin, each (T, 1, head_dim / 2) float32, of positions 0..T-1; see rotate()."""
        c = self.config
        pairs = torch.arange(0, c.head_dim, 2, device=self.embed.weight.device)
        f = 1.0 / c.rope_theta ** (pairs / c.head_dim)
        if scaling := c.rope_scaling:
            # Llama 3.1 stretches long wavelengths, keeps short ones, and blends in between.
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            f = f * (smooth + (1 - smooth) / scaling["factor"])
        angle = torch.arange(T, device=f.device)[:, None, None] * f
        return angle.cos(), angle.sin()

    # ---------------------------------------------------------- initializing and checkpoints

    @torch.no_grad()
    def init_weights(self, seed):
        """Takase/Huginn initialization, to train baselines from scratch (the paper's Figure 2)."""
        c = self.config
        generator = torch.Generator(self.embed.weight.device).manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # norms are 1 already
                std = math.sqrt(2 / (5 * c.n_embd))
                if name.endswith("proj.weight"):
                    std /= math.sqrt(2 * c.depth(c.mean_recurrence))
                p.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                p.zero_()

    @classmethod
    def empty(cls, config):
        """Return a model without storage (on the meta device), to count or fill its parameters."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """
        Read a checkpoint folder, or the newest step_* checkpoint of a run's folder. dtype: cast to
        this; by default float32, or bfloat16 if that represents every stored weight exactly.
        """
        folder = find_checkpoint(folder)
        model = cls.load_mapped(folder, load_config(folder))
        # A run with --train saves trained parameters in float32, the others perhaps in bfloat16.
        # Never float16, whose range is too small for many models' activations.
        coarse = all(p.dtype == torch.bfloat16 for p in model.parameters())
        return model.to(device, dtype or (torch.bfloat16 if coarse else torch.float32))

    @classmethod
    def load_mapped(cls, folder, config):
        """
        Return the model of a checkpoint folder, on the CPU and in the stored dtypes. It is
        memory-mapped, so that each tensor is read from disk only when it is used.
        """
        model = cls.empty(config)
        path = Path(folder, "model.safetensors")
        with reading(path):
            tensors = load_file(path)
        expected = {name: p.shape for name, p in model.named_parameters()}
        found = {name: t.shape for name, t in tensors.items()}
        if wrong := sorted(dict(expected.items() ^ found.items())):
            raise UserError(f"{path}: missing, unknown or in another shape: {wrong[:3]}. {FOREIGN}")
        model.fill(tensors)
        model.folder = folder
        return model

    def fill(self, tensors):
        """Use a checkpoint's {name: tensor} as the weights, without copying them."""
        if self.config.tie_embeddings:
            tensors = tensors | {"head.weight": tensors["embed.weight"]}
        self.load_state_dict(tensors, assign=True)
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def save(self, folder, weights=None):
        """
        Write model.safetensors, with `weights` {name: tensor} or the model's own, and then
        config.json. A folder is complete with that, so write its other files before.
        """
        weights = weights or self.state_dict()
        tensors = {name: weights[name] for name, _ in self.named_parameters()}  # tied ones once
        save_tensors(f"{folder}/model.safetensors", tensors)
        write_json(f"{folder}/config.json", {"model_type": "loopgraft"} | asdict(self.config))

    # ------------------------------------------------------------------------------ counting

    def num_params(self, trained=False, matrices=False):
        """
        Return a Counter of the parameters of each part. Tied embeddings have no "head". trained:
        count only parameters that require gradient. matrices: skip norms and biases.
        """
        counted = Counter()
        for name, p in self.named_parameters():
            if (p.requires_grad or not trained) and (p.dim() == 2 or not matrices):
                counted[name.split(".")[0]] += p.numel()
        return counted

    def flops_per_token(self, steps, T=1, training=False, labelled=1.0):
        """
        Count the FLOPs per token of the matrix products and attention in a forward pass over rows
        of T tokens; with training=True, also those of the backward pass. labelled: the fraction of
        the tokens that have a target, for which losses() computes logits. Excludes padding in its
        last chunk and recomputation under --activation_budget.
        """
        c = self.config
        n, k = self.split_steps(steps)
        size = self.num_params(matrices=True)
        trained = self.num_params(matrices=True, trained=True)
        has_trained = self.num_params(trained=True)  # of any kind: norms and biases, too
        outside = {"embed", "prelude", "core", "coda", "norm_f", "head"}
        for numbers in (size, trained, has_trained):  # the adapter, and new weights of a fork
            numbers["core"] += sum(n for part, n in numbers.items() if part not in outside)
        flops = 0
        # Gradient flows back as far as the first trained part.
        needs_gradient = has_trained["embed"] > 0
        for part, uses, uses_with_gradient in ("prelude", 1, 1), ("core", n + k, k), ("coda", 1, 1):
            # Each of attention's products takes 2 FLOPs per channel for every token that a token
            # sees, T / 2 on average. The forward pass has two products; the backward pass has five,
            # because it recomputes the scores.
            product = len(getattr(self, part)) * c.n_head * c.head_dim * T
            forward = 2 * size[part] + 2 * product
            backward = 2 * size[part] + 2 * trained[part] + 5 * product
            flops += uses * forward
            needs_gradient = needs_gradient or has_trained[part] > 0
            if training and needs_gradient:
                flops += uses_with_gradient * backward
        head = self.head.weight
        needs_gradient = needs_gradient or has_trained["norm_f"] > 0
        # Training computes the logits twice, then up to two gradients.
        times = (2 + needs_gradient + head.requires_grad) if training else 1
        return flops + times * 2 * head.numel() * labelled

    # ------------------------------------------------------------------------- torch.compile

    def compile_parts(self, **how):
        """
        Compile with torch.compile: the core, which runs r times; one layer, whose graph all layers
        of prelude and coda share, so that a deep model compiles as quickly as a small one; and the
        head. how: arguments of torch.compile. If compiling fails, the model runs uncompiled.
        """
        try:  # compile something trivial first
            torch.compile(torch.sin)(self.norm_f.weight.data)
            say("compiling takes half a minute on a CPU, a minute on an H100", sys.stderr)
        except Exception as e:  # of many kinds: no compiler, an odd path or locale, no disk space
            reason = f"{type(e).__name__}: {e}"
            reason = re.sub("(?s)Command:.*?Output:|Set TORCHDYNAMO.*", "", reason)
            say(f"warning: {' '.join(reason.split()):.300}. Continuing without torch.compile",
                sys.stderr)
            torch.compiler.set_stance("force_eager")
        # Decoding needs more graphs than the default limit allows: for one row, for a few rows, for
        # many, and for each view of the cache.
        torch._dynamo.config.recompile_limit = 32
        layer = torch.compile(Block.forward, **how)
        for block in [*self.prelude, *self.coda]:
            block.forward = functools.partial(layer, block)
        for part in ("run_core", "logits", "chunk_losses"):
            setattr(self, part, torch.compile(getattr(self, part), **how))


# -------------------------------------------------------------------------------- the noise

def mix(x):
    """
    Hash 32-bit numbers, an int or an int64 tensor, with splitmix32, except that the first addition
    keeps its carry. No product overflows int64, so the bits are the same on every device.
    """
    x = x + 0x9E3779B9
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= 0xFFFFFFFF
    x ^= x >> 15
    x *= 0x735A2D97
    x &= 0xFFFFFFFF
    x ^= x >> 15
    return x


def truncated_normal(seed, row, position, C):
    """
    Draw standard normal numbers, truncated at 3 standard deviations. Each depends only on (seed,
    row, position, channel). row, position: int64 tensors that broadcast to a shape (...). Returns
    (..., C) float32.
    """
    key = mix(mix(mix(seed) + row) + position)
    bits = mix(key[..., None] + torch.arange(C, device=key.device))
    uniform = ((bits >> 8) - 2**23).float()  # 24 bits, which float32 holds exactly
    within = math.erf(3 / math.sqrt(2))      # P(|z| < 3) for a standard normal z
    return (uniform * (within / 2**23)).erfinv_().mul_(math.sqrt(2))


# ---------------------------------------------------------------------------- the checkpoints

FOREIGN = "It was made by another model.py, or config.json belongs to another model"


def save_tensors(path, tensors):
    """Write {name: tensor} to a .safetensors file. An older one may be in use, memory-mapped."""
    with write_atomically(path) as new:
        save_file(tensors, new, {"format": "pt"})


def checkpoints(folder):
    """The step_N checkpoints in a run's folder, as Paths, oldest first; none in a model's."""
    if Path(folder, "config.json").exists():  # step_N may be another trainer's
        return []
    # One without config.json, which is written last, is unfinished.
    paths = [path.parent for path in Path(folder).glob("step_*/config.json")]
    return sorted((path for path in paths if path.name[5:].isdecimal()),
                  key=lambda path: int(path.name[5:]))


def find_checkpoint(folder):
    """Return a checkpoint folder itself, or the newest step_* checkpoint of a run's folder."""
    saved = checkpoints(folder)
    if saved:
        folder = saved[-1]
    if not Path(folder, "config.json").exists():
        raise UserError(f"{folder}: no such folder, or it has no config.json or step_* checkpoint")
    return str(folder)


def load_config(folder):
    """Read the Config of a loopgraft checkpoint. Raises UserError for any other kind of model."""
    path = Path(folder, "config.json")
    raw = read_json(path)
    kind = raw.pop("model_type", None)
    if kind != "loopgraft":
        raise UserError(f"{path}: model_type is {kind!r}, not loopgraft. Convert the model first: "
                        f"`python surgery.py {folder} OUT`, with --shape unless it is recurrent")
    if unknown := raw.keys() - {item.name for item in fields(Config)}:
        raise UserError(f"{path}: unknown {sorted(unknown)[:3]}. {FOREIGN}")
    return Config(**raw)


# ------------------------------------------------------------------------- plumbing for torch

# cuDNN's attention builds a plan for each new shape, up to 0.4 s while decoding, and torch's
# partitioner does not know that it is expensive to recompute. Others report NaN gradients on an
# H100, and wrong output on a B200 with fewer than 8 kv heads.
torch.backends.cuda.enable_cudnn_sdp(False)
# torch.compile's partitioner counts the FLOPs of attention with this function, which fails before
# torch 2.12 if there are fewer kv heads than heads. q, k and v are shapes.
if torch.__version__ < "2.12":
    flop_counter.sdpa_flop_count = lambda q, k, v: 4 * math.prod(q) * k[2]


def to_device(tensor, device):
    """Copy a tensor from the CPU to a device, without waiting for a GPU: from pinned memory."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
