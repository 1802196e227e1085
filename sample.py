"""
Write text from a model, at one or several numbers of recurrences. With --trace it shows instead
what each number of recurrences would say after every token of the prompt.

    python sample.py --steps 32                    # newest checkpoint, a prompt of its own
    python sample.py --steps 1,4,32                # the same prompt at several depths
    python sample.py --model out/tinyllama --steps 32 --dtype bfloat16 --compile --draft_steps 2
    python sample.py --model out/tinyllama --interactive
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8
    python sample.py --trace --prompt "has 7 so loses 4 so"     # what each r would say

What is unusual here, beside an exact cache for recurrent depth:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r:
  prelude + r * core + coda slots.
- The recurrences of a token depend on earlier tokens only. So a cheap draft's recurrences are the
  first ones of the full answer, and nothing is computed twice.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position follows from
  (seed, position) alone, whatever else is in the batch.

Read downwards: the cache, a batch of texts, two ways to decode, --trace, then the command.

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
import tempfile
import time
import unicodedata
from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import (Parser, UserError, cli, describe, find_gpu, natural, opening, positive, rate,
                    read_json, recurrences, say, seeds)
from data import check_tokenizer, legible_tokens
from model import COMPILING, Linear, RecurrentLM, load_config

DRAFTS = 12     # drafts of a row before the model checks them
TOO_FEW = 2     # right drafts of a round that do not pay for it, see speculative_round()
COLUMNS = 64    # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens of a row in one pass
FEW_ROWS = 4    # up to this many rows, multiply-and-sum beats a BLAS call on a CPU
DRAFT_STEPS = "recurrences of a draft; one pass at full depth checks 12 of them; 0: off"
COMPILE = "torch.compile: a minute at first (a GPU: 2 to 4), then about twice as fast"
TRACED = [1, 2, 4, 8, 16, 32]  # recurrences that --trace shows unless --steps names others


@dataclass
class Decoding:
    """How to decode. Drafts change the speed, not the distribution of the text."""
    temperature: float = 0.0      # 0: greedy
    top_k: int = 0                # 0: off
    seed: int = 0                 # of the noise and of sampling
    draft_steps: int = 0          # recurrences of a draft (0: off), see speculative_round()


# -------------------------------------------------------------------------------------- the cache

@dataclass
class LayerCache:
    """
    The cache as Attention sees it: keys and values of one layer, as far as this pass reads them.
    """
    keys: torch.Tensor    # (rows, columns, n_kv_head, head_dim)
    values: torch.Tensor
    write: tuple          # (rows, columns) of the tokens of this pass

    def update(self, k, v):
        """k, v (rows, n_kv_head, T, head_dim) of new tokens -> all that these attend to."""
        self.keys[self.write] = k.transpose(1, 2)
        self.values[self.write] = v.transpose(1, 2)
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)


@dataclass
class Place:
    """Where the tokens of one pass stand: their angles, what they see, where they are written."""
    rope: tuple           # cos and sin, (rows, T, 1, head_dim / 2)
    mask: torch.Tensor    # (rows, 1, groups * T, width): 0 for what is seen, else -inf
    write: tuple          # (rows, columns) of their keys and values
    width: int            # columns of the cache that the pass reads


class Decoder:
    """
    A model that decodes one batch of texts after another: their cache, and one pass at a time.

    The token at position p of a row keeps its keys and values in column p, and no token sees later
    columns. So texts of any lengths share a batch without padding, and going back to an earlier
    position undoes what came after it.

    cache: for each part its layers' [keys, values], (rows, slots, columns, n_kv_head, head_dim).
    The core has a slot for each recurrence, prelude and coda have one.

    Compiled on CUDA, a step is recorded as a graph, because its thousands of small kernels take
    longer to launch than to run. The next batch of the same size takes over the recorded step, and
    with it the cache.
    """

    def __init__(self, model, compile=False):
        self.model = model
        self.compiled = compile
        self.records = compile and model.embed.weight.is_cuda
        self.drop()
        # cuDNN would plan every new shape anew, for up to 0.4 s.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if compile:
            if not self.records:
                sum_few_rows(model)
            model.compile_parts(dynamic=True)

    def drop(self):
        """Free the memory of the last batch."""
        self.size = None
        self.cache = {}
        self.views = {}    # see caches()
        self.graph = None  # see next_logits()

    def make_room(self, r, rows, columns, options):
        """Get ready for `rows` texts at depth r. columns: the longest, with what is to come."""
        if self.size == (r, rows, columns, options):
            return
        self.drop()
        self.r = r
        self.columns = columns
        c = self.model.config
        weight = self.model.embed.weight
        # Drafts run ahead of the text, and passes read multiples of COLUMNS. One block more than
        # that: a view of all columns would be contiguous, and torch.compile would compile again.
        columns += DRAFTS + 2 * COLUMNS
        # Zeros, because the mask multiplies what nobody may see by zero, so it has to be finite.
        for part, slots in ("prelude", 1), ("core", r), ("coda", 1):
            shape = rows, slots, columns, c.n_kv_head, c.head_dim
            self.cache[part] = []
            for _ in getattr(self.model, part):
                self.cache[part].append([weight.new_zeros(shape) for _ in "kv"])
        self.column = torch.arange(max(columns, rows), device=weight.device)
        rope = torch.stack(self.model.rope(columns))
        self.rope = rope.to(weight.dtype)  # of each position
        self.noise = self.model.initial_state(1, columns, options.seed)[0]  # s_0 of each position
        self.size = r, rows, self.columns, options

    def at(self, position, end):
        """The Place of tokens at `position` (rows, T), all of them below `end`."""
        width = -(-end // COLUMNS) * COLUMNS
        rope = self.rope[:, position].unbind()
        # Attention joins the query heads that share a kv head, and each needs the same mask.
        groups = self.model.config.n_head // self.model.config.n_kv_head
        seen = self.column[:width] <= position[:, :, None]
        seen = seen.repeat(1, groups, 1).unsqueeze(1)
        mask = torch.where(seen, 0.0, -torch.inf).to(self.rope.dtype)
        rows = self.column[:len(position), None]
        return Place(rope, mask, (rows, position), width)

    def caches(self, part, place, slot=0):
        """A LayerCache for each layer of a part, at a recurrence's slot."""
        key = part, slot, place.width
        if key not in self.views:
            self.views[key] = []
            for keys, values in self.cache[part]:
                k = keys[:, slot, :place.width]
                v = values[:, slot, :place.width]
                self.views[key].append((k, v))
        return [LayerCache(k, v, place.write) for k, v in self.views[key]]

    def begin(self, idx, place):
        """Ids (rows, T) -> e and s_0, both (rows, T, C)."""
        _, position = place.write
        caches = self.caches("prelude", place)
        return self.model.begin(idx, self.noise[position], place.rope, place.mask, caches)

    def recur(self, s, e, place, first, last):
        """The state (rows, T, C) after `first` recurrences -> after `last`."""
        caches = [self.caches("core", place, slot) for slot in range(first, last)]
        return self.model.recur(s, e, place.rope, last - first, place.mask, caches)

    def run_coda(self, s, place):
        """State (rows, T, C) -> the head's input (rows, T, C)."""
        caches = self.caches("coda", place)
        return self.model.run_coda(s, place.rope, place.mask, caches)

    def logits(self, s, place):
        """State (rows, T, C) -> logits (rows, T, V) float32."""
        return self.model.head(self.run_coda(s, place)).float()

    def prefill(self, prompts):
        """
        Fill the cache with prompts (lists of ids), but for their last ids. Returns these (rows,)
        and their positions (rows,).
        """
        T = max(map(len, prompts))
        device = self.column.device
        rows = []
        for prompt in prompts:
            rows.append(prompt + [0] * (T - len(prompt)))
        idx = torch.tensor(rows, device=device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
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
                self.run_coda(s, place)
        token = idx.gather(1, last[:, None])
        return token[:, 0], last

    def next_logits(self, token, position, end):
        """
        The last token of each row, at position (rows,) below `end` -> logits (rows, V) float32 of
        the token after it.
        """
        if not self.records:
            return self.run_step(token, position, end)
        if not self.graph or end > self.recorded:
            self.graph = None
            gc.collect()  # the last graph, whose memory torch keeps in a reference cycle
            # That takes a while, so it is not done for every 64 columns.
            self.recorded = min(-(-end // 256) * 256, self.columns + 1)
            run = functools.partial(self.run_step, end=self.recorded)
            inputs = token.clone(), position.clone()
            self.graph = torch.cuda.make_graphed_callables(run, inputs)
        return self.graph(token, position)

    def run_step(self, token, position, end):
        place = self.at(position[:, None], end)
        e, s = self.begin(token[:, None], place)
        s = self.recur(s, e, place, 0, self.r)
        return self.logits(s, place)[:, -1]

    def keep(self, rows):
        """Continue with some rows (a tensor of indices) of the batch only."""
        self.size = None
        self.graph = None
        self.views = {}
        for layer in itertools.chain(*self.cache.values()):
            layer[:] = [t[rows] for t in layer]

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, steps=None, ends=None, **options):
        """
        Decode a batch. Yields (row, token, whether it was a draft) for every new token. A row ends
        after max_new_tokens, or after a token for which ends(row, token) returns True; there is no
        built-in end of text.

        prompts: lists of ids of any lengths. Greedily, each gives the tokens that it gives alone.
        steps: r (default: config.mean_recurrence; a feed-forward model ignores it). options: those
        of Decoding.
        """
        c = self.model.config
        options = Decoding(**options)
        r = sum(self.model.split_steps(steps)) if c.n_core else 0
        T = max(map(len, prompts))
        if not all(prompts) or max_new_tokens < 1:
            raise UserError("a prompt is empty, or no token is asked for")
        if T + max_new_tokens > c.context:
            raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in "
                            f"the context of {c.context}")
        columns = -(-(T + max_new_tokens) // COLUMNS) * COLUMNS  # texts of similar lengths share
        self.make_room(r, len(prompts), columns, options)
        batch = Batch(self, prompts)
        rng = torch.Generator(batch.token.device).manual_seed(options.seed)
        drafting = 0 < options.draft_steps < r
        left = [max_new_tokens] * len(prompts)
        try:
            while batch.live:
                batch.shrink()
                if drafting and batch.right_drafts > TOO_FEW:
                    found = speculative_round(batch, options, rng)
                else:
                    found = plain_round(batch, options, rng)
                for row, new in found:
                    if row not in batch.live:
                        continue
                    for token, drafted in new:
                        yield row, token, drafted
                        left[row] -= 1
                        if not left[row] or (ends and ends(row, token)):
                            batch.live.discard(row)
                            break
        finally:  # also if the caller stops before the end
            if not self.graph:
                self.drop()


class Batch:
    """
    Texts in the middle of being decoded.

    rows: their numbers, in the cache's order. live: those that go on; others stay in the cache
    until half of it is theirs. token (B,): the last of each, at position (B,). All positions are
    below `end`. right_drafts: how many drafts of a round were right, a running mean.
    """

    def __init__(self, decoder, prompts):
        self.decoder = decoder
        self.rows = list(range(len(prompts)))
        self.live = set(self.rows)
        self.token, self.position = decoder.prefill(prompts)
        self.end = max(map(len, prompts))
        self.right_drafts = DRAFTS / 2

    def advance(self, token, count):
        """Each row's last token is `token` (B,) now, `count` positions further."""
        self.token = token
        # Rows that have ended wait at the end of the cache.
        position = self.position + count
        self.position = position.clamp(max=self.decoder.columns)

    def shrink(self):
        """Once half of the rows have ended, the others go on alone."""
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
    A Linear's product. Decoding on a CPU is bound by reading the weights. Compiled, and for a few
    rows, plain sums read them once and beat the library's products (runs/README.md has
    the speeds).
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


def sum_few_rows(model):
    """Replace each Linear of a model by FewRows."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, FewRows(child))


# ------------------------------------------------------------------------------------ next tokens

def distribution(logits, options):
    """
    Probabilities (..., V) of the next token: 1 for the likeliest if greedy, 0 beyond the top k.
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
    """Tokens (...) drawn from probabilities (..., V): multinomial() would wait for a GPU."""
    luck = torch.empty_like(p).exponential_(generator=rng)
    return (p / luck).argmax(-1)


def pick(logits, options, rng):
    """Next tokens (B,) of logits (B, V)."""
    if options.temperature == 0:
        return logits.argmax(-1)
    return sample_token(distribution(logits, options), rng)


# --------------------------------------------------------------------------- two ways to decode
# A round returns [(row, [(token, whether it was a draft), ...]), ...] for the rows of the batch.

def plain_round(batch, options, rng):
    """One token of every row."""
    decoder = batch.decoder
    logits = decoder.next_logits(batch.token, batch.position, batch.end)
    batch.advance(pick(logits, options, rng), 1)
    batch.end = min(batch.end, decoder.columns) + 1
    return [(row, [(token, False)]) for row, token in zip(batch.rows, batch.token.tolist())]


def speculative_round(batch, options, rng):
    """
    Self-speculation. `draft_steps` recurrences draft tokens. One pass then takes the states of all
    drafts on to r, and the usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects
    them, so the text has the distribution of r. Only the coda is computed twice.

    A round at r = 32 takes as long as 5 plain tokens on a CPU (runs/README.md), so 4 right drafts
    pay for it. It calls the block as often as 2 plain tokens do. Where rows are free, 1 pays. So
    generate() goes on without drafts once TOO_FEW are right.
    """
    decoder = batch.decoder
    drafts, q, e, s = make_drafts(batch, options, rng)
    ahead = decoder.column[:DRAFTS + 1]
    place = decoder.at(batch.position[:, None] + ahead, batch.end + DRAFTS)
    s = decoder.recur(s, e, place, options.draft_steps, decoder.r)
    p = distribution(decoder.logits(s, place), options)
    accepted, token = accept(p, q, drafts, rng)
    batch.advance(token, accepted + 1)
    report = torch.column_stack((batch.position, accepted, token, drafts))
    report = report.tolist()
    batch.end = max(line[0] for line in report) + 1
    found = []
    for row, line in zip(batch.rows, report):
        _, count, last, *guesses = line
        found.append((row, [(guess, True) for guess in guesses[:count]] + [(last, False)]))
        batch.right_drafts += (count - batch.right_drafts) / (4 * len(batch.rows))
    return found


def make_drafts(batch, options, rng):
    """
    Drafts (B, n) and their probabilities (B, n, V); e and the state (B, n + 1, C) of the last token
    and of every draft, since all of them may be right.
    """
    decoder = batch.decoder
    token = batch.token
    drafts = []
    q = []
    es = []
    states = []
    for i in range(DRAFTS + 1):
        place = decoder.at(batch.position[:, None] + i, batch.end + i)
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
    return drafts, q, torch.cat(es, 1), torch.cat(states, 1)


def accept(p, q, drafts, rng):
    """
    Speculative sampling. Probabilities of the model p (B, n + 1, V) and of the drafts q (B, n, V),
    drafts (B, n) -> how many are accepted (B,), and the token (B,) that follows them.
    """
    index = drafts[:, :, None]
    ratio = p[:, :-1].gather(2, index) / q.gather(2, index)
    ratio = ratio.squeeze(2)
    luck = torch.rand(ratio.shape, device=ratio.device, generator=rng)
    accepted = (luck < ratio).long().cumprod(1).sum(1)
    wrong = torch.arange(len(p), device=p.device), accepted  # the first, or what follows the last
    p = p[wrong]
    q = F.pad(q, (0, 0, 0, 1))[wrong]
    left = (p - q).clamp(min=1e-30 * p)  # p itself where the two differ by rounding alone
    return accepted, sample_token(left, rng)


# ------------------------------------------------------------- what every decoding script needs

def add_model_arguments(how, dtype):
    """The flags that every script with a model has, in a group of its parser."""
    device = "cuda" if find_gpu() else "cpu"
    how.add_argument("--device", default=device, help="cuda or cpu; default: %(default)s")
    how.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                     help=f"default: {dtype or 'as stored'}")
    how.add_argument("--seed", type=seeds, default=0, metavar="N",
                     help="of the initial state and of sampling (0)")


def add_evaluation_arguments(what, how, output):
    """The flags of every script that scores a model, in the groups of its parser."""
    what.add_argument("--model", required=True, help="checkpoint or run folder")
    how.add_argument("--steps", type=recurrences, default="1,2,4,8,16,32", metavar="R,R",
                     help="recurrences r, comma-separated; default: %(default)s")
    how.add_argument("--batch_size", type=positive, default=32, metavar="N",
                     help="questions at once; default: %(default)s")
    output.add_argument("--out", metavar="FILE",
                        help="the summary; default: eval_TASK.json in the folder of --model")
    add_model_arguments(how, dtype="float32")


def decoding(args):
    """Those of a script's flags that are fields of Decoding, {name: value}."""
    fields = Decoding.__dataclass_fields__
    return {name: value for name, value in vars(args).items() if name in fields}


def check_out(path):
    """UserError or OSError now, rather than after hours, if the result cannot be written."""
    path = Path(path).resolve()
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder: name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def load_model(folder, device="cpu", dtype=None):
    """(model, tokenizer) of a checkpoint or run folder. dtype: its name, or None: as stored."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as e:
        raise UserError(f"--device {device}: torch does not find it here ({e!r:.100})")
    model = RecurrentLM.load(folder, device, dtype and getattr(torch, dtype)).eval()
    tokenizer = check_tokenizer(model.config, model.folder)
    if model.embed.weight.is_cuda:
        torch.cuda.set_device(model.embed.weight.device)  # a step is recorded on the current one
    return model, tokenizer


def end_ids(model, tokenizer):
    """The ids that end a text: those in the model's config.json, and the tokenizer's EOS."""
    return model.config.ends | {tokenizer.eos_id}


def answer_batch(decoder, tokenizer, prompts, max_new_tokens, stops, r, **options):
    """
    Continue a batch of prompts (lists of ids) until each has met a stop string or an end of text.
    options: those of Decoding.

    Returns two lists: texts, cut at the first stop; and the number of tokens generated.
    """
    new = [[] for _ in prompts]
    last = end_ids(decoder.model, tokenizer)
    # A stop of n characters spans at most n tokens, so it is enough to look at the last few.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:])
        return token in last or any(stop in end for stop in stops)

    for row, token, _ in decoder.generate(prompts, max_new_tokens, r, ends, **options):
        new[row].append(token)
    texts = []
    unsaid = {*tokenizer.special.values(), *last}  # control tokens, as in the harness's own HFLM
    for ids in new:
        text = tokenizer.decode([i for i in ids if i not in unsaid])
        texts.append(cut(text, stops))
    return texts, list(map(len, new))


def cut(text, stops):
    """text up to the first of the stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


# ------------------------------------------------------------------------------- seeing it think

@torch.inference_mode()
def next_tokens(model, ids, steps, seed=0):
    """
    What a model would say after each token of a text, at each r of `steps` in rising order, from
    one pass. The noise is that of decoding, so these are the tokens that decoding would choose.

    ids: T token ids. Returns three tensors (len(steps), T): the likeliest next tokens, their
    probabilities, and at each r the probability of the token that the largest r chooses; on the
    CPU, since they are read one by one.
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
    return [torch.stack(found).cpu() for found in (tokens, probabilities, of_chosen)]


def trace(model, tokenizer, args, prompt):
    """
    Print a line for each token of the prompt: the likeliest next token at each r, with a star where
    it differs from that of the r before. The last line counts the positions that have settled: from
    this r on they choose what the largest r chooses.
    """
    c = model.config
    steps = asked_steps(args, c)
    ids = tokenizer.encode(prompt, bos=True)
    T = len(ids)
    if not 0 < T <= c.context:
        raise UserError(f"the prompt has {T} tokens, and --trace takes 1 to {c.context}, the "
                        "context of the model")
    tokens, probabilities, of_chosen = next_tokens(model, ids, steps, args.seed)
    texts = legible_tokens(model.folder)

    def name(token):
        text = texts.get(token, f"<{token}>")  # the padding of a vocabulary has no text
        return text if len(text) <= 16 else text[:15] + "…"

    names = [name(token) for token in ids]
    columns = [["", *names, "settled"]]
    agrees = tokens == tokens[-1]
    settled = agrees.flip(0).cumprod(0).flip(0).sum(1)
    for i, r in enumerate(steps):
        column = [f"  r = {r}" if c.n_core else "  next"]
        for t in range(T):
            changed = i > 0 and tokens[i, t] != tokens[i - 1, t]
            token = name(tokens[i, t].item())
            column.append(f"{'*' if changed else ' '} {probabilities[i, t]:4.0%} {token}")
        column.append(f"  {settled[i]} of {T}")
        columns.append(column)
    padded = [pad(column) for column in columns]
    for line in zip(*padded):
        print(" ".join(line).rstrip())
    if args.picture:
        draw_trace(args.picture, names, steps, of_chosen)


def pad(column):
    """Texts, padded to the width of the widest on a terminal, where some characters take two."""
    widths = []
    for text in column:
        wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
        marks = sum(unicodedata.combining(character) > 0 for character in text)
        widths.append(len(text) + wide - marks)
    return [text + " " * (max(widths) - width) for text, width in zip(column, widths)]


def draw_trace(path, names, steps, of_chosen):
    """Draw positions over r, coloured by the probability of what the largest r chooses."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--picture needs `pip install matplotlib`")
    size = 2.5 + 0.5 * len(steps), min(1 + 0.22 * len(names), 200)
    picture = Figure(size, layout="constrained")
    panel = picture.add_subplot()
    image = panel.imshow(of_chosen.T.numpy(), aspect="auto", vmin=0, vmax=1)
    panel.set_xticks(range(len(steps)), steps)
    panel.set_yticks(range(len(names)), names, parse_math=False)  # a $ is a token like others
    panel.set_xlabel("recurrences r")
    picture.colorbar(image, label="probability of the last column's choice")
    try:
        picture.savefig(path)
    except (ValueError, OSError) as e:  # ValueError: a format that matplotlib does not write
        raise UserError(f"--picture {path}: {e}")
    tell(f"wrote {path}")


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """The newest recurrent checkpoint under root."""
    paths = []
    for path in Path(root).glob("**/config.json"):
        with contextlib.suppress(UserError):  # a model of another kind
            if ".tmp-" not in str(path) and load_config(path.parent).n_core:
                paths.append(path)
    if not paths:
        raise UserError(f"no recurrent checkpoint under {root}/: run `bash runs/tiny.sh` first, or "
                        "give --model")
    return max(paths, key=os.path.getmtime).parent


def default_prompt(folder):
    """The sample prompt of the (first) data set that a checkpoint was trained on."""
    path = Path(folder, "train.json")
    if not path.exists():
        raise UserError(f"{folder}: does not say what it was trained on: give --prompt")
    run = read_json(path)
    data = re.split("[:,]", run["config"]["data"])[0]
    return read_json(Path(data, "meta.json"))["prompt"]


def asked_steps(args, config):
    """The list of r that a command asks for: by default the model's own, or several to trace."""
    if not config.n_core:
        return [0]
    return args.steps or (TRACED if args.trace else [config.mean_recurrence])


def respond(decoder, tokenizer, args, prompt):
    """Continue a prompt at each r, or trace it."""
    try:
        prompt.encode()
    except UnicodeEncodeError as e:  # a byte that was no character became a lone surrogate
        raise UserError(f"the prompt is not UTF-8 text: its character {e.start + 1} is a stray "
                        "byte")
    if args.picture and not args.trace:
        raise UserError(f"--picture {args.picture}: is a picture of --trace, so give both")
    if args.trace:
        return trace(decoder.model, tokenizer, args, prompt)
    for r in asked_steps(args, decoder.model.config):
        write(decoder, tokenizer, args, prompt, r)


def write(decoder, tokenizer, args, prompt, r):
    """Stream what follows prompt at depth r to stdout, and say how fast it went."""
    model = decoder.model
    options = decoding(args)
    ids = tokenizer.encode(prompt, bos=True)
    text = tokenizer.decode(ids)
    if "<unk>" in text:
        tell(f"<unk> stands for what the tokenizer does not know: {text}")
    if model.config.n_core:
        tell(f"--- r = {r}")
    room = model.config.context - len(ids)
    room = max(1, min(args.tokens, room))
    shown = len(text)
    drafts = []  # whether each token was one
    last = end_ids(model, tokenizer)
    began = time.perf_counter()
    events = decoder.generate([ids], room, r, lambda _, token: token in last, **options)
    for _, token, drafted in events:
        drafts.append(drafted)
        if token not in last:
            ids.append(token)
        # Decode all of it: a token alone may lack its leading space or be a part of a character.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the character may be complete with the next token
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)
    count = len(drafts)
    words = f"--- {count} tokens, {count / (time.perf_counter() - began):.1f} tokens/s"
    if options["draft_steps"]:
        words += f", {sum(drafts) / count:.0%} of them right drafts"
    tell(words)


def interact(decoder, tokenizer, args):
    """Prompts from the terminal, each on its own. /FLAG VALUE sets a flag of dial()."""
    sys.stdin.reconfigure(errors="surrogateescape")  # a stray byte is a mistake in its line alone
    tell("a line is a prompt; /steps 16, /draft_steps 2 or /temperature 0.8 sets a flag; "
         "/trace shows what each r would say, until /no-trace; /help lists all; /quit ends")
    while True:
        try:
            line = input("> ")
            if line == "/quit":
                return
            if line == "/help":
                tell(dial().format_help().replace("--", "/"))
            elif line.startswith("/"):
                words = f"--{line[1:]}".split()
                args = dial().parse_args(words, copy.copy(args))  # a mistake changes nothing
            elif line:
                respond(decoder, tokenizer, args, line)
        except UserError as e:  # a mistake ends a text, not the session
            tell(e)
        except EOFError:
            return


def tell(text):
    """Print anything but the model's text, to stderr."""
    say(text, file=sys.stderr)


def add_dial(how, output):
    """The flags that --interactive can set, too, in the groups of a parser."""
    how.add_argument("--steps", type=recurrences, metavar="R,R",
                     help="recurrences r, or several such as 1,4,32; default: the model's own")
    how.add_argument("--tokens", type=positive, default=256, metavar="N",
                     help="new tokens at most (256)")
    how.add_argument("--temperature", type=rate, default=0.0, metavar="X",
                     help="0 (default): always the likeliest token")
    how.add_argument("--top_k", type=natural, default=0, metavar="N",
                     help="sample from the k likeliest tokens only; 0 (default): from all")
    how.add_argument("--draft_steps", type=natural, default=0, metavar="R", help=DRAFT_STEPS)
    output.add_argument("--trace", action=BooleanOptionalAction, default=False,
                        help="instead of a text, show what each r would say after each token")
    output.add_argument("--picture", metavar="FILE",
                        help="also draw what --trace shows to this file, such as trace.png")


def dial():
    """The parser of a line such as /steps 16."""
    p = Parser(add_help=False, usage="/FLAG VALUE ...")
    _, how, output = p.groups()
    add_dial(how, output)
    return p


def main():
    p = Parser(usage="sample.py [flags]", description=opening(__doc__))
    what, how, output = p.groups()
    what.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    what.add_argument("--prompt", metavar="TEXT",
                      help="the text to continue; default: a sample from the training data")
    what.add_argument("--interactive", action="store_true",
                      help="ask for prompts; /help lists what can be changed on the way")
    add_dial(how, output)
    add_model_arguments(how, dtype=None)
    how.add_argument("--compile", action="store_true", help=COMPILE)
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
            list(decoder.generate([[0]], 4, r, **decoding(args)))
    if args.interactive:
        return interact(decoder, tokenizer, args)
    prompt = default_prompt(model.folder) if args.prompt is None else args.prompt
    tell(prompt)
    respond(decoder, tokenizer, args, prompt)


if __name__ == "__main__":
    cli(main)
