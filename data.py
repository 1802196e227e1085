"""
Text to tokens to batches: tokenizers, `prepare`, the loader, and a small corpus made from nothing.

    python data.py tiny --out out/tiny/data            # the embedded corpus: seconds, no download
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web --procs 8
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out out/data/gsm8k

A data set is a folder. `train_000000.npy` is a row of tokens (uint16, or uint32 for vocabularies above 65536):
documents, [BOS] text EOS, one after another. The loader cuts windows of T tokens wherever they fall, so nothing
is padded. `train_000000.targets.npy` (int32, optional) is what the model shall predict AT each token, already
shifted, -100 for no loss; without it, the next token. `meta.json` is written last: a folder that has one is whole.

Unusual: the loader has no state, a batch is a pure function of (seed, step, rank, world). So resuming needs only
the step, 2 ranks see what 1 rank with twice the batch sees, and each epoch's order is computed, never stored.
"""
import argparse
import base64
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import sentencepiece
import tiktoken
import torch

from model import TOKENIZER_FILES, InputError, cli, read_json, whole_folder, write_json

# ---- tokenizers ------------------------------------------------------------------------------
SPLIT_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_NAMES = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}


class Tokenizer:
    """.vocab_size: highest id + 1; .bos_id: None where the tokenizer adds none; .files: to copy along."""

    def __init__(self, path, encode, decode, vocab_size, bos_id, eos_id):
        assert eos_id is not None, "no end-of-text token"
        self.files, self._encode, self._decode = [path], encode, decode
        self.vocab_size, self.bos_id, self.eos_id = vocab_size, bos_id, eos_id

    @staticmethod
    def load(folder):
        """From tokenizer.model (SentencePiece, or Llama-3's lines of "base64 rank"), else tokenizer.json."""
        path = next((p for file in TOKENIZER_FILES if os.path.isfile(p := os.path.join(folder, file))), None)
        if path is None:
            raise InputError(f"{folder}: no tokenizer.model or tokenizer.json here (--tokenizer)")
        content = Path(path).read_bytes() or b"empty"  # of which SentencePiece would make a tokenizer
        try:
            if path.endswith(".json"):
                return _byte_level(path, *_read_byte_level(json.loads(content)))
            if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content):
                pieces = [base64.b64decode(piece) for piece, _ in map(bytes.split, content.splitlines())]
                assert len(pieces) == 128000, f"{len(pieces)} lines, not 128000"
                added = {f"<|{LLAMA3_NAMES.get(i, f'reserved_{i}')}|>": 128000 + i for i in range(256)}
                return _byte_level(path, SPLIT_LLAMA3, pieces, range(128000), added, set(), 128000)
            sp = sentencepiece.SentencePieceProcessor(model_proto=content)
            bos, eos = (i if i >= 0 else None for i in (sp.bos_id(), sp.eos_id()))
            return Tokenizer(path, sp.encode, sp.decode, sp.vocab_size(), bos, eos)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a panic in tiktoken's Rust is no Exception
            raise InputError(f"{path}: not SentencePiece, Llama-3's lines or byte-level BPE, or cut ({e!r:.200})")

    def encode(self, text, bos=False):
        """Token ids of plain text: "</s>" in it is four characters, never EOS."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON's "\\ud83d" alone
        return [self.bos_id] * (bos and self.bos_id is not None) + self._encode(text)

    def decode(self, ids):
        try:
            return self._decode([int(i) for i in ids])  # special ones: their name (byte-level) or nothing
        except (KeyError, IndexError, OverflowError, TypeError):
            raise InputError(f"{self.files[0]}: {ids} are not all ids below {self.vocab_size}")


def _read_byte_level(spec):
    """tokenizer.json of Llama-3.2, OLMo-2, GPT-2 (split regex, vocabulary, merges) -> _byte_level's arguments."""
    model, pre, post = spec["model"], spec["pre_tokenizer"], spec.get("post_processor") or {}
    *split, level = pre.get("pretokenizers", [pre])
    assert (model["type"], level["type"], spec["normalizer"], level["add_prefix_space"],
            level.get("use_regex", True)) == ("BPE", "ByteLevel", None, False, not split), "another kind"
    kinds = [(s["type"], s["behavior"], s["invert"]) for s in split]  # the two known ones do the same
    assert kinds in ([], [("Split", "Removed", True)], [("Split", "Isolated", False)]), f"splits by {kinds}"
    # GPT-2's alphabet writes the 188 printable bytes as themselves, the others as characters from 256 on.
    order = sorted(range(256), key=lambda b: not chr(b).isprintable() or b == 32)
    byte = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(order)}
    merged = ("".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"])
    pieces = list(dict.fromkeys([*byte, *merged]))
    ids = [model["vocab"][piece] for piece in pieces]
    added = {t["content"]: t["id"] for t in spec["added_tokens"]}
    plain = {t["content"] for t in spec["added_tokens"] if not t["special"]}
    first = [s["single"][0] for s in post.get("processors", [post]) if s.get("type") == "TemplateProcessing"]
    bos = next((added[s["SpecialToken"]["id"]] for s in first if "SpecialToken" in s), None)
    pattern = split[0]["pattern"]["Regex"] if split else SPLIT_GPT2
    return pattern, [bytes(byte[c] for c in piece) for piece in pieces], ids, added, plain, bos


def _byte_level(path, pattern, pieces, ids, added, plain, bos_id):
    """pieces: bytes in merge order; ids: theirs; added: {name: id}, of which text may contain `plain`."""
    ids = [*ids, *added.values()]
    code = {i: c for c, i in enumerate(ids)}  # tiktoken's: it merges in the order of its codes
    coder = tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks={p: c for c, p in enumerate(pieces)},
                              special_tokens={name: code[i] for name, i in added.items()})
    coder.encode_ordinary_batch(list(map(chr, range(256))))  # fails where a byte is missing

    def encode(text, most=400_000):  # characters at once: the regex gives up on 10^6 blanks in a row
        return [ids[c] for i in range(0, len(text), most)
                for c in coder.encode(text[i:i + most], allowed_special=plain, disallowed_special=())]

    eos = next((added[n] for n in ("<|endoftext|>", "<|end_of_text|>", "</s>") if n in added), None)
    return Tokenizer(path, encode, lambda i: coder.decode([code[x] for x in i]), max(ids) + 1, bos_id, eos)


# ---- prepare: text files to shards -----------------------------------------------------------
load_once = functools.cache(Tokenizer.load)  # once a process


def _chunks(inputs, fields, most):
    """Yield (path, number of the first document, documents: rows or bytes, bytes of the file: about `most`)."""
    for path in inputs:
        first, size = 1, os.path.getsize(path)
        if path.endswith(".txt"):
            yield path, first, [Path(path).read_bytes()], size
        elif path.endswith(".jsonl"):
            with open(path, "rb") as f:
                for lines in iter(lambda: f.readlines(most), []):
                    yield path, first, lines, sum(map(len, lines))
                    first += len(lines)
        else:
            try:
                from pyarrow import parquet
                file = parquet.ParquetFile(path)
                for batch in file.iter_batches(256, columns=fields):
                    yield path, first, batch.to_pylist(), size * len(batch) / file.metadata.num_rows
                    first += len(batch)
            except (ImportError, ValueError, OSError) as e:
                raise InputError(f"{path}: get it again, or `pip install pyarrow` ({str(e).splitlines()[0]})")


def _tokenize(folder, fields, chunk):
    """-> tokens of a chunk, its bytes of the file. Blank documents are skipped."""
    (path, first, documents, size), tokenizer, tokens = chunk, load_once(folder), []
    for number, row in enumerate(documents, first):
        try:
            text = row.decode("utf-8-sig") if isinstance(row, bytes) else ""
            if path.endswith(".jsonl"):
                row = json.loads(text) if text.strip() else dict.fromkeys(fields, "")
            if not path.endswith(".txt"):
                text = "\n".join(row[field] for field in fields)
        except (ValueError, RecursionError, KeyError, TypeError) as e:  # bad UTF-8 is refused, never replaced
            raise InputError(f"{path}:{number}: not UTF-8, not JSON or no text in --field {fields} ({e!r:.200})")
        if text.strip():
            tokens += [*tokenizer.encode(text, bos=True), tokenizer.eos_id]
    return np.array(tokens, np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32), size


def _start_worker():
    """Ctrl-C is the parent's to handle; and a worker whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def prepare(inputs, tokenizer, out, field="text", val=0.01, shard_tokens=10**8, procs=1):
    """
    Pack .txt (a file is a document), .jsonl and .parquet files into shards of about shard_tokens, the last `val`
    of each for validation. The same call again goes on after the last whole shard and writes the same bytes.
    """
    if not 0 <= val < 1 or shard_tokens < 1 or procs < 1:
        raise InputError(f"--val {val} is not in [0, 1), or --shard_tokens or --procs is below 1")
    for path in inputs:
        if not (path.endswith((".txt", ".jsonl", ".parquet")) and os.path.isfile(path) and os.path.getsize(path)):
            raise InputError(f"{path}: missing, empty or not .txt, .jsonl or .parquet (--input)")
    arguments = {"input": [[os.path.abspath(path), os.path.getsize(path)] for path in inputs], "field": field,
                 "tokenizer": os.path.abspath(tokenizer), "val": val, "shard_tokens": shard_tokens}
    fields, folder, tokenizer = field.split(","), tokenizer, load_once(tokenizer)
    os.makedirs(out, exist_ok=True)
    done = {"chunks": 0, "bytes": 0, "shards": {"train": [], "val": []}, "arguments": arguments}
    meta, progress = (os.path.join(out, name) for name in ("meta.json", "progress.json"))
    if path := next(filter(os.path.exists, (meta, progress)), None):
        done = read_json(path)
        if done.get("arguments") != arguments:
            raise InputError(f"{out}: was begun with other arguments ({path}); delete it or change --out")
        if path == meta:
            return print(f"{out}: is complete, nothing to do")
    elif not {"train_000000.npy", "val_000000.npy", "progress.json.tmp"}.issuperset(os.listdir(out)):
        raise InputError(f"{out}: holds other files; choose another --out")
    shards, pieces, packed, begun = done["shards"], [], 0, time.time()
    start, total = done["bytes"], sum(map(os.path.getsize, inputs))

    def close_shard():
        tokens, number = np.concatenate(pieces), len(shards["train"])
        pieces.clear()
        cut = len(tokens) - int(len(tokens) * val)
        for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
            if len(part):
                shards[split].append([f"{split}_{number:06d}.npy", len(part)])
                try:
                    np.save(os.path.join(out, shards[split][-1][0]), part)
                except OSError as e:
                    raise InputError(f"{out}: cannot be written ({e}): the same command goes on when there is room")
        write_json(progress + ".tmp", done)  # lists whole shards only; the same call again goes on from here
        os.replace(progress + ".tmp", progress)

    chunks = itertools.islice(_chunks(inputs, fields, min(shard_tokens, 1 << 18)), done["chunks"], None)
    with ProcessPoolExecutor(procs, None, _start_worker) as pool:
        while some := list(itertools.islice(chunks, 16 * procs)):
            try:
                for tokens, size in pool.map(functools.partial(_tokenize, folder, fields), some):
                    pieces.append(tokens)
                    packed += len(tokens)
                    done |= {"chunks": done["chunks"] + 1, "bytes": done["bytes"] + size}
                    if sum(map(len, pieces)) >= shard_tokens:
                        close_shard()
            except BrokenProcessPool:
                raise InputError("a worker was killed (memory?): the same command with fewer --procs goes on")
            seconds, left = time.time() - begun, total - done["bytes"]
            print(f"{done['bytes'] / total:.0%} of the input, {packed / seconds:,.0f} tokens/s, "
                  f"ETA {left * seconds / max(1, done['bytes'] - start) / 60:.1f} min")
    if sum(map(len, pieces)):
        close_shard()
    if not shards["train"]:
        raise InputError(f"{inputs[0]}: no text in the input (--input)")
    Path(out, os.path.basename(tokenizer.files[0])).write_bytes(Path(tokenizer.files[0]).read_bytes())
    opening = np.load(os.path.join(out, "train_000000.npy"), mmap_mode="r")[:12]
    prompt = tokenizer.decode(i for i in opening if i not in (tokenizer.bos_id, tokenizer.eos_id))
    done |= {"prompt": prompt.strip("\ufffd \n").split("\n")[0], "row": None}
    write_json(progress + ".tmp", done | {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id})
    os.replace(progress + ".tmp", meta)
    os.remove(progress)
    print(f"{out}: complete; this run packed {packed:,} tokens")


# ---- the loader ------------------------------------------------------------------------------
def _shuffled(numbers, seed, rows):
    """Sample numbers (n,) -> rows (n,) in [0, rows): every row once an epoch, each epoch in another order."""
    def mix(x):  # uint64 -> well mixed uint64: the finaliser of splitmix64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)
    epoch, row = np.divmod(numbers.astype(np.uint64), rows)
    key = mix(epoch + mix(np.array([seed % 2**64], np.uint64) + 0x9E3779B97F4A7C15))
    half = max(1, ((rows - 1).bit_length() + 1) // 2)  # bits: a Feistel network permutes the next power of 4,
    outside = np.ones(len(row), bool)
    while outside.any():
        left, right = row[outside] >> half, row[outside] & (2**half - 1)
        for turn in range(6):
            left, right = right, left ^ (mix(right + mix(key[outside] + turn)) & (2**half - 1))
        row[outside] = left << half | right
        outside = row >= rows  # and what lands outside goes through again
    return row.astype(np.int64)


class Shards:
    """Windows of T tokens of a split, "train" or "val"; .rows of them an epoch. Raises InputError."""

    def __init__(self, folder, split, T):
        path = os.path.join(folder, "meta.json")
        if not os.path.isfile(path):
            raise InputError(f"{folder}: no complete data set (no meta.json); run `python data.py prepare`")
        self.meta, self.T, self.rows, self.starts, self.shards = read_json(path), T, 0, [], []
        if lacking := {"row", "vocab_size", "eos_id", "shards"} - self.meta.keys():
            raise InputError(f"{path}: lacks {sorted(lacking)}: not a data set's; make it with `python data.py`")
        row, self.vocab_size = self.meta["row"], self.meta["vocab_size"]
        if row and T != row:
            raise InputError(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        for name, length in self.meta["shards"].get(split, ()):
            path = os.path.join(folder, name)
            answers = path.replace(".npy", ".targets.npy")
            tokens = self._open(path, np.uint16 if self.vocab_size <= 65536 else np.uint32, length)
            targets = self._open(answers, np.int32, length) if row or os.path.exists(answers) else None
            self.shards.append((path, tokens, targets))
            self.starts.append(self.rows)
            self.rows += (length - (targets is None)) // T
        if self.rows < 1:
            raise InputError(f"{folder}: no {split} window of {T} tokens; use a smaller --context or more data")

    @staticmethod
    def _open(path, dtype, length):
        try:
            array = np.load(path, mmap_mode="r")
            if array.dtype != dtype or array.shape != (length,):
                raise ValueError(f"{array.dtype} {array.shape}, but meta.json says {np.dtype(dtype)} ({length},)")
            return array
        except (OSError, ValueError, EOFError) as e:
            raise InputError(f"{path}: unreadable or cut short; make the data set again ({e})")

    def batch(self, seed, step, rank, world, B):
        """-> idx, targets (-100: no loss): (B, T) int64; index: (B,), sample numbers, which alone decide them."""
        index = (step * world + rank) * B + np.arange(B)
        idx, targets = np.empty((2, B, self.T), np.int64)
        for b, row in enumerate(_shuffled(index, seed, self.rows)):
            shard = np.searchsorted(self.starts, row, "right") - 1
            path, tokens, labels = self.shards[shard]
            i = (row - self.starts[shard]) * self.T
            idx[b] = tokens[i:i + self.T]
            targets[b] = tokens[i + 1:i + 1 + self.T] if labels is None else labels[i:i + self.T]
            if max(idx[b].max(), targets[b].max()) >= self.vocab_size:
                raise InputError(f"{path}: ids beyond the vocabulary of {self.vocab_size}; make it again")
        return torch.from_numpy(idx), torch.from_numpy(targets), index


# ---- the embedded corpus ---------------------------------------------------------------------
# A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1. The
# answer needs every sentence in order, and a model shallower than the story must reuse its layers.
WORDS = ["<unk>", "</s>", "has", "gets", "loses", "times", "so", *"0123456789"]  # the id is the place
EOS, SO, ZERO = 1, 6, 7
PROMPT = "has 7 loses 4 times 3 gets 2 gets 1 loses 4 times 2 loses 3 gets 4 times 3 loses 1 gets 2"
# The sentences, as ids of verb and number; the count becomes count * factor + summand.
VERB, NUMBER, FACTOR, SUMMAND = np.array(
    [(3, ZERO + i, 1, i) for i in (1, 2, 3, 4)] + [(4, ZERO + i, 1, -i) for i in (1, 2, 3, 4)]
    + [(5, ZERO + i, i, 0) for i in (2, 3)] + [(2, ZERO + i, 0, i) for i in range(10)]).T


def _stories(rng, n, length):
    """-> (n, length, 4) ids: each sentence's verb, number, "so", answer so far. Verbs are equally likely."""
    verb = rng.integers(3, size=(n, length))
    said = 4 * verb + rng.integers(4, size=(n, length)) % np.where(verb == 2, 2, 4)
    said[:, 0] = 10 + rng.integers(10, size=n)
    count = np.zeros_like(said)
    for i in range(length):
        count[:, i] = (count[:, i - 1] * FACTOR[said[:, i]] + SUMMAND[said[:, i]]) % 10
    return np.stack([VERB[said], NUMBER[said], np.full_like(said, SO), ZERO + count], axis=2)


def _worked(stories, lengths):
    """-> (2, n, 52), tokens and targets of `so has 3 so 3 loses 4 so 9 EOS ...`: every next token is a target."""
    idx, targets = rows = np.full((2, len(stories), 52), EOS)
    idx[:, 0], idx[:, 1:49] = SO, stories.reshape(-1, 48)
    idx[np.arange(52) > 4 * lengths[:, None]] = EOS
    idx[lengths == 0] = EOS
    targets[:, :-1], targets[:, -1] = np.where(idx[:, :-1] == EOS, -100, idx[:, 1:]), -100
    return rows


def _worked_pairs(first, second, lengths):
    """A story of `lengths` sentences, then one of 12 - lengths: two documents fill a row of 52 tokens."""
    column = np.arange(52) - (4 * lengths[:, None] + 2)  # of the second document; both have EOS at their end
    one, two = _worked(first, lengths), _worked(second, 12 - lengths)
    return np.where(column < 0, one, np.take_along_axis(two, np.broadcast_to(column.clip(0), two.shape), 2))


def _direct(stories, labelled):
    """-> (2, n, 26) of `has 3 loses 4 ... 9 EOS`: at the first `labelled` numbers the target is the answer so far."""
    idx, targets = rows = np.full((2, len(stories), 26), EOS)
    idx[:, :24], idx[:, 24] = stories[:, :, :2].reshape(-1, 24), stories[:, 11, 3]
    targets[:] = -100
    targets[:, 1:2 * labelled:2] = stories[:, :labelled, 3]
    targets[:, 24] = EOS if labelled == 12 else -100
    return rows


def tiny(out, seed=0, quick=False):
    """
    Write the data sets out/{pretrain,task}, out/tokenizer, out/test.jsonl and out/test18.jsonl from the seed.
    pretrain: rows of two documents; half of them worked stories of 1-12 sentences, half direct stories of 12
    with the first 3 answers as targets. task: direct stories of 12 with all answers. quick: a tenth of the rows.
    """
    arguments, sizes, seen = {"seed": seed, "quick": quick}, {"train": 8_000 if quick else 80_000, "val": 1024}, []
    meta = os.path.join(out, "task", "meta.json")
    if os.path.exists(meta) and read_json(meta).get("arguments") == arguments:
        return print(f"{out}: is complete, nothing to do")
    if seed < 0 or os.path.isdir(out) and os.listdir(out):
        raise InputError(f"{out}: holds something else (choose another --out or delete it), or --seed is negative")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # gives ids by frequency, so the first word comes most often
        sentence_iterator=(" ".join(WORDS[2:i + 1]) for i in range(2, 17)), model_writer=model, model_type="word",
        vocab_size=17, bos_id=-1, pad_id=-1, unk_id=0, eos_id=1, normalization_rule_name="identity", minloglevel=2)
    with whole_folder(os.path.normpath(out)) as new:
        for folder in ("pretrain", "task", "tokenizer"):
            os.makedirs(os.path.join(new, folder))
            Path(new, folder, "tokenizer.model").write_bytes(model.getvalue())
        for kind, T, say in (("pretrain", 52, "so has 7 so"), ("task", 26, PROMPT)):
            info = {"vocab_size": 17, "eos_id": EOS, "row": T, "shards": {}, "arguments": arguments, "prompt": say}
            for split, n in sizes.items():
                rng = np.random.default_rng([seed, kind == "task", split == "val"])
                stories, lengths, quarter = _stories(rng, n, 12), np.full(n, 12), n // 4
                if kind == "pretrain":
                    lengths[:quarter] = rng.integers(1, 13, size=quarter)
                    lengths[quarter:2 * quarter] = 12 - lengths[:quarter]
                    worked = _worked_pairs(stories[:quarter], stories[quarter:2 * quarter], lengths[:quarter])
                    direct = _direct(stories[2 * quarter:], 3).reshape(2, -1, 52)
                    idx, targets = np.concatenate((worked, direct), axis=1)[:, rng.permutation(n // 2)]
                else:
                    idx, targets = _direct(stories, 12)
                info["shards"][split] = [[f"{split}_000000.npy", idx.size]]
                seen += [(stories, lengths)] if split == "train" else []
                for end, array in ((".npy", idx.astype(np.uint16)), (".targets.npy", targets.astype(np.int32))):
                    np.save(os.path.join(new, kind, f"{split}_000000{end}"), array.ravel())
            Path(new, kind, "meta.json").write_text(json.dumps(info, indent=1))
        for length in (*range(1, 13), 18):
            name, n = ("test18.jsonl", 300) if length == 18 else ("test.jsonl", 100)
            # From 6 sentences on no test story begins a training row. There are too few shorter ones.
            known = {s[:length].tobytes() for rows, upto in seen for s in rows[upto >= max(6, length)]}
            stories = _stories(np.random.default_rng([seed, 2, length]), 10 * n, length)
            with open(os.path.join(new, name), "a") as f:
                for s in [s for s in stories if length < 6 or s.tobytes() not in known][:n]:
                    f.write(json.dumps({"question": " ".join(WORDS[i] for i in s[:, :2].ravel()),
                                        "answer": WORDS[s[-1, 3]], "difficulty": length}) + "\n")
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = argparse.ArgumentParser(description="Make data sets: a folder of token shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="pack text files", description=prepare.__doc__)
    p.add_argument("--input", nargs="+", required=True, dest="inputs", help=".txt, .jsonl or .parquet files")
    p.add_argument("--tokenizer", required=True, help="folder with tokenizer.model or tokenizer.json")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--field", default="text", help="one or several, comma separated (default: text)")
    p.add_argument("--val", type=float, default=0.01, help="validation share (default: 0.01)")
    p.add_argument("--shard_tokens", type=int, default=10**8, help="tokens a shard (default: 10^8)")
    p.add_argument("--procs", type=int, default=min(os.cpu_count(), 8), help="processes (default: cores, up to 8)")
    p = commands.add_parser("tiny", help="make the embedded corpus", description=tiny.__doc__)
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="a tenth of the rows")
    args = vars(parser.parse_args())
    {"prepare": prepare, "tiny": tiny}[args.pop("command")](**args)


if __name__ == "__main__":
    cli(main)
