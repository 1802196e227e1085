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
  prelude + r * core + coda slots. --kv last keeps one slot a core layer, whatever r is.
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
import re
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F

from data import Parser, Tokenizer, cli, describe, read_json
from model import RecurrentLM, UserError

COLUMNS = 64    # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens of a row in one pass


@dataclass
class Decoding:
    """How to decode. exit and kv make the result inexact and are off by default."""
    temperature: float = 0.0      # 0: greedy
    top_k: int = 0                # 0: off
    top_p: float = 1.0            # 1: off
    seed: int = 0                 # of the noise and of sampling
    state: str = "noise"          # s_0: noise or zero
    kv: str = "full"              # full: a slot per recurrence; last or N: 1 or N slots a layer
    exit: str | None = None       # kl: a token stops recurring once it has settled, see adaptive()
    exit_threshold: float = 0.001   # in nats
    min_steps: int = 1            # no token stops earlier
    draft_steps: int = 0          # recurrences of drafts (0, or r and more: off), speculative()
    draft_len: int = 12           # tokens drafted at a time

    def __post_init__(self):
        if not re.fullmatch("full|last|[1-9][0-9]*", self.kv):
            raise UserError(f"--kv {self.kv}: must be full, last or a number of slots")
        assert self.exit in (None, "kl") and self.state in ("noise", "zero"), self
        if self.draft_steps and (self.exit or self.kv != "full"):
            raise UserError("--draft_steps: cannot be combined with --exit or --kv")


# -------------------------------------------------------------------------------------- the cache

class Decoder:
    """
    B texts in the middle of being decoded at depth r: the cache, and one pass at a time.

    The token at position p of a row keeps its keys and values in column p, and no token sees later
    columns. So texts of any lengths share a batch without padding, and to roll back means to
    continue from an earlier position. S: columns that are needed. o: a Decoding.

    cache: for prelude, core and coda a tensor (layers, 2, slots, B, columns, n_kv_head, head_dim),
    where 2 stands for keys and values. The prelude and the coda have one slot.
    """

    def __init__(self, model, r, B, S, o):
        c, weight = model.config, model.embed.weight
        self.model, self.r, self.S, self.width, self.graph = model, r, S, 0, None
        self.slots = min(r, int({"full": r, "last": 1}.get(o.kv, o.kv)))
        # A block more than is needed: a view of all columns would be contiguous, for which
        # torch.compile would compile everything once more.
        S = (S // COLUMNS + 2) * COLUMNS
        shape = B, S, c.n_kv_head, c.head_dim
        # Zeros, because the mask multiplies what nobody may see by zero, so it has to be finite.
        self.cache = [weight.new_zeros(layers, 2, slots, *shape) for layers, slots in
                      ((c.n_prelude, 1), (c.n_core, self.slots), (c.n_coda, 1))]
        self.column = torch.arange(max(S, B), device=weight.device)
        self.last = self.column.new_full((B, S), self.slots - 1)  # last slot of each token
        self.table = [t.to(weight.dtype) for t in model.rope(S)]
        noise = model.initial_state(S, 1, o.seed, range(S))[:, 0]
        self.noise = noise * (o.state == "noise")  # s_0 of each position

    def place(self, position, end):
        """The next pass takes tokens at `position` (B, T), all of them below `end`."""
        self.width = -(-end // COLUMNS) * COLUMNS
        self.position = position
        self.rope = [t[position].unsqueeze(1) for t in self.table]  # (B, 1, T, D/2)
        # Attention joins the query heads that share a kv head, and each needs the same mask: 0
        # for what it sees and -inf for the rest, (B, 1, groups * T, width).
        groups = self.model.config.n_head // self.model.config.n_kv_head
        seen = self.column[:self.width] <= position[:, :, None]
        self.mask = seen.repeat(1, groups, 1).unsqueeze(1).to(self.table[0].dtype).log()
        self.rows = self.column[:len(position), None]
        self.at = (self.rows, position), None

    def kv(self, part, slot):
        """(keys, values) (B, width, H, D) per layer of the prelude (0), core (1) or coda (2)."""
        return [layer.unbind() for layer in self.cache[part][:, :, slot, :, :self.width]]

    def begin(self, idx):
        """Tokens (B, T) -> e and s_0, both (B, T, C)."""
        x = self.model.embed_idx(idx)
        e = self.model.run_prelude(x, self.rope, self.mask, self.kv(0, 0), self.at)
        return e, self.noise[self.position].type_as(e) if self.model.config.n_core else e

    def recur(self, s, e, first, last):
        """The state after `first` recurrences -> after `last`."""
        kvs = [self.kv(1, min(i, self.slots - 1)) for i in range(first, last)]
        return self.model.recur(s, e, self.rope, last - first, self.mask, kvs, self.at)

    def recur_each(self, s, e, done):
        """
        One recurrence of rows that have done (B,) different numbers of them. Of a token that
        stopped earlier, later recurrences see the last keys and values.
        """
        slot = done.clamp(max=self.slots - 1)[:, None]
        self.last[self.rows, self.position] = slot
        seen = torch.minimum(slot, self.last[:, :self.width])
        at = (slot, *self.at[0]), (seen, self.rows, self.column[:self.width])
        return self.model.run_core(s, e, self.rope, self.mask, self.kv(1, slice(None)), at)

    def finish(self, s):
        """State (B, T, C) -> what the head reads."""
        return self.model.run_coda(s, self.rope, self.mask, self.kv(2, 0), self.at)

    def logits(self, s):
        """State (B, T, C) -> logits (B, T, V) float32."""
        return self.model.head(self.finish(s)).float()

    def prefill(self, prompts):
        """
        Fill the cache with prompts (lists of ids), but for their last ids. Returns these (B,),
        their positions (B,), and the number of tokens in the longest prompt.
        """
        T, device = max(map(len, prompts)), self.column.device
        idx = torch.tensor([p + [0] * (T - len(p)) for p in prompts], device=device)
        position = torch.tensor([len(p) - 1 for p in prompts], device=device)
        eager = contextlib.nullcontext()
        if self.model.compiled:  # large products are as fast, and compiling takes a minute
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            for start in range(0, T - 1, PREFILL):
                end = min(start + PREFILL, T - 1)
                self.place(self.column[start:end].expand(len(prompts), -1), end)
                e, s = self.begin(idx[:, start:end])
                self.finish(self.recur(s, e, 0, self.r))
        return idx[self.column[:len(idx)], position], position, T

    def step(self, token, position, end):
        """
        A new token (B,) of every row at position (B,), below `end` -> logits (B, V) float32.

        Compiled on CUDA, the pass is thousands of small kernels, recorded once as a CUDA graph and
        launched as one. No GPU has run this yet.
        """
        if not (self.model.compiled and token.is_cuda):
            return self.run_step(token, position, end)
        if not self.graph or end > self.width:
            self.graph = None
            gc.collect()  # the last graph, whose memory torch keeps in a reference cycle
            end = min(-(-end // 256) * 256, self.S)  # recording takes a while, so not for every 64
            run = functools.partial(self.run_step, end=end)
            inputs = token.clone(), position.clone()
            self.graph = torch.cuda.make_graphed_callables(run, inputs)
        return self.graph(token, position)

    def run_step(self, token, position, end):
        self.place(position[:, None], end)
        e, s = self.begin(token[:, None])
        return self.logits(self.recur(s, e, 0, self.r))[:, -1]

    def keep(self, rows):
        """Continue with some rows (a tensor of indices) of the batch only."""
        self.cache = [cache[:, :, :, rows] for cache in self.cache]
        self.last, self.width = self.last[rows], 0


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
    """Tokens (...) drawn from probabilities (..., V): multinomial() would wait for a GPU."""
    return (p / torch.empty_like(p).exponential_(generator=rng)).argmax(-1)


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
    Decoding.
    """
    c, o = model.config, Decoding(**options)
    r = sum(model.split_steps(steps)) if c.n_core else 0
    T = max(map(len, prompts))
    assert all(prompts) and max_new_tokens > 0, "a prompt is empty, or no token is asked for"
    assert T + max_new_tokens <= c.context, f"{T} + {max_new_tokens} tokens, context {c.context}"
    way = plain
    if r and o.exit:
        way = adaptive
    elif 0 < o.draft_steps < r:
        way = speculative
    d = Decoder(model, r, len(prompts), T + max_new_tokens + o.draft_len, o)
    rng = torch.Generator(d.column.device).manual_seed(o.seed)
    left = [max_new_tokens] * len(prompts)
    live = set(range(len(prompts)))  # the rows that go on
    for row, token, took in way(d, prompts, o, rng, live):
        if row in live:
            yield row, token, took
            left[row] -= 1
            if not left[row] or (ends and ends(row, token)):
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
    rows = list(range(len(prompts)))
    token, position, end = d.prefill(prompts)
    while live:
        rows, token, position = shrink(d, rows, live, token, position)
        token = pick(d.step(token, position, end), o, rng)
        for row, t in zip(rows, token.tolist()):
            yield row, t, d.r
        position, end = position + 1, end + 1


def speculative(d, prompts, o, rng, live):
    """
    Self-speculation. `draft_steps` recurrences draft tokens. One pass then takes the states of all
    drafts on to r, and the usual rule (Leviathan et al., arXiv 2211.17192) accepts or corrects
    them, so what comes out has the distribution of r. Nothing is computed twice but the coda.
    """
    rows, n = list(range(len(prompts))), o.draft_len
    token, position, end = d.prefill(prompts)
    while live:
        rows, token, position = shrink(d, rows, live, token, position)
        drafts, q, started = [], [], []
        for i in range(n + 1):  # the last draft gets its e and s, too: all may be accepted
            d.place(position[:, None] + i, end + i)
            e, s = d.begin(token[:, None])
            s = d.recur(s, e, 0, o.draft_steps)
            started.append((e, s))
            if i < n:
                q.append(distribution(d.logits(s)[:, -1], o))
                token = draw(q[-1], rng)
                drafts.append(token)
        d.place(position[:, None] + d.column[:n + 1], end + n)
        e, s = (torch.cat(part, 1) for part in zip(*started))
        p = distribution(d.logits(d.recur(s, e, o.draft_steps, d.r)), o)
        drafts = torch.stack(drafts, 1)
        accepted, token = verify(p, torch.stack(q, 1), drafts, rng)
        position = (position + accepted + 1).clamp(max=d.S - n - 1)  # ended rows stay in the cache
        report = torch.column_stack((position, accepted, token, drafts)).tolist()
        end = max(p for p, *_ in report) + 1
        for row, (_, count, new, *guesses) in zip(rows, report):
            for t in (*guesses[:count], new):
                yield row, t, d.r


def verify(p, q, drafts, rng):
    """
    Speculative sampling. Probabilities of the model p (B, n + 1, V) and of the drafts q (B, n, V),
    drafts (B, n) -> how many are accepted (B,), and the token (B,) that follows them.
    """
    index = drafts[:, :, None]
    ratio = (p[:, :-1].gather(2, index) / q.gather(2, index))[:, :, 0]
    luck = torch.rand(ratio.shape, device=ratio.device, generator=rng)
    accepted = (luck < ratio).long().cumprod(1).sum(1)
    first_wrong = torch.arange(len(p), device=p.device), accepted
    p, q = p[first_wrong], F.pad(q, (0, 0, 0, 1))[first_wrong]  # after the last draft all of p
    left = (p - q).clamp(min=1e-30 * p)  # p itself where the two differ by rounding alone
    return accepted, draw(left, rng)


def adaptive(d, prompts, o, rng, live):
    """
    A token stops recurring once its last recurrence changed the distribution over the next token by
    less than exit_threshold nats, KL(p_i || p_(i-1)) (Geiping et al., arXiv 2502.05171), or at r. A
    row that is done goes on with its next token at once, beside rows at other recurrences: a batch
    takes the time of its mean, not of its slowest. All ids of a prompt but the last take r.
    """
    rows = list(range(len(prompts)))
    token, position, end = d.prefill(prompts)
    done = torch.zeros_like(token)  # recurrences of the current token
    s = d.noise[position[:, None]]
    logp = s.new_zeros(len(rows), d.model.config.vocab_size)
    begin = True
    while live:
        if begin:
            rows, token, position, done, s, logp = shrink(
                d, rows, live, token, position, done, s, logp)
            d.place(position[:, None], end)
            e, first = d.begin(token[:, None])
            s = torch.where((done == 0)[:, None, None], first, s)
        s, done = d.recur_each(s, e, done), done + 1
        logits = d.logits(s)[:, -1]
        before, logp = logp, logits.log_softmax(-1)
        kl = F.kl_div(before, logp, reduction="none", log_target=True).sum(-1).clamp(min=0)
        stops = (kl < o.exit_threshold) & (done >= max(2, o.min_steps)) | (done == d.r)
        token = torch.where(stops, pick(logits, o, rng), token)
        position = (position + stops).clamp(max=d.S - 1)  # ended rows stay in the cache
        report = torch.stack((stops, done, token, position), 1).tolist()
        done = done.masked_fill(stops, 0)
        end = max(p for *_, p in report) + 1
        begin = any(stop for stop, *_ in report)
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


def add_decoding_arguments(p):
    """The flags with which scripts say how to decode; see Decoding."""
    p.add_argument("--compile", action="store_true",
                   help="torch.compile: a minute at first, then about twice as fast")
    p.add_argument("--exit", choices=("kl",), help="let tokens that have settled stop recurring")
    add_options(
        p,
        exit_threshold="... once a recurrence changes less than so many nats",
        min_steps="... but after so many at the earliest",
        kv="cache slots per layer: full (one a recurrence, exact), last (one), or N",
        draft_steps="draft tokens with so many recurrences, then verify them",
        draft_len="... so many at a time",
    )


def add_options(p, **helps):
    """A flag for each of these fields of Decoding."""
    for name, text in helps.items():
        default = getattr(Decoding, name)
        p.add_argument(f"--{name}", type=type(default), default=default, help=text)


def decoding(args):
    """{name: value} of Decoding's fields among a script's flags."""
    return {f.name: getattr(args, f.name) for f in fields(Decoding) if f.name in args}


def load_model(folder, device="cpu", dtype=None, compile=False):
    """(model, tokenizer) of a checkpoint or run folder. dtype: its name, or None: as stored."""
    model = RecurrentLM.load(folder, device, dtype and getattr(torch, dtype)).eval()
    tokenizer = Tokenizer.load(model.folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"{model.folder}: its tokenizer has {tokenizer.vocab_size} ids, its model "
                        f"{model.config.vocab_size}: it is the tokenizer of another model")
    if not all(p.sum().isfinite() for p in model.parameters()):
        raise UserError(f"{model.folder}: its weights are not finite: it is damaged, or training "
                        "diverged")
    if model.embed.weight.is_cuda:
        torch.cuda.set_device(model.embed.weight.device)  # a step is recorded on the current one
    if compile:
        model.compile_parts(dynamic=True)
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
    tokens, recurrences = [0] * len(prompts), [0] * len(prompts)
    # A stop of n characters spans at most n tokens, so it is enough to look at the last few.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:])
        return token == tokenizer.eos_id or any(stop in end for stop in stops)

    for row, token, took in generate(model, prompts, max_new_tokens, r, ends, **options):
        tokens[row] += 1
        recurrences[row] += took
        if token != tokenizer.eos_id:
            new[row].append(token)
    texts = [cut(tokenizer.decode(ids), stops) for ids in new]
    return texts, tokens, recurrences


def cut(text, stops):
    """text up to the first of the stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


# ------------------------------------------------------------------------------------ the command

def newest_checkpoint(root="out"):
    """The newest checkpoint under root, a recurrent one if there is one."""
    found = []
    for path in Path(root).glob("**/config.json"):
        config = read_json(path)
        if config.get("model_type") == "loopgraft" and ".tmp-" not in str(path):
            found.append((config["n_core"] > 0, path.stat().st_mtime, path.parent))
    if not found:
        raise UserError(f"no checkpoint under {root}/: run `bash runs/tiny.sh` first, or give "
                        "--model")
    return max(found)[2]


def default_prompt(folder):
    """The sample prompt of the (first) data set that a checkpoint was trained on."""
    path = Path(folder, "train.json")
    if not path.exists():
        raise UserError(f"{folder}: does not say what it was trained on: give --prompt")
    data = re.split("[:,]", read_json(path)["config"]["data"])[0]
    return read_json(Path(data, "meta.json"))["prompt"]


def write(model, tokenizer, args, prompt, r):
    """Stream what follows prompt at depth r to stdout, and say how fast it went."""
    ids, context = tokenizer.encode(prompt, bos=True), model.config.context
    room = min(args.tokens, context - len(ids))
    if not ids or room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, the context {context}: give at least "
                        "one word, and leave room for more")
    say(f"--- r = {r}")
    text = tokenizer.decode(ids)
    shown, recurrences, began = len(text), [], time.perf_counter()
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
    count, seconds = len(recurrences), time.perf_counter() - began
    say(f"--- {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s, "
        f"{sum(recurrences) / count:.2f} recurrences a token")


def interact(model, tokenizer, args, steps):
    """Prompts from the terminal, each on its own. /steps 16 or /steps 1,4,32 turns the dial."""
    say(f"r = {steps}; a line is a prompt; /steps N sets the recurrences; ctrl-D ends")
    while True:
        try:
            line = input("> ")
            if line.startswith("/steps"):
                steps = parse_steps(line.removeprefix("/steps").strip())
            elif line:
                for r in steps:
                    write(model, tokenizer, args, line, r)
        except UserError as e:  # a mistake ends a text, not the session
            say(e)
        except EOFError:
            return


def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_args():
    p = Parser(description="Stream text from a model.")
    p.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    p.add_argument("--steps", help="recurrences r, or several such as 1,4,32")
    p.add_argument("--prompt", help="the text to continue")
    p.add_argument("--interactive", action="store_true", help="ask for prompts")
    p.add_argument("--tokens", type=int, default=256, help="new tokens at most")
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
    say(f"{model.folder}, ({c.n_prelude},{c.n_core},{c.n_coda}) layers, "
        f"{', '.join(describe(model))}")
    steps = parse_steps(args.steps or str(c.mean_recurrence))
    if not c.n_core:
        if args.steps or args.exit or args.draft_steps:
            say("a feed-forward model: --steps, --exit and --draft_steps have no effect")
        steps = [0]
    if args.interactive:
        return interact(model, tokenizer, args, steps)
    prompt = default_prompt(model.folder) if args.prompt is None else args.prompt
    say(prompt)
    for r in steps:
        write(model, tokenizer, args, prompt, r)


if __name__ == "__main__":
    cli(main)
