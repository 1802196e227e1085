"""
Generate text with a model, at one or more numbers of recurrences r. With --trace, show instead what
the model would say at each r after every token of the prompt.

    python sample.py --steps 1,4,32                # reads prompts from the terminal
    python sample.py --model out/tinyllama --prompt "Once upon a time" --temperature 0.8
    python sample.py --model out/tinyllama --steps 32 --compile --draft_steps 2
    python sample.py --trace --only so --prompt "has 7 so loses 4 so"   # what each r would say

What is unusual here:
- Every recurrence of every core layer has its own keys and values, so the cache grows with r: it
  has prelude + r * core + coda layers.
- Recurrence i of a token depends only on recurrences up to i of this token and of earlier ones. So
  the pass at full depth continues from the few recurrences of a cheap draft, instead of starting
  over. Only the coda runs twice.
- s_0 is noise, so even greedy text depends on the seed. The noise at a position depends on (seed,
  position) alone, not on what else is in the batch.
"""
import contextlib
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common import (DTYPE_HELP, DTYPES, Parser, UserError, choose_dtype, cli, dtype_on, natural,
                    non_negative, positive, random_seed, recurrences, say)
from data import load_tokenizer
from model import Linear, RecurrentLM, attend

DRAFTS = 12     # tokens that a row drafts before one pass at full depth checks them
TOO_FEW = 2     # drafting stops once rounds average this many accepted drafts or fewer
CHUNK = 64      # passes read the cache in multiples of this, so that few shapes are compiled
PREFILL = 512   # prompt tokens per row in one pass
FEW_ROWS = 4    # up to this many rows, multiply-and-sum beats a BLAS call on a CPU
IN_CACHE = 2**18  # a matrix with no more weights than this stays in a core's cache
DEPTHS = [1, 2, 4, 8, 16, 32]  # default r of --trace and of eval_gsm8k.py
NO_TOKEN = -1   # see checked()
NOT_FINITE = "the model's logits are not finite, so its weights must be damaged"
CHANGEABLE = "steps", "tokens", "temperature", "top_k", "seed", "draft_steps"  # in a session


# ---------------------------------------------------------------------------------- choosing tokens

def distribution(logits, temperature, top_k):
    """
    Turn logits (..., V) into the probabilities (..., V) of the next token. temperature: 0 gives the
    likeliest token probability 1. top_k: if not 0, all but the k likeliest get probability 0.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if top_k:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return (logits / temperature).softmax(-1)


def sample_token(p, rng):
    """
    Draw tokens (...) from probabilities p (..., V), which need not sum to 1.

    With noise from Exp(1), p / noise is largest at each token with a probability proportional to
    its p. torch.multinomial() would make the CPU wait for the GPU.
    """
    return (p / torch.empty_like(p).exponential_(generator=rng)).argmax(-1)


def checked(tokens, logits):
    """
    Return new tokens (B, n), with NO_TOKEN in rows whose logits (B, T, V) are not all finite. So
    generate() learns of that from the tokens, and does not wait for the GPU once more.
    """
    return tokens.where(logits.flatten(1).amax(1, keepdim=True).isfinite(), NO_TOKEN)


# ----------------------------------------------------------------------------------------- decoding

@dataclass
class Batch:
    """A batch that is being decoded. The examples are for prompts [[1, 5, 9], [1, 7]]."""
    cache: "KVCache"
    rows: list[int]         # the index of each cache row's text, [0, 1]
    live: set[int]          # the indices of unfinished texts, {0, 1}
    token: torch.Tensor     # the last token of each row, (B, 1) int64, [[9], [7]]
    position: torch.Tensor  # the positions of these tokens, (B, 1) int64, [[2], [1]]
    end: int                # an exclusive upper bound on the positions, known to the CPU, 3
    temperature: float
    top_k: int
    rng: torch.Generator
    graph: Callable | None = None  # the CUDA graph of a step at this number of rows

    def advance(self, token, count):
        """
        Set new last tokens (B, 1), `count` positions further on: an int, or (B, 1). Finished rows
        keep advancing, too, but only to cache.longest.
        """
        self.token = token
        self.position = (self.position + count).clamp(max=self.cache.longest)

    def shrink(self):
        """Once half of the rows are finished, remove them from the batch and from the cache."""
        if 2 * len(self.live) > len(self.rows):
            return
        kept = [i for i, row in enumerate(self.rows) if row in self.live]
        self.rows = [self.rows[i] for i in kept]
        index = torch.tensor(kept, device=self.token.device)
        self.cache.select(index)
        self.token, self.position = self.token[index], self.position[index]
        if self.graph:
            self.graph = None
            gc.collect()  # frees it


class Decoder:
    """
    Decodes batches of texts with a model. compile: compile the model, in place, and on CUDA record
    each step as a graph.
    """

    def __init__(self, model, compile=False):
        self.model = model
        self.compiled = compile
        self.use_graph = compile and model.embed.weight.is_cuda
        if compile:
            for module in model.modules():
                if isinstance(module, Linear) and not self.use_graph:
                    module.__class__ = FewRows
            self.compiled = model.compile_parts(dynamic=True)

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, steps=None, is_last=None, *,
                 temperature=0.0, top_k=0, seed=0, draft_steps=0):
        """
        Decode a batch of prompts. Yields (row, token, accepted) for every new token, such as
        (0, 278, False). accepted: whether it was a draft.

        prompts: lists of ids of any lengths, such as [[1, 450, 7483], [1, 20]]. With greedy
        decoding, each gets the same tokens as it would alone.
        steps: r, by default config.mean_recurrence; an ordinary model ignores it.
        is_last: a row ends after max_new_tokens, or after a token for which is_last(row, token) is
        True; there is no built-in end of text.
        temperature: 0 is greedy decoding. top_k: sample from the k likeliest tokens; 0: from all.
        seed: seeds the noise s_0 and the sampling.
        draft_steps: recurrences per draft, see draft_rounds(); 0, or r or more: no drafts. Drafts
        change the speed, not the distribution of the text.

        Raises UserError if a prompt is empty or leaves no room for max_new_tokens in the context,
        or if logits are not finite.
        """
        c = self.model.config
        n, k = self.model.split_steps(steps)
        r = n + k if c.n_core else 0
        if not all(prompts):
            raise UserError("a prompt has no tokens")
        T = max(map(len, prompts))
        total = T + max_new_tokens
        if total > c.context:
            raise UserError(f"a prompt of {T} tokens leaves no room for {max_new_tokens} more in "
                            f"the context of {c.context}")
        if self.use_graph:
            gc.collect()  # frees the last graph and cache, which torch keeps in a reference cycle
        cache = KVCache(self.model, r, len(prompts), total, seed)
        self.prefill(cache, prompts)
        device = cache.index.device
        batch = Batch(
            cache=cache,
            rows=list(range(len(prompts))),
            live=set(range(len(prompts))),
            token=torch.tensor([[prompt[-1]] for prompt in prompts], device=device),
            position=torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device),
            end=T,
            temperature=temperature,
            top_k=top_k,
            rng=torch.Generator(device).manual_seed(seed),
        )
        rounds = self.plain_rounds(batch)
        if 0 < draft_steps < r:
            rounds = itertools.chain(draft_rounds(self, batch, draft_steps), rounds)
        remaining = [max_new_tokens] * len(prompts)
        while batch.live:
            batch.shrink()
            for row, token, accepted in next(rounds):
                if row not in batch.live:
                    continue
                if token == NO_TOKEN:
                    raise UserError(NOT_FINITE)
                yield row, token, accepted
                remaining[row] -= 1
                if remaining[row] < 1 or is_last and is_last(row, token):
                    batch.live.remove(row)

    def prefill(self, cache, prompts):
        """
        Fill the cache with all tokens of the prompts except the last of each, which the first step
        reads.
        """
        T = max(map(len, prompts))
        # Cache entries of the padding are overwritten before any token sees them.
        padded = [prompt + [0] * (T - len(prompt)) for prompt in prompts]
        tokens = torch.tensor(padded, device=cache.index.device)
        # Large matmuls gain little from compiling.
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        with eager:
            for start in range(0, T - 1, PREFILL):
                end = min(start + PREFILL, T - 1)
                cache.go_to(cache.index[start:end].expand(len(prompts), -1), end)
                _, s = self.run(cache, tokens[:, start:end], cache.r)
                self.model.run_coda(s, cache.rope, cache.coda)  # fills the coda's layers

    def plain_rounds(self, batch):
        """
        Advance a Batch by one token of every row per round. Yields the new tokens of each round,
        and whether they were drafts: [(0, 278, False), (3, 29889, False)], for example.
        """
        while True:
            logits = self.next_logits(batch)
            token = logits.argmax(-1)
            if batch.temperature:
                p = distribution(logits, batch.temperature, batch.top_k)
                token = sample_token(p, batch.rng)
            batch.advance(token, 1)
            batch.end = min(batch.end, batch.cache.longest) + 1  # see advance()
            tokens = checked(token, logits).flatten().tolist()
            yield [(row, token, False) for row, token in zip(batch.rows, tokens)]

    def next_logits(self, batch):
        """
        Run the last token of each row. Returns the logits (B, 1, V) float32 of the next ones.

        On CUDA a compiled step is recorded as a graph and replayed, because its thousands of small
        kernels take longer to launch than to run. The next call overwrites the logits.
        """
        cache = batch.cache

        def whole_pass(token, position):
            cache.go_to(position, cache.longest + 1 if self.use_graph else batch.end)
            return self.logits(cache, self.run(cache, token, cache.r)[1])

        if not self.use_graph:
            return whole_pass(batch.token, batch.position)
        if not batch.graph:  # for all positions, up to where finished rows stay: see advance()
            inputs = batch.token.clone(), batch.position.clone()
            batch.graph = torch.cuda.make_graphed_callables(whole_pass, inputs)
        return batch.graph(batch.token, batch.position)

    # The two parts of a pass, to call after cache.go_to(). tokens: (rows, T).

    def run(self, cache, tokens, r):
        """Run the prelude, then r recurrences. Returns the prelude's output e and the state s."""
        e, s = self.model.run_prelude(tokens, cache.noise, cache.rope, cache.prelude)
        return e, self.model.recur(s, e, cache.rope, r, cache.core[:r])

    def logits(self, cache, s):
        return self.model.logits(self.model.run_coda(s, cache.rope, cache.coda))


# ---------------------------------------------------------------------------------------- the cache

class KVCache:
    """
    The keys and values of a batch, and the rotary angles and the noise of each position. The token
    at position p of a row is at index p, and no token sees later ones. So texts of different
    lengths can share a batch, and going back to an earlier position discards all that follows it.

    longest: tokens in the longest text. seed: seeds the noise s_0.
    """

    def __init__(self, model, r, rows, longest, seed):
        c = model.config
        weight = model.embed.weight
        self.config = c
        self.r = r
        self.longest = longest
        self.visible = 0  # positions that the last pass could read
        # Drafts run ahead of the text, and a pass reads up to the next multiple of CHUNK. One more
        # CHUNK, so that no pass reads the whole cache, which is contiguous: torch.compile would
        # compile again for that.
        capacity = longest + DRAFTS + 2 * CHUNK
        self.index = torch.arange(capacity, device=weight.device)
        rope = torch.stack(model.rope(capacity))
        self.all_rope = rope.to(weight.dtype)  # (2, capacity, 1, head_dim / 2)
        self.all_noise = model.initial_state(1, capacity, seed)[0]  # (capacity, C)
        # Zeros, not empty(): masked values are multiplied by 0, and 0 times NaN is NaN.
        zeros = weight.new_zeros(rows, capacity, c.n_kv_head, c.head_dim)
        self.prelude = [LayerCache(zeros) for _ in range(c.n_prelude)]
        self.core = [[LayerCache(zeros) for _ in range(c.n_core)] for _ in range(r)]
        self.coda = [LayerCache(zeros) for _ in range(c.n_coda)]
        self.layers = sum(self.core, self.prelude + self.coda)

    def select(self, rows):
        """Remove all rows except these, a tensor of indices such as [0, 3]."""
        self.visible = 0
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def go_to(self, positions, end):
        """
        Prepare a pass over T tokens of each row: 1 in a plain step, up to PREFILL of a prompt.

        positions: (rows, T), such as [[8], [5]]. end: an exclusive upper bound on them, such as 9,
        which the CPU must know without waiting for the GPU.
        """
        self.rope = self.all_rope[:, positions].unbind()  # cos, sin: (rows, T, 1, head_dim / 2)
        self.noise = self.all_noise[positions]            # (rows, T, C)
        c = self.config
        visible = CHUNK * math.ceil(end / CHUNK)
        if visible == c.head_dim:  # torch.compile would take the two equal sizes for one, and
            visible += CHUNK       # compile again once they differ
        seen = self.index[:visible] <= positions.unsqueeze(2)
        # attend() stacks the query heads that share a kv head; all need the same mask.
        seen = seen.repeat(1, c.n_head // c.n_kv_head, 1)
        mask = torch.where(seen, 0.0, -torch.inf).to(self.all_rope.dtype).unsqueeze(1)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for layer in self.layers:
            layer.write, layer.mask = (rows, positions), mask
            if visible != self.visible:  # slices in each pass would take 4% of a small model's time
                layer.visible_keys = layer.keys[:, :visible]
                layer.visible_values = layer.values[:, :visible]
        self.visible = visible


class LayerCache:
    """
    The keys and values of one layer at one recurrence. KVCache.go_to() sets what a pass needs:
    write, the indices (rows, 1) and (rows, T) of its tokens; visible_keys and visible_values, the
    part that it reads; and mask (rows, 1, groups * T, visible).
    """

    def __init__(self, zeros):
        self.keys = zeros.clone()  # (rows, capacity, n_kv_head, head_dim), such as (2, 320, 4, 64)
        self.values = zeros.clone()

    def attend(self, q, k, v):
        """
        Store the keys and values of new tokens, each (rows, n_kv_head, T, head_dim). Returns the
        attention (rows, n_head, T, head_dim) of their queries over everything in the cache.
        """
        self.visible_keys[self.write] = k.transpose(1, 2)
        self.visible_values[self.write] = v.transpose(1, 2)
        k, v = self.visible_keys.transpose(1, 2), self.visible_values.transpose(1, 2)
        # Stack the query heads that share a kv head along T, so that the cache is read once.
        rows, n_kv_head, _, head_dim = k.shape
        T = q.shape[2]
        q = q.reshape(rows, n_kv_head, -1, head_dim)
        compiled_on_cpu = torch.compiler.is_compiling() and not q.is_cuda
        attention = attend_one if compiled_on_cpu and T == 1 else attend
        # On a GPU, this copies: SDPA's output there has the memory layout (rows, T, H, head_dim).
        return attention(q, k, v, self.mask).reshape(rows, -1, T, head_dim)


def attend_one(q, k, v, mask):
    """
    attend() for one token per row. Compiled for a CPU, this is two loops over the cache, which
    take about two thirds as long as SDPA's kernel.
    """
    scores = (q.unsqueeze(3).float() * k.unsqueeze(2).float()).sum(-1)  # (..., groups, visible)
    p = (scores / math.sqrt(q.shape[-1]) + mask).softmax(-1)
    return (p.unsqueeze(-1) * v.unsqueeze(2).float()).sum(-2).type_as(v)


# ------------------------------------------------------------------------------------------- drafts

def accept(p, q, drafts, rng):
    """
    Decide how many drafts of each row to accept, and draw the token after them (Leviathan et al.,
    arXiv 2211.17192).

    p (B, n + 1, V): the model's probabilities for each draft, and for the token after the last.
    q (B, n, V): the probabilities from which the drafts were drawn. drafts (B, n), such as (2, 12).

    Returns the number of accepted drafts of each row, such as [[12], [3]], and the token that
    follows them, both (B, 1) int64.
    """
    index = drafts.unsqueeze(2)
    ratio = (p[:, :-1].gather(2, index) / q.gather(2, index)).squeeze(2)
    right = torch.empty_like(ratio).uniform_(generator=rng) < ratio
    accepted = right.long().cumprod(1).sum(1, keepdim=True)
    rows = torch.arange(len(p), device=p.device)[:, None]
    q = F.pad(q, (0, 0, 0, 1))  # zeros for the token after the last draft
    p, q = p[rows, accepted], q[rows, accepted]
    # The token that replaces a rejected draft is drawn from the part of p that exceeds q. If
    # that part rounds to zero everywhere, the clamp leaves 1e-30 * p: a draw from p itself.
    return accepted, sample_token((p - q).clamp(min=1e-30 * p), rng)


def draft_rounds(decoder, batch, draft_steps):
    """
    Advance a Batch by drafts, and yield what plain_rounds() yields. A round drafts DRAFTS tokens
    with few recurrences, advances the states of all drafts to r in one pass, and yields the drafts
    that accept() takes and one more token. The text has the same distribution as without drafts.
    With 2 recurrences per draft at r = 32, a round calls the recurrent block 13 * 2 + 30 = 56
    times; 2 plain tokens take 64.
    """
    cache = batch.cache
    mean_accepted = DRAFTS / 2  # so that drafting gets a few rounds to prove itself
    while mean_accepted > TOO_FEW:
        drafts, q, e, s = draft(decoder, batch, draft_steps)
        cache.go_to(batch.position + cache.index[:DRAFTS + 1], batch.end + DRAFTS)
        rest = cache.core[draft_steps:]
        s = decoder.model.recur(s, e, cache.rope, len(rest), rest)
        logits = decoder.logits(cache, s)
        p = distribution(logits, batch.temperature, batch.top_k)
        accepted, token = accept(p, q, drafts, batch.rng)
        batch.advance(token, accepted + 1)
        tokens = checked(torch.cat((token, drafts), 1), logits)
        # One tensor, because the CPU waits for the GPU at each transfer.
        outcome = torch.column_stack((batch.position, accepted, tokens)).tolist()
        batch.end = max(position for position, *_ in outcome) + 1
        new = []
        for row, (_, count, last, *guesses) in zip(batch.rows, outcome):
            new += [(row, guess, True) for guess in guesses[:count]]
            new.append((row, last, False))
            if row in batch.live:  # a running mean over about four rounds
                mean_accepted += (count - mean_accepted) / (4 * len(batch.live))
        yield new


def draft(decoder, batch, draft_steps):
    """
    Draft DRAFTS tokens for each row. Returns them (B, DRAFTS), the probabilities (B, DRAFTS, V)
    that they were drawn from, and the prelude's output e and the state s after draft_steps
    recurrences, both (B, DRAFTS + 1, C), of the row's last token and of the drafts.
    """
    token = batch.token
    drafts, q, es, states = [], [], [], []
    for i in range(DRAFTS + 1):  # once more, since all drafts may be accepted
        batch.cache.go_to(batch.position + i, batch.end + i)
        e, s = decoder.run(batch.cache, token, draft_steps)
        es.append(e)
        states.append(s)
        if i < DRAFTS:
            logits = decoder.logits(batch.cache, s)
            q.append(distribution(logits, batch.temperature, batch.top_k))
            token = sample_token(q[-1], batch.rng)
            drafts.append(token)
    return tuple(torch.cat(parts, 1) for parts in (drafts, q, es, states))


# ------------------------------------------------------------------------------- compiled for a CPU

class FewRows(Linear):
    """
    What a Linear becomes in compiled decoding on a CPU, where reading the weights takes most of the
    time. For up to FEW_ROWS rows, a compiled multiply-and-sum reads them once and beats a BLAS
    call.
    """

    def forward(self, x):
        x = x.to(self.weight.dtype)
        *shape, fan_in = x.shape
        rows = math.prod(shape)
        if rows > FEW_ROWS or not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        # Large ones in quarters: a core that reads four places at once waits less for the memory.
        parts = self.weight.float().chunk(4 if self.weight.numel() > IN_CACHE else 1)
        y = [(part * row.float()).sum(-1) for row in x.view(rows, fan_in) for part in parts]
        y = torch.cat(y).type_as(x).view(*shape, -1)
        return y if self.bias is None else y + self.bias


# ---------------------------------------------------------------------------------------- --trace

def token_text(tokenizer, token):
    """Return a token's text, such as "so", or its repr if blank, unprintable or incomplete."""
    for name, control in tokenizer.special.items():
        if token == control:
            return name
    text = tokenizer.decode([token])
    readable = text.strip() and text.isprintable() and "\ufffd" not in text
    return text if readable else repr(text)


@torch.inference_mode()
def trace(model, tokenizer, args, ids, steps):
    """
    Print one line per prompt token, or only for the tokens that match --only: the most likely next
    token at each r, with a star if it differs from that of the largest r. ids: the prompt.
    """
    names = [token_text(tokenizer, token) for token in ids]
    shown = [t for t, name in enumerate(names) if args.only in (None, name.strip())]
    names = [names[t] for t in shown]
    if not shown:
        raise UserError(f"--only {args.only}: no token of the prompt is this word")
    context = model.config.context
    if len(ids) > context:
        raise UserError(f"a prompt of {len(ids)} tokens is longer than the context of {context}")

    noise = model.initial_state(1, len(ids), args.seed)  # as in decoding
    idx = torch.tensor([ids], device=noise.device)
    found = []  # for each r, the likeliest tokens' probabilities and ids, both (len(shown),)
    for _, x in model.trajectory(idx, steps, noise):
        p = model.logits(x[0, shown]).softmax(-1)  # (len(shown), V)
        found.append(p.max(-1))
    probabilities, tokens = (torch.stack(x).cpu() for x in zip(*found))
    if not probabilities.isfinite().all():
        raise UserError(NOT_FINITE)

    columns = [["", *names, "settled"]]
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
    """
    Load the model and the Tokenizer of a checkpoint or a run, on the GPU if there is one. dtype:
    one of DTYPES.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RecurrentLM.load(folder, device, getattr(torch, choose_dtype(dtype, device)))
    return model, load_tokenizer(model.folder, model.config)


def respond(decoder, tokenizer, args, prompt):
    """Continue a prompt at each r, or trace it."""
    c = decoder.model.config
    ids = tokenizer.encode(prompt, bos=True)
    if not ids:
        raise UserError("the prompt has no tokens")
    tracing = args.trace or args.only
    steps = args.steps or (DEPTHS if tracing else [c.mean_recurrence])
    if not c.n_core:
        steps = [0]
    if tracing:
        trace(decoder.model, tokenizer, args, ids, steps)
        return
    if args.top_k and not args.temperature:
        raise UserError("--top_k needs a --temperature above 0: greedy decoding ignores it")
    for r in steps:
        stream(decoder, tokenizer, args, ids, r)


def stream(decoder, tokenizer, args, prompt, r):
    """Generate text after a prompt, ids, with r recurrences, and print it token by token."""
    c = decoder.model.config
    ids = [*prompt]
    shown = len(tokenizer.decode(ids))
    if c.n_core:
        say(f"--- r = {r}", sys.stderr)
    limit = max(1, min(args.tokens, c.context - len(ids)))  # so generate() rejects long prompts
    count = count_accepted = 0
    began = time.perf_counter()
    for _, token, accepted in decoder.generate(
            [prompt], limit, r, lambda _, token: token in c.ends, temperature=args.temperature,
            top_k=args.top_k, seed=args.seed, draft_steps=args.draft_steps):
        count += 1
        count_accepted += accepted
        if token not in c.ends:
            ids.append(token)
        # Decode all of it: a single token may lack its leading space or be part of a character.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the character may be complete with the next token
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)
    seconds = time.perf_counter() - began
    message = f"--- {count} tokens in {seconds:.1f} s"
    if args.draft_steps:
        message += f", {count_accepted} of them accepted drafts"
    say(message, sys.stderr)


def converse(decoder, tokenizer, args, parser):
    """Read prompts from the terminal, and answer each independently. "/steps 16" sets a flag."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, for arrow keys and lines of any length in input()
    say("Type a prompt. /steps 16 sets a flag; Ctrl-D ends.", sys.stderr)
    sys.stdin.reconfigure(errors="surrogateescape")  # so that a wrong byte ends only its prompt
    while True:
        say("> ", sys.stderr, end="")
        try:
            line = input()
            if line.startswith("/"):
                name, _, value = line[1:].partition(" ")
                if name not in CHANGEABLE:
                    raise UserError(f"/{name}: not one of {', '.join(CHANGEABLE)}")
                parser.parse_args([f"--{name}={value}"], args)
            elif line:
                respond(decoder, tokenizer, args, line)
        except EOFError:
            return
        except UserError as e:  # a mistake does not end the session
            say(e, sys.stderr)


def make_parser():
    parser = Parser(__doc__, usage="sample.py [flags]")
    flag = parser.add_argument
    flag("--model", metavar="FOLDER", default=os.path.relpath(f"{__file__}/../assets/tiny"),
         help="checkpoint or run folder; default: %(default)s, which counts modulo 10")
    flag("--prompt", type=str, metavar="TEXT", help="default: read prompts from the terminal")
    flag("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    flag("--compile", action="store_true", help="use torch.compile, which takes a while")
    flag("--steps", type=recurrences,
         help="recurrences r, or several such as 1,4,32; default: the model's own, or with "
              "--trace several from 1 to 32")
    flag("--tokens", type=positive, default=256,
         help="generate at most this many tokens (256)")
    flag("--temperature", type=non_negative, default=0.0,
         help="of sampling; 0 (default): always the likeliest token")
    flag("--top_k", type=natural, default=0,
         help="sample from this many of the likeliest tokens only; 0 (default): from all")
    flag("--seed", type=random_seed, default=0,
         help="seed of the initial state and of sampling (0)")
    flag("--draft_steps", type=natural, default=0,
         help="draft tokens with this many recurrences; one pass at full depth checks "
              f"{DRAFTS} of them; 0 (default), or r and more: off")
    flag("--trace", action="store_true",
         help="instead of a text, show what each r would say after each token of the prompt")
    flag("--only", type=str, metavar="WORD", help="like --trace, but only for this token")
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, args.dtype)
    c = model.config
    device, dtype = device_and_dtype(model)
    # Everything but the model's text goes to stderr.
    say(f"{model.folder}: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, {dtype_on(dtype, device)}",
        sys.stderr)
    decoder = Decoder(model, args.compile)
    if args.prompt is None:
        converse(decoder, tokenizer, args, parser)
    else:
        respond(decoder, tokenizer, args, args.prompt)


if __name__ == "__main__":
    cli(main)
