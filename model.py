"""
The whole model: a Llama (or OLMo-2) whose middle layers are a recurrent block.

    e   = prelude(embed(idx))                     a few ordinary layers, once
    s   = s_0                                     small noise
    s   = core(adapter([s, e]))                   r times: the "thinking", same weights each time
    out = head(norm_f(coda(s)))                   a few ordinary layers, once

With n_core = 0 it is an ordinary feed-forward Llama: the parent, and every baseline. Three things
are unusual if you know nanoGPT. The depth r is an argument of forward(). Gradients flow through the
last k recurrences only. A KV cache has one slot for every (recurrence, layer) pair.

    model = RecurrentLM.load("out/tiny/task")
    logits, _ = model(idx, steps=32)              # idx (B, T) int64 -> logits (B, T, V) float32

In bfloat16 the weights, the products and the sums of a weight's gradients over the recurrences are
bfloat16; the residual stream and the state are float32 throughout. Under the paper's autocast it is
the other way round: float32 weights and sums, and in its Llama a stream that is bfloat16 from the
adapter on. Our gradients are no further from float32's (runs/README.md).

Paper: arXiv 2511.07384, section 3.
"""
import functools
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

STATE_STD = 0.008703882797784892  # sqrt(2 / (5 * 5280)): Huginn's, kept at any width
IGNORE = -100                     # the target that carries no loss, as torch has it
LOGITS_AT_ONCE = 1 << 26          # 256 MB in float32


class UserError(Exception):
    """What its user got wrong, in one line: scripts print it, without a traceback."""


@dataclass
class Config:
    """Everything that decides the forward pass; the content of a checkpoint's config.json."""
    vocab_size: int
    n_embd: int                       # C, the width
    n_head: int
    n_kv_head: int                    # query head i reads kv head i // (n_head / n_kv_head)
    n_ffn: int
    n_prelude: int
    n_core: int = 0                   # 0: an ordinary feed-forward model
    n_coda: int = 0
    head_dim: int = 0                 # 0: n_embd / n_head
    norm: str = "pre"                 # pre: Llama; post: OLMo-2, norms on q and k; sandwich: Huginn
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # the "llama3" scaling of config.json, or None
    context: int = 2048               # the longest sequence the model is meant for
    tie_embeddings: bool = False
    adapter: str = "linear"           # linear: 2C -> C on [state, e]; add: state + e
    state_std: float = STATE_STD
    embed_scale: float = 1.0          # multiplies the embeddings
    mean_recurrence: int = 32         # default r
    backprop_depth: int = 8           # k: gradients flow through the last k recurrences
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self):
        self.head_dim = self.head_dim or self.n_embd // self.n_head


# -------------------------------------------------------------------------------- the noise

def mix(x):
    """
    A hash of 32-bit numbers (splitmix32) for an int or a tensor of int64, where no product
    overflows: the same bits on every device, compiled or not.
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


def normal(seed, row, position, C):
    """
    Normal numbers (..., C) float32, cut at 3 std, a function of (seed, row, position, channel)
    alone. row and position: tensors of int64 (...).
    """
    key = mix(mix(mix(seed) + row) + position)
    bits = mix(key[..., None] + torch.arange(C, device=key.device))
    edge = math.erf(3 / math.sqrt(2))  # within 3 std
    uniform = ((bits >> 8) - 2**23).float() * (edge / 2**23)  # 24 bits, exact in float32
    return uniform.erfinv_().mul_(math.sqrt(2))


# ------------------------------------------------------------------------------- the layers

class RMSNorm(nn.RMSNorm):
    """Normalise in float32, cast to the weights' dtype, then scale: the order that Llama has."""

    def forward(self, x):
        x = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return x.to(self.weight.dtype) * self.weight


class Linear(nn.Linear):
    """x W^T without a bias, in the dtype of W."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def rotate(x, rope):
    """Rotary embedding as Hugging Face has it: the two halves of a head (B, H, T, D) are pairs."""
    cos, sin = (t.type_as(x) for t in rope)  # (T, D/2), or (B, 1, T, D/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.n_kv_head = c.n_kv_head
        self.head_dim = c.head_dim
        q = c.n_head * c.head_dim
        kv = c.n_kv_head * c.head_dim
        self.split = q, kv, kv
        self.qkv = Linear(c.n_embd, q + 2 * kv)
        self.proj = Linear(q, c.n_embd)
        self.q_norm = self.k_norm = nn.Identity()
        if c.norm == "post":  # OLMo-2 normalises over all heads together, before the split
            self.q_norm = RMSNorm(q, c.norm_eps)
            self.k_norm = RMSNorm(kv, c.norm_eps)
        self.qk_bias = None
        if c.norm == "sandwich":  # Huginn adds one to q and k, and has as many heads for either
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, c.n_head, c.head_dim))

    def forward(self, x, rope, mask=None, cache=None):
        """
        x (B, T, C); rope: see rotate(); mask: what SDPA takes, by default causal. cache: has
        update(k, v), which stores the new keys and values and returns all to attend to, as
        (B, n_kv_head, columns, D). Then the mask has a row for each query head of a group.
        """
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is None:
            if q.is_cuda and (mask is not None or q.dtype == torch.float32):
                # Flash attention takes neither. The kernel that does, and stores no scores either,
                # wants a head of k and v for each of q.
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None,
                                               enable_gqa=q.shape[1] != k.shape[1])
        else:
            k, v = cache.update(k, v)
            # Query heads that share a kv head become rows of one, so the cache is read once.
            q = q.reshape(B, self.n_kv_head, -1, self.head_dim)
            y = F.scaled_dot_product_attention(q, k, v, mask).view(B, self.n_head, T, -1)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = Linear(c.n_embd, 2 * c.n_ffn)  # gate and up, stacked
        self.proj = Linear(c.n_ffn, c.n_embd)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    """
    Llama: x + f(norm(x)). OLMo-2: x + norm(f(x)). Huginn: norm(x + f(norm(x))).
    f is attention, then the MLP.
    """

    def __init__(self, c):
        super().__init__()
        self.norm = c.norm
        self.attn = Attention(c)
        self.mlp = MLP(c)
        for i in range(1, 5 if c.norm == "sandwich" else 3):
            setattr(self, f"norm_{i}", RMSNorm(c.n_embd, c.norm_eps))

    def forward(self, x, rope, mask=None, cache=None):
        if self.norm == "pre":
            x = x + self.attn(self.norm_1(x), rope, mask, cache)
            return x + self.mlp(self.norm_2(x))
        if self.norm == "post":
            x = x + self.norm_1(self.attn(x, rope, mask, cache))
            return x + self.norm_2(self.mlp(x))
        x = self.norm_2(x + self.attn(self.norm_1(x), rope, mask, cache))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


def run_blocks(blocks, x, rope, mask=None, caches=None):
    """x (B, T, C) through a list of blocks. caches: one for each block, or None."""
    for i, block in enumerate(blocks):
        x = block(x, rope, mask, caches and caches[i])
    return x


# -------------------------------------------------------------------------------- the model

class RecurrentLM(nn.Module):
    """
    See the top of this file. Attributes: config; folder, where it was loaded from, or None;
    recompute, which trades time for memory: activations inside a recurrence are not kept for the
    backward pass but computed again; rest, the weight in the gradient of how far the last
    recurrence still moves the state (2608.18222, but relative to the state's size).
    """

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.folder = None
        self.compiled = False
        self.recompute = False
        self.rest = 0.0
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

    # The parts. mask and caches are for decoding (sample.py): a cache for each block, or None.

    def embed_idx(self, idx):
        """Token ids (B, T) -> (B, T, C) float32."""
        # Not compiled: on a CPU the compiled backward of an embedding adds up by atomic adds, in
        # any order, and a resumed run would not end with the same bits.
        return self.embed(idx).float() * self.config.embed_scale

    def run_prelude(self, x, rope, mask=None, caches=None):
        """Embeddings (B, T, C) -> e (B, T, C)."""
        return run_blocks(self.prelude, x, rope, mask, caches)

    def run_core(self, s, e, rope, mask=None, caches=None):
        """One recurrence: state s and prelude output e, both (B, T, C) -> the next state."""
        if self.config.adapter == "add":
            x = s + e
        else:
            x = self.adapter(torch.cat((s, e), -1)).type_as(e)
        return run_blocks(self.core, x, rope, mask, caches)

    def run_coda(self, x, rope, mask=None, caches=None):
        """Last state (B, T, C) -> what the head reads (B, T, C)."""
        if self.config.norm == "sandwich":
            x = self.norm_f(x)  # Huginn's final norm stands before its coda, too
        return self.norm_f(run_blocks(self.coda, x, rope, mask, caches))

    def recur(self, s, e, rope, count, mask=None, caches=None):
        """
        The loop: `count` recurrences of state s. A feed-forward model returns s as it is.
        caches: those of the core's blocks for each recurrence, or None.
        """
        for i in range(count if self.core else 0):
            if self.recompute and torch.is_grad_enabled():
                s = checkpoint(self.run_core, s, e, rope, mask,
                               use_reentrant=False, preserve_rng_state=False)
            else:
                s = self.run_core(s, e, rope, mask, caches and caches[i])
        return s

    def encode(self, idx, state, rope, mask=None, caches=None):
        """Ids (B, T) -> prelude output e and s_0: the given state, or a new draw."""
        e = self.run_prelude(self.embed_idx(idx), rope, mask, caches)
        if not self.core:
            return e, e
        if state is None:
            state = self.initial_state(*idx.shape)
        return e, state.type_as(e)

    def forward(self, idx, targets=None, steps=None, state=None):
        """
        idx (B, T) int64. targets (B, T) int64, already shifted, -100 where there is no loss.
        steps: r, of which the last config.backprop_depth recurrences carry gradient (default r:
        config.mean_recurrence), or a tuple (n, k), n recurrences without and k with gradient. The
        value does not depend on the split. A feed-forward model ignores it.
        state: s_0 (B, T, C), by default drawn anew.

        Returns (logits (B, T, V) float32, None), or with targets (None, mean cross-entropy).
        """
        n, k = self.split_steps(steps)
        rope = self.rope(idx.shape[1])
        e, s = self.encode(idx, state, rope)
        with torch.no_grad():
            s = self.recur(s, e, rope, n)
        s = self.recur(s, e, rope, k - 1)  # the last one apart, for `rest`
        before, s = s, self.recur(s, e, rope, min(k, 1))
        out = self.finish(s, targets, rope)
        if self.rest and targets is not None:
            moved = (s - before).square().mean()
            rest = self.rest * moved / s.detach().square().mean()
            out = out + (rest - rest.detach())  # a gradient: the value stays the cross-entropy
        return (out, None) if targets is None else (None, out)

    @torch.no_grad()
    def trajectory(self, idx, steps, state=None, rope=None, mask=None):
        """
        Yields (r, state (B, T, C)) for every r of `steps`, such as [1, 2, 4, 8], in rising order,
        all from one pass. finish(state) gives what forward() gives at that r alone. rope and mask
        are for rows whose tokens do not simply follow one another (eval_lm.py).
        """
        rope = rope or self.rope(idx.shape[1])
        e, s = self.encode(idx, state, rope, mask)
        done = 0
        for r in sorted(steps):
            s = self.recur(s, e, rope, r - done, mask)
            yield r, s
            done = r

    def finish(self, s, targets=None, rope=None):
        """Last state (B, T, C) -> logits (B, T, V) float32, or the mean cross-entropy."""
        x = self.run_coda(s, rope or self.rope(s.shape[1]))
        if targets is None:
            return self.head(x).float()
        losses, _ = self.token_losses(x.flatten(0, 1), targets.flatten())
        return losses.sum() / (targets != IGNORE).sum().clamp(min=1)

    def token_losses(self, x, targets):
        """
        x (N, C) of run_coda(), targets (N,) -> the cross-entropy of each target (N,) float32, 0 for
        -100, and whether it is the most likely token (N,). The logits of a few rows exist at a
        time. The backward pass computes them again.
        """
        def losses(x, targets):
            logits = self.head(x).float()
            loss = F.cross_entropy(logits, targets, reduction="none")
            return loss, logits.argmax(-1) == targets

        rows = LOGITS_AT_ONCE // self.config.vocab_size
        parts = [checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False)
                 for part in zip(x.split(rows), targets.split(rows))]
        return map(torch.cat, zip(*parts))

    def split_steps(self, steps=None):
        """r or (n, k) or None -> (n, k); see forward()."""
        if steps is None:
            steps = self.config.mean_recurrence
        if isinstance(steps, int):
            k = min(steps, self.config.backprop_depth)
            return steps - k, k
        return steps

    def initial_state(self, B, T, seed=None, row=0):
        """
        s_0 (B, T, C) float32: a normal distribution, cut at 3 std, drawn anew without a seed. With
        one it is a function of (seed, number of the row, position, channel), where the rows have
        the numbers row, row + 1, ... Decoding takes row 0 for every text.
        """
        c, device = self.config, self.embed.weight.device
        if seed is None:
            seed = torch.randint(2**31, ()).item()
        rows = torch.arange(row, row + B, device=device)
        position = torch.arange(T, device=device)
        std = c.state_std
        if c.norm == "sandwich":
            std *= c.embed_scale  # Huginn scales its state, too
        return std * normal(seed, rows[:, None], position, c.n_embd)

    def rope(self, T):
        """cos and sin, each (T, head_dim/2) float32, of positions 0..T-1."""
        c, device = self.config, self.embed.weight.device
        pairs = torch.arange(0, c.head_dim, 2, device=device)
        f = 1.0 / c.rope_theta ** (pairs / c.head_dim)
        if c.rope_scaling:
            # Llama-3.1 stretches long wavelengths, with a smooth band between long and short.
            scaling = c.rope_scaling
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            f = f * (smooth + (1 - smooth) / scaling["factor"])
        angle = torch.arange(T, device=device)[:, None] * f
        return angle.cos(), angle.sin()

    def compile_parts(self, dynamic=None):
        """
        torch.compile the three parts, in place. The core is compiled once for all recurrences.
        dynamic: True for decoding, where lengths differ from call to call. UserError where
        that does not work.
        """
        try:
            torch.compile(torch.sin)(self.norm_f.weight.data)
        except RuntimeError as e:
            raise UserError(f"torch.compile needs g++ on a CPU and Triton on a GPU ({e!r:.200})")
        self.compiled = True
        torch._dynamo.config.recompile_limit = 32  # one row, few rows, many; views of the cache
        for part in ("run_prelude", "run_core", "run_coda"):
            setattr(self, part, torch.compile(getattr(self, part), dynamic=dynamic))

    # ------------------------------------------------------------------ counting, initialising

    def num_params(self, trained=False):
        """
        Parameters by part, as the paper's Tables 6 and 7 count them. "embeddings" holds the head
        (once if tied); "body" is all layers, for a feed-forward model with the final norm.
        trained: count those that carry gradient.
        """
        n = Counter()
        for name, p in self.named_parameters():  # tied weights come once, as "embed.weight"
            if p.requires_grad or not trained:
                n[name.split(".")[0]] += p.numel()
        n["total"] = n.total()
        n["embeddings"] = n.pop("embed", 0) + n.pop("head", 0)
        n["body"] = n["prelude"] + n["core"] + n["coda"]
        if not self.core:
            n["body"] += n["norm_f"]
        return n

    def flops_per_token(self, steps=None):
        """
        Training FLOPs per token by the paper's rule: 6 per parameter that carries gradient and 2
        per one that does not, of the layers alone (a feed-forward model: and the final norm).
        """
        n, k = self.split_steps(steps)
        size, trained = self.num_params(), self.num_params(trained=True)
        forward = size["body"] + (n + k - 1) * size["core"]  # the body has the core once
        backward = trained["body"] + (k - 1) * trained["core"]
        return 2 * forward + 4 * backward

    @torch.no_grad()
    def init_weights(self, seed):
        """Takase/Huginn initialisation, for baselines from scratch (the paper's Figure 2)."""
        c = self.config
        depth = c.n_prelude + c.n_coda + c.n_core * c.mean_recurrence  # effective depth
        generator = torch.Generator(self.embed.weight.device).manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # norms are 1 already
                std = math.sqrt(2 / (5 * c.n_embd))
                if name.endswith("proj.weight"):
                    std /= math.sqrt(2 * depth)
                p.normal_(0.0, std, generator=generator)

    # --------------------------------------------------------------------------- checkpoints

    @classmethod
    def empty(cls, config):
        """The model without storage (meta device), to be counted or filled."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """
        Read a checkpoint folder, or the newest step_* of a run's folder. dtype: cast to it; by
        default to the one that holds all that is stored. UserError names a file that is missing,
        damaged or of another model.
        """
        folder = find_checkpoint(folder)
        model = cls.empty(load_config(folder))
        path = Path(folder, "model.safetensors")
        try:
            model.fill(load_file(path))
        except (SafetensorError, RuntimeError) as e:
            raise UserError(f"{path}: damaged, or of another model than config.json: {e!r:.300}")
        model.folder = folder
        # A run that trained some of the parameters stored these in float32, the others as they
        # were.
        stored = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()})
        return model.to(device, dtype or stored)

    def fill(self, tensors):
        """Take {name: tensor}, as a checkpoint holds them, as the weights, without a copy."""
        tied = self.config.tie_embeddings
        if tied:
            tensors["head.weight"] = tensors.get("embed.weight")
        self.load_state_dict(tensors, assign=True)
        if tied:
            self.head.weight = self.embed.weight

    def save(self, folder, weights=None):
        """
        Write config.json and model.safetensors. weights: {name: tensor} to write in place of the
        model's own, such as float32 master weights.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = weights or self.state_dict()
        tensors = {name: weights[name] for name, _ in self.named_parameters()}  # tied ones once
        save_file(tensors, folder / "new", {"format": "pt"})
        (folder / "new").rename(folder / "model.safetensors")  # ours may be a view of the old file
        config = {"model_type": "loopgraft", **asdict(self.config)}
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def checkpoints(folder):
    """Paths of the checkpoints step_N in a run's folder, oldest first. Other names do not count."""
    found = [path for path in Path(folder).glob("step_*/") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def find_checkpoint(folder):
    """A checkpoint folder as it is, or the newest step_* checkpoint of a run's folder."""
    folder = str([folder, *checkpoints(folder)][-1])
    if not Path(folder, "config.json").exists():
        raise UserError(f"{folder}: no such folder, or no config.json or step_* in it (config/ has "
                        "the commands that make models)")
    return folder


def load_config(folder):
    """Config of a loopgraft checkpoint; UserError for that of another kind of model."""
    path = Path(folder, "config.json")
    raw = json.loads(path.read_text())
    kind = raw.pop("model_type", None)
    if kind != "loopgraft":
        raise UserError(f"{path}: model_type is {kind!r}, not loopgraft: convert it first with "
                        f"`python surgery.py {folder} OUT` (--feed_forward keeps all layers)")
    return Config(**raw)
