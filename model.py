"""
The whole model: a Llama (or OLMo-2) whose middle layers are a recurrent block.

    e   = prelude(embed(idx))                     a few ordinary layers, once
    s   = s_0                                     small noise
    s   = core(adapter([s, e]))                   r times: the "thinking", same weights each time
    out = head(norm_f(coda(s)))                   a few ordinary layers, once

With n_core = 0 it is an ordinary feed-forward Llama: the parent, and every baseline. What is
unusual compared with nanoGPT: the depth r is an argument of forward(), gradients flow through
the last k recurrences only, and a KV cache has one slot for every (recurrence, layer) pair.

    model = RecurrentLM.load("out/tiny/task")
    logits, _ = model(idx, steps=32)              # idx (B, T) int64 -> logits (B, T, V) float32

Paper: arXiv 2511.07384, section 3.
"""
import contextlib
import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import repeat

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

STATE_STD = 0.008703882797784892  # sqrt(2 / (5 * 5280)): Huginn's, which the paper gives every width
STARTS = ("noise", "zero", "prelude")
LLAMA3_ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
CARRIED_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # of use to transformers alone
FEW_ROWS = 4  # of decoding; with more the libraries' products are as fast or faster
LOGITS_AT_ONCE = 1 << 26  # 256 MB in float32
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # in safetensors' words


class InputError(Exception):
    """Bad input: one line that names the file or flag and the mend."""


def cli(main):
    """Run a script's main(): bad input ends in one line on stderr and exit code 1, no traceback."""
    if sys.stdout is None:  # and the next file to be opened would take its number
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: stdout is closed: send it to a file, or to /dev/null")
    sys.stdout.reconfigure(errors="backslashreplace")  # a character that the terminal lacks must not end a run
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `python sample.py | head`: the reader has gone, nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except torch.OutOfMemoryError as e:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: out of memory: take fewer rows at once (--micro_batch, "
                 f"--batch_size), bfloat16 or fewer recurrences ({str(e).splitlines()[0]:.150})")
    except (InputError, OSError) as e:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: {e}".replace("\n", "\\n"))
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass
class Config:
    """Everything that decides the forward pass; the content of a checkpoint's config.json."""
    vocab_size: int
    n_embd: int                       # C, the width
    n_head: int
    n_kv_head: int                    # query head i reads kv head i // (n_head / n_kv_head)
    n_ffn: int
    n_prelude: int
    n_core: int                       # 0: an ordinary feed-forward model
    n_coda: int
    head_dim: int = 0                 # 0: n_embd / n_head
    norm: str = "pre"                 # "pre": Llama. "post": OLMo-2, with norms on q and k. "sandwich": Huginn
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # the "llama3" scaling of config.json, or None
    context: int = 2048               # the longest sequence the model is meant for
    tie_embeddings: bool = False
    adapter: str = "linear"           # "linear": 2C -> C on [state, e]. "add": state + e
    state_std: float = STATE_STD
    start: str = "noise"              # s_0: "noise" of state_std (the paper), "zero", or "prelude": its output
    embed_scale: float = 1.0          # factor on embeddings and initial state (Huginn: sqrt(C))
    mean_recurrence: int = 32         # default r
    backprop_depth: int = 8           # k: gradients flow through the last k recurrences
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self):
        for key in ("n_prelude", "n_core", "n_coda", "head_dim", "vocab_size", "n_embd", "n_head", "n_kv_head", "n_ffn",
                    "context", "mean_recurrence", "backprop_depth"):
            value, low = getattr(self, key), key not in ("n_prelude", "n_core", "n_coda", "head_dim")
            if type(value) is not int or value < low:
                raise InputError(f"config.json: {key}={value!r} is not an integer of at least {int(low)}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        scaling = dict(self.rope_scaling or {})
        kind = scaling.get("rope_type", scaling.get("type", "llama3"))
        for ok, what in ((self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim={self.head_dim} is not even"),
                         (self.norm in ("pre", "post", "sandwich"), f"norm={self.norm!r} is not pre, post or sandwich"),
                         (self.adapter in ("linear", "add"), f"adapter={self.adapter!r} is not linear or add"),
                         (self.start in STARTS, f"start={self.start!r} is not one of {', '.join(STARTS)}"),
                         (self.n_head % self.n_kv_head == 0, f"n_head={self.n_head} is not a multiple of "
                                                             f"n_kv_head={self.n_kv_head}"),
                         (kind == "llama3", f"rope_scaling of type {kind!r} is not supported, only llama3"),
                         (not scaling or LLAMA3_ROPE <= scaling.keys(), f"rope_scaling lacks one of {LLAMA3_ROPE}")):
            if not ok:
                raise InputError(f"config.json: {what}")


class RMSNorm(nn.Module):
    """Normalise in float32, cast back, then scale: the order matters in bf16 (as in Llama)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


class Linear(nn.Linear):
    """
    x W^T, without a bias. Compiled, on a CPU and for few rows: as sums that read W once, faster than the libraries' products
    ("of limit" in bench.py decode).
    """

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x):
        rows = x.numel() // x.shape[-1]
        if rows > FEW_ROWS or x.device.type != "cpu" or not torch.compiler.is_compiling() or torch.is_grad_enabled():
            return super().forward(x)
        y = torch.stack([(self.weight.float() * row.float()).sum(-1) for row in x.view(rows, -1)])
        return y.type_as(x).view(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """A Linear with its weights rounded to 8 bits, a scale for each output; inputs in bfloat16 only."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
        self.lack = -weight.shape[1] % 16  # torch's kernel reads beyond rows that are no multiple of 16
        self.register_buffer("weight", F.pad((weight / scale[:, None]).round().to(torch.int8), (0, self.lack)))
        self.register_buffer("scale", scale.bfloat16())

    def forward(self, x):
        y = torch._weight_int8pack_mm(F.pad(x.flatten(0, -2), (0, self.lack)), self.weight, self.scale)
        return y.view(*x.shape[:-1], -1)


def rotate(x, rope):
    """Rotary embedding in Hugging Face's convention: the two halves of a head are the pairs."""
    cos, sin = rope[0].type_as(x), rope[1].type_as(x)  # (T, D/2), or (B, 1, T, D/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        self.split = (q, kv, kv)
        self.qkv = Linear(c.n_embd, sum(self.split))
        self.proj = Linear(q, c.n_embd)
        self.qk_norm = c.norm == "post"
        if self.qk_norm:  # OLMo-2 normalises over all heads together, before the split
            self.q_norm, self.k_norm = RMSNorm(q, c.norm_eps), RMSNorm(kv, c.norm_eps)
        self.has_bias = c.norm == "sandwich"
        if self.has_bias:  # Huginn adds one to q and k; it has as many heads for either
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, c.n_head, c.head_dim))

    def forward(self, x, rope, mask=None, kv=None, at=None):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(B, T, -1, self.head_dim) for x in (q, k, v))
        if self.has_bias:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        q, k, v = rotate(q.transpose(1, 2), rope), rotate(k.transpose(1, 2), rope), v.transpose(1, 2)
        if kv is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                               enable_gqa=self.n_head != self.n_kv_head)
        else:  # the query heads of one kv head stand as rows of one: the cache is read as it lies, not once per head
            k, v = (cached.transpose(1, 2) for cached in write_read(kv, k.transpose(1, 2), v.transpose(1, 2), *at))
            y = F.scaled_dot_product_attention(q.reshape(B, self.n_kv_head, -1, self.head_dim), k, v, attn_mask=mask)
            y = y.view(B, self.n_head, T, self.head_dim)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


def write_read(kv, k, v, write, read):
    """
    Put k and v (B, T, n_kv_head, D) of new tokens into their cached tensors and return what these tokens attend to,
    both (B, W, n_kv_head, D): the tensors themselves, or a copy of the part that the indices `read` choose.
    """
    keys, values = kv
    keys[write], values[write] = k, v
    return (keys, values) if read is None else (keys[read], values[read])


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = Linear(c.n_embd, 2 * c.n_ffn)  # gate and up, stacked
        self.proj = Linear(c.n_ffn, c.n_embd)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    """Llama: x + f(norm(x)). OLMo-2: x + norm(f(x)). Huginn: norm(x + f(norm(x))). (f: attention, then MLP)"""

    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(c.n_embd, c.norm_eps), RMSNorm(c.n_embd, c.norm_eps)
        self.attn, self.mlp, self.norm = Attention(c), MLP(c), c.norm
        if c.norm == "sandwich":
            self.norm_3, self.norm_4 = RMSNorm(c.n_embd, c.norm_eps), RMSNorm(c.n_embd, c.norm_eps)

    def forward(self, x, rope, *cached):
        if self.norm == "pre":
            x = x + self.attn(self.norm_1(x), rope, *cached)
            return x + self.mlp(self.norm_2(x))
        if self.norm == "post":
            x = x + self.norm_1(self.attn(x, rope, *cached))
            return x + self.norm_2(self.mlp(x))
        x = self.norm_2(x + self.attn(self.norm_1(x), rope, *cached))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


class HeadLoss(torch.autograd.Function):
    """
    Sum of the cross-entropies of softmax(x weight^T): x (N, C), weight (V, C), targets (N,), -100 = no loss ->
    float32 scalar. Logits exist for a few rows at a time: their gradients are made on the way forward.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        loss, (want_x, want_w, _) = x.new_zeros((), dtype=torch.float32), ctx.needs_input_grad
        dx = torch.empty_like(x) if want_x else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if want_w else None
        rows = max(1, LOGITS_AT_ONCE // len(weight))
        for i in range(0, len(x), rows):
            part, keep = x[i:i + rows], targets[i:i + rows] != -100
            logits, target = (part @ weight.mT).float(), targets[i:i + rows].clamp(min=0)[:, None]
            total = logits.logsumexp(-1, keepdim=True)
            loss += ((total - logits.gather(1, target))[:, 0] * keep).sum()
            if want_x or want_w:
                d = logits.sub_(total).exp_().scatter_add_(1, target, -torch.ones_like(total))
                d = d.mul_(keep[:, None]).to(x.dtype)
            if want_x:
                dx[i:i + rows] = d @ weight
            if want_w:
                dw += d.mT @ part
        ctx.save_for_backward(dx, dw)
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    def backward(ctx, scale):  # in float32: it would be off by up to 0.4 % as a whole
        return *(None if d is None else d.float().mul_(scale).to(ctx.dtype) for d in ctx.saved_tensors), None


class RecurrentLM(nn.Module):
    """
    See the top of this file. Attributes: config; folder, where it was loaded from, or None; compiled; recompute: True
    keeps no activations inside the recurrences and computes them once more in the backward pass.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.folder, self.recompute, self.compiled, self._rope = config, None, False, False, None
        c = config
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.prelude = nn.ModuleList(Block(c) for _ in range(c.n_prelude))
        if c.n_core and c.adapter == "linear":
            self.adapter = Linear(2 * c.n_embd, c.n_embd)
        self.core = nn.ModuleList(Block(c) for _ in range(c.n_core))
        self.coda = nn.ModuleList(Block(c) for _ in range(c.n_coda))
        self.norm_f = RMSNorm(c.n_embd, c.norm_eps)
        self.head = Linear(c.n_embd, c.vocab_size)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight

    def embed_idx(self, idx):
        # Not a part of run_prelude: the compiled backward of an embedding adds up in any order (on a CPU,
        # by atomic adds), and a resumed run would not end with the same bits.
        return self.embed(idx) * self.config.embed_scale

    # mask (B, 1, rows, W), kv (the cached tensors of each layer) and at (indices) belong to decoding: see sample.py.

    def run_prelude(self, x, rope, mask=None, kv=None, at=None):
        """Embeddings (B, T, C) -> e (B, T, C)"""
        for block, cached in zip(self.prelude, kv or repeat(None)):
            x = block(x, rope, mask, cached, at)
        return x

    def run_core(self, s, e, rope, mask=None, kv=None, at=None):
        """One recurrence: state s and prelude output e, both (B, T, C) -> the next state."""
        x = self.adapter(torch.cat((s, e), dim=-1)) if self.config.adapter == "linear" else s + e
        for block, cached in zip(self.core, kv or repeat(None)):
            x = block(x, rope, mask, cached, at)
        return x

    def run_coda(self, x, rope, mask=None, kv=None, at=None):
        """Last state (B, T, C) -> what the head reads (B, T, C)"""
        if self.config.norm == "sandwich":
            x = self.norm_f(x)  # Huginn's final norm stands before its coda, too
        for block, cached in zip(self.coda, kv or repeat(None)):
            x = block(x, rope, mask, cached, at)
        return self.norm_f(x)

    def compile_parts(self, dynamic=None):
        """
        torch.compile the three parts, in place: the core once for all recurrences and every (n, k). dynamic: True for
        decoding, where lengths differ from call to call.
        """
        self.compiled = True
        torch._dynamo.config.recompile_limit = 32  # one row, few rows, many; views of the cache or parts of it; drafts
        for part in ("run_prelude", "run_core", "run_coda"):
            setattr(self, part, torch.compile(getattr(self, part), dynamic=dynamic))

    def quantise_core(self):
        """Weights of the recurrent block in int8, for decoding in bfloat16: half the memory to read a recurrence."""
        if self.embed.weight.dtype != torch.bfloat16 or not self.config.n_core:
            raise InputError("--int8: needs --dtype bfloat16 and a recurrent model")
        for module in [m for block in self.core for m in (block.attn, block.mlp)] + [self]:
            for name, child in list(module.named_children()):
                if isinstance(child, Linear) and name != "head":
                    setattr(module, name, Int8Linear(child))

    def forward(self, idx, targets=None, steps=None, state=None):
        """
        idx (B, T) int64; targets (B, T) int64, already shifted, -100 = no loss; state: see first_state().
        steps: (n, k) recurrences without, then with gradient; or r, of which the
        last config.backprop_depth carry gradient (default r: config.mean_recurrence). The value does
        not depend on the split. A feed-forward model ignores it; a negative number is a ValueError.
        Returns logits (B, T, V) float32 and None; with targets, None and the mean cross-entropy (0 if none counts).
        """
        n, k = self.split_steps(steps)
        rope = self.rope(idx.shape[1])
        x = self.run_prelude(self.embed_idx(idx), rope)
        if self.config.n_core:
            e, x = x, self.first_state(x, state)
            with torch.no_grad():
                for _ in range(n):
                    x = self.run_core(x, e, rope)
            for _ in range(k):
                x = checkpoint(self.run_core, x, e, rope, use_reentrant=False, preserve_rng_state=False) \
                    if self.recompute else self.run_core(x, e, rope)
        out = self.finish(x, rope, targets)
        return (out, None) if targets is None else (None, out)

    def finish(self, x, rope, targets=None):
        """Last state (B, T, C) -> logits (B, T, V) float32, or the mean cross-entropy of targets."""
        x = self.run_coda(x, rope)
        if targets is None:
            return self.head(x).float()
        weight = self.head.weight if torch.is_grad_enabled() else self.head.weight.detach()  # else its gradient is made
        loss = HeadLoss.apply(x.flatten(0, 1), weight, targets.flatten())
        return loss / (targets != -100).sum().clamp(min=1)

    @torch.no_grad()
    def trajectory(self, idx, steps, targets=None, state=None, finish=None):
        """
        Every r of `steps`, such as [1, 2, 4, 8], from one pass of the largest; the rest as in forward(). Returns
        {r: logits}, or {r: loss} with targets: what forward() gives for each r alone; or what finish() makes of a state.
        """
        rope, out = self.rope(idx.shape[1]), {}
        x = e = self.run_prelude(self.embed_idx(idx), rope)
        if self.config.n_core:
            x = self.first_state(e, state)
        for r in range(max(steps) + 1):
            x = self.run_core(x, e, rope) if r and self.config.n_core else x
            if r in steps:
                out[r] = (finish or self.finish)(x, rope, targets)
        return out

    def split_steps(self, steps=None):
        """r or (n, k) or None -> (n, k); see forward()."""
        steps = self.config.mean_recurrence if steps is None else steps
        k = min(steps, self.config.backprop_depth) if isinstance(steps, int) else steps[1]
        n = steps - k if isinstance(steps, int) else steps[0]
        if n < 0 or k < 0:
            raise ValueError(f"steps={steps}: the number of recurrences cannot be negative")
        return n, k

    def first_state(self, e, state=None):
        """s_0 (B, T, C) for the prelude's output e: where config.start is "noise" it is state, or drawn anew."""
        if self.config.start != "noise":
            return torch.zeros_like(e) if self.config.start == "zero" else e.clone()  # not two names for one input
        return (self.initial_state(*e.shape[:2]) if state is None else state).type_as(e)

    def initial_state(self, B, T, seeds=None):
        """
        s_0 (B, T, C) float32: normal, cut at 3 std, by the inverse of its distribution function.
        seeds: B integers, each of which decides its row; default: torch's global generator.
        """
        std = self.config.state_std * self.config.embed_scale
        s = torch.empty(B, T, self.config.n_embd, device=self.embed.weight.device)
        generator = torch.Generator(s.device)
        if seeds is None:
            s.uniform_(-1, 1)
        for row, seed in zip(s, seeds or ()):
            row.uniform_(-1, 1, generator=generator.manual_seed(seed))
        return torch.erfinv(s.mul_(math.erf(3 / math.sqrt(2)))).mul_(math.sqrt(2) * std).clamp_(-3 * std, 3 * std)

    def rope(self, T):
        """cos and sin, each (T, head_dim/2) float32, of positions 0..T-1; the table grows on demand."""
        c, device = self.config, self.embed.weight.device
        if self._rope is None or len(self._rope[0]) < T or self._rope[0].device != device:
            f = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
            if scaling := c.rope_scaling:  # Llama-3.1: long wavelengths are stretched, with a smooth band between
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
                smooth = ((turns - low) / (high - low)).clamp(0, 1)
                f = f * (smooth + (1 - smooth) / scaling["factor"])
            angle = torch.outer(torch.arange(1 << (T - 1).bit_length()).float(), f)
            self._rope = angle.cos().to(device), angle.sin().to(device)
        return self._rope[0][:T], self._rope[1][:T]

    def num_params(self):
        """
        Parameters by part, as the paper's Tables 6 and 7 count them: embeddings with the head (once
        if tied), prelude, core, coda, body (all layers; feed-forward: and final norm), adapter, norm_f, total.
        """
        count = lambda module: sum(p.numel() for p in module.parameters())
        n = {"embeddings": self.embed.weight.numel() * (1 if self.config.tie_embeddings else 2),
             "prelude": count(self.prelude), "core": count(self.core), "coda": count(self.coda),
             "adapter": count(self.adapter) if hasattr(self, "adapter") else 0,
             "norm_f": count(self.norm_f), "total": count(self)}
        return n | {"body": n["prelude"] + n["core"] + n["coda"] + (0 if self.config.n_core else n["norm_f"])}

    def flops_per_token(self, steps=None):
        """
        Training FLOPs per token by the paper's rule: 6 per parameter that carries gradient (N1) and 2 per
        one that does not (N2), of the layers alone; steps as in forward(). Feed-forward: and the final norm.
        """
        n = self.num_params()
        if not self.config.n_core:
            return 6 * n["body"]
        without, with_grad = self.split_steps(steps)
        return 6 * (n["prelude"] + n["coda"] + with_grad * n["core"]) + 2 * without * n["core"]

    def init_weights(self, seed):
        """Takase/Huginn initialisation, for baselines from scratch (the paper's Figure 2)."""
        c = self.config
        depth = c.n_prelude + c.n_coda + c.n_core * c.mean_recurrence  # effective depth
        generator = torch.Generator(self.embed.weight.device).manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = math.sqrt(2 * depth) if name.endswith("proj.weight") else 1.0
                nn.init.normal_(p, 0.0, math.sqrt(2 / (5 * c.n_embd)) / shrink, generator)

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """
        Read a checkpoint folder (config.json, model.safetensors), or the newest step_* of a run's
        folder. dtype: cast to it; default: as stored.
        Raises InputError naming the file that is missing, truncated or of another model.
        """
        folder = find_checkpoint(folder)
        model = cls.empty(load_config(folder))
        model.fill(read_tensors(os.path.join(folder, "model.safetensors"), model.state_shapes(), device, dtype))
        model.folder = folder
        return model

    @classmethod
    def empty(cls, config):
        """The model without storage (meta device): for counting, or to be filled."""
        with torch.device("meta"):
            return cls(config)

    def state_shapes(self):
        """Name -> shape of every tensor that a checkpoint of this model holds on disk."""
        shapes = {name: tuple(t.shape) for name, t in self.state_dict().items()}
        if self.config.tie_embeddings:
            del shapes["head.weight"]
        return shapes

    def fill(self, tensors):
        """Take {name: tensor}, all those of state_shapes(), as the weights, without a copy."""
        tied = {"head.weight": tensors["embed.weight"]} if self.config.tie_embeddings else {}
        self.load_state_dict(tensors | tied, assign=True)
        if tied:
            self.head.weight = self.embed.weight

    def save(self, folder, tokenizer=None, extra=None):
        """
        Write a checkpoint folder: see save_folder(). tokenizer: default: the folder that this model
        was loaded from.
        """
        tensors = self.state_dict()
        save_folder(folder, {"model_type": "nanoloop"} | asdict(self.config),
                    {name: tensors[name].contiguous() for name in self.state_shapes()}, tokenizer or self.folder, extra)


# -------------------------------------------------------------------- checkpoint folders

def save_folder(folder, config, tensors, tokenizer=None, extra=None):
    """
    Write config.json from a dict, model.safetensors from {name: tensor}, and the tokenizer's files, copied
    from the folder `tokenizer`; extra: {file name: function(path)} adds files. All or nothing.
    """
    with whole_folder(folder) as new:
        save_file(tensors, os.path.join(new, "model.safetensors"), {"format": "pt"})
        write_json(os.path.join(new, "config.json"), config)
        for file in TOKENIZER_FILES + CARRIED_FILES if tokenizer else ():
            if os.path.exists(os.path.join(tokenizer, file)):
                shutil.copyfile(os.path.join(tokenizer, file), os.path.join(new, file))
        for file, write in (extra or {}).items():
            write(os.path.join(new, file))


def flush(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@contextlib.contextmanager
def whole_folder(folder):
    """All or nothing: yields a new folder beside; at the end it is flushed to disk and takes the name."""
    folder = os.path.normpath(folder)
    new, old = f"{folder}.tmp-{os.getpid()}", f"{folder}.old-{os.getpid()}"
    for left in glob.glob(glob.escape(folder) + ".old-*") + glob.glob(glob.escape(folder) + ".tmp-*"):
        try:  # what a process that was killed left here
            os.kill(int(left.rpartition("-")[2]), 0)
        except ProcessLookupError:
            if ".old-" in left and not os.path.exists(folder):
                os.rename(left, folder)
            shutil.rmtree(left, ignore_errors=True)
        except (ValueError, OSError):  # somebody else's folder, or process
            continue
    try:
        os.makedirs(new)
        yield new
        for file in [*os.listdir(new), "."]:  # on the disk before the name that promises it
            flush(os.path.join(new, file))
        if os.path.exists(folder):
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except OSError:
            if os.path.exists(old):
                os.rename(old, folder)
            raise
        flush(os.path.dirname(folder) or ".")
    except (SafetensorError, OSError) as e:  # the former is how safetensors reports a full disk
        raise InputError(f"{folder}: cannot be written ({e}); what was there before is untouched")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder):
    """A checkpoint folder as it is, or the newest complete step_* checkpoint of a run's folder."""
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    steps = sorted((d for d in os.listdir(folder) if re.fullmatch(r"step_\d+", d)), key=lambda d: int(d[5:]))
    if steps or os.path.exists(os.path.join(folder, "config.json")):
        return os.path.join(folder, steps[-1]) if steps else folder
    raise InputError(f"{folder}: holds neither config.json nor a step_* checkpoint")


def load_config(folder):
    """Config of a nanoloop checkpoint folder; InputError for a foreign or broken config.json."""
    path = os.path.join(folder, "config.json")
    raw = read_json(path)
    kind = raw.pop("model_type", None)
    if kind != "nanoloop":
        raise InputError(f"{path}: model_type is {kind!r}, not a nanoloop checkpoint: convert it "
                         f"first with `python surgery.py {folder} OUT` (--feed-forward for all layers)")
    try:
        return Config(**raw)
    except (TypeError, ValueError, InputError) as e:  # says which key is missing, unknown or wrong
        raise InputError(f"{path}: {e}")


@contextlib.contextmanager
def open_safetensors(path, device="cpu"):
    """safe_open (lazy) with one clear line for a missing, truncated or damaged file."""
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file: fetch it, or name another folder")
    try:
        with safe_open(path, "pt", device=str(device)) as f:
            yield f
    except SafetensorError as e:
        raise InputError(f"{path}: is truncated or damaged ({e}): fetch or write it again")


def check_tensors(f, path, shapes):
    """Compare an open safetensors file's header with {name: shape}: InputError, or {name: kind, as in FLOATS}."""
    missing, kinds = sorted(shapes.keys() - set(f.keys())), {}
    if missing:
        raise InputError(f"{path}: {len(missing)} tensors are missing, such as {missing[0]}: incomplete, or of "
                         "another model than config.json says")
    for name, shape in shapes.items():
        has, kinds[name] = tuple(f.get_slice(name).get_shape()), f.get_slice(name).get_dtype()
        if has != tuple(shape) or kinds[name] not in FLOATS:
            raise InputError(f"{path}: {name} is {kinds[name]} of shape {has}; config.json asks for {', '.join(FLOATS)} "
                             f"of shape {tuple(shape)}")
    return kinds


def read_tensors(path, shapes, device="cpu", dtype=None):
    """The tensors of `shapes` ({name: shape}), and nothing else, of one safetensors file. InputError."""
    with open_safetensors(path, device) as f:
        kinds = check_tensors(f, path, shapes)
        return {name: f.get_tensor(name).to(dtype or FLOATS[kinds[name]]) for name in shapes}


def read_json(path):
    """A JSON object from a file; InputError names the file where it is missing or broken."""
    try:
        with open(path, encoding="utf-8") as f:
            return dict(json.load(f))
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise InputError(f"{path}: cannot be read as a JSON object ({e})")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def describe(model):
    """(device, dtype) of a model in words, to stand beside a figure."""
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return name, str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def writing(path):
    """A full disk ends in one line that names the file."""
    try:
        yield
    except OSError as e:
        raise InputError(f"{path}: cannot be written ({e}): make room, and start the same command again")


def commit():
    """The hash of the checkout that these files stand in; None without git, or where they are no checkout"""
    try:
        return subprocess.run(("git", "rev-parse", "HEAD"), cwd=os.path.dirname(os.path.abspath(__file__)),
                              capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(path, script, model, task, results, seconds, tokens, **more):
    """
    The JSON that every measuring script writes, whole or not at all: results is a list of {"steps": r, "metric": name,
    "value": x, "standard_error": se, "n": count, ...}, tokens what `seconds` were spent on; more: the script's own keys.
    """
    device, dtype = describe(model)
    new = f"{path}.tmp-{os.getpid()}"
    try:
        with writing(path):
            write_json(new, {"script": script, "model": model.folder, "commit": commit(), "config": asdict(model.config),
                             "task": task, "device": device, "dtype": dtype, "seconds": seconds,
                             "tokens_per_second": tokens / seconds, **more, "results": results})
            os.replace(new, path)
    finally:
        if os.path.exists(new):
            os.remove(new)
