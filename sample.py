"""
Decoding: an exact KV cache for recurrent depth, drafts, exits, and text streamed to the terminal.

    python sample.py --steps 32                    # newest checkpoint, a prompt of its own
    python sample.py --steps 1,4,32                # the same prompt at several depths
    python sample.py --model out/tinyllama --steps 32 --dtype bfloat16 --compile --draft_steps 2
    python sample.py --model out/tinyllama --steps 32 --exit kl --exit_threshold 0.001
    python sample.py --model out/tinyllama --interactive
    echo "Once upon a time" | python sample.py --model out/tinyllama --prompt - --temperature 0.8

What is unusual here:
- Every recurrence of every core layer has keys and values of its own, so the cache grows with r:
  prelude + r * core + coda slots (--kv last: a few, whatever r is).
- The recurrences of a token depend on earlier tokens only. So those of a cheap draft are the first
  ones of the full answer, and nothing is computed twice.
- All recurrences have the same weights, so rows of a batch may be at different ones in one pass.
- s_0 is noise, so greedy text depends on a seed. The noise of a position follows from (seed,
  position) alone, whatever else is in the batch. --state zero does without noise.

Text goes to stdout, everything said about it to stderr. eval_gsm8k.py decodes with generate() too.
"""
import argparse
import glob
import os
import re
import sys
import time
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from data import Tokenizer, cli, describe, read_json
from model import RecurrentLM

COLUMNS = 64    # the cache is read up to a multiple of so many columns, for few shapes to compile
PREFILL = 512   # prompt tokens of a row at once


@dataclass
class Decoding:
    """How to decode. What is not exact by nature (exit, kv) is off by default."""
    temperature: float = 0.0      # 0: greedy
    top_k: int = 0                # 0: off
    top_p: float = 1.0            # 1: off
    seed: int = 0                 # of the noise and of sampling
    state: str = "noise"          # s_0: noise, or zero
    kv: str = "full"              # full: a slot per recurrence; last or N: so many slots a layer
    exit: str | None = None       # kl: a token stops recurring once it has settled, see adaptive()
    exit_threshold: float = 0.001   # in nats
    min_steps: int = 1            # no token stops before
    draft_steps: int = 0          # recurrences of drafts (0: off), see speculative()
    draft_len: int = 12           # tokens drafted at a time

    def __post_init__(self):
        if not re.fullmatch("full|last|[1-9][0-9]*", self.kv):
            sys.exit(f"--kv {self.kv}: must be full, last or a number of slots")
        if self.exit not in (None, "kl") or self.state not in ("noise", "zero"):
            sys.exit(f"--exit {self.exit} --state {self.state}: give kl; noise or zero")
        if self.draft_steps and (self.exit or self.kv != "full"):
            sys.exit("--draft_steps: goes together with neither --exit nor --kv")


# -------------------------------------------------------------------------------------- the cache

class Decoder:
    """
    A model in the middle of B texts at depth r: the cache, and one pass at a time.

    The token at position p of a row has its keys and values in column p, and what lies in later
    columns is never seen. So texts of any lengths go together without padding, and to roll back is
    to continue from an earlier position. Each layer has a pair of cached tensors (keys, values),
    (slots, B, S, n_kv_head, D), with one slot in prelude and coda. o: a Decoding.
    """

    def __init__(self, model, r, B, S, o):
        c, weight = model.config, model.embed.weight
        # One block more than fits. A view of all columns would be contiguous, and compiled code is
        # for one or the other.
        S = (S // COLUMNS + 2) * COLUMNS
        self.model, self.r, self.W, self.graph = model, r, 0, None
        self.slots = r
        if o.kv != "full":
            self.slots = min(r, 1 if o.kv == "last" else int(o.kv))

        def cache(layers, slots):
            # Zeros, as what nobody sees yet is multiplied by zero and so must be finite.
            shape = (slots, B, S, c.n_kv_head, c.head_dim)
            return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(layers)]

        self.layers = cache(c.n_prelude, 1), cache(c.n_core, self.slots), cache(c.n_coda, 1)
        self.table = [t.to(weight.dtype) for t in model.rope(S)]
        self.noise = torch.zeros(S, c.n_embd, device=weight.device)  # s_0 of each position
        if c.n_core and o.state == "noise":
            self.noise = model.initial_state(S, 1, o.seed, range(S))[:, 0]
        self.column = torch.arange(max(S, B), device=weight.device)

    def place(self, position, end, rows=None):
        """The next pass is of tokens at position (B, T), below `end`, of these rows (or all)."""
        width = -(-end // COLUMNS) * COLUMNS
        if width != self.W:
            self.view(width)
        self.position = position
        self.rope = [t[position].unsqueeze(1) for t in self.table]  # (B, 1, T, D/2)
        c = self.model.config
        # Query heads of one kv head are rows of one (see Attention), each with the same mask.
        groups = c.n_head // c.n_kv_head if position.shape[1] > 1 else 1
        unseen = (self.column[:width] > position[:, :, None]).repeat(1, groups, 1)
        mask = torch.zeros_like(unseen, dtype=self.table[0].dtype)
        self.mask = mask.masked_fill_(unseen, -torch.inf).unsqueeze(1)  # (B, 1, rows, W)
        self.rows = self.column[:len(position)] if rows is None else rows
        self.at = (self.rows[:, None], position), None if rows is None else (rows,)

    def view(self, width):
        """The first `width` columns of the cache, a pair (keys, values) (B, W, H, D) per layer."""
        def columns(layers, slot):
            return [(k[slot, :, :width], v[slot, :, :width]) for k, v in layers]

        self.W = width
        prelude, core, coda = self.layers
        self.prelude, self.coda = columns(prelude, 0), columns(coda, 0)
        self.core = [columns(core, slot) for slot in range(self.slots)]
        self.all_slots = columns(core, slice(None))  # for rows that are at different recurrences

    def slot(self, i):
        """Recurrence i (from 0) -> its slot."""
        return min(i, self.slots - 1)

    def begin(self, idx):
        """Tokens (B, T) -> e and s_0, both (B, T, C)."""
        x = self.model.embed_idx(idx)
        e = self.model.run_prelude(x, self.rope, self.mask, self.prelude, self.at)
        return e, self.noise[self.position].type_as(e) if self.model.config.n_core else e

    def recur(self, s, e, first, last):
        """The state after `first` recurrences -> after `last`."""
        kvs = [self.core[self.slot(i)] for i in range(first, last)]
        return self.model.recur(s, e, self.rope, last - first, self.mask, kvs, self.at)

    def recur_each(self, s, e, done):
        """One recurrence of rows that have `done` (a list) different numbers behind them."""
        slots = torch.tensor([self.slot(i) for i in done], device=s.device)
        at = (slots[:, None], *self.at[0]), (slots, self.rows)
        return self.model.run_core(s, e, self.rope, self.mask, self.all_slots, at)

    def end(self, s):
        """State (B, T, C) -> what the head reads."""
        return self.model.run_coda(s, self.rope, self.mask, self.coda, self.at)

    def logits(self, s):
        """State (B, T, C) -> logits (B, T, V) float32."""
        return self.model.head(self.end(s)).float()

    def prefill(self, prompts):
        """Lists of ids -> logits (B, V) float32 after the last id of each."""
        if self.model.compiled:  # large products are as fast without compiling them
            with torch.compiler.set_stance("force_eager"):
                return self.run_prefill(prompts)
        return self.run_prefill(prompts)

    def run_prefill(self, prompts):
        device, row = self.column.device, self.column[:len(prompts)]
        T = max(map(len, prompts))
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        idx = torch.tensor([list(p) + [0] * (T - len(p)) for p in prompts], device=device)
        out = self.table[0].new_zeros(1)
        for start in range(0, T, PREFILL):
            end = min(start + PREFILL, T)
            self.place(self.column[start:end].expand(len(prompts), -1), end)
            e, s = self.begin(idx[:, start:end])
            x = self.end(self.recur(s, e, 0, self.r))[row, (last - start).clamp(0, end - start - 1)]
            out = torch.where((last >= start)[:, None], x, out)  # else an earlier part had the last
        if out.isnan().any():
            sys.exit("the model's states are not numbers: its weights are damaged (--model)")
        return self.model.head(out).float()

    def step(self, token, position, end):
        """A new token (B,) of every row at position (B,), below `end` -> logits (B, V) float32."""
        if self.model.compiled and token.is_cuda:
            return self.replay(token, position, end)
        return self.run_step(token, position, end)

    def run_step(self, token, position, end):
        self.place(position[:, None], end)
        e, s = self.begin(token[:, None])
        return self.logits(self.recur(s, e, 0, self.r))[:, -1]

    def replay(self, token, position, end):
        """
        step() as a CUDA graph: thousands of small kernels, recorded once and launched as one. The
        recipe is torch's own ("Whole-network capture"). No GPU has run it yet.
        """
        key = -(-end // COLUMNS), len(token)
        if not self.graph or self.graph[0] != key:  # texts only grow: no earlier shape comes again
            inputs, side = (token.clone(), position.clone()), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, and lets libraries take their memory
                    self.run_step(*inputs, end)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.run_step(*inputs, end)
            self.graph = key, graph, inputs, out
        _, graph, inputs, out = self.graph
        inputs[0].copy_(token)
        inputs[1].copy_(position)
        graph.replay()
        return out

    def fill(self, row, position, steps):
        """A token that stopped after `steps` has its last keys and values in all later slots."""
        for keys, values in self.layers[1]:
            for t in (keys, values):
                t[steps:, row, position] = t[self.slot(steps - 1), row, position]

    def keep(self, rows):
        """Continue with these rows (a tensor of indices) of the batch only."""
        self.layers = [[(k[:, rows], v[:, rows]) for k, v in part] for part in self.layers]
        self.W, self.graph = 0, None


# ------------------------------------------------------------------------------------ next tokens

def distribution(logits, o):
    """
    Probabilities (..., V) of the next token. Greedy: 1 for the likeliest. Else top-k, then the
    nucleus: the fewest likely tokens that hold probability top_p (arXiv 1904.09751).
    """
    if o.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = (logits / o.temperature).softmax(-1)
    if o.top_k or o.top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        if o.top_k:
            p[..., o.top_k:] = 0
            p = p / p.sum(-1, keepdim=True)
        p[p.cumsum(-1) - p >= o.top_p] = 0  # keeps the token that crosses top_p
        p = torch.zeros_like(p).scatter_(-1, order, p)
    return p / p.sum(-1, keepdim=True)


def draw(p, rng):
    """Tokens (...) drawn from probabilities (..., V)."""
    return torch.multinomial(p.flatten(0, -2), 1, generator=rng).view(p.shape[:-1])


def pick(logits, o, rng):
    """Next tokens (B,) of logits (B, V)."""
    return logits.argmax(-1) if o.temperature == 0 else draw(distribution(logits, o), rng)


# ------------------------------------------------------------------------- three ways to decode

@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps=None, ends=None, **options):
    """
    Decode a batch. Yields (row, token, recurrences it took) for every new token, max_new_tokens of
    each row. It knows no end of text: ends(row, token) -> True ends a row.

    prompts: lists of ids of any lengths. Greedily, each gives the tokens that it gives alone.
    steps: r (default: config.mean_recurrence; a feed-forward model ignores it). options: those of
    Decoding. Exits on NaN logits.
    """
    c, o = model.config, Decoding(**options)
    r = sum(model.split_steps(steps)) if c.n_core else 0
    T = max(map(len, prompts))
    assert all(prompts) and max_new_tokens > 0, "a prompt is empty, or no token is asked for"
    assert T + max_new_tokens <= c.context, f"{T} + {max_new_tokens} tokens, context {c.context}"
    way = plain
    if r and o.exit:
        way = adaptive
    if r and o.draft_steps:
        way = speculative
        if o.draft_steps >= r:
            sys.exit(f"--draft_steps {o.draft_steps}: drafts need fewer recurrences than r = {r}")
    decoder = Decoder(model, r, len(prompts), T + max_new_tokens + o.draft_len, o)
    rng = torch.Generator(model.embed.weight.device).manual_seed(o.seed)
    live = set(range(len(prompts)))  # the rows that go on
    count = [0] * len(prompts)
    for row, token, took in way(decoder, prompts, o, rng, live):
        count[row] += 1
        if count[row] <= max_new_tokens and row in live:
            yield row, token, took
            if count[row] == max_new_tokens or (ends and ends(row, token)):
                live.discard(row)


def shrink(d, rows, live, *tensors):
    """Once half of the rows have ended, the others go on alone: -> rows, tensors (B, ...)."""
    if 2 * len(live) > len(rows):
        return rows, *tensors
    keep = [i for i, row in enumerate(rows) if row in live]
    index = torch.tensor(keep, device=d.column.device)
    d.keep(index)
    return [rows[i] for i in keep], *(t[index] for t in tensors)


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
        rows, token, position = shrink(d, rows, live, token, position)
        end += 1
        logits = d.step(token, position, end)
        position = position + 1


def speculative(d, prompts, o, rng, live):
    """
    Self-speculation. `draft_steps` recurrences draft tokens. One pass then takes the states of all
    drafts on to r, and the usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects
    them, so what comes out has the distribution of r. Nothing is computed twice but the coda.
    """
    rows, n = list(range(len(prompts))), o.draft_len
    position = torch.tensor([len(p) for p in prompts], device=d.column.device)
    token = pick(d.prefill(prompts), o, rng)
    for row, t in zip(rows, token.tolist()):
        yield row, t, d.r
    while live:
        rows, token, position = shrink(d, rows, live, token, position)
        top = int(position.max()) + 1
        tokens, guesses, kept = [token], [], []
        for i in range(n + 1):  # the last draft is a token to go on from, if all are accepted
            d.place(position[:, None] + i, top + i)
            e, s = d.begin(tokens[-1][:, None])
            s = d.recur(s, e, 0, o.draft_steps)
            kept.append((e, s))
            if i < n:
                guesses.append(distribution(d.logits(s)[:, -1], o))
                tokens.append(draw(guesses[-1], rng))
        d.place(position[:, None] + d.column[:n + 1], top + n)
        e, s = (torch.cat(x, 1) for x in zip(*kept))
        p = distribution(d.logits(d.recur(s, e, o.draft_steps, d.r)), o)  # (B, n + 1, V)
        q, drafts = torch.stack(guesses, 1), torch.stack(tokens[1:], 1)   # (B, n, V), (B, n)
        accepted, token = verify(p, q, drafts, rng)
        new = torch.cat((drafts, token[:, None]), 1).scatter_(1, accepted[:, None], token[:, None])
        for row, row_tokens, count in zip(rows, new.tolist(), accepted.tolist()):
            for t in row_tokens[:count + 1]:
                yield row, t, d.r
        # An ended row that is still here must not leave its columns.
        going = torch.tensor([row in live for row in rows], device=position.device)
        position = position + (accepted + 1) * going


def verify(p, q, drafts, rng):
    """
    Probabilities of the model p (B, n + 1, V) and of the drafts q (B, n, V), drafts (B, n) -> how
    many are accepted (B,), and the token (B,) that follows them: speculative sampling.
    """
    index = drafts[:, :, None]
    ratio = (p[:, :-1].gather(2, index) / q.gather(2, index))[:, :, 0]
    luck = torch.rand(ratio.shape, device=ratio.device, generator=rng)
    accepted = (luck < ratio).long().cumprod(1).sum(1)
    last = torch.arange(len(p), device=p.device), accepted
    q = torch.cat((q, torch.zeros_like(q[:, :1])), 1)  # after the last draft: all of p
    left = (p[last] - q[last]).clamp_(min=0)
    left = torch.where(left.any(-1, keepdim=True), left, p[last])  # p and q equal but for rounding
    return accepted, draw(left, rng)


def adaptive(d, prompts, o, rng, live):
    """
    A token stops recurring once its last recurrence changed the distribution over the next token by
    less than exit_threshold nats, KL(p_i || p_(i-1)) (Geiping et al., arXiv 2502.05171), or at r. A
    row that is done goes on with its next token at once, beside rows at other recurrences: a batch
    takes the time of its mean, not of its slowest. All ids of a prompt but the last take r.
    """
    device, B = d.column.device, len(prompts)
    if max(map(len, prompts)) > 1:
        d.prefill([p[:-1] or [0] for p in prompts])
    token, position = [p[-1] for p in prompts], [len(p) - 1 for p in prompts]
    done = [0] * B
    e = torch.zeros(B, 1, d.noise.shape[1], device=device)
    s, logp = e.clone(), torch.zeros(B, d.model.config.vocab_size, device=device)

    def place(rows):
        at = torch.tensor([[position[i]] for i in rows], device=device)
        d.place(at, 1 + max(position[i] for i in rows), torch.tensor(rows, device=device))

    while live:
        rows = sorted(live)
        fresh = [i for i in rows if done[i] == 0]
        if fresh:
            place(fresh)
            e[fresh], s[fresh] = d.begin(torch.tensor([[token[i]] for i in fresh], device=device))
        place(rows)
        s[rows] = d.recur_each(s[rows], e[rows], [done[i] for i in rows])
        logits = d.logits(s[rows])[:, -1]
        new = logits.log_softmax(-1)
        kl = F.kl_div(logp[rows], new, reduction="none", log_target=True).sum(-1)
        settled = (kl.clamp(min=0) < o.exit_threshold).tolist()  # below 0 by rounding only
        logp[rows] = new
        picked = pick(logits, o, rng).tolist()
        for i, small, t in zip(rows, settled, picked):
            done[i] += 1
            if done[i] == d.r or (small and done[i] >= max(2, o.min_steps)):
                d.fill(i, position[i], done[i])
                took, token[i], position[i], done[i] = done[i], t, position[i] + 1, 0
                yield i, t, took


# ------------------------------------------------------------- what every decoding script needs

def add_model_arguments(p, dtype):
    """The flags that every script with a model has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=device, help="cuda or cpu; default: %(default)s")
    p.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                   help=f"default: {dtype or 'as stored'}")
    p.add_argument("--seed", type=int, default=0, help="of the initial state and of sampling")
    p.add_argument("--state", default="noise", choices=("noise", "zero"), help="initial state")


def add_decoding_arguments(p):
    """The flags with which scripts say how to decode; see Decoding."""
    p.add_argument("--compile", action="store_true",
                   help="torch.compile: half a minute at first, then 2-3 times as fast")
    p.add_argument("--kv", default=Decoding.kv,
                   help="cache slots per layer: full (one a recurrence, exact), last (one), or N")
    p.add_argument("--exit", choices=("kl",), help="let tokens that have settled stop recurring")
    p.add_argument("--exit_threshold", type=float, default=Decoding.exit_threshold,
                   help="... once a recurrence changes less than so many nats")
    p.add_argument("--min_steps", type=int, default=Decoding.min_steps,
                   help="... but after so many at the earliest")
    p.add_argument("--draft_steps", type=int, default=Decoding.draft_steps,
                   help="draft tokens with so many recurrences, then verify them")
    p.add_argument("--draft_len", type=int, default=Decoding.draft_len,
                   help="... so many at a time")


def decoding(args):
    """{name: value} of Decoding's fields among a script's flags."""
    options = {f.name: getattr(args, f.name) for f in fields(Decoding) if f.name in args}
    Decoding(**options)
    return options


def load_model(folder, device="cpu", dtype=None, compile=False):
    """(model, tokenizer) of a checkpoint or run folder. dtype: its name, or None: as stored."""
    model = RecurrentLM.load(folder, device, dtype and getattr(torch, dtype)).eval()
    tokenizer = Tokenizer.load(model.folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        sys.exit(f"{model.folder}: its tokenizer has {tokenizer.vocab_size} ids, its model "
                 f"{model.config.vocab_size}: it is the tokenizer of another model")
    if compile:
        model.compile_parts(dynamic=True)
    return model, tokenizer


def parse_steps(text):
    """'1,4,32' -> [1, 4, 32]"""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        sys.exit(f"--steps {text}: give recurrences such as 32 or 1,4,32")
    return list(dict.fromkeys(map(int, text.split(","))))


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """The checkpoint under root that was written last; a recurrent one, if there is one."""
    found = []
    for path in glob.glob(os.path.join(root, "**", "config.json"), recursive=True):
        config = read_json(path)
        if config.get("model_type") == "nanoloop" and ".tmp-" not in path:
            found.append((config["n_core"] > 0, os.path.getmtime(path), os.path.dirname(path)))
    if not found:
        sys.exit(f"no checkpoint under {root}/: run `bash runs/tiny.sh` first, or give --model")
    return max(found)[2]


def default_prompt(folder):
    """A sample prompt of the data set that a checkpoint was trained on."""
    path = os.path.join(folder, "train.json")
    data = read_json(path)["config"]["data"] if os.path.exists(path) else ""
    meta = os.path.join(data, "meta.json")
    if not os.path.exists(meta):
        sys.exit(f"{folder}: does not say what it was trained on: give --prompt")
    return read_json(meta)["prompt"]


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


def continuation(model, tokenizer, args, prompt, r):
    """The text that follows prompt at depth r, piece by piece; says its speed at the end."""
    ids = tokenizer.encode(prompt, bos=True, special=args.special)
    room = min(args.tokens, model.config.context - len(ids))
    if not ids or room < 1:
        sys.exit(f"the prompt has {len(ids)} tokens, the context {model.config.context}: give at "
                 "least one word, and leave room")
    count = recurrences = 0

    def tokens():
        nonlocal count, recurrences
        for _, token, took in generate(model, [ids], room, r, **decoding(args)):
            count, recurrences = count + 1, recurrences + took
            if token == tokenizer.eos_id:
                return
            yield token

    began = time.perf_counter()
    yield from stream(tokenizer, ids, tokens())
    yield "\n"
    seconds = time.perf_counter() - began
    mean = f", {recurrences / count:.2f} recurrences a token" if args.exit else ""
    say(f"r = {r}: {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s{mean}")


def write(model, tokenizer, args, prompt, steps):
    """Stream to stdout, one text after another for several recurrences."""
    for r in steps:
        print(prompt, end="", flush=True)
        for piece in continuation(model, tokenizer, args, prompt, r):
            print(piece, end="", flush=True)


def interact(model, tokenizer, args, steps):
    """Prompts from the terminal, each on its own. /steps 16 or /steps 1,4,32 turns the dial."""
    say(f"r = {steps}; a line is a prompt; /steps N sets the recurrences; ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        try:
            if line.startswith("/steps "):
                steps = parse_steps(line.removeprefix("/steps ").strip())
            elif line:
                write(model, tokenizer, args, line, steps)
        except SystemExit as e:  # a mistake ends a text, not the session
            say(e)
        except KeyboardInterrupt:
            print()


def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_args():
    p = argparse.ArgumentParser(description="Stream text from a model.")
    p.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    p.add_argument("--steps", help="recurrences r, or several such as 1,4,32")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; - reads stdin")
    source.add_argument("--interactive", action="store_true",
                        help="ask for prompts; /steps 16 turns the dial")
    p.add_argument("--special", action="store_true",
                   help="read names of special tokens in the prompt, such as <|eot_id|>, as those")
    p.add_argument("--tokens", type=int, default=256, help="new tokens at most")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    p.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens")
    p.add_argument("--top_p", type=float, default=1.0,
                   help="... from the likeliest that hold this probability")
    add_model_arguments(p, dtype=None)
    add_decoding_arguments(p)
    return p.parse_args()


def main():
    args = parse_args()
    decoding(args)  # a wrong flag is said before the model is read
    prompt = args.prompt
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    model, tokenizer = load_model(args.model or newest_checkpoint(), args.device, args.dtype,
                                  args.compile)
    c = model.config
    steps = parse_steps(args.steps) if args.steps else [c.mean_recurrence]
    shape = f"({c.n_prelude},{c.n_core},{c.n_coda}) layers"
    say(f"{model.folder}, {shape}, {', '.join(describe(model))}")
    if not c.n_core:
        say("a feed-forward model: --steps, --exit, --draft_steps and --kv have no effect")
        steps = [0]
    if args.interactive:
        return interact(model, tokenizer, args, steps)
    if prompt is None:
        prompt = default_prompt(model.folder)
    write(model, tokenizer, args, prompt, steps)


if __name__ == "__main__":
    cli(main)
