"""
Generate text with a model, at one or several numbers of recurrences. With --trace, show instead
what each number of recurrences would say after every token of the prompt.

    python sample.py --steps 32                    # newest checkpoint, prompt from its data
    python sample.py --steps 1,4,32                # the same prompt at several depths
    python sample.py --model out/tinyllama --steps 32 --dtype bfloat16 --compile --draft_steps 2
    python sample.py --model out/tinyllama --interactive
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8
    python sample.py --trace --prompt "has 7 so loses 4 so"     # what each r would say

What is unusual here, besides an exact cache for recurrent depth:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r: it
  has prelude + r * core + coda slots.
- Recurrence i of a token depends only on recurrences up to i of this token and of earlier ones. So
  the few recurrences of a cheap draft are also the first ones of the pass at full depth, which
  continues from there. Only the coda runs twice.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position depends on (seed,
  position) alone, not on what else is in the batch.

Read from top to bottom: the cache, a batch of texts, choosing tokens, two ways to decode, --trace,
what every decoding script needs, the command.

The model's text goes to stdout, everything else to stderr.
"""
import contextlib
import copy
import functools
import gc
import itertools
import os
import re
import sys
import time
import unicodedata
from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (Parser, UserError, cli, find_gpu, natural, non_negative, opening,
                    positive, random_seed, read_json, recurrences, say)
from data import check_tokenizer, legible_tokens
from model import COMPILING, Linear, RecurrentLM, load_config

DRAFTS = 12     # tokens that a row drafts before one pass at full depth checks them
TOO_FEW = 2     # with this many right drafts per round or fewer, drafting stops
COLUMNS = 64    # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens per row in one pass
FEW_ROWS = 4    # up to this many rows, multiply-and-sum beats a BLAS call on a CPU
DEPTHS = [1, 2, 4, 8, 16, 32]  # default r of --trace and of the evaluation scripts

DRAFT_STEPS_HELP = ("draft tokens with this many recurrences; one pass at full depth checks "
                    f"{DRAFTS} of them; 0: off")
COMPILE_HELP = ("use torch.compile: takes a minute (2 to 4 on a GPU), then decoding is about twice "
                "as fast")


@dataclass
class Decoding:
    """How to decode. Drafts change the speed, not the distribution of the text."""
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0            # 0: off
    seed: int = 0             # of the noise s_0, and of sampling
    draft_steps: int = 0      # recurrences of a draft (0: off), see speculative_round()


# -------------------------------------------------------------------------------------- the cache

@dataclass
class LayerCache:
    """
    The cache as Attention sees it: the keys and values of one layer at one recurrence, up to the
    last column that this pass reads.
    """
    keys: torch.Tensor    # (rows, width, n_kv_head, head_dim), such as (2, 64, 4, 64)
    values: torch.Tensor  # of the same shape
    write: tuple          # indices (rows, 1) and (rows, T), where this pass stores its tokens

    def update(self, k, v):
        """
        Store the keys and values of new tokens, each (rows, n_kv_head, T, head_dim). Returns all
        keys and values that these tokens may attend to, each (rows, n_kv_head, width, head_dim).
        """
        self.keys[self.write] = k.transpose(1, 2)
        self.values[self.write] = v.transpose(1, 2)
        keys = self.keys.transpose(1, 2)
        values = self.values.transpose(1, 2)
        return keys, values


@dataclass
class Place:
    """
    Where the tokens of one pass are: their rotary angles, what they may attend to, and where the
    cache stores them. Each row has T tokens in the pass: 1 in a plain step, up to PREFILL of a
    prompt.
    """
    rope: tuple             # cos and sin, each (rows, T, 1, head_dim / 2)
    mask: torch.Tensor      # (rows, 1, groups * T, width): 0 for what a token sees, otherwise -inf
    position: torch.Tensor  # (rows, T), such as [[8], [5]]
    write: tuple            # indices (rows, 1) and (rows, T) into rows and columns of the cache
    width: int              # columns of the cache that the pass reads, such as 64


def round_up(number, multiple):
    """Return the smallest multiple that is at least `number`: round_up(65, 64) is 128."""
    return (number + multiple - 1) // multiple * multiple


class Decoder:
    """
    Decodes batches of texts with a model, one batch after another. Holds the cache of the current
    batch, and runs one pass at a time.

    The keys and values of the token at position p of a row are in column p, and no token sees later
    columns. So texts of different lengths share a batch without padding, and going back to an
    earlier position undoes all that came after it.

    cache: {part: [[keys, values] of each layer]}, each tensor (rows, slots, columns, n_kv_head,
    head_dim). The core has a slot for each recurrence, prelude and coda have one each. For a batch
    of 8 rows and 332 columns at r = 32, a core layer of TinyLlama has (8, 32, 332, 4, 64).

    compile: compile the parts of the model, in place. On CUDA a step is also captured as a graph,
    because its thousands of small kernels take longer to launch than to run. The next batch with
    the same r, number of rows, columns and options reuses the graph, and with it the cache.
    """

    def __init__(self, model, compile=False):
        self.model = model
        self.compiled = compile
        self.use_graph = compile and model.embed.weight.is_cuda
        self.drop()
        # For the whole process: cuDNN would plan each new shape anew, for up to 0.4 s.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if compile:
            if not self.use_graph:
                use_few_rows(model)
            model.compile_parts(dynamic=True)

    def drop(self):
        """Free the memory of the last batch."""
        self.made_for = None  # what make_room() made the cache for
        self.cache = {}
        self.views = {}       # see caches()
        self.graph = None     # see next_logits()
        self.graph_end = 0    # the graph serves positions below this

    def make_room(self, r, rows, columns, options):
        """
        Allocate the cache for `rows` texts at depth r, unless that of the last batch fits. columns:
        length of the longest prompt with its continuation. options: a Decoding.
        """
        if self.made_for == (r, rows, columns, options):
            return
        self.drop()
        self.r = r
        self.columns = columns
        c = self.model.config
        weight = self.model.embed.weight
        # Room for drafts, which run ahead of the text, and for passes, which read a multiple of
        # COLUMNS. COLUMNS more than that, because a view of all columns would be contiguous, and
        # torch.compile would compile again for it.
        columns += DRAFTS + 2 * COLUMNS
        # Zeros and not empty(): what is masked is multiplied by 0, and 0 times NaN would be NaN.
        slots = {"prelude": 1, "core": r, "coda": 1}
        for part in slots:
            shape = rows, slots[part], columns, c.n_kv_head, c.head_dim
            self.cache[part] = []
            for _ in getattr(self.model, part):
                keys = weight.new_zeros(shape)
                values = weight.new_zeros(shape)
                self.cache[part].append([keys, values])
        self.column = torch.arange(max(columns, rows), device=weight.device)
        rope = torch.stack(self.model.rope(columns))
        self.rope = rope.to(weight.dtype)                       # (2, columns, 1, head_dim / 2)
        noise = self.model.initial_state(1, columns, options.seed)
        self.noise = noise[0]                                   # (columns, C): s_0 of each position
        self.made_for = r, rows, self.columns, options

    def at(self, position, end):
        """
        Return the Place of tokens at `position` (rows, T), such as [[8], [5]]. end: an int above
        all positions, such as 9.
        """
        width = round_up(end, COLUMNS)
        rope = self.rope[:, position].unbind()
        # Attention joins the query heads that share a kv head, and each needs the same mask.
        groups = self.model.config.n_head // self.model.config.n_kv_head
        seen = self.column[:width] <= position[:, :, None]
        seen = seen.repeat(1, groups, 1).unsqueeze(1)
        mask = torch.where(seen, 0.0, -torch.inf).to(self.rope.dtype)
        rows = self.column[:len(position), None]  # 0, 1, ..., for each row of the batch
        return Place(rope, mask, position, (rows, position), width)

    def caches(self, part, place, slot=0):
        """Return a LayerCache for each layer of a part, at the slot of a recurrence."""
        key = part, slot, place.width
        if key not in self.views:
            # Kept, because slicing for each recurrence and layer would take time for every token.
            self.views[key] = []
            for keys, values in self.cache[part]:
                k = keys[:, slot, :place.width]
                v = values[:, slot, :place.width]
                self.views[key].append((k, v))
        return [LayerCache(k, v, place.write) for k, v in self.views[key]]

    def begin(self, idx, place):
        """Run the prelude on ids (rows, T). Returns its output e, and s_0, both (rows, T, C)."""
        caches = self.caches("prelude", place)
        s = self.noise[place.position]
        return self.model.begin(idx, s, place.rope, place.mask, caches)

    def recur(self, s, e, place, first, last):
        """Take the state s (rows, T, C) from recurrence `first` to `last`, such as 0 to 32."""
        caches = [self.caches("core", place, slot) for slot in range(first, last)]
        return self.model.recur(s, e, place.rope, last - first, place.mask, caches)

    def run_coda(self, s, place):
        """Run the coda on the state s (rows, T, C). Returns the head's input (rows, T, C)."""
        caches = self.caches("coda", place)
        return self.model.run_coda(s, place.rope, place.mask, caches)

    def logits(self, s, place):
        """Return the logits (rows, T, V) float32 of the state s (rows, T, C)."""
        x = self.run_coda(s, place)
        return self.model.head(x).float()

    def prefill(self, prompts):
        """
        Fill the cache with all tokens of the prompts except the last of each, which the first step
        reads. prompts: lists of ids, such as [[1, 5, 9], [1, 7]].

        Returns the last ids, [9, 7], and their positions, [2, 1], both (rows,) int64.
        """
        T = max(map(len, prompts))
        device = self.column.device
        rows = []
        for prompt in prompts:
            # The cache's columns of this padding are overwritten before any token sees them.
            padding = [0] * (T - len(prompt))
            rows.append(prompt + padding)
        idx = torch.tensor(rows, device=device)
        last = [len(prompt) - 1 for prompt in prompts]
        last = torch.tensor(last, device=device)
        eager = contextlib.nullcontext()
        if self.compiled:  # large products gain little from compiling, which takes a minute
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            for start in range(0, T - 1, PREFILL):
                end = min(start + PREFILL, T - 1)
                position = self.column[start:end].expand(len(prompts), -1)
                place = self.at(position, end)
                e, s = self.begin(idx[:, start:end], place)
                s = self.recur(s, e, place, 0, self.r)
                self.run_coda(s, place)  # fills the coda's cache
        token = idx.gather(1, last[:, None])
        return token[:, 0], last

    def next_logits(self, token, position, end):
        """
        Run the last token of each row, such as [9, 7], at `position`, such as [2, 1], both (rows,).
        end: an int above all positions, such as 3.

        Returns the logits (rows, V) float32 of the tokens after these. With a graph, the next call
        overwrites them.
        """
        if not self.use_graph:
            return self.run_step(token, position, end)
        if not self.graph or end > self.graph_end:
            self.graph = None
            gc.collect()  # the last graph, whose memory torch keeps in a reference cycle
            # Capturing takes a while, so a graph serves 256 columns, not COLUMNS. Rows that have
            # ended wait at position self.columns, see Batch.advance().
            self.graph_end = min(round_up(end, 256), self.columns + 1)
            run = functools.partial(self.run_step, end=self.graph_end)
            inputs = token.clone(), position.clone()
            self.graph = torch.cuda.make_graphed_callables(run, inputs)
        return self.graph(token, position)

    def run_step(self, token, position, end):
        """next_logits() without a graph."""
        place = self.at(position[:, None], end)
        e, s = self.begin(token[:, None], place)
        s = self.recur(s, e, place, 0, self.r)
        return self.logits(s, place)[:, -1]

    def keep(self, rows):
        """Remove all rows from the cache except these, a tensor of indices such as [0, 3]."""
        self.made_for = None
        self.graph = None
        self.views = {}
        for layer in itertools.chain(*self.cache.values()):
            layer[:] = [t[rows] for t in layer]

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, steps=None, ends=None, **options):
        """
        Decode a batch of prompts. Yields (row, token, whether it was a draft), such as
        (0, 278, False), for every new token.

        prompts: lists of ids of any lengths, such as [[1, 450, 7483], [1, 20]]. With greedy
        decoding, each gets the tokens that it would get alone.
        steps: r, by default config.mean_recurrence; an ordinary model ignores it.
        ends: a row ends after max_new_tokens, or after a token for which ends(row, token) returns
        True; there is no built-in end of text.
        options: the fields of Decoding, such as temperature=0.8.

        Raises UserError if a prompt is empty, or does not fit into the context.
        """
        c = self.model.config
        options = Decoding(**options)
        r = sum(self.model.split_steps(steps)) if c.n_core else 0
        T = max(map(len, prompts))
        if not all(prompts) or max_new_tokens < 1:
            raise UserError("a prompt is empty, or max_new_tokens is less than 1")
        if T + max_new_tokens > c.context:
            raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in "
                            f"the context of {c.context}")
        columns = round_up(T + max_new_tokens, COLUMNS)  # so that similar lengths share a cache
        self.make_room(r, len(prompts), columns, options)
        batch = Batch(self, prompts)
        rng = torch.Generator(batch.token.device).manual_seed(options.seed)
        drafting = 0 < options.draft_steps < r
        remaining = [max_new_tokens] * len(prompts)
        try:
            while batch.live:
                batch.shrink()
                if drafting and batch.right_drafts > TOO_FEW:
                    new = speculative_round(batch, options, rng)
                else:
                    new = plain_round(batch, options, rng)
                for row, tokens in new:
                    if row not in batch.live:
                        continue
                    for token, drafted in tokens:
                        yield row, token, drafted
                        remaining[row] -= 1
                        if not remaining[row] or (ends and ends(row, token)):
                            batch.live.discard(row)
                            break
        finally:  # also if the caller stops early
            if not self.graph:  # a graph keeps its cache for the next batch
                self.drop()


class Batch:
    """
    A batch in the middle of decoding. For prompts [[1, 5, 9], [1, 7]] it begins as

        rows          [0, 1]   the numbers of its B texts, in the order of the cache
        live          {0, 1}   those that are not finished; a finished one stays in the cache until
                               half of the rows are finished
        token         [9, 7]   the last token of each row, (B,) int64
        position      [2, 1]   the positions of these tokens, (B,) int64
        end           3        an int above all positions
        right_drafts  6.0      a running mean of the number of right drafts per round
    """

    def __init__(self, decoder, prompts):
        self.decoder = decoder
        self.rows = list(range(len(prompts)))
        self.live = set(self.rows)
        self.token, self.position = decoder.prefill(prompts)
        self.end = max(map(len, prompts))
        self.right_drafts = DRAFTS / 2  # so that drafting gets a few rounds to prove itself

    def advance(self, token, count):
        """Move on to new last tokens (B,), `count` positions further: an int, or one per row."""
        self.token = token
        # A row that has ended advances to the end of the cache, too, and stays there.
        position = self.position + count
        self.position = position.clamp(max=self.decoder.columns)

    def shrink(self):
        """Remove the finished rows once they are half of the batch."""
        if 2 * len(self.live) > len(self.rows):
            return
        kept = [i for i, row in enumerate(self.rows) if row in self.live]
        self.rows = [self.rows[i] for i in kept]
        index = torch.tensor(kept, device=self.token.device)
        self.decoder.keep(index)
        self.token = self.token[index]
        self.position = self.position[index]


class FewRows(nn.Module):
    """
    Takes the place of a Linear in compiled decoding on a CPU, where reading the weights takes most
    of the time. For up to FEW_ROWS rows, a compiled multiply-and-sum reads them once and beats a
    BLAS call (runs/README.md has the speeds).
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


# -------------------------------------------------------------------------------- choosing tokens

def distribution(logits, options):
    """
    Turn logits (..., V) into the probabilities (..., V) of the next token. Greedy: 1 for the
    likeliest token. With top_k: 0 for all but the k likeliest.
    """
    if options.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, likeliest, 1.0)
    if options.top_k:
        k = min(options.top_k, logits.shape[-1])
        likeliest = logits.topk(k).values
        logits = logits.masked_fill(logits < likeliest[..., -1:], -torch.inf)
    return (logits / options.temperature).softmax(-1)


def sample_token(p, rng):
    """
    Draw tokens (...) from probabilities p (..., V), which need not sum to 1.

    If each noise is drawn from Exp(1), p / noise is largest at a token with the probability of that
    token. torch.multinomial() would make the CPU wait for the GPU.
    """
    noise = torch.empty_like(p).exponential_(generator=rng)
    return (p / noise).argmax(-1)


def pick(logits, options, rng):
    """Choose the next tokens (B,) from logits (B, V)."""
    if options.temperature == 0:
        return logits.argmax(-1)
    return sample_token(distribution(logits, options), rng)


# --------------------------------------------------------------------------- two ways to decode
# Both advance a Batch by one round. They return the new tokens of each row, and whether each was a
# draft: [(0, [(278, True), (4996, False)]), (3, [(29889, False)])], for example.

def plain_round(batch, options, rng):
    """Decode one token of every row."""
    decoder = batch.decoder
    logits = decoder.next_logits(batch.token, batch.position, batch.end)
    token = pick(logits, options, rng)
    batch.advance(token, 1)
    batch.end = min(batch.end, decoder.columns) + 1  # no position exceeds decoder.columns
    new = []
    for row, value in zip(batch.rows, token.tolist()):
        new.append((row, [(value, False)]))
    return new


def speculative_round(batch, options, rng):
    """
    Draft tokens with `draft_steps` recurrences, then take the states of all drafts on to r in one
    pass. The usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects the drafts, so the
    text has the distribution of r. Only the coda is computed twice.

    A round gives its right drafts and one more token. With 2 recurrences per draft at r = 32, it
    calls the recurrent block 13 * 2 + 30 = 56 times, less often than 2 plain tokens do (64). So
    where more rows per call cost nothing, 1 right draft pays for the round. On a CPU they do cost:
    a round takes as long as 5 plain tokens (runs/README.md), which 4 right drafts make up for.
    TOO_FEW lies between: generate() drops drafting once their running mean is no higher than that.
    """
    decoder = batch.decoder
    drafts, q, e, s = make_drafts(batch, options, rng)
    ahead = decoder.column[:DRAFTS + 1]
    position = batch.position[:, None] + ahead
    place = decoder.at(position, batch.end + DRAFTS)
    s = decoder.recur(s, e, place, options.draft_steps, decoder.r)
    p = distribution(decoder.logits(s, place), options)
    accepted, token = accept(p, q, drafts, rng)
    batch.advance(token, accepted + 1)
    # One tensor, because the CPU waits for the GPU at each transfer.
    outcome = torch.column_stack((batch.position, accepted, token, drafts))
    batch.end = 0
    new = []
    for row, numbers in zip(batch.rows, outcome.tolist()):
        last_position, count, last, *guesses = numbers
        batch.end = max(batch.end, last_position + 1)
        tokens = [(guess, True) for guess in guesses[:count]]
        tokens.append((last, False))
        new.append((row, tokens))
        # A running mean over about four rounds of all rows.
        batch.right_drafts += (count - batch.right_drafts) / (4 * len(batch.rows))
    return new


def make_drafts(batch, options, rng):
    """
    Draft n = DRAFTS tokens for each row.

    Returns the drafts (B, n); the probabilities q (B, n, V) from which they were drawn; and e and
    the states, both (B, n + 1, C), of the last token and of every draft, since all may be right.
    """
    decoder = batch.decoder
    token = batch.token
    drafts = []
    q = []
    es = []
    states = []
    for i in range(DRAFTS + 1):
        position = batch.position[:, None] + i
        place = decoder.at(position, batch.end + i)
        e, s = decoder.begin(token[:, None], place)
        s = decoder.recur(s, e, place, 0, options.draft_steps)
        es.append(e)
        states.append(s)
        if i < DRAFTS:
            logits = decoder.logits(s, place)[:, -1]
            q.append(distribution(logits, options))
            token = sample_token(q[-1], rng)
            drafts.append(token)
    drafts = torch.stack(drafts, 1)
    q = torch.stack(q, 1)
    e = torch.cat(es, 1)
    s = torch.cat(states, 1)
    return drafts, q, e, s


def accept(p, q, drafts, rng):
    """
    Decide how many drafts of each row are accepted, and draw the token after them.

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


def trace(model, tokenizer, args, prompt):
    """
    Print a line for each token of the prompt: the likeliest next token at each r, with a star where
    it differs from the one at the previous r. The last line counts the positions that have settled:
    from this r on, they choose what the largest r chooses.
    """
    c = model.config
    steps = asked_steps(args, c)
    ids = tokenizer.encode(prompt, bos=True)
    T = len(ids)
    if not 0 < T <= c.context:
        raise UserError(f"the prompt has {T} tokens, and --trace takes 1 to {c.context}, the "
                        "model's context")
    tokens, probabilities, of_chosen = next_tokens(model, ids, steps, args.seed)
    texts = legible_tokens(model.folder)

    def name(token):
        text = texts.get(token, f"<{token}>")  # the padding of a vocabulary has no text
        return text if len(text) <= 16 else text[:15] + "…"

    names = [name(token) for token in ids]
    columns = [["", *names, "settled"]]
    # For each r, at how many positions it and all larger ones agree with the largest.
    agrees = tokens == tokens[-1]
    settled = agrees.flip(0).cumprod(0).flip(0).sum(1)
    for i, r in enumerate(steps):
        column = [f"  r = {r}" if c.n_core else "  next"]
        for t in range(T):
            changed = i > 0 and tokens[i, t] != tokens[i - 1, t]
            star = "*" if changed else " "
            token = name(tokens[i, t].item())
            column.append(f"{star} {probabilities[i, t]:4.0%} {token}")
        column.append(f"  {settled[i]} of {T}")
        columns.append(column)
    padded = [pad(column) for column in columns]
    for line in zip(*padded):
        print(" ".join(line).rstrip())
    if args.picture:
        draw_trace(args.picture, names, steps, of_chosen)


def pad(column):
    """
    Pad texts to the width of the widest on a terminal, where some characters take two columns and
    some take none: ["漢字", "a"] gives ["漢字", "a   "].
    """
    widths = []
    for text in column:
        wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
        marks = sum(unicodedata.combining(character) > 0 for character in text)
        widths.append(len(text) + wide - marks)
    padded = []
    for text, width in zip(column, widths):
        spaces = max(widths) - width
        padded.append(text + " " * spaces)
    return padded


def draw_trace(path, names, steps, of_chosen):
    """
    Draw a picture with a row for each position and a column for each r, coloured by the probability
    of what the largest r chooses. names: the T tokens as text; of_chosen: see next_tokens().
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--picture needs `pip install matplotlib`")
    size = 2.5 + 0.5 * len(steps), min(1 + 0.22 * len(names), 200)
    picture = Figure(size, layout="constrained")
    panel = picture.add_subplot()
    image = panel.imshow(of_chosen.T.numpy(), aspect="auto", vmin=0, vmax=1)
    panel.set_xticks(range(len(steps)), steps)
    panel.set_yticks(range(len(names)), names, parse_math=False)  # "$" is an ordinary token
    panel.set_xlabel("recurrences r")
    picture.colorbar(image, label="probability of the last column's choice")
    try:
        picture.savefig(path)
    except (ValueError, OSError) as e:  # ValueError: a format that matplotlib does not write
        raise UserError(f"--picture {path}: {e}")
    tell(f"wrote {path}")


# --------------------------------------------------------------- what every decoding script needs

def add_model_arguments(how, dtype):
    """
    Add the flags of every script that decodes to a group of its parser. dtype: the default, such as
    "float32", or None for the dtype of the checkpoint.
    """
    device = "cuda" if find_gpu() else "cpu"
    how.add_argument("--device", default=device, help="cuda or cpu; default: %(default)s")
    how.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                     help=f"default: {dtype or 'as stored'}")
    how.add_argument("--seed", type=random_seed, default=0, metavar="N",
                     help="seed of the initial state and of sampling (0)")


def decoding_options(args):
    """Return the flags of a script that are fields of Decoding, such as {"seed": 0}."""
    fields = Decoding.__dataclass_fields__
    return {name: value for name, value in vars(args).items() if name in fields}


def load_model(folder, device="cpu", dtype=None):
    """
    Load the model and the Tokenizer of a checkpoint or of a run's folder. dtype: "float32",
    "bfloat16", or None for the dtype of the checkpoint. Raises UserError if torch cannot use the
    device.
    """
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as e:
        raise UserError(f"--device {device}: torch cannot use it here ({e!r:.100})")
    if dtype:
        dtype = getattr(torch, dtype)
    model = RecurrentLM.load(folder, device, dtype).eval()
    tokenizer = check_tokenizer(model.config, model.folder)
    if model.embed.weight.is_cuda:
        torch.cuda.set_device(model.embed.weight.device)  # a graph is captured on the current one
    return model, tokenizer


def describe(model):
    """Return the names of a model's device and dtype, such as ("NVIDIA A100", "bfloat16")."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device)
    return device, str(weight.dtype).removeprefix("torch.")


def end_ids(model, tokenizer):
    """Return the ids that end a text: those in the model's config.json, and the tokenizer's EOS."""
    return model.config.ends | {tokenizer.eos_id}


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """Return the folder of the newest recurrent checkpoint under `root`."""
    paths = []
    for path in Path(root).glob("**/config.json"):
        with contextlib.suppress(UserError):  # not a loopgraft checkpoint
            if ".tmp-" not in str(path) and load_config(path.parent).n_core:
                paths.append(path)
    if not paths:
        raise UserError(f"there is no recurrent checkpoint under {root}/. Run `bash runs/tiny.sh` "
                        "first, or give --model")
    return max(paths, key=os.path.getmtime).parent


def default_prompt(folder):
    """Return the sample prompt of the (first) data set that a checkpoint was trained on."""
    path = Path(folder, "train.json")
    if not path.exists():
        raise UserError(f"{folder} has no train.json that names its training data. Give --prompt")
    run = read_json(path)
    first, *_ = re.split("[:,]", run["config"]["data"])  # "FOLDER:WEIGHT,FOLDER:WEIGHT"
    return read_json(Path(first, "meta.json"))["prompt"]


def asked_steps(args, config):
    """Return the list of r that a command asks for: by default the model's own, or DEPTHS."""
    if not config.n_core:
        return [0]
    if args.steps:
        return args.steps
    return DEPTHS if args.trace else [config.mean_recurrence]


def respond(decoder, tokenizer, args, prompt):
    """Continue a prompt at each r, or trace it."""
    try:
        prompt.encode()
    except UnicodeEncodeError as e:  # bytes that are not UTF-8 arrive as lone surrogates
        raise UserError(f"the prompt is not UTF-8 text: its character {e.start + 1} is a stray "
                        "byte")
    if args.picture and not args.trace:
        raise UserError(f"--picture {args.picture} is a picture of --trace. Give both")
    if args.trace:
        trace(decoder.model, tokenizer, args, prompt)
        return
    for r in asked_steps(args, decoder.model.config):
        stream(decoder, tokenizer, args, prompt, r)


def stream(decoder, tokenizer, args, prompt, r):
    """
    Print the continuation of a prompt at depth r to stdout as it is generated, then the speed to
    stderr.
    """
    model = decoder.model
    options = decoding_options(args)
    ids = tokenizer.encode(prompt, bos=True)
    text = tokenizer.decode(ids)
    if "<unk>" in text:
        tell(f"the tokenizer does not know the words shown as <unk>: {text}")
    if model.config.n_core:
        tell(f"--- r = {r}")
    room = model.config.context - len(ids)
    limit = max(1, min(args.tokens, room))  # at least 1: generate() refuses too long a prompt
    shown = len(text)
    drafts = []  # whether each token was a draft
    last = end_ids(model, tokenizer)
    began = time.perf_counter()
    events = decoder.generate([ids], limit, r, lambda _, token: token in last, **options)
    for _, token, drafted in events:
        drafts.append(drafted)
        if token not in last:
            ids.append(token)
        # Decode all of it: a single token may lack its leading space or be part of a character.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the character may be complete with the next token
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)
    count = len(drafts)
    seconds = time.perf_counter() - began
    speed = f"--- {count} tokens, {count / seconds:.1f} tokens/s"
    if options["draft_steps"]:
        speed += f", {sum(drafts) / count:.0%} of them right drafts"
    tell(speed)


def interact(decoder, tokenizer, args):
    """Read prompts from the terminal and answer each on its own. "/steps 16" sets a flag."""
    # So that a byte that is not UTF-8 is a mistake in its line, and does not end the session.
    sys.stdin.reconfigure(errors="surrogateescape")
    tell("Type a prompt. /steps 16, /draft_steps 2 or /temperature 0.8 sets a flag; /trace shows "
         "what each r would say, until /no-trace; /help lists all flags; /quit exits.")
    parser = interactive_parser()
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            line = input()
            if line == "/quit":
                return
            if line == "/help":
                tell(parser.format_help().replace("--", "/"))
            elif line.startswith("/"):
                flags = f"--{line[1:]}".split()
                args = parser.parse_args(flags, copy.copy(args))  # a mistake changes nothing
            elif line:
                respond(decoder, tokenizer, args, line)
        except UserError as e:  # a mistake does not end the session
            tell(e)
        except EOFError:
            return


def tell(text):
    """Print to stderr, where everything but the model's text goes."""
    say(text, file=sys.stderr)


def add_interactive_arguments(how, output):
    """Add the flags that --interactive can change, too, to the groups of a parser."""
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
    output.add_argument("--trace", action=BooleanOptionalAction, default=False,
                        help="instead of a text, show what each r would say after each token")
    output.add_argument("--picture", metavar="FILE",
                        help="also draw what --trace shows to this file, such as trace.png")


def interactive_parser():
    """Return the parser of a line such as /steps 16."""
    p = Parser(add_help=False, usage="/FLAG VALUE ...")
    _, how, output = p.groups()
    add_interactive_arguments(how, output)
    return p


def main():
    p = Parser(usage="sample.py [flags]", description=opening(__doc__))
    what, how, output = p.groups()
    what.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    what.add_argument("--prompt", metavar="TEXT",
                      help="the text to continue; default: a sample from the training data")
    what.add_argument("--interactive", action="store_true",
                      help="read prompts from the terminal; /help lists the flags to change there")
    add_interactive_arguments(how, output)
    add_model_arguments(how, dtype=None)
    how.add_argument("--compile", action="store_true", help=COMPILE_HELP)
    args = p.parse_args()
    folder = args.model or newest_checkpoint()
    model, tokenizer = load_model(folder, args.device, args.dtype)
    c = model.config
    chosen = "" if args.model else ", the newest under out/ (--model names another)"
    tell(f"{model.folder}{chosen}: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, "
         f"{', '.join(describe(model))}")
    decoder = Decoder(model, args.compile)
    if args.compile:
        tell(COMPILING)
        for r in asked_steps(args, c):
            tell(f"compiling for r = {r}")
            events = decoder.generate([[0]], 4, r, **decoding_options(args))  # of any token
            list(events)
    if args.interactive:
        interact(decoder, tokenizer, args)
        return
    prompt = args.prompt
    if prompt is None:
        prompt = default_prompt(model.folder)
    tell(prompt)
    respond(decoder, tokenizer, args, prompt)


if __name__ == "__main__":
    cli(main)
