"""
Decoding: an exact KV cache for recurrent depth, drafts, exits, and text streamed to the terminal.

    python sample.py --steps 32                    # newest checkpoint, a prompt of its own
    python sample.py --steps 1,4,32                # the same prompt at several depths
    python sample.py --model out/tinyllama --steps 32 --dtype bfloat16 --compile --draft_steps 2
    python sample.py --model out/tinyllama --steps 32 --exit kl --exit_threshold 0.001
    python sample.py --model out/tinyllama --interactive
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8

What is unusual here:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r:
  prelude + r * core + coda slots. --kv 1 keeps one slot a core layer, whatever r is.
- The recurrences of a token depend on earlier tokens only. So a cheap draft's recurrences are the
  first ones of the full answer, and nothing is computed twice.
- All recurrences share their weights, so one pass may take rows of a batch that are at different
  recurrences.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position follows from
  (seed, position) alone, whatever else is in the batch. --state zero goes without noise.

The model's text goes to stdout, everything else to stderr.
"""
import contextlib
import functools
import gc
import itertools
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from data import Parser, check_tokenizer, cli, describe, natural, positive, rate, read_json, say
from model import Linear, RecurrentLM, UserError

DRAFTS = 12     # drafts of a row before they are verified
COLUMNS = 64    # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens of a row in one pass
FEW_ROWS = 4    # up to so many rows plain sums beat a CPU library's products


@dataclass
class Decoding:
    """How to decode. exit and kv make the result inexact and are off by default."""
    temperature: float = 0.0      # 0: greedy
    top_k: int = 0                # 0: off
    top_p: float = 1.0            # 1: off
    seed: int = 0                 # of the noise and of sampling
    state: str = "noise"          # s_0: noise or zero
    kv: int = 0                   # cache slots a layer; 0: one a recurrence
    exit: str | None = None       # kl: a token stops recurring once it has settled, see adaptive()
    exit_threshold: float = 0.001   # in nats
    exit_every: int = 2           # recurrences between two looks, cut to the gcd with r
    min_steps: int = 1            # no token stops earlier
    draft_steps: int = 0          # recurrences of a draft (0: off), see speculative()

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p}: must be above 0 and at most 1")
        if self.draft_steps and (self.exit or self.kv):
            raise UserError("--draft_steps: cannot be combined with --exit or --kv")


# -------------------------------------------------------------------------------------- the cache

@dataclass
class LayerCache:
    """
    What Attention gets of the cache: keys and values of one layer. Indices say where it writes the
    tokens of this pass, and what of it these attend to.
    """
    keys: torch.Tensor    # (rows, columns, n_kv_head, head_dim), or (rows, slots, columns, ...)
    values: torch.Tensor
    write: tuple
    read: tuple = ()

    def update(self, k, v):
        """k, v (rows, n_kv_head, T, head_dim) of new tokens -> all that these attend to."""
        self.keys[self.write] = k.transpose(1, 2)
        self.values[self.write] = v.transpose(1, 2)
        k, v = self.keys[self.read], self.values[self.read]
        return k.transpose(1, 2), v.transpose(1, 2)


@dataclass
class Pass:
    """The tokens of one pass: where they stand, what they see, where they are written."""
    rope: tuple           # cos and sin, (rows, T, 1, head_dim / 2)
    mask: torch.Tensor    # (rows, 1, groups * T, width): 0 for what is seen, else -inf
    write: tuple          # (rows, columns) of their keys and values
    width: int            # columns of the cache that the pass reads


class Decoder:
    """
    B texts in the middle of being decoded at depth r: the cache, and one pass at a time.

    The token at position p of a row keeps its keys and values in column p, and no token sees later
    columns. So texts of any lengths share a batch without padding, and to roll back means to
    continue from an earlier position. `columns`: the longest text, with what is to come.

    cache: for each part its layers' [keys, values], (B, slots, columns, n_kv_head, head_dim). The
    core has a slot for each recurrence, prelude and coda have one.
    """

    def __init__(self, model, r, B, columns, options):
        c, weight = model.config, model.embed.weight
        self.model, self.r = model, r
        self.graph = None  # see step()
        self.views = {}    # see caches()
        self.slots = min(r, options.kv or r)
        self.limit = columns  # rows that have ended stay at this position
        # Drafts run ahead of the text. A block more than that: a view of all columns would be
        # contiguous, for which torch.compile would compile once more.
        columns = ((columns + DRAFTS) // COLUMNS + 2) * COLUMNS
        # Zeros, because the mask multiplies what nobody may see by zero, so it has to be finite.
        self.cache = {}
        for part, slots in ("prelude", 1), ("core", self.slots), ("coda", 1):
            shape = B, slots, columns, c.n_kv_head, c.head_dim
            self.cache[part] = [
                [weight.new_zeros(shape) for _ in "kv"] for _ in getattr(model, part)]
        self.column = torch.arange(max(columns, B, self.slots), device=weight.device)
        self.rope = torch.stack(model.rope(columns)).to(weight.dtype)  # of each position
        noise = model.initial_state(1, columns, options.seed)[0]
        self.noise = noise * (options.state == "noise")  # s_0 of each position

    def at(self, position, end):
        """The Pass of tokens at `position` (rows, T), all of them below `end`."""
        width = -(-end // COLUMNS) * COLUMNS
        rope = self.rope[:, position].unbind()
        # Attention joins the query heads that share a kv head, and each needs the same mask.
        groups = self.model.config.n_head // self.model.config.n_kv_head
        seen = self.column[:width] <= position[:, :, None]
        seen = seen.repeat(1, groups, 1).unsqueeze(1)
        mask = seen.to(self.rope.dtype).log()
        rows = self.column[:len(position), None]
        return Pass(rope, mask, (rows, position), width)

    def caches(self, part, tokens, slot=0):
        """A LayerCache for each layer of a part, at a recurrence's slot."""
        key = part, slot, tokens.width
        if key not in self.views:
            self.views[key] = [[t[:, slot, :tokens.width] for t in layer]
                               for layer in self.cache[part]]
        return [LayerCache(*layer, tokens.write) for layer in self.views[key]]

    def encode(self, idx, tokens):
        """Ids (B, T) -> e and s_0, both (B, T, C)."""
        _, position = tokens.write
        caches = self.caches("prelude", tokens)
        return self.model.begin(idx, self.noise[position], tokens.rope, tokens.mask, caches)

    def recur(self, s, e, tokens, first, last):
        """The state (B, T, C) after `first` recurrences -> after `last`."""
        caches = []
        for i in range(first, last):
            slot = min(i, self.slots - 1)
            caches.append(self.caches("core", tokens, slot))
        return self.model.recur(s, e, tokens.rope, last - first, tokens.mask, caches)

    def finish(self, s, tokens):
        """State (B, T, C) -> what the head reads."""
        return self.model.run_coda(s, tokens.rope, tokens.mask, self.caches("coda", tokens))

    def logits(self, s, tokens):
        """State (B, T, C) -> logits (B, T, V) float32."""
        return self.model.head(self.finish(s, tokens)).float()

    def prefill(self, prompts):
        """
        Fill the cache with prompts (lists of ids), but for their last ids. Returns these (B,),
        their positions (B,), and the number of tokens in the longest prompt.
        """
        T, device = max(map(len, prompts)), self.column.device
        idx = torch.tensor([p + [0] * (T - len(p)) for p in prompts], device=device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        eager = contextlib.nullcontext()
        if self.model.compiled:  # large products gain little from compiling, which takes a minute
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            for start in range(0, T - 1, PREFILL):
                end = min(start + PREFILL, T - 1)
                position = self.column[start:end].expand(len(prompts), -1)
                tokens = self.at(position, end)
                e, s = self.encode(idx[:, start:end], tokens)
                self.finish(self.recur(s, e, tokens, 0, self.r), tokens)
        return idx.gather(1, last[:, None])[:, 0], last, T

    def step(self, token, position, end):
        """
        The next token of each row, at position (B,) below `end` -> logits (B, V) float32. Compiled
        on CUDA, thousands of small kernels are recorded once as a graph and launched as one.
        """
        if not (self.model.compiled and token.is_cuda):
            return self.run_step(token, position, end)
        if not self.graph or end > self.recorded:
            self.graph = None
            gc.collect()  # the last graph, whose memory torch keeps in a reference cycle
            # That takes a while, so it is not done for every 64 columns.
            self.recorded = min(-(-end // 256) * 256, self.limit + 1)
            run = functools.partial(self.run_step, end=self.recorded)
            self.graph = torch.cuda.make_graphed_callables(run, (token.clone(), position.clone()))
        return self.graph(token, position)

    def run_step(self, token, position, end):
        tokens = self.at(position[:, None], end)
        e, s = self.encode(token[:, None], tokens)
        return self.logits(self.recur(s, e, tokens, 0, self.r), tokens)[:, -1]

    def recur_each(self, s, e, tokens, done):
        """
        One recurrence of rows that have done (B,) different numbers of them. What it writes fills
        the slots of later recurrences, too: once a token exits, these see its last keys and values.
        """
        rows, position = tokens.write
        slot = done.clamp(max=self.slots - 1)
        later = torch.maximum(slot[:, None], self.column[:self.slots])
        write, read = (rows, later, position), (rows[:, 0], slot)
        caches = []
        for layer in self.cache["core"]:
            k, v = (t[:, :, :tokens.width] for t in layer)
            caches.append(LayerCache(k, v, write, read))
        return self.model.run_core(s, e, tokens.rope, tokens.mask, caches)

    def keep(self, rows):
        """Continue with some rows (a tensor of indices) of the batch only."""
        self.graph = None
        self.views = {}
        for layer in itertools.chain(*self.cache.values()):
            layer[:] = [t[rows] for t in layer]


# ------------------------------------------------------------------------------------ next tokens

def distribution(logits, options):
    """
    Probabilities (..., V) of the next token. Greedy: 1 for the likeliest. Else top-k, then the
    nucleus: the fewest likely tokens that hold probability top_p (arXiv 1904.09751).
    """
    if options.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = (logits / options.temperature).softmax(-1)
    if options.top_k or options.top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        if options.top_k:
            p[..., options.top_k:] = 0
        enough = options.top_p * p.sum(-1, keepdim=True)
        p[p.cumsum(-1) - p >= enough] = 0  # keeps the token that crosses top_p
        p = torch.zeros_like(p).scatter_(-1, order, p)
    return p / p.sum(-1, keepdim=True)


def draw(p, rng):
    """Tokens (...) drawn from probabilities (..., V): multinomial() would wait for a GPU."""
    return (p / torch.empty_like(p).exponential_(generator=rng)).argmax(-1)


def pick(logits, options, rng):
    """Next tokens (B,) of logits (B, V)."""
    if options.temperature == 0:
        return logits.argmax(-1)
    return draw(distribution(logits, options), rng)


# ------------------------------------------------------------------------- three ways to decode

@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps=None, ends=None, **options):
    """
    Decode a batch. Yields (row, token, recurrences it took) for every new token, max_new_tokens of
    each row. It knows no end of text: ends(row, token) -> True ends a row.

    prompts: lists of ids of any lengths. Greedily, each gives the tokens that it gives alone.
    steps: r (default: config.mean_recurrence; a feed-forward model ignores it). options: those of
    Decoding. A draft that was right counts draft_steps recurrences.
    """
    c, options = model.config, Decoding(**options)
    r = sum(model.split_steps(steps)) if c.n_core else 0
    T = max(map(len, prompts))
    if not all(prompts) or max_new_tokens < 1:
        raise UserError("a prompt is empty, or no token is asked for")
    if T + max_new_tokens > c.context:
        raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in the "
                        f"context of {c.context}")
    decoder = Decoder(model, r, len(prompts), T + max_new_tokens, options)
    way = plain
    if r and options.exit:
        way = adaptive
    elif 0 < options.draft_steps < r:
        way = speculative
    rng = torch.Generator(decoder.column.device).manual_seed(options.seed)
    left = [max_new_tokens] * len(prompts)
    live = set(range(len(prompts)))  # the rows that go on
    start = list(live), *decoder.prefill(prompts)
    for row, token, took in way(decoder, *start, options, rng, live):
        if row in live:
            yield row, token, took
            left[row] -= 1
            if not left[row] or (ends and ends(row, token)):
                live.discard(row)


def shrink(decoder, rows, live, tensors):
    """Once half of the rows have ended, the others go on alone: -> rows, tensors [(B, ...)]."""
    if 2 * len(live) > len(rows):
        return rows, tensors
    keep = [i for i, row in enumerate(rows) if row in live]
    index = torch.tensor(keep, device=decoder.column.device)
    decoder.keep(index)
    return [rows[i] for i in keep], [t[index] for t in tensors]


# The ways begin with the last token (B,) of each text, at position (B,) below `end`. While a row is
# in `live`, they yield (row, token, recurrences).

def plain(decoder, rows, token, position, end, options, rng, live):
    """One token of every row at a time."""
    while live:
        rows, (token, position) = shrink(decoder, rows, live, [token, position])
        token = pick(decoder.step(token, position, end), options, rng)
        position = (position + 1).clamp(max=decoder.limit)
        end = min(end + 1, decoder.limit + 1)
        for row, t in zip(rows, token.tolist()):
            yield row, t, decoder.r


def speculative(decoder, rows, token, position, end, options, rng, live):
    """
    Self-speculation. `draft_steps` recurrences draft tokens. One pass then takes the states of all
    drafts on to r, and the usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects
    them, so what comes out has the distribution of r. Nothing is computed twice but the coda.
    Where too few are right to pay for the others, the batch goes on without.
    """
    ahead = decoder.column[:DRAFTS + 1]
    # At r = 32 a round takes as long as 5 plain tokens on a CPU (runs/README.md), and by its calls
    # of the block as 2. So it pays from 4 right drafts there, from 1 where rows are free.
    right, too_few = DRAFTS / 2, 2  # right: of a round, a running mean
    while live and right > too_few:
        rows, (token, position) = shrink(decoder, rows, live, [token, position])
        drafts, q, started = [], [], []
        for i in range(DRAFTS + 1):  # the last draft gets its e and s, too: all may be right
            tokens = decoder.at(position[:, None] + i, end + i)
            e, s = decoder.encode(token[:, None], tokens)
            s = decoder.recur(s, e, tokens, 0, options.draft_steps)
            started.append((e, s))
            if i < DRAFTS:
                q.append(distribution(decoder.logits(s, tokens)[:, -1], options))
                token = draw(q[-1], rng)
                drafts.append(token)
        tokens = decoder.at(position[:, None] + ahead, end + DRAFTS)
        e, s = (torch.cat(part, 1) for part in zip(*started))
        s = decoder.recur(s, e, tokens, options.draft_steps, decoder.r)
        p = distribution(decoder.logits(s, tokens), options)
        drafts = torch.stack(drafts, 1)
        accepted, token = verify(p, torch.stack(q, 1), drafts, rng)
        # Rows that have ended stay in the cache.
        position = (position + accepted + 1).clamp(max=decoder.limit)
        report = torch.column_stack((position, accepted, token, drafts)).tolist()
        end = max(position for position, *_ in report) + 1
        for row, (_, count, new, *guesses) in zip(rows, report):
            for guess in guesses[:count]:
                yield row, guess, options.draft_steps
            yield row, new, decoder.r
            right += (count - right) / (4 * len(rows))
    yield from plain(decoder, rows, token, position, end, options, rng, live)


def verify(p, q, drafts, rng):
    """
    Speculative sampling. Probabilities of the model p (B, n + 1, V) and of the drafts q (B, n, V),
    drafts (B, n) -> how many are accepted (B,), and the token (B,) that follows them.
    """
    index = drafts[:, :, None]
    ratio = (p[:, :-1].gather(2, index) / q.gather(2, index))[:, :, 0]
    luck = torch.rand(ratio.shape, device=ratio.device, generator=rng)
    accepted = (luck < ratio).long().cumprod(1).sum(1)
    wrong = torch.arange(len(p), device=p.device), accepted  # the first, or what follows the last
    p, q = p[wrong], F.pad(q, (0, 0, 0, 1))[wrong]
    left = (p - q).clamp(min=1e-30 * p)  # p itself where the two differ by rounding alone
    return accepted, draw(left, rng)


def adaptive(decoder, rows, token, position, end, options, rng, live):
    """
    A token stops recurring once its last exit_every recurrences changed the distribution over the
    next token by less than exit_threshold nats (KL, Geiping et al., arXiv 2502.05171), or at r. To
    look costs a pass of coda and head. A row that is done goes on with its next token at once,
    beside rows at other recurrences: a batch takes the time of its mean, not of its slowest. All
    ids of a prompt but the last take r.
    """
    done = torch.zeros_like(token)  # recurrences of the current token
    s = decoder.noise[position[:, None]]
    logp = s.new_zeros(len(rows), decoder.model.config.vocab_size)
    every = math.gcd(decoder.r, options.exit_every)
    earliest = max(2 * every, options.min_steps)
    while live:
        rows, (token, position, done, s, logp) = shrink(
            decoder, rows, live, [token, position, done, s, logp])
        tokens = decoder.at(position[:, None], end)
        e, first = decoder.encode(token[:, None], tokens)
        s = first.where((done == 0)[:, None, None], s)
        stopped = False
        while not stopped:  # until a row has its next token
            for _ in range(every):
                s = decoder.recur_each(s, e, tokens, done)
                done = done + 1
            logits = decoder.logits(s, tokens)[:, -1]
            before, logp = logp, logits.log_softmax(-1)
            kl = (logp.exp() * (logp - before)).sum(-1).clamp(min=0)  # less by rounding alone
            settled = (kl < options.exit_threshold) & (done >= earliest)
            stops = settled | (done == decoder.r)
            token = pick(logits, options, rng).where(stops, token)
            position = (position + stops).clamp(max=decoder.limit)  # ended rows stay in the cache
            report = torch.stack((stops, done, token, position), 1).tolist()
            stopped = any(stop for stop, *_ in report)
        done = done.masked_fill(stops, 0)
        end = max(p for *_, p in report) + 1
        for row, (stop, took, t, _) in zip(rows, report):
            if stop:
                yield row, t, took


# ------------------------------------------------------------- what every decoding script needs

def add_model_arguments(p, dtype):
    """The flags that every script with a model has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=device, help="cuda or cpu; default: %(default)s")
    p.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                   help=f"default: {dtype or 'as stored'}")
    add_options(p, seed="of the initial state and of sampling")
    p.add_argument("--state", default="noise", choices=("noise", "zero"), help="initial state")


def add_evaluation_arguments(p):
    """The flags of every script that scores a model."""
    p.add_argument("--model", required=True, help="checkpoint or run folder")
    p.add_argument("--steps", type=parse_steps, default="1,2,4,8,16,32",
                   help="recurrences r, comma-separated; default: %(default)s")
    p.add_argument("--limit", type=positive, help="the first so many questions of a task only")
    p.add_argument("--batch_size", type=positive, default=32, help="default: %(default)s")
    p.add_argument("--out", help="the summary; default: eval_TASK.json in the folder of --model")
    add_model_arguments(p, dtype="float32")


def add_decoding_arguments(p):
    """The flags with which scripts say how to decode; see Decoding."""
    p.add_argument("--compile", action="store_true",
                   help="torch.compile: a minute at first, then about twice as fast")
    p.add_argument("--exit", choices=("kl",), help="let tokens that have settled stop recurring")
    add_options(
        p,
        exit_threshold="... once recurrences change less than so many nats",
        exit_every="... of which so many lie between two looks",
        min_steps="... but after so many at the earliest",
        kv="cache slots a layer; 0 (default): one a recurrence, which is exact",
        draft_steps="draft tokens with so many recurrences, then verify them",
    )


def add_options(p, **helps):
    """A flag for each of these fields of Decoding."""
    for name, text in helps.items():
        default = getattr(Decoding, name)
        kind = rate if isinstance(default, float) else natural
        p.add_argument(f"--{name}", type=kind, default=default, help=text)


def decoding(args):
    """Decoding's {name: value} by a script's flags. UserError for values that make no sense."""
    known = vars(Decoding())
    given = {name: value for name, value in vars(args).items() if name in known}
    return vars(Decoding(**given))


class FewRows(Linear):
    """
    Decoding on a CPU is bound by reading the weights. Compiled, and for a few rows, plain sums read
    them once and beat the library's matrix products, by 2.4 in float32 (runs/README.md).
    """

    def forward(self, x):
        rows = x.numel() // x.shape[-1]
        if rows > FEW_ROWS or not torch.compiler.is_compiling():
            return super().forward(x)
        weight = self.weight.float()
        x = x.to(self.weight.dtype)
        y = [(weight * row.float()).sum(-1) for row in x.view(rows, -1)]
        y = torch.stack(y).type_as(x)
        return y.view(*x.shape[:-1], -1)


def compile_decoding(model):
    """torch.compile a model for decoding, in place."""
    if not model.embed.weight.is_cuda:
        for module in model.modules():
            if isinstance(module, Linear):
                module.__class__ = FewRows
    model.compile_parts(dynamic=True)


def load_model(folder, device="cpu", dtype=None, compile=False):
    """(model, tokenizer) of a checkpoint or run folder. dtype: its name, or None: as stored."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as e:
        raise UserError(f"--device {device}: torch does not find it here ({e!r:.100})")
    model = RecurrentLM.load(folder, device, dtype and getattr(torch, dtype)).eval()
    tokenizer = check_tokenizer(model.config, model.folder)
    if model.embed.weight.is_cuda:
        torch.cuda.set_device(model.embed.weight.device)  # a step is recorded on the current one
    if compile:
        compile_decoding(model)
    return model, tokenizer


def parse_steps(text):
    """'32,1,4' -> [1, 4, 32]"""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise UserError(f"--steps {text}: give recurrences such as 32 or 1,4,32")
    return sorted(set(map(int, text.split(","))))


def answer_batch(model, tokenizer, prompts, max_new_tokens, stops, r, **options):
    """
    Continue a batch of prompts (lists of ids) until each has met a stop string or EOS.
    options: those of sample.Decoding.

    Returns three lists: texts, cut at the first stop; tokens generated; recurrences these took.
    """
    new = [[] for _ in prompts]
    recurrences = [0] * len(prompts)
    # A stop of n characters spans at most n tokens, so it is enough to look at the last few.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:])
        return token == tokenizer.eos_id or any(stop in end for stop in stops)

    for row, token, took in generate(model, prompts, max_new_tokens, r, ends, **options):
        new[row].append(token)
        recurrences[row] += took
    texts = []
    for ids in new:
        text = tokenizer.decode([i for i in ids if i != tokenizer.eos_id])
        texts.append(cut(text, stops))
    return texts, list(map(len, new)), recurrences


def cut(text, stops):
    """text up to the first of the stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """The newest recurrent checkpoint under root."""
    paths = [path for path in Path(root).glob("**/config.json")
             if ".tmp-" not in str(path) and read_json(path).get("n_core")]  # whole() writes there
    if not paths:
        raise UserError(f"no recurrent checkpoint under {root}/: run `bash runs/tiny.sh` first, or "
                        "give --model")
    return max(paths, key=os.path.getmtime).parent


def default_prompt(folder):
    """The sample prompt of the (first) data set that a checkpoint was trained on."""
    path = Path(folder, "train.json")
    if not path.exists():
        raise UserError(f"{folder}: does not say what it was trained on: give --prompt")
    data = re.split("[:,]", read_json(path)["config"]["data"])[0]
    return read_json(Path(data, "meta.json"))["prompt"]


def write(model, tokenizer, args, prompt, r):
    """Stream what follows prompt at depth r to stdout, and say how fast it went."""
    ids = tokenizer.encode(prompt, bos=True)
    room = max(1, min(args.tokens, model.config.context - len(ids)))
    tell(f"--- r = {r}")
    text = tokenizer.decode(ids)
    shown = len(text)
    recurrences = []
    began = time.perf_counter()
    for _, token, took in generate(model, [ids], room, r, **decoding(args)):
        recurrences.append(took)
        if token == tokenizer.eos_id:
            break
        # Decode all of it: a token alone may lack its leading space or be a part of a character.
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the character may be complete with the next token
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)
    count = len(recurrences)
    speed = count / (time.perf_counter() - began)
    mean = sum(recurrences) / count
    tell(f"--- {count} tokens, {speed:.1f} tokens/s, {mean:.2f} recurrences a token")


def interact(model, tokenizer, args, steps):
    """Prompts from the terminal, each on its own. /steps 16 or /steps 1,4,32 turns the dial."""
    tell(f"r = {steps}; a line is a prompt; /steps N sets the recurrences; ctrl-D ends")
    while True:
        try:
            line = input("> ")
            if line.startswith("/steps"):
                steps = parse_steps(line.removeprefix("/steps").strip())
            elif line.startswith("/"):
                raise UserError(f"{line}: is unknown; /steps 16 sets the recurrences")
            elif line:
                for r in steps:
                    write(model, tokenizer, args, line, r)
        except UserError as e:  # a mistake ends a text, not the session
            tell(e)
        except EOFError:
            return


def tell(text):
    """Anything but the model's text."""
    say(text, file=sys.stderr)


def parse_args():
    p = Parser(description="Stream text from a model.")
    p.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    p.add_argument("--steps", type=parse_steps, help="recurrences r, or several such as 1,4,32")
    p.add_argument("--prompt", help="the text to continue")
    p.add_argument("--interactive", action="store_true", help="ask for prompts")
    p.add_argument("--tokens", type=positive, default=256, help="new tokens at most")
    add_options(
        p,
        temperature="0 (default): greedy",
        top_k="sample from the k likeliest tokens",
        top_p="... from the likeliest that hold this probability",
    )
    add_model_arguments(p, dtype=None)
    add_decoding_arguments(p)
    return p.parse_args()


def main():
    args = parse_args()
    folder = args.model or newest_checkpoint()
    model, tokenizer = load_model(folder, args.device, args.dtype, args.compile)
    c = model.config
    tell(f"{model.folder}, ({c.n_prelude},{c.n_core},{c.n_coda}) layers, "
        f"{', '.join(describe(model))}")
    steps = args.steps or [c.mean_recurrence]
    if not c.n_core:
        steps = [0]
    if not args.temperature and (args.top_k or args.top_p < 1):
        tell("--top_k and --top_p have no effect without a --temperature")
    if args.compile:
        tell("compiling, about a minute")
        for r in steps:
            list(generate(model, [[0]], 4, r, **decoding(args)))
    if args.interactive:
        return interact(model, tokenizer, args, steps)
    prompt = default_prompt(model.folder) if args.prompt is None else args.prompt
    tell(prompt)
    for r in steps:
        write(model, tokenizer, args, prompt, r)


if __name__ == "__main__":
    cli(main)
