"""
Text to tokens to batches: tokenizers, `prepare`, the loader, and a small corpus made from nothing.

    python data.py tiny --out data/tiny                  # the embedded corpus: seconds, no download
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out data/web --procs 16
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out data/gsm8k

A data set is a folder. `train_000000.npy` is a row of tokens (uint16, or uint32 for vocabularies
above 65536): documents, [BOS] text EOS, one after another. The loader cuts windows of T tokens
wherever they fall, so nothing is padding. `train_000000.targets.npy` (int32, optional) is what the
model shall predict AT each token, already shifted, -100 for no loss; without it, the next token.
`meta.json` is written last: a folder that has one is complete. The tokenizer lies there too.

Unusual: the loader has no state. A batch is a pure function of (seed, step, rank, world), so
resuming needs only the step, and 2 ranks see what 1 rank with twice the batch sees. Each epoch's
order is a pseudo-random permutation that is computed, never stored.
"""
import argparse
import base64
import collections
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, process

import numpy as np
import sentencepiece
import tiktoken
import torch

from model import InputError, cli, read_json

# ---- tokenizers ------------------------------------------------------------------------------
SPLIT_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
RESERVED = [f"reserved_special_token_{i}" for i in range(251)]
LLAMA3_SPECIAL = ["begin_of_text", "end_of_text", *RESERVED[:4], "start_header_id", "end_header_id",
                  RESERVED[4], "eot_id", *RESERVED[5:]]  # 256 names


class Tokenizer:
    """
    .encode(text, bos) -> ids, .decode(ids) -> text, .vocab_size (highest id + 1), .bos_id (None
    where the tokenizer adds none), .eos_id, .files (paths of its own files, to copy along).
    """

    def __init__(self, path, encode, decode, vocab_size, bos_id, eos_id):
        if eos_id is None:
            raise InputError(f"{path}: no end-of-text token; name one in eos_token_id of a config.json here")
        self.files, self._encode, self._decode = [path], encode, decode
        self.vocab_size, self.bos_id, self.eos_id = vocab_size, bos_id, eos_id

    @staticmethod
    def load(folder):
        """
        From tokenizer.model (SentencePiece, or Llama-3's lines of "base64 rank"), else tokenizer.json
        (byte-level BPE). SentencePiece knows its bos and eos. Elsewhere eos is config.json's
        eos_token_id if that is one of the special tokens, else the usual name; bos is what the
        tokenizer itself puts in front, whatever config.json says. Raises InputError.
        """
        path = os.path.join(folder, "tokenizer.model")
        if not os.path.isfile(path):
            path = os.path.join(folder, "tokenizer.json")
            if not os.path.isfile(path):
                raise InputError(f"{folder}: no tokenizer.model or tokenizer.json here (--tokenizer)")
            return _read_byte_level(path)
        with open(path, "rb") as f:
            content = f.read()
        try:
            if not content:
                raise ValueError("empty file")
            if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content):
                ranks = {int(rank): base64.b64decode(piece, validate=True)
                         for piece, rank in map(bytes.split, content.splitlines())}
                pieces = [ranks[i] for i in range(len(ranks))]
                added = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(LLAMA3_SPECIAL)}
                return _byte_level(path, SPLIT_LLAMA3, pieces, list(range(len(ranks))), added, set(),
                                   added["<|begin_of_text|>"])
            sp = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (ValueError, KeyError, RuntimeError) as e:
            raise InputError(f"{path}: neither SentencePiece nor Llama-3's lines; get it again ({e!r})")
        bos, eos = (i if i >= 0 else None for i in (sp.bos_id(), sp.eos_id()))
        return Tokenizer(path, sp.encode, sp.decode, sp.vocab_size(), bos, eos)

    def encode(self, text, bos=False):
        """Token ids of plain text: "</s>" in it is four characters, never EOS."""
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, as "\\ud83d" in JSON: becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return [self.bos_id] * (bos and self.bos_id is not None) + self._encode(text)

    def decode(self, ids):
        """Text of ids; special ids give their name (byte-level) or nothing (SentencePiece)."""
        try:
            return self._decode([int(i) for i in ids])
        except (KeyError, IndexError, OverflowError, TypeError):
            raise InputError(f"{self.files[0]}: {ids} are not all ids below {self.vocab_size}")


def _read_byte_level(path):
    """tokenizer.json of Llama-3.2, OLMo-2, GPT-2: a split regex, a vocabulary, a list of merges."""
    spec = read_json(path)
    try:
        model, pre, post = spec["model"], spec["pre_tokenizer"] or {}, spec.get("post_processor") or {}
        *split, level = pre.get("pretokenizers", [pre])
        # "Removed" and inverted keeps the matches, which is what "Isolated" does.
        if not (model["type"] == "BPE" and level.get("type") == "ByteLevel" and not spec["normalizer"]
                and not level["add_prefix_space"] and level.get("use_regex", True) == (not split)
                and [(s["type"], s["behavior"], s["invert"]) for s in split] in
                ([], [("Split", "Removed", True)], [("Split", "Isolated", False)])):
            raise ValueError(f"{model['type']} with pre_tokenizer {level.get('type')}")
        # GPT-2's alphabet writes a printable byte as itself, the others as the characters from 256 on.
        printable = [b for b in range(256) if chr(b).isprintable() and b != 32]
        others = [b for b in range(256) if b not in printable]
        byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        merges = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        pieces = list(dict.fromkeys([*byte, *map("".join, merges)]))
        ids = [model["vocab"][piece] for piece in pieces]
        added = {t["content"]: t["id"] for t in spec["added_tokens"]}
        plain = {t["content"] for t in spec["added_tokens"] if not t["special"]}
        if unmade := set(model["vocab"].values()) - set(ids) - set(added.values()):
            raise ValueError(f"no merge makes id {min(unmade)}")
        bos = None
        for step in post.get("processors", [post]):
            if step.get("type") == "TemplateProcessing" and "SpecialToken" in step["single"][0]:
                bos = step["special_tokens"][step["single"][0]["SpecialToken"]["id"]]["ids"][0]
        pattern = split[0]["pattern"]["Regex"] if split else SPLIT_GPT2
        pieces = [bytes(byte[c] for c in piece) for piece in pieces]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise InputError(f"{path}: not a byte-level BPE like Llama-3's or OLMo-2's ({e!r}); put the"
                         " model's SentencePiece tokenizer.model beside it")
    return _byte_level(path, pattern, pieces, ids, added, plain, bos)


def _byte_level(path, pattern, pieces, ids, added, plain, bos_id):
    """
    pieces: bytes in the order of their merges; ids: theirs; added: {name: id}, of which `plain` are
    no special tokens, so that text may contain them.
    """
    ids = ids + list(added.values())
    code = {i: c for c, i in enumerate(ids)}  # tiktoken's: it merges in the order of its codes
    try:
        coder = tiktoken.Encoding(path, pat_str=pattern,
                                  mergeable_ranks={piece: c for c, piece in enumerate(pieces)},
                                  special_tokens={n: len(pieces) + i for i, n in enumerate(added)})
        coder.encode_ordinary_batch(list(map(chr, range(256))))  # fails where a byte is missing
    except BaseException as e:  # a Rust panic is no Exception
        raise InputError(f"{path}: cut short or garbled; get it again ({e!r})")

    def encode(text):
        try:
            return [ids[c] for c in coder.encode(text, allowed_special=plain, disallowed_special=())]
        except BaseException as e:  # the split regex overflows its stack on ~10^6 blanks in a row
            if type(e).__name__ != "PanicException":
                raise
            return encode(text[:len(text) // 2]) + encode(text[len(text) // 2:])

    config = os.path.join(os.path.dirname(path), "config.json")
    eos = read_json(config).get("eos_token_id") if os.path.isfile(config) else None
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if eos not in added.values():  # e.g. a library's default left in config.json
        eos = next((added[n] for n in ("<|endoftext|>", "<|end_of_text|>", "</s>") if n in added), None)
    return Tokenizer(path, encode, lambda i: coder.decode([code[x] for x in i]), max(ids) + 1, bos_id, eos)


# ---- prepare: text files to shards -----------------------------------------------------------
def _write(path, content):
    """`path` is whole or absent, also after a power cut. content: array, bytes or JSON value."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    with open(temporary, "wb") as f:
        if isinstance(content, np.ndarray):
            np.save(f, content)
        else:
            f.write(content if isinstance(content, bytes) else json.dumps(content, indent=1).encode())
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _dtype(vocab_size):
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.uint32)


def _read_chunks(path, fields):
    """
    Yield (number of the first document from 1, documents, bytes of the file), of about 1 MB. A
    document is bytes, parsed later by a worker (a .jsonl line, a .txt file), or a .parquet row.
    """
    first, size = 1, os.path.getsize(path)
    if path.endswith(".parquet"):
        try:
            from pyarrow import parquet
            file = parquet.ParquetFile(path)
            for batch in file.iter_batches(256, columns=fields):
                yield first, batch.to_pylist(), size * len(batch) / file.metadata.num_rows
                first += len(batch)
        except ImportError:
            raise InputError(f"{path}: .parquet needs `pip install pyarrow`")
        except (ValueError, OSError) as e:
            raise InputError(f"{path}: broken parquet; get it again ({str(e).splitlines()[0]})")
        return
    with open(path, "rb") as f:
        while documents := [f.read()] if path.endswith(".txt") else f.readlines(1 << 20):
            if not documents[0]:
                return
            yield first, documents, sum(map(len, documents))
            first += len(documents)


def _start_worker(folder, fields):
    global WORKER
    WORKER = Tokenizer.load(folder), fields
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Nothing tells a worker that its parent was killed: unless it watches, it waits for ever.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _tokenize(path, first, documents, size):
    """A chunk -> its tokens, each document's number of them (0 for blanks), bytes of the file."""
    tokenizer, fields = WORKER
    tokens, lengths = [], []
    for number, document in enumerate(documents, first):
        try:
            text = document.decode("utf-8-sig") if isinstance(document, bytes) else " "
            if path.endswith(".jsonl") and text.strip():
                document = json.loads(text)
            if isinstance(document, dict):
                text = "\n".join(document[field] for field in fields)
            elif path.endswith(".jsonl") and text.strip():
                raise ValueError(f"a {type(document).__name__}, not an object")
        except (ValueError, RecursionError) as e:  # bad UTF-8 is refused, never replaced
            raise InputError(f"{path}:{number}: not UTF-8 text or not JSON; mend or drop it ({e})")
        except (KeyError, TypeError):
            raise InputError(f"{path}:{number}: --field {','.join(fields)} must name strings; here"
                             f" are {', '.join(map(str, document))}")
        ids = [*tokenizer.encode(text, bos=True), tokenizer.eos_id] if text.strip() else []
        tokens += ids
        lengths.append(len(ids))
    return np.array(tokens, _dtype(tokenizer.vocab_size)), lengths, size


def _tokenize_all(chunks, folder, fields, procs):
    """Results in the chunks' order; few chunks are under way at once, however slow the disk."""
    pool, pending = ProcessPoolExecutor(procs, None, _start_worker, (folder, fields)), collections.deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_tokenize, *chunk))
            if len(pending) > 4 * procs:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except process.BrokenProcessPool:
        raise InputError("a worker was killed (memory?); the same command with fewer --procs goes on")
    finally:
        pool.shutdown(cancel_futures=True)


def prepare(inputs, tokenizer, out, field="text", val=0.01, shard_tokens=10**8, procs=1):
    """
    Pack .txt (a file is a document), .jsonl and .parquet files into shards that end with the
    document that reaches shard_tokens; the last `val` of each is its validation shard. The same
    call again goes on after the last whole shard and writes the same bytes. Raises InputError.
    """
    if not 0 <= val < 1 or shard_tokens < 1 or procs < 1:
        raise InputError(f"--val {val} is not in [0, 1), or --shard_tokens or --procs is below 1")
    for path in inputs:
        if not (path.endswith((".txt", ".jsonl", ".parquet")) and os.path.isfile(path) and os.path.getsize(path)):
            raise InputError(f"{path}: missing, empty or not .txt, .jsonl or .parquet (--input)")
    fields, folder, tokenizer = field.split(","), tokenizer, Tokenizer.load(tokenizer)
    with open(tokenizer.files[0], "rb") as f:
        tokenizer_file = f.read()
    total = sum(map(os.path.getsize, inputs))
    arguments = {"input": [[os.path.abspath(p), os.path.getsize(p)] for p in inputs], "field": field,
                 "val": val, "shard_tokens": shard_tokens, "tokenizer": [
                     hashlib.sha256(tokenizer_file).hexdigest(), tokenizer.bos_id, tokenizer.eos_id]}
    progress_path, meta_path = os.path.join(out, "progress.json"), os.path.join(out, "meta.json")
    state = {"documents": 0, "shards": {"train": [], "val": []}, "arguments": arguments}
    path = meta_path if os.path.exists(meta_path) else progress_path
    if os.path.exists(path):
        previous = read_json(path)
        if previous.get("arguments") == arguments:
            state = previous
        elif path == meta_path or previous.get("documents"):
            raise InputError(f"{out}: was begun with other arguments (see {path}); choose another --out"
                             " or delete it")
        if path == meta_path:
            return print(f"{out}: is complete, nothing to do")
    os.makedirs(out, exist_ok=True)
    if not os.path.exists(path) and any(not name.startswith(".") for name in os.listdir(out)):
        raise InputError(f"{out}: holds other files; choose another --out")
    _write(progress_path, state)
    shards, documents, held, pieces = state["shards"], state["documents"], 0, []
    packed, read, skipped, start_time, shown = 0, 0, 0, time.time(), time.time()

    def chunks(skip):
        for path in inputs:
            for first, texts, size in _read_chunks(path, fields):
                yield path, first + skip, texts[skip:], size
                skip = max(0, skip - len(texts))

    def close_shard():
        tokens, number = np.concatenate(pieces), len(shards["train"])
        cut = len(tokens) - int(len(tokens) * val)
        for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
            if len(part):
                shards[split].append([f"{split}_{number:06d}.npy", len(part)])
                _write(os.path.join(out, shards[split][-1][0]), part)
        _write(progress_path, state | {"documents": documents})

    for tokens, lengths, size in _tokenize_all(chunks(documents), folder, fields, procs):
        start = end = 0
        for length in lengths:
            end, held, documents = end + length, held + length, documents + 1
            if held >= shard_tokens:
                pieces.append(tokens[start:end])
                close_shard()
                start, held, pieces = end, 0, []
        pieces.append(tokens[start:])
        packed, read, skipped = packed + len(tokens), read + size, skipped + (0 if lengths else size)
        if time.time() > shown + 2:
            shown = time.time()
            seconds = shown - start_time
            print(f"{packed:,} tokens  {packed / seconds:,.0f} tokens/s  {read / total:.0%}  ETA"
                  f" {(total - read) * seconds / max(1, read - skipped) / 60:.1f} min", file=sys.stderr)
    if held:
        close_shard()
    if not shards["train"]:
        raise InputError(f"{inputs[0]}: no text in the input (--input)")
    _write(os.path.join(out, os.path.basename(tokenizer.files[0])), tokenizer_file)
    _write(os.path.join(out, "config.json"), {"eos_token_id": tokenizer.eos_id})  # for Tokenizer.load
    opening = np.load(os.path.join(out, shards["train"][0][0]), mmap_mode="r")[:12].tolist()
    prompt = tokenizer.decode(i for i in opening if i not in (tokenizer.bos_id, tokenizer.eos_id))
    for name in os.listdir(out):
        if name.endswith(".tmp"):  # of runs that were killed
            os.remove(os.path.join(out, name))
    _write(meta_path, state | {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "row": None,
                               "documents": documents, "prompt": prompt.strip("\ufffd \n").split("\n")[0]})
    os.remove(progress_path)
    print(f"{out}: {documents:,} documents in {len(shards['train'])} shards; this run packed {packed:,}"
          f" tokens at {packed / (time.time() - start_time):,.0f} tokens/s")


# ---- the loader ------------------------------------------------------------------------------
def _mix(x):
    """uint64 array -> well mixed uint64 array (the finaliser of splitmix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def _shuffled(numbers, seed, rows):
    """
    Sample numbers (n,) -> rows (n,) in [0, rows), every row once an epoch, each epoch in another
    order. A Feistel network permutes the next power of 4; what lands outside goes through again.
    """
    epoch, row = np.divmod(numbers.astype(np.uint64), rows)
    key = _mix(epoch + _mix(np.array([seed % 2**64], np.uint64) + 0x9E3779B97F4A7C15))
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    outside = np.ones(len(row), bool)
    while outside.any():
        left, right = row[outside] >> half, row[outside] & (2**half - 1)
        for turn in range(6):
            left, right = right, left ^ (_mix(right + _mix(key[outside] + turn)) & (2**half - 1))
        row[outside] = left << half | right
        outside = row >= rows
    return row.astype(np.int64)


class Shards:
    """Windows of T tokens over the memory-mapped shards of folder's split, "train" or "val"."""

    def __init__(self, folder, split, T, vocab_size=None):
        """vocab_size: the model's, to be refused if below the data's. Raises InputError."""
        path = os.path.join(folder, "meta.json")
        if not os.path.isfile(path):
            raise InputError(f"{folder}: no complete data set (no meta.json); run `python data.py prepare`")
        self.meta, self.shards = read_json(path), []
        try:
            row, self.vocab_size, listed = (self.meta[k] for k in ("row", "vocab_size", "shards"))
            listed = [(name, int(length)) for name, length in listed[split]]
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"{path}: is not a data set's ({e!r}); delete {folder} and make it again")
        if row and T != row:
            raise InputError(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise InputError(f"{folder}: token ids up to {self.vocab_size - 1}, but the model's"
                             f" vocab_size is {vocab_size}; prepare with the model's tokenizer")
        starts, self.T, self.rows = [], T, 0
        for name, length in listed:
            target_name = name.replace(".npy", ".targets.npy")
            has_targets = bool(row) or os.path.exists(os.path.join(folder, target_name))
            tokens = self._open(os.path.join(folder, name), _dtype(self.vocab_size), length)
            self.shards.append((name, tokens, self._open(os.path.join(folder, target_name),
                                                         np.dtype(np.int32), length) if has_targets else None))
            starts.append(self.rows)
            self.rows += (length - (not has_targets)) // T
        self.folder, self.starts = folder, np.array(starts)
        if self.rows < 1:
            raise InputError(f"{folder}: no {split} window of {T} tokens; use a smaller --context or more data")

    @staticmethod
    def _open(path, dtype, length):
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as e:
            raise InputError(f"{path}: unreadable or cut short; make the data set again ({e})")
        if array.dtype != dtype or array.shape != (length,):
            raise InputError(f"{path}: {array.dtype} {array.shape}, but meta.json says {dtype} ({length},)")
        return array

    def batch(self, seed, step, rank, world, B):
        """
        -> idx, targets: (B, T) int64, targets already shifted, -100 for no loss; index: (B,) array of
        the global sample numbers, (step * world + rank) * B + b. Nothing else enters.
        """
        index = (step * world + rank) * B + np.arange(B)
        idx, targets = np.empty((2, B, self.T), np.int64)
        for b, row in enumerate(_shuffled(index, seed, self.rows)):
            shard = np.searchsorted(self.starts, row, "right") - 1
            name, tokens, labels = self.shards[shard]
            start = (row - self.starts[shard]) * self.T
            idx[b] = tokens[start:start + self.T]
            targets[b] = (tokens[start + 1:start + self.T + 1] if labels is None
                          else labels[start:start + self.T])
            if max(idx[b].max(), targets[b].max()) >= self.vocab_size:
                raise InputError(f"{os.path.join(self.folder, name)}: ids beyond the vocabulary of"
                                 f" {self.vocab_size}; make the data set again")
        return torch.from_numpy(idx), torch.from_numpy(targets), index


# ---- the embedded corpus ---------------------------------------------------------------------
# A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1. The
# answer needs every sentence in order, and a model shallower than the story must reuse its layers.
WORDS = ["<unk>", "</s>", "has", "gets", "loses", "times", "so", *"0123456789"]  # the id is the place
EOS, SO, ZERO = 1, 6, 7
# A story is a row of codes 0-9: the digit after `has`, then gets 1-4, loses 1-4, times 2-3.
VERB = np.array([3] * 4 + [4] * 4 + [5] * 2)
NUMBER = np.array([1, 2, 3, 4, 1, 2, 3, 4, 2, 3])
FACTOR, SUMMAND = np.array([1] * 8 + [2, 3]), np.array([1, 2, 3, 4, -1, -2, -3, -4, 0, 0])


def _stories(rng, n, length):
    """-> codes (n, length) of sentences, verbs equally likely; words (n, length, 2); answers (n, length)."""
    verb = rng.integers(3, size=(n, length))
    codes = 4 * verb + rng.integers(4, size=(n, length)) % np.where(verb == 2, 2, 4)
    codes[:, 0] = rng.integers(10, size=n)
    words = np.stack([VERB[codes], ZERO + NUMBER[codes]], axis=2)
    words[:, 0] = np.stack([np.full(n, WORDS.index("has")), ZERO + codes[:, 0]], axis=1)
    answers = codes.copy()
    for i in range(1, length):
        answers[:, i] = (answers[:, i - 1] * FACTOR[codes[:, i]] + SUMMAND[codes[:, i]]) % 10
    return codes, words, ZERO + answers


def _direct(words, answers, T, labelled):
    """Rows `story answer EOS...` (n, T) and targets: the answers so far at the first `labelled` sentences."""
    n, length = answers.shape
    idx, targets = np.full((n, T), EOS), np.full((n, T), -100)
    idx[:, :2 * length], idx[:, 2 * length] = words.reshape(n, -1), answers[:, -1]
    targets[:, 1:2 * labelled:2] = answers[:, :labelled]
    if labelled == length:
        targets[:, 2 * length] = EOS
    return idx, targets


def _worked(words, answers, lengths):
    """Rows `so has 3 so 3 loses 4 so 9 EOS...` (n, 50) of `lengths` sentences; every next token is a target."""
    n, length = answers.shape
    idx = np.full((n, 2 + 4 * length), EOS)
    idx[:, 0] = SO
    idx[:, 1:-1] = np.concatenate([words, np.full((n, length, 1), SO), answers[:, :, None]], 2).reshape(n, -1)
    past = np.arange(idx.shape[1]) > 4 * lengths[:, None]
    idx[past] = EOS
    return idx, np.where(past, -100, np.roll(idx, -1, axis=1))


def tiny(out, seed=0, quick=False):
    """
    Write out/{pretrain,task} (shard folders), out/tokenizer, out/test.jsonl and out/test18.jsonl, all
    a function of the seed. pretrain: half worked stories of 1-12 sentences, half stories of 12 with
    the first 3 answers as targets. task: stories of 12 with all answers. quick: a tenth of the rows.
    """
    arguments = {"seed": seed, "quick": quick}
    if os.path.isdir(out) and os.listdir(out):
        meta = os.path.join(out, "task", "meta.json")
        if not os.path.exists(meta) or read_json(meta).get("arguments") != arguments:
            raise InputError(f"{out}: holds something else than this corpus; choose another --out or delete it")
        return print(f"{out}: is complete, nothing to do")
    if seed < 0:
        raise InputError(f"--seed {seed} is negative")
    model = io.BytesIO()
    corpus = (" ".join(WORDS[2:i + 1]) for i in range(2, 17))  # frequency decides the ids
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus, model_writer=model, model_type="word", vocab_size=17, bos_id=-1, pad_id=-1,
        unk_id=0, eos_id=1, normalization_rule_name="identity", minloglevel=2)
    new = f"{os.path.normpath(out)}.tmp-{os.getpid()}"  # renamed once whole
    train, seen = 8_000 if quick else 80_000, []
    try:
        for part, (kind, T) in enumerate((("pretrain", 50), ("task", 26))):
            folder, listed = os.path.join(new, kind), {}
            os.makedirs(folder)
            for split, n in (("train", train), ("val", 1024)):
                rng = np.random.default_rng([seed, part, split == "val"])
                codes, words, answers = _stories(rng, n, 12)
                lengths = np.full(n, 12)
                if kind == "task":
                    idx, targets = _direct(words, answers, T, 12)
                else:
                    lengths[:n // 2] = rng.integers(1, 13, size=n // 2)
                    worked = _worked(words[:n // 2], answers[:n // 2], lengths[:n // 2])
                    direct = _direct(words[n // 2:], answers[n // 2:], T, 3)
                    order = rng.permutation(n)
                    idx, targets = (np.concatenate(pair)[order] for pair in zip(worked, direct))
                seen += [(codes, lengths)] if split == "train" else []
                _write(os.path.join(folder, f"{split}_000000.npy"), idx.astype(np.uint16).ravel())
                _write(os.path.join(folder, f"{split}_000000.targets.npy"), targets.astype(np.int32).ravel())
                listed[split] = [[f"{split}_000000.npy", n * T]]
            _write(os.path.join(folder, "tokenizer.model"), model.getvalue())
            _write(os.path.join(folder, "meta.json"), {
                "vocab_size": len(WORDS), "eos_id": EOS, "row": T, "shards": listed, "arguments": arguments,
                "prompt": "so has 7 so" if kind == "pretrain" else "has 7 loses 4 times 3 gets 2"})
        os.makedirs(os.path.join(new, "tokenizer"))
        _write(os.path.join(new, "tokenizer", "tokenizer.model"), model.getvalue())
        for name, lengths, n in (("test.jsonl", range(1, 13), 100), ("test18.jsonl", [18], 300)):
            lines = []
            for length in lengths:
                codes, words, answers = _stories(np.random.default_rng([seed, 2, length]), 10 * n, length)
                # From 6 sentences on no test story begins a training row. There are too few shorter ones.
                power = 10 ** np.arange(length)
                known = [c[upto >= length, :length] @ power for c, upto in seen] if 6 <= length <= 12 else []
                fresh = ~np.isin(codes @ power, np.concatenate([*known, [-1]]))
                for story, answer in list(zip(words[fresh].reshape(-1, 2 * length), answers[fresh, -1]))[:n]:
                    lines.append(json.dumps({"question": " ".join(WORDS[i] for i in story),
                                             "answer": WORDS[answer], "difficulty": length}) + "\n")
            _write(os.path.join(new, name), "".join(lines).encode())
        os.makedirs(out, exist_ok=True)
        os.rename(new, out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{out}: {train:,} rows each in pretrain and task; tests in test.jsonl and test18.jsonl")


def main():
    parser = argparse.ArgumentParser(description="Make data sets: a folder of token shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="pack text files", description=prepare.__doc__)
    p.add_argument("--input", nargs="+", required=True, help=".txt, .jsonl or .parquet files")
    p.add_argument("--tokenizer", required=True, help="folder with tokenizer.model or tokenizer.json")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--field", default="text", help="one or several, comma separated (default: text)")
    p.add_argument("--val", type=float, default=0.01, help="validation share (default: 0.01)")
    p.add_argument("--shard_tokens", type=int, default=10**8, help="tokens a shard (default: 10^8)")
    p.add_argument("--procs", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    p = commands.add_parser("tiny", help="make the embedded corpus", description=tiny.__doc__)
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="a tenth of the rows")
    args = vars(parser.parse_args())
    if args.pop("command") == "tiny":
        tiny(**args)
    else:
        prepare(args.pop("input"), **args)


if __name__ == "__main__":
    cli(main)
