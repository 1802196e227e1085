"""
Generate text with a model, at one or several numbers of recurrences. With --trace, show instead
what each number of recurrences would say after every token of the prompt.

    python sample.py --steps 32                    # newest checkpoint, prompt from its data
    python sample.py --steps 1,4,32                # the same prompt at several depths
    python sample.py --model out/tinyllama --steps 32 --dtype bfloat16 --compile --draft_steps 2
    python sample.py --model out/tinyllama --interactive
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8
    python sample.py --trace --only so --prompt "has 7 so loses 4 so"   # what each r would say

What is unusual here, besides an exact cache for recurrent depth:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r: it
  has prelude + r * core + coda slots.
- Recurrence i of a token depends only on recurrences up to i of this token and of earlier ones. So
  the few recurrences of a cheap draft are also the first ones of the pass at full depth, which
  continues from there. Only the coda runs twice.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position depends on (seed,
  position) alone, not on what else is in the batch.

The model's text goes to stdout, everything else to stderr.
"""
import contextlib
import functools
import gc
import itertools
import os
import re
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (Parser, UserError, cli, natural, non_negative, opening,
                    positive, random_seed, read_json, recurrences)
from data import check_tokenizer
from model import COMPILING, Linear, RecurrentLM, find_checkpoint, load_config

DRAFTS = 12     # tokens that a row drafts before one pass at full depth checks them
TOO_FEW = 2     # with this many accepted drafts per round or fewer, drafting stops
CHUNK = 64      # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens per row in one pass
FEW_ROWS = 4    # up to this many rows, multiply-and-sum beats a BLAS call on a CPU
DEPTHS = [1, 2, 4, 8, 16, 32]  # default r of --trace and of eval_gsm8k.py

DRAFT_STEPS_HELP = ("draft tokens with this many recurrences; one pass at full depth checks "
                    f"{DRAFTS} of them; 0: off")
COMPILE_HELP = ("use torch.compile: takes half a minute (2 to 4 on a GPU), then decoding is about "
                "twice as fast")


# -------------------------------------------------------------------------------------- the cache

def round_up(number, multiple):
    """Return the smallest multiple that is at least `number`: round_up(65, 64) is 128."""
    return (number + multiple - 1) // multiple * multiple


class KVCache:
    """
    The keys and values of a batch, with the rotary angles and the noise of each position. The token
    at position p of a row is at index p, and no token sees later ones. So texts of different
    lengths share a batch without padding, and going back to an earlier position undoes all that
    came after it.

    length: of the longest text in tokens. seed: of the noise s_0.

    slots: the layers of the prelude, those of the core for each recurrence, and those of the coda:
    a list of lists of [keys, values], each (rows, capacity, n_kv_head, head_dim).
    """

    def __init__(self, model, r, rows, length, seed):
        c = model.config
        weight = model.embed.weight
        # Room for drafts, which run ahead of the text, and for passes, which read a multiple of
        # CHUNK. CHUNK more than that, because a view of the whole cache would be contiguous, and
        # torch.compile would compile again for it.
        capacity = length + DRAFTS + 2 * CHUNK
        self.r = r
        self.length = length
        self.made_for = r, rows, length, seed
        self.row = torch.arange(rows, device=weight.device)[:, None]
        self.index = torch.arange(capacity, device=weight.device)
        rope = torch.stack(model.rope(capacity))
        self.rope = rope.to(weight.dtype)                       # (2, capacity, 1, head_dim / 2)
        self.noise = model.initial_state(1, capacity, seed)[0]  # (capacity, C)
        # Zeros and not empty(): what is masked is multiplied by 0, and 0 times NaN would be NaN.
        shape = rows, capacity, c.n_kv_head, c.head_dim
        self.slots = []
        for count in (c.n_prelude, *[c.n_core] * r, c.n_coda):
            layers = [[weight.new_zeros(shape), weight.new_zeros(shape)] for _ in range(count)]
            self.slots.append(layers)
        self.graph = None   # of a step with this cache, see Decoder.step()
        self.graph_end = 0  # the graph serves positions below this

    def keep(self, rows):
        """Remove all rows except these, a tensor of indices such as [0, 3]."""
        self.made_for = None
        self.graph = None
        self.row = self.row[:len(rows)]
        for layer in itertools.chain(*self.slots):
            layer[:] = [t[rows] for t in layer]


# ------------------------------------------------------------------------------- one pass over it

@dataclass
class LayerCache:
    """The cache as Attention sees it in one pass: one layer at one recurrence."""
    keys: torch.Tensor    # (rows, length, n_kv_head, head_dim), such as (2, 64, 4, 64)
    values: torch.Tensor  # of the same shape
    mask: torch.Tensor    # (rows, 1, groups * T, length), see Pass
    write: tuple          # indices (rows, 1) and (rows, T): where this pass stores its tokens

    def update(self, k, v):
        """
        Store the keys and values of new tokens, each (rows, n_kv_head, T, head_dim). Returns all
        keys and values, each (rows, n_kv_head, length, head_dim), and the mask of those that these
        tokens may attend to.
        """
        self.keys[self.write] = k.transpose(1, 2)
        self.values[self.write] = v.transpose(1, 2)
        return self.keys.transpose(1, 2), self.values.transpose(1, 2), self.mask


class Pass:
    """
    One pass over the cache, of T tokens of each row: 1 in a plain step, up to PREFILL of a prompt.
    All tensors in and out of its methods are (rows, T, ...).

    positions: (rows, T), such as [[8], [5]]. end: an exclusive upper bound of them, such as 9,
    which the CPU knows without waiting for the GPU.
    """

    def __init__(self, model, cache, positions, end):
        c = model.config
        length = round_up(end, CHUNK)
        seen = cache.index[:length] <= positions[:, :, None]
        # Attention joins the query heads that share a kv head, and each needs the same mask.
        groups = c.n_head // c.n_kv_head
        seen = seen.repeat(1, groups, 1).unsqueeze(1)  # (rows, 1, groups * T, length)
        mask = torch.where(seen, 0.0, -torch.inf).to(cache.rope.dtype)
        self.rope = cache.rope[:, positions].unbind()  # cos and sin, (rows, T, 1, head_dim / 2)
        self.noise = cache.noise[positions]            # (rows, T, C)
        write = cache.row, positions
        slots = []
        for layers in cache.slots:
            slots.append([LayerCache(k[:, :length], v[:, :length], mask, write)
                          for k, v in layers])
        self.prelude, *self.core, self.coda = slots
        self.model = model

    def begin(self, tokens, r):
        """Run the prelude, which gives e, and r recurrences, which give the state s."""
        e, s = self.model.begin(tokens, self.noise, self.rope, self.prelude)
        s = self.recur(s, e, 0, r)
        return e, s

    def recur(self, s, e, first, last):
        """Take the state from recurrence `first` to `last`, such as 2 to 32."""
        caches = self.core[first:last]
        return self.model.recur(s, e, self.rope, last - first, caches)

    def run_coda(self, s):
        return self.model.run_coda(s, self.rope, self.coda)

    def logits(self, s):
        return self.model.logits(self.run_coda(s))


# -------------------------------------------------------------------------------- choosing tokens

def distribution(logits, temperature, top_k):
    """
    Turn logits (..., V) into the probabilities (..., V) of the next token. Temperature 0: 1 for the
    likeliest token. top_k: if not 0, the probability of all but the k likeliest is 0.
    """
    if temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, likeliest, 1.0)
    if top_k:
        k = min(top_k, logits.shape[-1])
        likeliest = logits.topk(k).values
        logits = logits.masked_fill(logits < likeliest[..., -1:], -torch.inf)
    return (logits / temperature).softmax(-1)


def sample_token(p, rng):
    """
    Draw tokens (...) from probabilities p (..., V), which need not sum to 1.

    If each noise is drawn from Exp(1), p / noise is largest at a token with the probability of that
    token. torch.multinomial() would make the CPU wait for the GPU.
    """
    noise = torch.empty_like(p).exponential_(generator=rng)
    return (p / noise).argmax(-1)


def accept(p, q, drafts, rng):
    """
    Decide how many drafts of each row are accepted, and draw the token after them (Leviathan et
    al., arXiv 2211.17192).

    p (B, n + 1, V): the model's probabilities of each draft, and of the token after the last.
    q (B, n, V): the probabilities from which the drafts were drawn. drafts (B, n), such as (2, 12).

    Returns the number of accepted drafts of each row, such as [12, 3], and the token that follows
    them, both (B,) int64.
    """
    index = drafts[:, :, None]
    p_of_drafts = p[:, :-1].gather(2, index)
    q_of_drafts = q.gather(2, index)
    ratio = (p_of_drafts / q_of_drafts).squeeze(2)
    uniform = torch.rand(ratio.shape, device=ratio.device, generator=rng)
    accepted = (uniform < ratio).long().cumprod(1).sum(1)
    rows = torch.arange(len(p), device=p.device)
    p = p[rows, accepted]                       # at the first wrong draft, or after the last one
    q = F.pad(q, (0, 0, 0, 1))[rows, accepted]  # zeros after the last one
    # Negative differences become almost 0, but if all are negative, because p and q differ by
    # rounding alone, the token is drawn from p.
    residual = (p - q).clamp(min=1e-30 * p)
    return accepted, sample_token(residual, rng)


# ------------------------------------------------------------------- the two loops that decode

class Batch:
    """
    A batch in the middle of decoding. For prompts [[1, 5, 9], [1, 7]] it begins as

        rows      [0, 1]   the numbers of its B texts, in the order of the cache
        live      {0, 1}   the unfinished ones; finished rows leave the cache once they make up half
                           of it
        token     [9, 7]   the last token of each row, (B,) int64
        position  [2, 1]   the positions of these tokens, (B,) int64
        end       3        an exclusive upper bound of the positions
    """

    def __init__(self, cache, token, position, end, temperature, top_k, seed):
        self.cache = cache
        self.token = token
        self.position = position
        self.end = end
        self.rows = list(range(len(token)))
        self.live = set(self.rows)
        self.temperature = temperature
        self.top_k = top_k
        self.rng = torch.Generator(token.device).manual_seed(seed)

    def distribution(self, logits):
        return distribution(logits, self.temperature, self.top_k)

    def advance(self, token, count):
        """Move on to new last tokens (B,), `count` positions further: an int, or one per row."""
        self.token = token
        # A row that has ended advances to the end of the cache, too, and stays there.
        position = self.position + count
        self.position = position.clamp(max=self.cache.length)

    def shrink(self):
        """Remove the finished rows once they are half of the batch."""
        if 2 * len(self.live) > len(self.rows):
            return
        kept = [i for i, row in enumerate(self.rows) if row in self.live]
        self.rows = [self.rows[i] for i in kept]
        index = torch.tensor(kept, device=self.token.device)
        self.cache.keep(index)
        self.token = self.token[index]
        self.position = self.position[index]


class Decoder:
    """
    Decodes batches of texts with a model.

    compile: compile the model, in place, and on CUDA record each step as a graph. The next batch
    with the same r, number of rows, length and seed reuses the graph, and with it the cache.
    """

    def __init__(self, model, compile=False):
        self.model = model
        self.compiled = compile
        self.use_graph = compile and model.embed.weight.is_cuda
        self.cache = None  # that of the last batch, if it has a graph
        # For the whole process: cuDNN would plan each new shape anew, for up to 0.4 s.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if compile:
            if not self.use_graph:
                use_few_rows(model)
            model.compile_parts(dynamic=True)

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, steps=None, ends=None, *, temperature=0.0, top_k=0,
                 seed=0, draft_steps=0):
        """
        Decode a batch of prompts. Yields (row, token, accepted) for every new token, such as
        (0, 278, False), where accepted tells whether it was a draft.

        prompts: lists of ids of any lengths, such as [[1, 450, 7483], [1, 20]]. With greedy
        decoding, each gets the tokens that it would get alone.
        steps: r, by default config.mean_recurrence; an ordinary model ignores it.
        ends: a row ends after max_new_tokens, or after a token for which ends(row, token) returns
        True; there is no built-in end of text.
        temperature: of sampling; 0: greedy. top_k: sample from the k likeliest tokens; 0: from all.
        seed: of the noise s_0, and of sampling.
        draft_steps: recurrences of a draft, see draft_rounds(); 0: off. Drafts change the speed,
        not the distribution of the text.

        Raises UserError if a prompt is empty, or does not fit into the context.
        """
        c = self.model.config
        r = sum(self.model.split_steps(steps)) if c.n_core else 0
        T = max(map(len, prompts))
        if not all(prompts) or max_new_tokens < 1:
            raise UserError("a prompt is empty, or max_new_tokens is less than 1")
        if T + max_new_tokens > c.context:
            raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in "
                            f"the context of {c.context}")
        length = round_up(T + max_new_tokens, CHUNK)  # so that similar lengths share a graph
        made_for = r, len(prompts), length, seed
        cache = self.take_last_cache(made_for) or KVCache(self.model, *made_for)
        token, position = self.prefill(cache, prompts)
        batch = Batch(cache, token, position, T, temperature, top_k, seed)
        rounds = self.plain_rounds(batch)
        if 0 < draft_steps < r:
            rounds = itertools.chain(self.draft_rounds(batch, draft_steps), rounds)
        remaining = [max_new_tokens] * len(prompts)
        while batch.live:
            batch.shrink()
            for row, token, accepted in next(rounds):
                if row not in batch.live:
                    continue
                yield row, token, accepted
                remaining[row] -= 1
                if not remaining[row] or (ends and ends(row, token)):
                    batch.live.remove(row)
        if cache.graph:
            self.cache = cache

    def take_last_cache(self, made_for):
        """Return the cache of the last batch, with its graph, if it fits, otherwise None."""
        cache = self.cache
        self.cache = None  # so that no other batch uses it at the same time
        if cache and cache.made_for == made_for:
            return cache
        if cache:
            cache.graph = None  # the graph refers to the cache, so nothing would be freed

    def prefill(self, cache, prompts):
        """
        Fill the cache with all tokens of the prompts except the last of each, which the first step
        reads. Returns the last tokens and their positions, see Batch.
        """
        T = max(map(len, prompts))
        device = cache.index.device
        # What the cache holds of the padding is overwritten before any token sees it.
        rows = [torch.tensor(prompt) for prompt in prompts]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        last = [len(prompt) - 1 for prompt in prompts]
        position = torch.tensor(last, device=device)
        eager = contextlib.nullcontext()
        if self.compiled:  # large products gain little from compiling
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            for start in range(0, T - 1, PREFILL):
                end = min(start + PREFILL, T - 1)
                positions = cache.index[start:end].expand(len(prompts), -1)
                at = Pass(self.model, cache, positions, end)
                _, s = at.begin(tokens[:, start:end], cache.r)
                at.run_coda(s)  # fills the coda's slots
        token = tokens.gather(1, position[:, None])
        return token[:, 0], position

    def step(self, cache, token, position, end):
        """
        Run the last token of each row, such as [9, 7], at `position`, such as [2, 1], both (rows,).
        Returns the logits (rows, V) float32 of the tokens after these.

        On CUDA a compiled step is recorded as a graph and replayed, because its thousands of small
        kernels take longer to launch than to run. The next call overwrites the logits.
        """
        if not self.use_graph:
            return self.run_step(cache, token, position, end)
        if not cache.graph or end > cache.graph_end:
            cache.graph = None
            gc.collect()  # the last graph, whose memory torch keeps in a reference cycle
            # Recording takes a while, so a graph serves 256 positions, not CHUNK. Rows that have
            # ended wait at position cache.length, see Batch.advance().
            cache.graph_end = min(round_up(end, 256), cache.length + 1)
            run = functools.partial(self.run_step, cache, end=cache.graph_end)
            inputs = token.clone(), position.clone()
            cache.graph = torch.cuda.make_graphed_callables(run, inputs)
        return cache.graph(token, position)

    def run_step(self, cache, token, position, end):
        at = Pass(self.model, cache, position[:, None], end)
        _, s = at.begin(token[:, None], cache.r)
        return at.logits(s)[:, -1]

    # Both loops advance a Batch. After each round they yield the new tokens of its rows, and
    # whether each was a draft: [(0, 278, True), (0, 4996, False), (3, 29889, False)], for example.

    def plain_rounds(self, batch):
        """Decode one token of every row per round."""
        while True:
            logits = self.step(batch.cache, batch.token, batch.position, batch.end)
            if batch.temperature == 0:
                token = logits.argmax(-1)
            else:
                token = sample_token(batch.distribution(logits), batch.rng)
            batch.advance(token, 1)
            batch.end = min(batch.end, batch.cache.length) + 1  # see advance()
            values = token.tolist()
            yield [(row, value, False) for row, value in zip(batch.rows, values)]

    def draft_rounds(self, batch, draft_steps):
        """
        Draft DRAFTS tokens with few recurrences, then take the states of all drafts on to r in one
        pass. accept() makes sure that the text has the distribution of r.

        A round gives its accepted drafts and one more token. With 2 recurrences per draft at
        r = 32, it calls the recurrent block 13 * 2 + 30 = 56 times, less often than 2 plain tokens
        do (64). On a CPU more rows per call cost time, too, so a round has to yield more there.
        Once the running mean of accepted drafts is no higher than TOO_FEW, drafting ends.
        """
        mean_accepted = DRAFTS / 2  # so that drafting gets a few rounds to prove itself
        while mean_accepted > TOO_FEW:
            drafts, q, e, s = self.make_drafts(batch, draft_steps)
            ahead = batch.cache.index[:DRAFTS + 1]
            positions = batch.position[:, None] + ahead
            at = Pass(self.model, batch.cache, positions, batch.end + DRAFTS)
            s = at.recur(s, e, draft_steps, batch.cache.r)
            p = batch.distribution(at.logits(s))
            accepted, token = accept(p, q, drafts, batch.rng)
            batch.advance(token, accepted + 1)
            # One tensor, because the CPU waits for the GPU at each transfer.
            outcome = torch.column_stack((batch.position, accepted, token, drafts))
            batch.end = 0
            new = []
            for row, numbers in zip(batch.rows, outcome.tolist()):
                position, count, last, *guesses = numbers
                batch.end = max(batch.end, position + 1)
                new += [(row, guess, True) for guess in guesses[:count]]
                new.append((row, last, False))
                if row in batch.live:  # a running mean over about four rounds
                    mean_accepted += (count - mean_accepted) / (4 * len(batch.live))
            yield new

    def make_drafts(self, batch, draft_steps):
        """
        Draft n = DRAFTS tokens for each row. Returns the drafts (B, n); the probabilities q
        (B, n, V) from which they were drawn; and e and the states, both (B, n + 1, C), of the last
        token and of every draft, since all may be accepted.
        """
        token = batch.token
        drafts = []
        q = []
        es = []
        states = []
        for i in range(DRAFTS + 1):
            at = Pass(self.model, batch.cache, batch.position[:, None] + i, batch.end + i)
            e, s = at.begin(token[:, None], draft_steps)
            es.append(e)
            states.append(s)
            if i < DRAFTS:
                logits = at.logits(s)[:, -1]
                q.append(batch.distribution(logits))
                token = sample_token(q[-1], batch.rng)
                drafts.append(token)
        drafts = torch.stack(drafts, 1)
        q = torch.stack(q, 1)
        e = torch.cat(es, 1)
        s = torch.cat(states, 1)
        return drafts, q, e, s


class FewRows(nn.Module):
    """
    Takes the place of a Linear in compiled decoding on a CPU, where reading the weights takes most
    of the time. For up to FEW_ROWS rows, a compiled multiply-and-sum reads them once and beats a
    BLAS call.
    """

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x):
        x = x.to(self.weight.dtype)
        rows = x.numel() // x.shape[-1]
        if rows > FEW_ROWS or not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        weight = self.weight.float()
        y = []
        for row in x.view(rows, -1):
            y.append((weight * row.float()).sum(-1))
        y = torch.stack(y).type_as(x)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def use_few_rows(model):
    """Replace each Linear of a model with FewRows, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, FewRows(child))


# ---------------------------------------------------------------------------------------- --trace

@torch.inference_mode()
def next_tokens(model, ids, steps, seed=0):
    """
    Find what a model would say after each token of a text, at each r of `steps` in rising order,
    from one pass. The noise is that of decoding, so decoding would choose the same tokens.

    ids: T token ids, such as [1, 756, 29871, 29955].

    Returns three tensors (len(steps), T), such as (6, 4): the likeliest next tokens, their
    probabilities, and at each r the probability of the token that the largest r chooses. They are
    on the CPU, since they are read one by one.
    """
    idx = torch.tensor([ids], device=model.embed.weight.device)
    state = model.initial_state(1, len(ids), seed)
    states = [s for _, s in model.trajectory(idx, steps, state)]
    chosen = model.finish(states[-1])[0].argmax(-1)
    tokens = []
    probabilities = []
    of_chosen = []
    for s in states:  # one at a time, because the distributions of a long text are large
        p = model.finish(s)[0].softmax(-1)                                  # (T, V)
        probability, token = p.max(-1)
        tokens.append(token)
        probabilities.append(probability)
        of_chosen.append(p.gather(-1, chosen[:, None])[:, 0])
    return [torch.stack(rows).cpu() for rows in (tokens, probabilities, of_chosen)]


def token_text(tokenizer, token):
    """Return the text of a token, such as "so", or its repr where it is no whole character."""
    for name, control in tokenizer.special.items():
        if token == control:
            return name
    text = tokenizer.decode([token])
    readable = text.strip() and text.isprintable() and "\ufffd" not in text
    return text if readable else repr(text)


def trace(model, tokenizer, args, prompt, steps):
    """
    Print a line for each token of the prompt, or only for those that --only names. It shows the
    likeliest next token at each r, with a star where this differs from the previous r. The last
    line counts the tokens that have settled, whose prediction is the same at all larger r.
    """
    c = model.config
    ids = tokenizer.encode(prompt, bos=True)
    if not 0 < len(ids) <= c.context:
        raise UserError(f"the prompt has {len(ids)} tokens, the model's context {c.context}")
    tokens, probabilities, of_chosen = next_tokens(model, ids, steps, args.seed)
    names = [token_text(tokenizer, token) for token in ids]
    shown = [t for t, name in enumerate(names) if args.only in (None, name.strip())]
    names = [names[t] for t in shown]
    if not shown:
        raise UserError(f"--only {args.only}: no token of the prompt is this word")

    columns = [["", *names, "settled"]]
    for i, r in enumerate(steps):
        column = [f"  r = {r}" if c.n_core else "  next"]
        for t in shown:
            changed = i > 0 and tokens[i, t] != tokens[i - 1, t]
            star = "*" if changed else " "
            text = token_text(tokenizer, tokens[i, t].item())
            column.append(f"{star} {probabilities[i, t]:4.0%} {text}")
        agrees = tokens[i:, shown] == tokens[-1, shown]
        settled = agrees.all(0).sum()
        column.append(f"  {settled} of {len(shown)}")
        columns.append(column)
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns):
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        print(" ".join(cells).rstrip())
    if args.picture:
        draw_trace(args.picture, names, steps, of_chosen[:, shown])


def draw_trace(path, names, steps, of_chosen):
    """
    Draw a picture with a row for each position and a column for each r, coloured by the probability
    of the largest r's prediction. names: the tokens as text; of_chosen: see next_tokens().
    """
    from matplotlib.figure import Figure
    size = 2.5 + 0.5 * len(steps), min(1 + 0.22 * len(names), 200)
    picture = Figure(size, layout="constrained")
    panel = picture.add_subplot()
    image = panel.imshow(of_chosen.T.numpy(), aspect="auto", vmin=0, vmax=1)
    panel.set_xticks(range(len(steps)), steps)
    panel.set_yticks(range(len(names)), names, parse_math=False)  # "$" is an ordinary token
    panel.set_xlabel("recurrences r")
    picture.colorbar(image, label="probability of the last column's choice")
    picture.savefig(path)
    tell(f"wrote {path}")


# --------------------------------------------------- loading a model, here and in eval_gsm8k.py

def add_model_arguments(how, dtype):
    """
    Add the flags of every script that decodes to a group of its parser. dtype: the default, such as
    "float32", or None for that of load_model().
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how.add_argument("--device", default=device, help="cuda or cpu; default: %(default)s")
    how.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                     help=f"default: {dtype or 'that of its training'}")
    how.add_argument("--seed", type=random_seed, default=0, metavar="N",
                     help="seed of the initial state and of sampling (0)")


def describe(model):
    """Return the names of a model's device and dtype, such as ("NVIDIA A100", "bfloat16")."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device)
    return device, str(weight.dtype).removeprefix("torch.")


def training_settings(folder):
    """Return the settings of the run that made a checkpoint, or {} if none did."""
    path = Path(folder, "train.json")
    return read_json(path)["config"] if path.exists() else {}


def load_model(folder, device="cpu", dtype=None):
    """
    Load the model and the Tokenizer of a checkpoint or of a run's folder. dtype: "float32" or
    "bfloat16"; by default that of its training, or as stored if it was not trained here.
    """
    folder = find_checkpoint(folder)
    dtype = dtype or training_settings(folder).get("dtype")
    model = RecurrentLM.load(folder, device, dtype and getattr(torch, dtype)).eval()
    tokenizer = check_tokenizer(model.config, model.folder)
    if model.embed.weight.is_cuda:
        torch.cuda.set_device(model.embed.weight.device)  # a graph is captured on the current one
    return model, tokenizer


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """Return the folder of the newest recurrent checkpoint that was trained under `root`."""
    trained = Path(root).glob("**/step_*/config.json")
    paths = [path for path in trained if load_config(path.parent).n_core]
    if not paths:
        raise UserError(f"there is no trained recurrent model under {root}/. Run `bash "
                        "runs/tiny.sh` first, or give --model")
    return max(paths, key=os.path.getmtime).parent


def default_prompt(folder):
    """Return the sample prompt of the (first) data set that a checkpoint was trained on."""
    settings = training_settings(folder)
    if not settings:
        raise UserError(f"{folder} has no train.json that names its training data. Give --prompt")
    first, *_ = re.split("[:,]", settings["data"])  # "FOLDER:WEIGHT,FOLDER:WEIGHT"
    return read_json(Path(first, "meta.json"))["prompt"]


def respond(decoder, tokenizer, args, prompt):
    """Continue a prompt at each r, or trace it. The default r is the model's own, or DEPTHS."""
    c = decoder.model.config
    steps = args.steps or (DEPTHS if args.trace else [c.mean_recurrence])
    if not c.n_core:
        steps = [0]
    if args.trace:
        trace(decoder.model, tokenizer, args, prompt, steps)
        return
    for r in steps:
        stream(decoder, tokenizer, args, prompt, r)


def stream(decoder, tokenizer, args, prompt, r):
    """
    Print the continuation of a prompt at depth r to stdout as it is generated, then the speed to
    stderr.
    """
    model = decoder.model
    ids = tokenizer.encode(prompt, bos=True)
    text = tokenizer.decode(ids)
    if model.config.n_core:
        tell(f"--- r = {r}")
    room = model.config.context - len(ids)
    limit = max(1, min(args.tokens, room))  # at least 1: generate() refuses too long a prompt
    shown = len(text)
    last = model.config.ends | {tokenizer.eos_id}
    count = 0
    count_accepted = 0
    began = time.perf_counter()
    events = decoder.generate(
        [ids],
        limit,
        r,
        lambda _, token: token in last,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        draft_steps=args.draft_steps,
    )
    for _, token, accepted in events:
        if not count:
            first = time.perf_counter()
        count += 1
        count_accepted += accepted
        if token not in last:
            ids.append(token)
        # Decode all of it: a single token may lack its leading space or be part of a character.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the character may be complete with the next token
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)
    speed = (count - 1) / (time.perf_counter() - first)
    message = f"--- {count} tokens, the first after {first - began:.1f} s, then {speed:.1f}/s"
    if args.draft_steps:
        message += f"; {count_accepted / count:.0%} were accepted drafts"
    tell(message)


CHANGEABLE = ("steps", "tokens", "temperature", "top_k", "draft_steps", "seed", "trace", "no-trace")


def interact(decoder, tokenizer, args, parser):
    """Read prompts from the terminal and answer each on its own. "/steps 16" sets a flag."""
    tell("Type a prompt. /steps 16 sets a flag; Ctrl-D ends.")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input()
        except EOFError:
            return
        try:
            if line.startswith("/"):
                name, *value = line[1:].split() or [""]
                if name not in CHANGEABLE:
                    raise UserError(f"/{name}: /NAME VALUE sets one of {', '.join(CHANGEABLE)}")
                changed = Namespace(**vars(args))  # a copy: errors may leave it half changed
                args = parser.parse_args([f"--{name}", *value], changed)
            elif line:
                respond(decoder, tokenizer, args, line)
        except UserError as e:  # a mistake does not end the session
            tell(e)


def tell(text):
    """Print to stderr, where everything but the model's text goes."""
    print(text, file=sys.stderr, flush=True)


def make_parser():
    p = Parser(usage="sample.py [flags]", description=opening(__doc__))
    what, how, output = p.groups()
    what.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    what.add_argument("--prompt", metavar="TEXT",
                      help="the text to continue; default: a sample from the training data")
    what.add_argument("--interactive", action="store_true",
                      help="read prompts from the terminal; /steps 16 sets a flag there")
    how.add_argument("--steps", type=recurrences, metavar="R,R",
                     help="recurrences r, or several such as 1,4,32; default: the model's own, or "
                          f"with --trace {','.join(map(str, DEPTHS))}")
    how.add_argument("--tokens", type=positive, default=256, metavar="N",
                     help="generate at most this many tokens (256)")
    how.add_argument("--temperature", type=non_negative, default=0.0, metavar="X",
                     help="of sampling; 0 (default): always the likeliest token")
    how.add_argument("--top_k", type=natural, default=0, metavar="N",
                     help="sample from the N likeliest tokens only; 0 (default): from all")
    how.add_argument("--draft_steps", type=natural, default=0, metavar="R", help=DRAFT_STEPS_HELP)
    add_model_arguments(how, dtype=None)
    how.add_argument("--compile", action="store_true", help=COMPILE_HELP)
    output.add_argument("--trace", action=BooleanOptionalAction, default=False,
                        help="instead of a text, show what each r would say after each token")
    output.add_argument("--only", metavar="WORD",
                        help="--trace, but show only the lines of this token")
    output.add_argument("--picture", metavar="FILE",
                        help="--trace, and draw it to this file, such as trace.png")
    return p


def main():
    parser = make_parser()
    args = parser.parse_args()
    args.trace |= bool(args.only or args.picture)
    if args.top_k and not args.temperature:
        raise UserError("--top_k needs a --temperature above 0: greedy decoding ignores it")
    folder = args.model or newest_checkpoint()
    model, tokenizer = load_model(folder, args.device, args.dtype)
    c = model.config
    tell(f"{model.folder}: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, "
         f"{', '.join(describe(model))}")
    decoder = Decoder(model, args.compile)
    if args.compile:
        tell(COMPILING)
    if args.interactive:
        interact(decoder, tokenizer, args, parser)
        return
    prompt = args.prompt
    if prompt is None:
        prompt = default_prompt(model.folder)
    tell(prompt)
    respond(decoder, tokenizer, args, prompt)


if __name__ == "__main__":
    cli(main)
