"""
Generate text with a model, at one or more numbers of recurrences r. With --trace, show instead what
the model would say at each r after each sentence of the prompt, or after each token.

    python sample.py --steps 1,4,32                # reads prompts from the terminal
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8
    python sample.py --model out/tinyllama --steps 32 --compile
    python sample.py --trace .                     # what each r says after each sentence of STORY

What is unusual here:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r: it
  has prelude + r * core + coda layers.
- Rows of any lengths share a batch, because the positions of their tokens are data, not shapes. So
  a step can be recorded as a CUDA graph once, and replayed for later tokens and other prompts.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position depends on (seed,
  position) alone, not on what else is in the batch.
"""
import copy
import gc
import math
import os
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, pairwise

from common import (DTYPE_HELP, DTYPES, LOCAL_RANK, Parser, UserError, choose_dtype, cli,
                    natural, non_negative, paths, positive, random_seed, recurrences, refuse_idle,
                    say, yes_or_no)

import torch

from data import load_tokenizer
from model import Linear, RecurrentLM, attend

DEVICE = f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu"
FEW_ROWS = 4    # up to this many rows, multiply-and-sum beats a BLAS call on a CPU
IN_CACHE = 2**18  # a matrix with no more weights than this stays in a core's cache
DEPTHS = [1, 2, 4, 8, 16, 32]  # default r of --trace and of eval_gsm8k.py
STORY = ("The ball is under B. B and D swap. A and C swap. D and E swap. E and A swap. B and C "
         "swap. A and C swap. C and D swap. E and B swap. D and A swap. A and E swap. "
         "C and E swap.")
NO_TOKEN = -1   # see choose()
WINDOW = 16  # tokens in which to look for a stop; at worst, each of its bytes is a token
NOT_FINITE = "the model's logits are not finite, so its weights must be damaged"
# For torch.compile on a GPU: products for one row by kernels that are tuned to read faster than
# cuBLAS's, and sums of many layers' outputs stored on the way, so that all layers share kernels.
GPU_OPTIONS = {"coordinate_descent_tuning": True, "realize_reads_threshold": 2}


# ----------------------------------------------------------------------------------------- decoding

class Decoder:
    """
    Decodes texts with a model, one batch at a time. The cache stays for the next batch.

    compile: use torch.compile, on a copy of the model that shares its weights. On CUDA, also record
    each kind of step as a graph, because its thousands of small kernels take longer to launch than
    to run.
    """

    def __init__(self, model, compile=False):
        self.model = model
        self.compiled = compile
        self.on_gpu = model.embed.weight.is_cuda
        self.recording = compile and self.on_gpu
        self.chunk = 256 if self.on_gpu else 64  # a step reads the cache in multiples of this
        self.cache = None
        self.kinds = {}        # {arguments of make_step(): the step for this cache}
        self.recorded = set()  # the keys of steps that replay a CUDA graph
        self.pool = None       # the memory of the graphs
        self.rng = None        # of the current generate()
        self.look_up = look_up
        self.choose_likeliest = choose
        if compile:
            self.compile_model()

    def compile_model(self):
        # For the whole process: torch.compile must not take two sizes for one because they are
        # equal when it first sees them, such as rows = 64 and visible = 64.
        torch.fx.experimental._config.use_duck_shape = False
        self.model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        if not self.on_gpu:
            for module in self.model.modules():
                if isinstance(module, Linear):
                    module.__class__ = FewRows
            self.model.compile_parts(dynamic=True)
            return
        say("tuning kernels takes minutes the first time; torch.compile keeps them", sys.stderr)
        self.model.compile_parts(dynamic=True, options=GPU_OPTIONS)
        self.look_up = torch.compile(look_up, dynamic=True)
        self.choose_likeliest = torch.compile(choose, dynamic=True)

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, steps=None, is_last=None, *,
                 temperature=0.0, top_k=0, seed=0):
        """
        Decode a batch of prompts. Yields (row, token) for every new token, such as (0, 278).

        prompts: lists of ids of any lengths, such as [[1, 450, 7483], [1, 20]]. With greedy
        decoding in float32, each gets the same tokens as it would alone; in bfloat16, rounding
        depends on the number of rows.
        steps: r, by default config.mean_recurrence; an ordinary model ignores it.
        is_last: a row ends after max_new_tokens, or after a token for which is_last(row, token) is
        True; there is no built-in end of text.
        temperature: 0 is greedy decoding. top_k: sample from the k likeliest tokens; 0: from all.
        seed: seeds the noise s_0 and the sampling.

        Raises UserError if a prompt is empty or leaves no room for max_new_tokens in the context,
        or if logits are not finite.
        """
        c = self.model.config
        r = sum(self.model.split_steps(steps)) if c.n_core else 0
        if not all(prompts):
            raise UserError("a prompt has no tokens")
        T = max(map(len, prompts))
        total = T + max_new_tokens
        if total > c.context:
            raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in "
                            f"the context of {c.context}")
        self.begin(prompts, total, r, seed)
        self.rng = rng = torch.Generator(self.cache.index.device).manual_seed(seed)
        live = set(range(len(prompts)))  # those whose texts are unfinished, such as {0, 2}

        def launched():
            """Launch step after step. Yields each one's prompts, and what launch() returned."""
            rows = sorted(live)
            for end in range(T, total):  # an exclusive upper bound on the tokens' positions
                assert self.rng is rng, "another generate() of this Decoder has begun"
                if 2 * len(live) <= self.size(len(rows)):
                    kept = [i for i, row in enumerate(rows) if row in live]
                    rows = [rows[i] for i in kept]
                    self.cache.keep(kept)
                yield rows, *self.launch(len(rows), end, r, temperature, top_k)

        for rows, tokens, event in one_late(launched()) if self.on_gpu else launched():
            if event:
                event.synchronize()
            for row, token in zip(rows, tokens.flatten().tolist()):
                if row not in live:
                    continue
                if token == NO_TOKEN:
                    self.cache = None  # it may hold NaN
                    raise UserError(NOT_FINITE)
                yield row, token
                if is_last and is_last(row, token):
                    live.remove(row)
            if not live:
                return

    def size(self, rows):
        """How many rows of the cache to run for this many texts: if recorded, a power of two."""
        return 1 << (rows - 1).bit_length() if self.recording else rows

    def visible(self, end):
        """How many positions of the cache a step reads, if those of its tokens are below `end`."""
        return self.chunk * math.ceil(end / self.chunk)

    def begin(self, prompts, end, r, seed):
        """
        Fill the cache with all tokens but the longest prompt's last one: the first step reads each
        prompt's last token, again if that is shorter. If it is too small for `end` tokens, replace
        it first.
        """
        rows = self.size(len(prompts))
        visible = self.visible(end)
        cache = self.cache
        if not cache or rows > cache.rows or visible >= cache.capacity or r > cache.r:
            self.cache = cache = self.pool = None
            self.kinds, self.recorded = {}, set()  # frees the memory of all first
            # One position more than any step reads: the whole cache would be contiguous, which a
            # part of it is not, and torch.compile would compile again for that.
            self.cache = cache = KVCache(self.model, rows, visible + 1, r)
        cache.start(self.model, prompts, seed)
        T = max(map(len, prompts)) - 1
        if not T:
            return
        # Cache entries of the padding are overwritten before any token sees them.
        padded = [(prompt + [0] * T)[:T] for prompt in prompts]
        tokens = torch.tensor(padded, device=cache.index.device)
        # Large matmuls gain little from compiling.
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        with eager:
            noise = cache.noise[:T].expand(len(tokens), -1, -1)
            layers = cache.layers(len(tokens), cache.index[None, :T], r)
            self.run(tokens, cache.rope[:, :T], noise, *layers)

    def run(self, tokens, rope, noise, prelude, core, coda):
        """
        Run a pass over tokens (rows, T), with the rotary angles and the noise of their positions,
        and what KVCache.layers() returns. Returns the head's input (rows, T, C).
        """
        rope = rope.unbind()
        e, s = self.model.run_prelude(tokens, noise, rope, prelude)
        s = self.model.recur(s, e, rope, len(core), core)
        return self.model.run_coda(s, rope, coda)

    def launch(self, rows, end, r, temperature, top_k):
        """
        Run a step, which continues each row by a token, without waiting for the GPU. end: an
        exclusive upper bound on their positions. Returns the new tokens, and on a GPU an event
        after which they can be read.
        """
        kind = self.size(rows), self.visible(end), r, temperature, top_k
        if kind not in self.kinds:  # not recorded yet, since its first run compiles and tunes
            self.kinds[kind] = self.make_step(*kind)
        elif self.recording and kind not in self.recorded:
            self.kinds[kind] = self.record(self.kinds[kind])
            self.recorded.add(kind)
        if temperature:
            self.cache.draws[:self.size(rows)].exponential_(generator=self.rng)
        new = self.kinds[kind]()
        new = new.to("cpu", non_blocking=True, copy=True)  # from a GPU, to pinned memory
        event = None
        if self.on_gpu:
            event = torch.cuda.Event()
            event.record()
        return new, event

    def make_step(self, rows, visible, r, temperature, top_k):
        """
        Return a function that continues each of `rows` rows by a token, reading `visible` positions
        of the cache. It returns the tokens (rows, 1), or NO_TOKEN: see choose(). All that it uses
        stays in place, because a CUDA graph has the same addresses at each replay.
        """
        cache = self.cache
        tokens, positions, draws = cache.tokens[:rows], cache.positions[:rows], cache.draws[:rows]
        mask = cache.rope.new_empty(rows, 1, 1, visible)
        layers = cache.layers(rows, positions, r, visible, mask)

        def step():
            rope, noise = self.look_up(cache.rope, cache.noise, positions, mask)
            logits = self.model.logits(self.run(tokens, rope, noise, *layers))
            if temperature:
                chosen, new = choose(logits, draws, temperature, top_k)
            else:
                chosen, new = self.choose_likeliest(logits)
            tokens.copy_(chosen)
            positions.add_(1)
            return new

        return step

    def record(self, step):
        """Record a step as a CUDA graph. Returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a graph or a kernel that is freed meanwhile would invalidate the recording
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                new = step()
        finally:
            gc.enable()
        self.pool = graph.pool()  # for the other graphs, too, as no two run at once

        def replay():
            graph.replay()
            return new

        return replay


def one_late(items):
    """Yield each item after the next one has been made, so that a GPU need not wait."""
    for item, _ in pairwise(chain(items, [None])):
        yield item


def look_up(rope, noise, positions, mask):
    """
    Return the rotary angles (2, rows, 1, 1, head_dim / 2) and the noise (rows, 1, C) of positions
    (rows, 1), and hide the later ones in mask (rows, 1, 1, visible).
    """
    index = torch.arange(mask.shape[-1], device=mask.device)
    mask.copy_(torch.where(index > positions[:, None, None], -torch.inf, 0.0))
    return rope[:, positions], noise[positions]


def choose(logits, draws=None, temperature=0.0, top_k=0):
    """
    Choose the next tokens (rows, 1) by their logits (rows, 1, V): without draws the likeliest ones.
    draws (rows, 1, V): numbers from Exp(1), to sample from softmax(logits / temperature). top_k: if
    not 0, from the k likeliest tokens only.

    Returns the tokens, and once more with NO_TOKEN in rows whose logits are not all finite. So
    generate() learns of that from the tokens, and does not wait for the GPU a second time.
    """
    scores = logits
    if draws is not None:
        if top_k:
            lowest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
            scores = logits.masked_fill(logits < lowest, -torch.inf)
        # The Gumbel trick: softmax(logits / temperature) is where logits / temperature - log(draws)
        # is largest. Not divided, since that would overflow at a tiny temperature.
        scores = scores - temperature * draws.log()
    tokens = scores.argmax(-1)
    return tokens, tokens.where(logits.sum(-1).isfinite(), NO_TOKEN)


def answer_batch(decoder, tokenizer, prompts, max_new_tokens, stops, r, seed=0):
    """
    Continue a batch of prompts, lists of ids, at depth r, each until it has produced one of the
    strings `stops`, an end of text, or max_new_tokens. seed: for the noise s_0.

    Returns the new texts, cut at the first stop string, and whether max_new_tokens cut them off,
    such as [(" It is 18.", False), ("", False)].
    """
    new = [[] for _ in prompts]
    ends = decoder.model.config.ends

    def is_last(row, token):
        text = tokenizer.decode(new[row][-WINDOW:])  # generate() has already yielded `token`
        return token in ends or any(stop in text for stop in stops)

    for row, token in decoder.generate(prompts, max_new_tokens, r, is_last, seed=seed):
        new[row].append(token)
    cut = [not is_last(row, ids[-1]) for row, ids in enumerate(new)]
    control = {*tokenizer.special.values(), *ends}  # not part of a text, as in the harness
    texts = [tokenizer.decode([i for i in ids if i not in control]) for ids in new]
    return [(cut_at_stops(text, stops), is_cut) for text, is_cut in zip(texts, cut)]


def cut_at_stops(text, stops):
    """Return `text` up to the first of the stop strings: ("18 Q: Is", ["Q:"]) gives "18 "."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


# ---------------------------------------------------------------------------------------- the cache

class KVCache:
    """
    The keys and values of a batch, and the rotary angles and the noise of each position. The token
    at position p of a row is at index p, and no token sees later ones. So texts of different
    lengths can share a batch, and what an earlier batch left behind is never seen.

    rows: the most texts. capacity: the most tokens of each. r: the most recurrences.
    """

    def __init__(self, model, rows, capacity, r):
        self.config = c = model.config
        self.rows, self.capacity, self.r = rows, capacity, r
        weight = model.embed.weight
        self.index = torch.arange(capacity, device=weight.device)
        rope = torch.stack(model.rope(capacity))
        self.rope = rope.to(weight.dtype)  # (2, capacity, 1, head_dim / 2)
        self.noise = weight.new_empty(capacity, c.n_embd, dtype=torch.float32)
        # Zeros, not empty(): masked values are multiplied by 0, and 0 times NaN is NaN.
        zeros = weight.new_zeros(rows, capacity, c.n_kv_head, c.head_dim)
        self.keys = [zeros.clone() for _ in range(c.depth(r))]
        self.values = [zeros.clone() for _ in range(c.depth(r))]
        self.tokens = self.index.new_zeros(rows, 1)     # the last token of each row
        self.positions = self.index.new_zeros(rows, 1)  # and its position
        self.draws = self.noise.new_empty(rows, 1, c.vocab_size)  # for sampling

    def start(self, model, prompts, seed):
        """Set the last tokens of a batch, and the noise of a seed."""
        self.noise.copy_(model.initial_state(1, self.capacity, seed)[0])
        last = [(prompt[-1], len(prompt) - 1) for prompt in prompts]
        last += [(0, 0)] * (self.rows - len(prompts))
        last = torch.tensor(last, device=self.index.device)
        self.tokens.copy_(last[:, :1])
        self.positions.copy_(last[:, 1:])

    def keep(self, rows):
        """Move these rows, indices such as [0, 3], to the front."""
        index = torch.tensor(rows, device=self.index.device)
        for tensor in (self.tokens, self.positions, *self.keys, *self.values):
            tensor[:len(rows)] = tensor[index]

    def layers(self, rows, positions, r, visible=None, mask=None):
        """
        Return the caches of the prelude, of each recurrence, and of the coda, for a pass over the
        tokens of the first `rows` rows at positions, (rows, T) or (1, T): functions of q, k and v.
        """
        c = self.config
        write = torch.arange(rows, device=positions.device)[:, None], positions
        layers = [partial(attend_cached, keys[:rows, :visible], values[:rows, :visible], write,
                          mask) for keys, values in zip(self.keys, self.values)]
        prelude, layers = layers[:c.n_prelude], layers[c.n_prelude:]
        coda, layers = layers[:c.n_coda], layers[c.n_coda:]
        core = [layers[i * c.n_core:(i + 1) * c.n_core] for i in range(r)]
        return prelude, core, coda


def attend_cached(keys, values, write, mask, q, k, v):
    """
    Store the keys and values of new tokens, k and v (rows, n_kv_head, T, head_dim), in those of one
    layer at one recurrence, both (rows, visible, n_kv_head, head_dim). Returns the attention (rows,
    n_head, T, head_dim) of the queries q.

    write: the indices (rows, 1) and (rows, T) of the new tokens. mask: (rows, 1, 1, visible), to
    add to the scores of one token per row; None for a pass over whole prompts.
    """
    keys[write] = k.transpose(1, 2)
    values[write] = v.transpose(1, 2)
    if mask is None:
        return attend(q, k, v, is_causal=True)
    # Tells torch.compile that the cache's n_kv_head and head_dim are those of k, constants.
    assert keys.shape[2:] == values.shape[2:] == k.shape[1::2]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    # One token per row has n_head queries. Those that share a kv head become tokens of one
    # head, so that the cache is read once.
    rows, n_kv_head, _, head_dim = k.shape
    heads = q.reshape(rows, n_kv_head, -1, head_dim)
    # On a GPU, SDPA uses a multiprocessor for each row and kv head: for one row, too few.
    by_inductor = torch.compiler.is_compiling() and (rows == 1 or not q.is_cuda)
    y = (attend_one if by_inductor else attend)(heads, k, v, mask)
    return y.reshape(q.shape)  # on a GPU, a copy: SDPA's output is laid out as (rows, T, H, D)


def attend_one(q, k, v, mask):
    """
    attend() for one token per row. Compiled for a CPU, this is two loops over the cache, which
    take about two thirds as long as SDPA's kernel.
    """
    scores = (q.unsqueeze(3).float() * k.unsqueeze(2).float()).sum(-1)  # (..., groups, visible)
    p = (scores / math.sqrt(q.shape[-1]) + mask).softmax(-1)
    return (p.unsqueeze(-1) * v.unsqueeze(2).float()).sum(-2).type_as(v)


# ------------------------------------------------------------------------------- compiled for a CPU

class FewRows(Linear):
    """
    What a Linear becomes in compiled decoding on a CPU, where reading the weights takes most of the
    time. For up to FEW_ROWS rows, a compiled multiply-and-sum reads them once and beats a BLAS
    call.
    """

    def forward(self, x):
        *shape, fan_in = x.shape
        rows = math.prod(shape)
        if rows > FEW_ROWS or not torch.compiler.is_compiling():
            return super().forward(x)
        x = x.to(self.weight.dtype)
        # Large ones in quarters: a core that reads four places at once waits less for the memory.
        parts = self.weight.float().chunk(4 if self.weight.numel() > IN_CACHE else 1)
        y = [(part * row.float()).sum(-1) for row in x.view(rows, fan_in) for part in parts]
        y = torch.cat(y).type_as(x).view(*shape, -1)
        return y if self.bias is None else y + self.bias


# ---------------------------------------------------------------------------------------- --trace

def token_text(tokenizer, token):
    """Return a token's text, such as "swap.", or its repr if blank, unprintable or incomplete."""
    for name, control in tokenizer.special.items():
        if token == control:
            return name
    text = tokenizer.decode([token])
    readable = text.strip() and text.isprintable() and "\ufffd" not in text
    return text if readable else repr(text)


@torch.inference_mode()
def trace(model, tokenizer, ids, steps, seed, end):
    """
    Print the most likely next token at each r, with a star if it differs from that of the largest
    r: one line for each piece of a prompt, ids, that ends with a token that ends with `end`.
    """
    shown = [t for t, token in enumerate(ids) if tokenizer.decode([token]).strip().endswith(end)]
    if not shown:
        raise UserError(f"the prompt has no tokens that end with {end!r}")
    if end:
        names = [" ".join(tokenizer.decode(ids[a + 1:b + 1]).split())
                 for a, b in zip([-1, *shown], shown)]
    else:
        names = [token_text(tokenizer, token) for token in ids]
    context = model.config.context
    if len(ids) > context:
        raise UserError(f"a prompt of {len(ids)} tokens is longer than the context of {context}")

    noise = model.initial_state(1, len(ids), seed)  # as in decoding
    idx = torch.tensor([ids], device=noise.device)
    found = []  # for each r, the likeliest tokens' probabilities and ids, both (len(shown),)
    for _, x in model.trajectory(idx, steps, noise):
        p = model.logits(x[0, shown]).softmax(-1)  # (len(shown), V)
        found.append(p.max(-1))
    probabilities, tokens = (torch.stack(x).cpu() for x in zip(*found))
    if not probabilities.isfinite().all():
        raise UserError(NOT_FINITE)

    columns = [["", *names, f"same as r = {steps[-1]}"]]
    for r, best, chosen, agrees in zip(steps, probabilities, tokens, tokens == tokens[-1]):
        column = [f"  r = {r}" if r else "  next"]
        for p, token, agree in zip(best, chosen.tolist(), agrees):
            column.append(f"  {p:4.0%} {token_text(tokenizer, token)}{'' if agree else '*'}")
        columns.append([*column, f"  {agrees.sum()} of {len(shown)}"])
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns):
        print(" ".join(map(str.ljust, row, widths)).rstrip())


# ------------------------------------------------------------------------------------ the command

def device_and_dtype(model):
    """Return the names of a model's device and dtype, such as ("NVIDIA A100", "bfloat16")."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name() if weight.is_cuda else "cpu"
    return device, str(weight.dtype).removeprefix("torch.")


def load_model(folder, dtype="auto"):
    """Load the model and Tokenizer of a checkpoint or run, on this rank's GPU if there is one."""
    if DEVICE != "cpu":
        torch.cuda.set_device(DEVICE)
    model = RecurrentLM.load(folder, DEVICE, getattr(torch, choose_dtype(dtype, DEVICE)))
    return model, load_tokenizer(model.folder, model.config)


def respond(decoder, tokenizer, args, prompt):
    """Continue a prompt at each r, and print the text token by token."""
    c = decoder.model.config
    prompt = tokenizer.encode(prompt, bos=True)
    limit = max(1, min(args.tokens, c.context - len(prompt)))  # so generate() rejects long ones
    for r in args.steps:
        if c.n_core:
            say(f"--- r = {r}", sys.stderr)
        ids = [*prompt]
        shown = len(tokenizer.decode(ids))
        began = time.perf_counter()
        new = decoder.generate([prompt], limit, r, lambda _, token: token in c.ends,
                               temperature=args.temperature, top_k=args.top_k, seed=args.seed)
        for count, (_, token) in enumerate(new, 1):
            if token not in c.ends:
                ids.append(token)
            # Decode all: a single token may lack its leading space or be part of a character.
            text = tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # the character may be complete with the next token
                print(text[shown:], end="", flush=True)
                shown = len(text)
        print(text[shown:], flush=True)
        seconds = time.perf_counter() - began
        say(f"--- {count} tokens in {seconds:.1f} s", sys.stderr)


def converse(decoder, tokenizer, args):
    """Read prompts from the terminal, and answer each independently."""
    with suppress(ImportError):
        import readline  # noqa: F401, for arrow keys and lines of any length in input()
    say("Type a prompt. Ctrl-D ends.", sys.stderr)
    sys.stdin.reconfigure(errors="surrogateescape")  # so that a wrong byte ends only its prompt
    while True:
        say("> ", sys.stderr, end="")
        try:
            if line := input():
                respond(decoder, tokenizer, args, line)
        except EOFError:
            return
        except UserError as e:  # a mistake does not end the session
            say(e, sys.stderr)


def parse_args():
    parser = Parser(__doc__, usage="sample.py [flags]")
    flag = parser.add_argument
    flag("--model", type=paths, metavar="FOLDER",
         default=os.path.relpath(f"{__file__}/../assets/tiny"),
         help="checkpoint or run folder; default: %(default)s, a tiny model of the shell game")
    flag("--prompt", metavar="TEXT",
         help="default: read prompts from the terminal; with --trace, a story of the shell game")
    flag("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    flag("--compile", type=yes_or_no, nargs="?", const=True, default=False,
         help="use torch.compile, which takes a while (false)")
    flag("--steps", type=recurrences,
         help="recurrences r, or several such as 1,4,32; default: the model's own, or with "
              "--trace several from 1 to 32")
    flag("--tokens", type=positive, default=256, help="generate at most this many tokens (256)")
    flag("--temperature", type=non_negative, default=0.0,
         help="of sampling; 0 (default): always the likeliest token")
    flag("--top_k", type=natural, default=0,
         help="sample from this many of the likeliest tokens only; 0 (default): from all")
    flag("--seed", type=random_seed, default=0,
         help="seed of the initial state and of sampling (0)")
    flag("--trace", nargs="?", const="", metavar="END",
         help="instead of a text, show what each r would say after each token of the prompt; "
              "--trace . shows it only at full stops")
    args = parser.parse_args()
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    refuse_idle(given, (
        (args.trace is not None, ("compile", "tokens", "temperature", "top_k"),
         "no effect with --trace, which decodes no text"),
        (not args.temperature, ["top_k"], "needs a --temperature above 0")))
    return args


def main():
    args = parse_args()
    model, tokenizer = load_model(args.model, args.dtype)
    c = model.config
    device, dtype = device_and_dtype(model)
    # Everything but the model's text goes to stderr.
    say(f"{model.folder}: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, {dtype} on {device}",
        sys.stderr)
    tracing = args.trace is not None
    args.steps = args.steps or (DEPTHS if tracing else [c.mean_recurrence])
    if not c.n_core:
        args.steps = [0]
    if tracing:
        ids = tokenizer.encode(STORY if args.prompt is None else args.prompt, bos=True)
        trace(model, tokenizer, ids, args.steps, args.seed, args.trace)
        return
    decoder = Decoder(model, args.compile)
    if args.prompt is None:
        converse(decoder, tokenizer, args)
    else:
        respond(decoder, tokenizer, args, args.prompt)


if __name__ == "__main__":
    cli(main)
