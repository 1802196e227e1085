"""
Decoding: an exact KV cache for recurrent depth, drafts, exits, sampling, and text streamed to the terminal.

    python sample.py --steps 32                    # the newest checkpoint under out/, a prompt of its corpus
    python sample.py --steps 1,4,32                # the same prompt side by side at several depths
    python sample.py --model out/tinyllama --steps 32 --draft_steps 2 --dtype bfloat16 --compile    # fast, and exact
    python sample.py --model out/tinyllama --exit latent --exit_threshold 0.05 --show_steps
    python sample.py --model smcleish/Recurrent-TinyLlama-3T-train-recurrence-4 --interactive
    echo "Once upon a time" | python sample.py --model out/tinyllama --prompt - --samples 3 --temperature 0.8

What is unusual here: every recurrence of every core layer has keys and values of its own, so the cache grows with r:
prelude + r * core + coda slots (--kv last: a few, whatever r is). The recurrences of a token depend on nothing but
earlier tokens, so those of a cheap draft are the first ones of the full answer; and as the weights of all recurrences
are the same, rows of a batch may be at different ones in one pass. And s_0 is noise, so greedy text depends on a seed:
the noise of a position follows from (seed, position) alone, whatever else is in the batch, however long the prompt is
and whichever way the text is decoded. --state zero does without noise.

Text goes to stdout, everything said about it to stderr. eval_gsm8k.py decodes with generate() too.
"""
import argparse
import contextlib
import glob
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F

from data import Tokenizer
from model import InputError, RecurrentLM, cli, describe, find_checkpoint, read_json
from surgery import build, check, open_source

COLUMNS = 64    # the cache is read up to a multiple of so many columns: few shapes to compile or to capture
PREFILL = 512   # prompt tokens of a row at once
RULES = "latent", "kl", "second-order"


@dataclass
class Decoding:
    """
    How to decode; InputError for values that make no sense. What is not exact by nature (exit, kv) is off by default.

    temperature 0: greedy; top_k (0 = off), top_p (1 = off): see distribution(). seed: of the noise and of sampling.
    state: "noise" or "zero", the initial state. kv: "full", a slot of keys and values for every recurrence; "last"
    or N: so many slots a layer, the last of which all later recurrences share (tokens of one part of a prompt, of PREFILL
    tokens, still see one another as without it). exit: "latent", "kl" or "second-order",
    a rule of adaptive() with its exit_threshold; min_steps: no token stops before. draft_steps: recurrences that
    draft draft_len tokens at a time (0 = off), see speculative().
    """
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    state: str = "noise"
    kv: str = "full"
    exit: str | None = None
    exit_threshold: float | None = None
    min_steps: int = 1
    draft_steps: int = 0
    draft_len: int = 12

    def __post_init__(self):
        for ok, what in (
                (0 <= self.temperature < math.inf, f"--temperature {self.temperature}: is 0 (greedy) or more"),
                (self.top_k >= 0, f"--top_k {self.top_k}: is 0 (off) or more"),
                (0 < self.top_p <= 1, f"--top_p {self.top_p}: lies above 0 and up to 1 (off)"),
                (self.temperature or (not self.top_k and self.top_p == 1), "--top_k, --top_p: need --temperature above 0"),
                (0 <= self.seed < 2**31, f"--seed {self.seed}: lies between 0 and 2^31 - 1"),
                (self.state in ("noise", "zero"), f"--state {self.state}: is noise or zero"),
                (self.exit in (None, *RULES), f"--exit {self.exit}: is {', '.join(RULES)}"),
                (re.fullmatch("full|last|[1-9][0-9]*", self.kv), f"--kv {self.kv}: is full, last or a number of slots"),
                (not self.exit or self.exit_threshold is not None, f"--exit {self.exit}: needs --exit_threshold"),
                (self.exit or self.exit_threshold is None, "--exit_threshold: needs a rule, such as --exit latent"),
                (self.exit_threshold is None or self.exit_threshold >= 0,
                 f"--exit_threshold {self.exit_threshold}: cannot be negative"),
                (self.min_steps >= 1, f"--min_steps {self.min_steps}: is 1 or more"),
                (self.exit or self.min_steps == 1, "--min_steps: needs a rule, such as --exit latent"),
                (self.draft_steps >= 0, f"--draft_steps {self.draft_steps}: cannot be negative"),
                (self.draft_len >= 1, f"--draft_len {self.draft_len}: draft at least one token"),
                (not (self.draft_steps and self.exit), "--draft_steps: does not go together with --exit"),
                (not self.draft_steps or self.kv == "full", f"--draft_steps: does not go together with --kv {self.kv}")):
            if not ok:
                raise InputError(what)


class Decoder:
    """
    A model in the middle of B texts: the cache, and one pass at a time. The token at position p of a row has its keys
    and values in column p, and what lies in later columns is never seen. So texts of any lengths go together without
    padding, and to take tokens back is to go on from an earlier position.

    Cached tensors are (layers, B, S, n_kv_head, D); layers: the prelude's, the core's once per slot, the coda's.
    """

    def __init__(self, model, r, B, S, o):
        c, device, dtype = model.config, model.embed.weight.device, model.embed.weight.dtype
        # One more than fits: a view of all columns would be contiguous, and compiled code is for one or the other.
        self.model, self.r, self.W, self.graphs, S = model, r, 0, {}, (S // COLUMNS + 2) * COLUMNS
        self.slots = self.count(o.kv, r)
        shape = (c.n_prelude + self.slots * c.n_core + c.n_coda, B, S, c.n_kv_head, c.head_dim)
        try:  # zeros: what nobody sees yet is multiplied by zero, so it must be finite
            self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        except RuntimeError:  # of which torch.OutOfMemoryError is one
            raise InputError(f"out of memory: the cache of {B} x {S} tokens at r = {r} takes "
                             f"{2 * math.prod(shape) * dtype.itemsize / 1e9:.1f} GB: ask for fewer rows, tokens or "
                             "recurrences, bfloat16 or --kv last")
        with torch.inference_mode(False):  # the model keeps this table, and may train with it later
            table = model.rope(S)
        self.table = [t.to(dtype) for t in table]
        self.noise = torch.zeros(S, c.n_embd, device=device, dtype=dtype)  # one s_0 a position
        if c.n_core and o.state == "noise":
            self.noise = model.initial_state(S, 1, [o.seed * 1_000_003 + i for i in range(S)])[:, 0].to(dtype)
        self.column, self.groups = torch.arange(max(S, B), device=device), c.n_head // c.n_kv_head

    @staticmethod
    def count(kv, r):
        """Slots a layer of the core."""
        return r if kv == "full" else min(r, 1 if kv == "last" else int(kv))

    def place(self, position, end, rows=None):
        """The next pass is of tokens at position (B, T), all below `end`; rows: those of the batch, by default all."""
        if (W := -(-end // COLUMNS) * COLUMNS) != self.W:
            c, self.W = self.model.config, W
            layers = list(zip(*(t[:, :, :W].unbind() for t in (self.keys, self.values))))
            first, last = c.n_prelude, c.n_prelude + self.slots * c.n_core
            self.prelude, self.coda = layers[:first], layers[last:]
            self.core = [layers[i:i + c.n_core] for i in range(first, last, c.n_core or 1)]
            self.core_layers = [tuple(t[first + i:last:c.n_core, :, :W] for t in (self.keys, self.values))
                                for i in range(c.n_core)]
        self.position = position
        self.rope = [t[position].unsqueeze(1) for t in self.table]                             # (B, 1, T, D/2)
        seen = (self.column[:W] <= position[:, :, None]).repeat(1, self.groups if position.shape[1] > 1 else 1, 1)
        self.mask = torch.zeros_like(seen, dtype=self.noise.dtype).masked_fill_(~seen, -torch.inf).unsqueeze(1)
        self.rows = self.column[:len(position)] if rows is None else rows
        self.at = (self.rows[:, None], position), None if rows is None else (rows,)

    def slot(self, i):
        """Recurrence i (from 0) -> its slot of the cache"""
        return min(i, self.slots - 1)

    def begin(self, idx):
        """Tokens (B, T) -> e and the initial state (B, T, C)"""
        model = self.model
        e = model.run_prelude(model.embed_idx(idx), self.rope, self.mask, self.prelude, self.at)
        return e, model.first_state(e, self.noise[self.position]) if model.config.n_core else e

    def recur(self, s, e, first, last):
        """The state after `first` recurrences -> after `last`"""
        for i in range(first, last):
            s = self.model.run_core(s, e, self.rope, self.mask, self.core[self.slot(i)], self.at)
        return s

    def recur_each(self, s, e, done):
        """One recurrence of rows that have `done` (a list) different numbers: the weights are the same for all."""
        slots = torch.tensor([self.slot(i) for i in done], device=s.device)
        at = (slots[:, None], *self.at[0]), (slots, self.rows)
        return self.model.run_core(s, e, self.rope, self.mask, self.core_layers, at)

    def end(self, s):
        """State (B, T, C) -> what the head reads"""
        return self.model.run_coda(s, self.rope, self.mask, self.coda, self.at)

    def logits(self, s):
        """State (B, T, C) -> logits (B, T, V) float32"""
        return self.model.head(self.end(s)).float()

    @torch.compiler.set_stance("force_eager")  # not worth half a minute: its products are as fast without compilation
    def prefill(self, prompts):
        """Lists of ids -> logits (B, V) float32 after the last id of each"""
        last = torch.tensor([len(p) - 1 for p in prompts], device=self.column.device)
        T, row, out = max(map(len, prompts)), self.column[:len(prompts)], self.noise.new_zeros(1)
        idx = torch.tensor([list(p) + [0] * (T - len(p)) for p in prompts], device=self.column.device)
        for start in range(0, T, PREFILL):
            end = min(start + PREFILL, T)
            self.place(self.column[start:end].expand(len(prompts), -1), end)
            e, s = self.begin(idx[:, start:end])
            x = self.end(self.recur(s, e, 0, self.r))[row, (last - start).clamp(0, end - start - 1)]
            out = torch.where((last >= start)[:, None], x, out)  # a later part holds the last token, or else zeros
        return self.model.head(out).float()

    def step(self, token, position, end):
        """A new token (B,) of every row, at position (B,), all below `end` -> logits (B, V) float32"""
        if not (self.model.compiled and token.is_cuda):
            return self.one_token(token, position, end)
        key = -(-end // COLUMNS), len(token)
        if key not in self.graphs:  # thousands of small kernels: recorded once, then launched as one
            inputs, side = (token.clone(), position.clone()), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, and lets libraries take their memory
                    self.one_token(*inputs, end)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.one_token(*inputs, end)
            self.graphs = {key: (graph, inputs, out)}  # texts only grow: no earlier one comes again, and each has memory
        graph, inputs, out = self.graphs[key]
        for there, new in zip(inputs, (token, position)):
            there.copy_(new)
        graph.replay()
        return out

    def one_token(self, token, position, end):
        self.place(position[:, None], end)
        e, s = self.begin(token[:, None])
        return self.logits(self.recur(s, e, 0, self.r))[:, -1]

    def fill(self, row, position, steps):
        """A token that stopped after `steps` recurrences has its last keys and values in the slots of the others."""
        first, n = self.model.config.n_prelude, self.model.config.n_core
        for t in (self.keys, self.values):
            t = t[first:first + self.slots * n, row, position].unflatten(0, (self.slots, n))
            t[steps:] = t[self.slot(steps - 1)]

    def keep(self, rows):
        """Go on with these rows (a tensor of indices) of the batch only."""
        self.keys, self.values, self.W, self.graphs = self.keys[:, rows], self.values[:, rows], 0, {}


def distribution(logits, o):
    """
    Probabilities (..., V) of the next token. Greedy: 1 for the likeliest. Else top-k, then nucleus: the fewest
    likely tokens that hold probability top_p (Holtzman et al., arXiv 1904.09751).
    """
    if o.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The largest is 0: no overflow. As a float32, a smaller temperature might be 0.
    p = ((logits - logits.amax(-1, keepdim=True)) / max(o.temperature, 1e-30)).softmax(-1)
    if o.top_k or o.top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        if o.top_k:
            p[..., o.top_k:] = 0
            p = p / p.sum(-1, keepdim=True)
        p[p.cumsum(-1) - p >= o.top_p] = 0  # keeps the token that crosses top_p, hence at least one
        p = torch.zeros_like(p).scatter_(-1, order, p)
    return p / p.sum(-1, keepdim=True)


def draw(p, rng):
    """Tokens (...) drawn from probabilities (..., V)"""
    return torch.multinomial(p.flatten(0, -2), 1, generator=rng).view(p.shape[:-1])


def pick(logits, o, rng):
    """Next tokens (B,) of logits (B, V); InputError for NaN"""
    if logits.isnan().any():
        raise InputError("the model's logits are not numbers: its weights are damaged (--model)")
    return logits.argmax(-1) if o.temperature == 0 else draw(distribution(logits, o), rng)


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps=None, ends=None, **options):
    """
    Decode a batch: yields (row, token, recurrences that it took) for every new token, max_new_tokens of each row.
    It knows no end of text: ends(row, token) -> True ends a row, and so does leaving the loop all of them.

    prompts: lists of ids of any lengths; greedily, each gives the tokens it gives alone. steps: r (default
    config.mean_recurrence; a feed-forward model ignores it). options: those of Decoding.
    Raises InputError for an empty prompt, ids beyond the vocabulary, no new or more than config.context tokens in all,
    draft_steps >= steps or NaN logits; ValueError for negative steps.
    """
    c, o = model.config, Decoding(**options)
    r = sum(model.split_steps(steps)) if c.n_core else 0
    T = max(map(len, prompts))
    if not all(prompts):
        raise InputError("the prompt is empty, and this tokenizer adds no BOS: give at least one word")
    if max(map(max, prompts)) >= c.vocab_size:
        raise InputError(f"the prompt holds token {max(map(max, prompts))}, the model's vocabulary ends at "
                         f"{c.vocab_size - 1}: {model.folder} holds the tokenizer of another model")
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens} new tokens: ask for at least one")
    if T + max_new_tokens > c.context:
        raise InputError(f"{T} prompt tokens and {max_new_tokens} new ones exceed the model's "
                         f"context of {c.context}: shorten the prompt or ask for fewer")
    if c.n_core and o.draft_steps >= r and o.draft_steps:
        raise InputError(f"--draft_steps {o.draft_steps}: drafts take fewer recurrences than --steps {r}")
    how = plain if not r or not (o.exit or o.draft_steps) else adaptive if o.exit else speculative
    decoder = Decoder(model, r, len(prompts), T + max_new_tokens + o.draft_len, o)
    rng = torch.Generator(model.embed.weight.device).manual_seed(o.seed)  # its own: picks leave the noise as it is
    live = set(range(len(prompts)))  # the rows that go on
    count = [0] * len(prompts)
    for row, token, took in how(decoder, prompts, o, rng, live):
        count[row] += 1
        if count[row] <= max_new_tokens and row in live:
            yield row, token, took
            if count[row] == max_new_tokens or (ends and ends(row, token)):
                live.discard(row)


def thin(d, rows, live, *tensors):
    """Once half of the rows have ended the rest goes on alone: -> rows and tensors (B, ...) of the rest, or as they are."""
    if 2 * len(live) > len(rows):
        return rows, *tensors
    keep = [i for i, row in enumerate(rows) if row in live]
    at = torch.tensor(keep, device=d.column.device)
    d.keep(at)
    return [rows[i] for i in keep], *(t[at] for t in tensors)


def plain(d, prompts, o, rng, live):
    """One token of every row at a time."""
    rows, logits, end = list(range(len(prompts))), d.prefill(prompts), max(map(len, prompts))
    position = torch.tensor([len(p) for p in prompts], device=d.column.device)
    while True:
        token = pick(logits, o, rng)
        for row, t in zip(rows, token.tolist()):
            yield row, t, d.r
        if not live:
            return
        rows, token, position = thin(d, rows, live, token, position)
        end += 1
        logits = d.step(token, position, end)
        position = position + 1


def speculative(d, prompts, o, rng, live):
    """
    Self-speculation: `draft_steps` recurrences draft tokens, one pass then takes the states of all drafts on to r, where
    the usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects: what comes out has the distribution of r.
    Recurrences of a draft are those of its token at any r, so nothing is computed twice but the coda.
    """
    rows, n = list(range(len(prompts))), o.draft_len
    position = torch.tensor([len(p) for p in prompts], device=d.column.device)
    token = pick(d.prefill(prompts), o, rng)
    for row, t in zip(rows, token.tolist()):
        yield row, t, d.r
    while live:
        rows, token, position = thin(d, rows, live, token, position)
        tokens, guesses, kept = [token], [], []
        top = int(position.max()) + 1
        for i in range(n + 1):  # the last draft, too, is a token to go on from, where all are accepted
            d.place(position[:, None] + i, top + i)
            e, s = d.begin(tokens[-1][:, None])
            kept.append((e, s := d.recur(s, e, 0, o.draft_steps)))
            if i < n:
                guesses.append(distribution(d.logits(s)[:, -1], o))
                tokens.append(draw(guesses[-1], rng))
        d.place(position[:, None] + d.column[:n + 1], top + n)
        e, s = (torch.cat(x, 1) for x in zip(*kept))
        p = distribution(d.logits(d.recur(s, e, o.draft_steps, d.r)), o)             # (B, n + 1, V)
        q, drafts = torch.stack(guesses, 1), torch.stack(tokens[1:], 1)              # (B, n, V), (B, n)
        ratio = (p[:, :n].gather(2, drafts[:, :, None]) / q.gather(2, drafts[:, :, None]))[:, :, 0]
        luck = torch.rand(ratio.shape, device=ratio.device, generator=rng)
        accepted = (luck < ratio).long().cumprod(1).sum(1)                           # (B,)
        at = torch.arange(len(rows), device=accepted.device), accepted
        left = p[at] - torch.cat((q, torch.zeros_like(q[:, :1])), 1)[at]             # after the last: all of p
        left = left.clamp_(min=0)
        token = draw(torch.where(left.any(-1, keepdim=True), left, p[at]), rng)      # none: p and q but for rounding
        drafts = torch.cat((drafts, token[:, None]), 1).scatter_(1, accepted[:, None], token[:, None])
        for row, new, count in zip(rows, drafts.tolist(), accepted.tolist()):
            yield from ((row, t, d.r) for t in new[:count + 1])
        going = torch.tensor([row in live for row in rows], device=position.device)
        position = position + (accepted + 1) * going  # an ended row that is still here must not leave its columns


def adaptive(d, prompts, o, rng, live):
    """
    A token stops recurring once it has settled: its last recurrence changed less than exit_threshold,
      latent         |s_i - s_(i-1)| / |s_i|
      kl             KL(p_i || p_(i-1)) of the distributions over the next token, in nats (Geiping et al., 2502.05171)
      second-order   |(s_i - s_(i-1)) - (s_(i-1) - s_(i-2))| / |s_i|, twice in a row (after Pappone et al., 2509.23314)
    or at r. A row that is done goes on with its next token at once, beside rows that are still at earlier or later
    recurrences: a batch takes the time of its mean, not of its slowest. All ids of a prompt but the last take r.
    """
    device, rows = d.column.device, sorted(live)
    if max(map(len, prompts)) > 1:
        d.prefill([p[:-1] or [0] for p in prompts])
    token, position = [p[-1] for p in prompts], [len(p) - 1 for p in prompts]
    done, hits = [0] * len(rows), torch.zeros(len(rows), dtype=torch.long, device=device)
    e = s = change = torch.zeros(len(rows), 1, d.noise.shape[1], dtype=d.noise.dtype, device=device)
    e, s, change, logp = e.clone(), s.clone(), change.float(), None
    while live:
        place = lambda rows: d.place(torch.tensor([[position[i]] for i in rows], device=device),
                                     1 + max(position[i] for i in rows), torch.tensor(rows, device=device))
        if fresh := [i for i in sorted(live) if not done[i]]:
            place(fresh)
            e[fresh], s[fresh] = d.begin(torch.tensor([[token[i]] for i in fresh], device=device))
        place(rows := sorted(live))
        before, now = s[rows], d.recur_each(s[rows], e[rows], [done[i] for i in rows])
        s[rows] = now
        for i in rows:
            done[i] += 1
        first, step = torch.tensor([done[i] == 1 for i in rows], device=device), now.float() - before.float()
        if o.exit == "kl":
            new = d.logits(now)[:, -1]
            logp = torch.zeros(len(prompts), new.shape[1], device=device) if logp is None else logp
            p = new.log_softmax(-1)
            moved = F.kl_div(logp[rows], p, reduction="none", log_target=True).sum(-1).clamp(min=0)  # but for rounding
            logp[rows] = p
        else:
            size = step if o.exit == "latent" else step - change[rows]
            moved = size.norm(dim=-1)[:, 0] / now.float().norm(dim=-1)[:, 0]
        change[rows] = step
        small = (moved < o.exit_threshold) & ~(first & (o.exit != "latent"))
        hits[rows] = torch.where(small, hits[rows] + 1, 0)
        settled = (hits[rows] >= (2 if o.exit == "second-order" else 1)).tolist()
        over = [j for j, i in enumerate(rows) if done[i] == d.r or (settled[j] and done[i] >= o.min_steps)]
        if not over:
            continue
        if o.exit == "kl":
            logits = new[over]
        else:
            place([rows[j] for j in over])
            logits = d.logits(now[over])[:, -1]
        for i, t in zip([rows[j] for j in over], pick(logits, o, rng).tolist()):
            d.fill(i, position[i], done[i])
            took, token[i], position[i], done[i], hits[i] = done[i], t, position[i] + 1, 0, 0
            yield i, t, took


# -------------------------------------------------------------------- what every decoding script needs

def add_model_arguments(p, dtype):
    """The flags that every script with a model has."""
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cuda or cpu; default: %(default)s")
    p.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"), help=f"default: {dtype or 'as stored'}")
    p.add_argument("--seed", type=int, default=0, help="of the initial state's noise, and of sampling")
    p.add_argument("--state", default="noise", choices=("noise", "zero"), help="initial state; default: noise")


def add_decoding_arguments(p):
    """The flags with which sample.py and eval_gsm8k.py say how to decode; see Decoding."""
    p.add_argument("--int8", action="store_true", help="recurrent block in 8 bits a weight; needs --dtype bfloat16")
    p.add_argument("--compile", action="store_true", help="torch.compile: half a minute at first, then 2-3 times as fast")
    p.add_argument("--kv", default="full",
                   help="slots of the cache a layer: full (default, exact): one a recurrence, last: one, or N")
    p.add_argument("--exit", choices=RULES, help="let tokens that have settled stop recurring")
    p.add_argument("--exit_threshold", type=float, help="... once a recurrence changes less than this")
    p.add_argument("--min_steps", type=int, default=1, help="... but after this many at the earliest")
    p.add_argument("--draft_steps", type=int, default=0, help="draft tokens with so many recurrences, then verify them")
    p.add_argument("--draft_len", type=int, default=12, help="... so many at a time; default: %(default)s")


def decoding(args):
    """{name: value} of Decoding's fields among a script's flags, checked: InputError."""
    return asdict(Decoding(**{f.name: getattr(args, f.name) for f in fields(Decoding) if hasattr(args, f.name)}))


def check_device(device):
    """InputError where torch cannot compute on it."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:  # AssertionError: torch built without CUDA
        raise InputError(f"--device {device}: cannot be used here ({str(e).splitlines()[0]})")


def load_model(folder, device="cpu", dtype=None, int8=False, compile=False):
    """
    (model, tokenizer) of a checkpoint or run folder, or of what surgery.py reads: a folder in another layout, or a hub
    id such as org/name. dtype: its name, or None: as stored.
    """
    check_device(device)
    dtype = getattr(torch, dtype) if dtype else None
    if os.path.isdir(folder) and read_json(os.path.join(find_checkpoint(folder), "config.json")).get("model_type") == \
            "nanoloop":
        model = RecurrentLM.load(folder, device, dtype).eval()
    else:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for text
            source = open_source(folder)
            model = build(source, dtype or check(source)).to(device)
        model.folder = source.folder
    tokenizer = Tokenizer.load(model.folder)
    if int8:
        model.quantise_core()
    if compile:
        model.compile_parts(dynamic=True)
    return model, tokenizer


# -------------------------------------------------------------------- the command

def newest_checkpoint(root="out", recurrent=False):
    """The folder under root whose config.json is a nanoloop model's and was written last; a recurrent one if asked."""
    paths = [p for p in glob.glob(os.path.join(glob.escape(root), "**", "config.json"), recursive=True)
             if ".tmp-" not in p and ".old-" not in p]  # halves of a save that is under way
    found = []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        with contextlib.suppress(InputError):  # somebody else's file
            if (config := read_json(path)).get("model_type") == "nanoloop":
                found.append((os.path.dirname(path), config.get("n_core", 0)))
    for folder, n_core in found:
        if n_core or not (recurrent and any(n for _, n in found)):
            return folder
    raise InputError(f"no checkpoint under {root}/: run `bash runs/tiny.sh` first, or name one with --model")


def corpus_prompt(folder):
    """(prompt, file it stands in): a sample prompt of the corpus that a checkpoint was trained on."""
    path = os.path.join(folder, "train.json")
    if not os.path.exists(path):
        raise InputError(f"{folder}: has no train.json that would name a corpus: give --prompt")
    meta = os.path.join(str(read_json(path).get("config", {}).get("data")), "meta.json")
    if not os.path.exists(meta) or not isinstance(read_json(meta).get("prompt"), str):
        raise InputError(f"{meta}: has no prompt to start from: give --prompt")
    return read_json(meta)["prompt"], meta


def read_prompt(args):
    """The prompt of --prompt or --prompt_file (less one final newline), or None."""
    if args.prompt_file is None and args.prompt != "-":
        return args.prompt
    try:
        with open(0 if args.prompt_file is None else args.prompt_file, encoding="utf-8") as f:
            return f.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise InputError(f"{args.prompt_file or 'stdin'}: the prompt is not UTF-8 text ({e})")


def stream(tokenizer, ids, tokens):
    """
    The text that `tokens` (an iterable of ids) add to that of `ids`, piece by piece: the growing
    difference, as a token alone may lack its leading space or be a part of a character.
    """
    ids = list(ids)
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else perhaps a character whose last bytes are to come
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def parse_args():
    p = argparse.ArgumentParser(description="Stream text from a model.")
    p.add_argument("--model", help="checkpoint or run folder, or a hub id org/name; default: the newest under out/")
    p.add_argument("--steps", help="recurrences r, or several such as 1,4,32 side by side; default: the model's "
                                   "mean_recurrence")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to go on from; - reads stdin; default: from the model's corpus")
    source.add_argument("--prompt_file", help="read the prompt from this file")
    source.add_argument("--interactive", action="store_true", help="ask for prompts; /steps 16 turns the dial")
    p.add_argument("--special", action="store_true",
                   help="read the names of special tokens in the prompt, such as <|eot_id|>, as those tokens")
    p.add_argument("--tokens", type=int, default=256, help="new tokens at most; default: %(default)s")
    p.add_argument("--samples", type=int, default=1, help="number of texts; number i uses seed + i")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy, the likeliest token")
    p.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens; 0 (default): off")
    p.add_argument("--top_p", type=float, default=1.0,
                   help="... from the likeliest that hold this probability; 1 (default): off")
    p.add_argument("--show_steps", action="store_true", help="colour the text by the recurrences that --exit let it take")
    add_model_arguments(p, dtype=None)
    add_decoding_arguments(p)
    args = p.parse_args()
    args.steps = args.steps and parse_steps(args.steps)
    for ok, what in ((args.tokens >= 1, f"--tokens {args.tokens}: ask for at least one"),
                     (sys.stdin or not (args.interactive or args.prompt == "-"),
                      "stdin: is closed: give --prompt or --prompt_file"),
                     (args.samples >= 1, f"--samples {args.samples}: ask for at least one"),
                     (args.exit or not args.show_steps, "--show_steps: needs a rule, such as --exit latent")):
        if not ok:
            raise InputError(what)
    decoding(args)
    return args


def parse_steps(text):
    """'1,4,32' -> [1, 4, 32]; InputError"""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise InputError(f"--steps {text}: give recurrences of at least 0, such as 32 or 1,4,32")
    return list(dict.fromkeys(map(int, text.split(","))))


class Writer:
    """Texts of one model for one user: what sample.py does with a prompt; counts tokens, recurrences and seconds."""

    def __init__(self, model, tokenizer, args):
        self.model, self.tokenizer, self.args, self.tokens, self.steps, self.seconds = model, tokenizer, args, 0, 0, 0.0

    def pieces(self, prompt, r, seed):
        """The text that follows prompt, piece by piece as it is generated."""
        args, c, tokenizer = self.args, self.model.config, self.tokenizer
        ids = tokenizer.encode(prompt, bos=True, special=args.special)
        room = min(args.tokens, c.context - len(ids))
        if room < 1:
            raise InputError(f"the prompt's {len(ids)} tokens leave no room in the model's context of {c.context}: "
                             "shorten it")
        if room < args.tokens:
            say(f"{len(ids)} prompt tokens leave room for {room} new ones in the context of {c.context}")
        took = 0

        def tokens():
            nonlocal took
            options = decoding(args) | {"seed": seed}
            for _, token, took in generate(self.model, [ids], room, r, lambda _, t: t == tokenizer.eos_id, **options):
                self.tokens, self.steps = self.tokens + 1, self.steps + took
                if token != tokenizer.eos_id:
                    yield token

        started = time.perf_counter()
        for piece in stream(tokenizer, ids, tokens()):  # colours of a 6 x 6 x 6 cube: from blue (few) to red (all)
            heat = round(5 * took / max(r, 1))
            yield f"\x1b[38;5;{16 + 36 * heat + 6 * 2 + 5 - heat}m{piece}\x1b[0m" if args.show_steps and piece else piece
        self.seconds += time.perf_counter() - started

    def write(self, prompt, steps):
        """Stream to stdout; several recurrences side by side, once all are there."""
        if self.args.show_steps and len(steps) > 1:
            raise InputError("--show_steps: colours no columns: give one number as --steps")
        for i in range(self.args.samples):
            print("---------------\n" * (i > 0) + prompt, end="", flush=True)
            if len(steps) == 1:
                for piece in self.pieces(prompt, steps[0], self.args.seed + i):
                    print(piece, end="", flush=True)
                print(flush=True)
                continue
            width = max(8, (shutil.get_terminal_size().columns - 2) // len(steps) - 2)
            wrap = lambda text: [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]
            columns = [[f"r = {r}", "-" * width] + wrap("".join(self.pieces(prompt, r, self.args.seed + i))) for r in steps]
            print()
            for line in itertools.zip_longest(*columns, fillvalue=""):
                print("  ".join(f"{part:{width}}" for part in line).rstrip())

    def report(self, steps):
        c, mean = self.model.config, f", {self.steps / max(self.tokens, 1):.2f} recurrences a token" * bool(self.args.exit)
        say(f"{self.model.folder}, {f'r = {str(steps)[1:-1]}' if c.n_core else 'feed-forward'}, "
            f"{', '.join(describe(self.model))}: {self.tokens} tokens in {self.seconds:.1f} s, "
            f"{self.tokens / max(self.seconds, 1e-9):.1f} tokens/s{mean}")
        self.tokens, self.steps, self.seconds = 0, 0, 0.0


def interact(writer, steps):
    """Prompts from the terminal, each on its own, until the end of input. /steps 16 or /steps 1,4,32 turns the dial."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (history and editing, where the system has it)
    sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the others
    say(f"r = {str(steps)[1:-1]}; a line is a prompt; /steps N sets the recurrences; ctrl-C ends a text, ctrl-D all")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return print()
        try:
            if line.startswith("/"):
                command, _, value = line.partition(" ")
                if command != "/steps":
                    raise InputError(f"{command}: there is only /steps N")
                steps = parse_steps(value.strip())
            elif line:
                writer.write(line, steps)
                writer.report(steps)
        except InputError as e:
            say(str(e))
        except KeyboardInterrupt:  # ends a text, not the session
            print()


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    args = parse_args()
    prompt = None if args.interactive else read_prompt(args)
    model, tokenizer = load_model(args.model or newest_checkpoint(recurrent=args.steps is not None),
                                  args.device, args.dtype, args.int8, args.compile)
    if prompt is None and not args.interactive:
        prompt, source = corpus_prompt(model.folder)
        say(f"prompt: {source}")
    say(f"model: {model.folder}")
    steps = args.steps or [model.config.mean_recurrence]
    if not model.config.n_core:
        if args.steps or args.exit or args.draft_steps or args.kv != "full":
            say("this is a feed-forward model: --steps, --exit, --draft_steps and --kv have no effect")
        steps = steps[:1]
    elif args.draft_steps >= min(steps) and args.draft_steps:
        raise InputError(f"--draft_steps {args.draft_steps}: drafts take fewer recurrences than --steps {min(steps)}")
    writer = Writer(model, tokenizer, args)
    if args.interactive:
        return interact(writer, steps)
    writer.write(prompt, steps)
    writer.report(steps)


if __name__ == "__main__":
    cli(main)
