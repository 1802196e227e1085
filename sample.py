"""
Decoding: an exact KV cache for recurrent depth, sampling, and text streamed to the terminal.

    python sample.py --steps 32                    # the newest checkpoint under out/, a prompt of its corpus
    python sample.py --model out/tinyllama --steps 8 --prompt "Once upon a time" --temperature 0.8
    echo "Once upon a time" | python sample.py --model out/tinyllama --prompt - --samples 3

What is unusual here: every recurrence of every core layer has keys and values of its own, so the
cache grows with r: prelude + r * core + coda slots. And s_0 is noise, so greedy text depends on a
seed: the noise of a position follows from (seed, position) alone, whatever else is in the batch
and however long the prompt is. --state zero does without noise.

Text goes to stdout, everything said about it to stderr. eval_gsm8k.py decodes with generate() too.
"""
import argparse
import contextlib
import glob
import math
import os
import sys
import time

import torch

from data import Tokenizer
from model import InputError, RecurrentLM, cli, describe, read_json


class KVCache:
    """
    Keys and values of every (recurrence, layer) pair, preallocated as (slots, B, n_kv_head, S, D).
    Slots: the prelude's layers, the core's once per recurrence, the coda's. Each forward pass
    opens its T new columns with extend(T); model.Attention then calls update() once per slot.
    """

    def __init__(self, config, r, B, S, device, dtype):
        slots = config.n_prelude + r * config.n_core + config.n_coda
        shape = (slots, B, config.n_kv_head, S, config.head_dim)
        try:
            self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in "kv")
        except RuntimeError:  # of which torch.OutOfMemoryError is one
            size = 2 * math.prod(shape) * dtype.itemsize / 1e9
            raise InputError(f"out of memory: the cache of {B} x {S} tokens at r = {r} takes {size:.1f} GB: "
                             "ask for fewer rows, tokens or recurrences, or bfloat16")
        self.length = 0  # columns filled so far

    def extend(self, T):
        # All views are cut here, with one call for all slots: indexing slot by slot in update()
        # takes a seventh longer for a token (h = 64 on CPU, where overhead is most of the time).
        start, self.length = self.length, self.length + T
        self.new, self.seen = ([t[:, :, :, first:self.length].unbind() for t in (self.k, self.v)]
                               for first in (start, 0))

    def update(self, slot, k, v):
        """k, v (B, n_kv_head, T, D) of the new columns -> all columns so far, views of the cache"""
        self.new[0][slot].copy_(k)
        self.new[1][slot].copy_(v)
        return self.seen[0][slot], self.seen[1][slot]

    def keep(self, rows):
        """Go on with these rows (a tensor of indices) of the batch only."""
        self.new = self.seen = None  # they hold on to the old storage
        self.k = self.k[:, rows]
        self.v = self.v[:, rows]


def pick(logits, temperature, top_k, top_p, generator):
    """
    Next tokens (B,) from logits (B, V). temperature 0: greedy. Else top-k (0 = off), then nucleus:
    the fewest likely tokens that hold probability top_p (1 = off; Holtzman et al., arXiv 1904.09751).
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = logits.sort(dim=-1, descending=True)
    logits = (logits - logits[:, :1]) / temperature  # the largest is 0: no overflow, however cold
    if top_k:
        logits[:, top_k:] = -torch.inf
    p = logits.softmax(-1)
    p[p.cumsum(-1) - p >= top_p] = 0  # keeps the token that crosses top_p, hence at least one
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps=None, temperature=0.0, top_k=0, top_p=1.0,
             seed=0, state="noise"):
    """
    Decode a batch: a generator of max_new_tokens tensors (B,) int64, the next token of every row.
    It knows no end of text: the caller stops when it has enough.

    prompts: B lists of ids of any lengths; shorter ones are padded on the left and masked, so each
    gives the tokens it gives alone. steps: r (default config.mean_recurrence; a feed-forward
    model ignores it). temperature, top_k, top_p: see pick(). state: "noise" or "zero".
    A caller that is done with some rows may send() a list of the rows to go on with (indices into
    the last yield); the answer is the next token of those alone.
    Raises InputError for an empty prompt, ids beyond the vocabulary, or more than config.context
    tokens in all; ValueError for negative steps.
    """
    c, device, dtype = model.config, model.embed.weight.device, model.embed.weight.dtype
    r = sum(model.split_steps(steps)) if c.n_core else 0
    B, T = len(prompts), max(map(len, prompts))
    S = T + max_new_tokens
    if not all(prompts):
        raise InputError("the prompt is empty, and this tokenizer adds no BOS: give at least one word")
    if max(map(max, prompts)) >= c.vocab_size:
        raise InputError(f"the prompt holds token {max(map(max, prompts))}, the model's vocabulary ends at "
                         f"{c.vocab_size - 1}: {model.folder} holds the tokenizer of another model")
    if S > c.context:
        raise InputError(f"{T} prompt tokens and {max_new_tokens} new ones exceed the model's "
                         f"context of {c.context}: shorten the prompt or ask for fewer")
    with torch.inference_mode(False):  # the model keeps this table, and may train with it later
        table = model.rope(S)
    table = [t.to(dtype) for t in table]
    if c.n_core:
        noise = torch.zeros(S, c.n_embd, device=device, dtype=dtype)            # one s_0 a position
        if state == "noise":
            noise = model.initial_state(S, 1, [seed * 1_000_003 + i for i in range(S)])[:, 0].to(dtype)
    rng = torch.Generator(device).manual_seed(seed)  # its own: picks leave the noise as it is
    cache = KVCache(c, r, B, S, device, dtype)
    pad = torch.tensor([T - len(p) for p in prompts], device=device)
    padded = bool(pad.any())
    idx = torch.tensor([[0] * (T - len(p)) + list(p) for p in prompts], device=device)
    column = torch.arange(S, device=device)
    start, end = 0, T
    for _ in range(max_new_tokens):
        position = (column[start:end] - pad[:, None]).clamp(min=0)              # (B, T), then (B, 1)
        rope = [t[position].unsqueeze(1) for t in table]                        # (B, 1, T, D/2)
        mask = None
        if padded:  # what each new column sees; padding sees itself, as a softmax over nothing is NaN
            i, j = column[start:end, None], column[:end]
            visible = (j <= i) & (j >= pad[:, None, None]) | (j == i)           # (B, T, end)
            mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf).unsqueeze(1)
        cache.extend(end - start)
        x = model.run_prelude(model.embed_idx(idx), rope, mask, cache)
        slot = c.n_prelude
        if c.n_core:
            e, x = x, noise[position]
            for _ in range(r):
                x = model.run_core(x, e, rope, mask, cache, slot)
                slot += c.n_core
        x = model.run_coda(x, rope, mask, cache, slot)
        logits = model.head(x[:, -1]).float()                                   # (B, V)
        token = pick(logits, temperature, top_k, top_p, rng)
        rows = yield token
        if rows is not None:
            rows = torch.tensor(rows, device=device)
            token, pad = token[rows], pad[rows]
            cache.keep(rows)
        idx, start, end = token[:, None], end, end + 1


# -------------------------------------------------------------------- what every decoding script needs

def add_model_arguments(parser, dtype):
    """The flags with which sample.py and eval_gsm8k.py name a model and how it decodes."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cuda or cpu; default: %(default)s")
    parser.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"),
                        help=f"default: {dtype or 'as stored'}")
    parser.add_argument("--seed", type=int, default=0, help="of the initial state's noise, and of sampling")
    parser.add_argument("--state", default="noise", choices=("noise", "zero"), help="initial state; default: noise")


def check_device(device):
    """InputError where torch cannot compute on it."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:  # AssertionError: torch built without CUDA
        raise InputError(f"--device {device}: cannot be used here ({str(e).splitlines()[0]})")


def load_model(folder, args):
    """(model, tokenizer) of a checkpoint or run folder; args: add_model_arguments' flags."""
    check_device(args.device)
    if not 0 <= args.seed < 2**31:
        raise InputError(f"--seed {args.seed}: lies between 0 and 2^31 - 1")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = RecurrentLM.load(folder, args.device, dtype).eval()
    return model, Tokenizer.load(model.folder)


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
    p.add_argument("--model", help="checkpoint or run folder; default: the newest under out/")
    p.add_argument("--steps", type=int, help="recurrences r; default: the model's mean_recurrence")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to go on from; - reads stdin; default: from the model's corpus")
    source.add_argument("--prompt_file", help="read the prompt from this file")
    p.add_argument("--special", action="store_true",
                   help="read the names of special tokens in the prompt, such as <|eot_id|>, as those tokens")
    p.add_argument("--tokens", type=int, default=256, help="new tokens at most; default: %(default)s")
    p.add_argument("--samples", type=int, default=1, help="number of texts; number i uses seed + i")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy, the likeliest token")
    p.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens; 0 (default): off")
    p.add_argument("--top_p", type=float, default=1.0,
                   help="... from the likeliest that hold this probability; 1 (default): off")
    add_model_arguments(p, dtype=None)
    args = p.parse_args()
    for ok, what in ((args.steps is None or args.steps >= 0, f"--steps {args.steps}: cannot be negative"),
                     (args.tokens >= 1, f"--tokens {args.tokens}: ask for at least one"),
                     (args.samples >= 1, f"--samples {args.samples}: ask for at least one"),
                     (0 <= args.temperature < float("inf"), f"--temperature {args.temperature}: is 0 (greedy) or more"),
                     (args.top_k >= 0, f"--top_k {args.top_k}: is 0 (off) or more"),
                     (0 < args.top_p <= 1, f"--top_p {args.top_p}: lies above 0 and up to 1 (off)")):
        if not ok:
            raise InputError(what)
    return args


def main():
    args = parse_args()
    say = lambda text: print(text, file=sys.stderr, flush=True)
    prompt = read_prompt(args)
    model, tokenizer = load_model(args.model or newest_checkpoint(recurrent=args.steps is not None), args)
    if prompt is None:
        prompt, source = corpus_prompt(model.folder)
        say(f"prompt: {source}")
    say(f"model: {model.folder}")
    c, r = model.config, model.config.mean_recurrence if args.steps is None else args.steps
    if not c.n_core and args.steps is not None:
        say("this is a feed-forward model: --steps has no effect")

    ids = tokenizer.encode(prompt, bos=True, special=args.special)
    room = min(args.tokens, c.context - len(ids))
    if room < 1:
        raise InputError(f"the prompt's {len(ids)} tokens leave no room in the model's context of {c.context}: "
                         "shorten it")
    if room < args.tokens:
        say(f"{len(ids)} prompt tokens leave room for {room} new ones in the context of {c.context}")

    count, started = 0, time.perf_counter()

    def until_eos(seed):
        nonlocal count
        for token in generate(model, [ids], room, r, args.temperature, args.top_k, args.top_p, seed,
                              args.state):
            count += 1
            if (token := token.item()) == tokenizer.eos_id:
                return
            yield token

    for i in range(args.samples):
        print("---------------\n" * (i > 0) + prompt, end="", flush=True)
        for piece in stream(tokenizer, ids, until_eos(args.seed + i)):
            print(piece, end="", flush=True)
        print(flush=True)
    seconds = time.perf_counter() - started
    say(f"{model.folder}, {f'r = {r}' if c.n_core else 'feed-forward'}, {', '.join(describe(model))}: {count} tokens "
        f"in {seconds:.1f} s, {count / seconds:.1f} tokens/s")


if __name__ == "__main__":
    cli(main)
