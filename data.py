"""
Turn text, chats, or questions and answers into tokens to train on. A data set is a folder of
shards, which train.py takes as --data.

    python data.py prepare --input out/tiny/data/test.jsonl --prompt question --field answer \\
        --tokenizer out/tiny/task --out out/data/asked
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web
    python data.py prepare --input gsm8k.jsonl --prompt question --field answer --tokenizer ...
    python data.py prepare --input chats.jsonl --field messages --loss assistant --tokenizer ...

Files on the hub come here with `hf download ORG/NAME --repo-type dataset --include "data/*.parquet"
--local-dir data/NAME` (pip install huggingface_hub).

A data set is a folder. `train_000000.npy` is one row of token ids (uint16, or uint32 if the
vocabulary exceeds 65,536): documents, each [BOS] text EOS, one after another. The loader cuts it
into windows of T tokens wherever they fall, so nothing is padded. The target at each position is
the next token. Where only some tokens carry loss, the file has two rows (int32): token ids, and
targets, already shifted, -100 for no loss. "row" in meta.json is T if windows may only begin at
its multiples. `meta.json` is written last, so a folder that has one is complete.

Unusual: the loader has no state. A batch is a pure function of (seed, step, rank, world), so a run
resumes from its step alone, and 2 ranks see what 1 rank with twice the batch size sees.
"""
import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import (Parser, UserError, check_settings, cli, digest, fraction, locked, opening,
                    positive, read_json, whole, write_json)
from model import IGNORE, checkpoints


# ---- tokenizer files ---------------------------------------------------------------------------

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "generation_config.json")


def copy_tokenizer(source, target):
    """Copy the files that say how text goes in and out of a model, and no others."""
    write_tokenizer(read_tokenizer_files(source), target)


def read_tokenizer_files(folder):
    """{name: bytes} of those files."""
    paths = [Path(folder, name) for name in TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def write_tokenizer(files, folder):
    """Write the files that read_tokenizer_files() found."""
    for name, content in files.items():
        Path(folder, name).write_bytes(content)


# ---- tokenizers ------------------------------------------------------------------------------

# Usual names of the end-of-text token, tried in this order where tokenizer_config.json names none.
EOS = "</s>", "<|end_of_text|>", "<|end_text|>", "<|endoftext|>"


@dataclass
class Tokenizer:
    """Text to ids and back."""
    encode_text: Callable  # text -> ids; names of control tokens are text like any other
    decode_ids: Callable   # list of known ids -> text
    known: set             # ids (or a range); a vocabulary may have gaps
    special: dict          # {name: id} of control tokens
    bos_id: int | None     # begins a text, where transformers' tokenizer of the same files adds it
    eos_id: int | None     # ends a document
    fingerprint: str       # of all that decides which ids a text becomes, and where they end

    @staticmethod
    def load(folder):
        """The Tokenizer in a folder."""
        path = tokenizer_file(folder)
        read = read_tokenizer_json if path.suffix == ".json" else read_sentencepiece
        config = Path(folder, "tokenizer_config.json")
        config = read_json(config) if config.exists() else {}
        try:
            encode, decode, known, special, bos_id = read(str(path), config)
        except UserError:
            raise
        except Exception as e:  # the libraries raise no narrower one
            raise UserError(f"{path}: is damaged, or of a kind that we do not read, such as "
                            f"Llama 3's own tokenizer.model: fetch its tokenizer.json ({e!r:.200})")
        eos_id = find_eos(path, config, special)
        fingerprint = f"{digest(path)}, BOS {bos_id}, EOS {eos_id}"
        return Tokenizer(encode, decode, known, special, bos_id, eos_id, fingerprint)

    @property
    def vocab_size(self):
        """The highest id + 1."""
        return max(self.known) + 1

    def encode(self, text, bos=False):
        """Token ids. "</s>" in a text is four characters, not EOS. bos: begin with BOS, if any."""
        ids = self.encode_text(text)
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def decode(self, ids):
        """The text of a list of ids. Those that only the model has, its padding, are left out."""
        return self.decode_ids([i for i in ids if i in self.known])


def find_eos(path, config, special):
    """
    Find the id of the end-of-text token: the one that tokenizer_config.json (`config`) names, else
    the first usual name among the control tokens `special`, else None. Raises UserError if the
    tokenizer lacks the token that the config names, since any other would be a wrong end.
    """
    name = token_name(config.get("eos_token"))
    if name and name not in special:
        raise UserError(f"{path}: has no control token {name}, which tokenizer_config.json beside "
                        "it names as eos_token")
    return next((special[n] for n in (name, *EOS) if n in special), None)


def token_name(token):
    """The name of a token of tokenizer_config.json, which may be text, a dict or null ("")."""
    if isinstance(token, dict):
        token = token["content"]
    return token or ""


def tokenizer_file(folder):
    """The file of a folder that defines its tokenizer: tokenizer.model before tokenizer.json."""
    for name in ("tokenizer.model", "tokenizer.json"):
        path = Path(folder, name)
        if path.exists():
            return path
    raise UserError(f"{folder}: is no folder with a tokenizer.model or tokenizer.json")


def check_tokenizer(config, folder, *others):
    """
    Load the Tokenizer of a model's folder. Raises UserError if it has more ids than the model, or
    if the tokenizer of one of the other folders, such as a data set's, differs from it.
    """
    tokenizer = Tokenizer.load(folder)
    for other in others:
        theirs = Tokenizer.load(other).fingerprint
        if theirs != tokenizer.fingerprint:
            raise UserError(f"{other}: its tokenizer ({theirs}) is not that of {folder} "
                            f"({tokenizer.fingerprint}). Prepare the data with "
                            f"--tokenizer={folder}")
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {tokenizer.vocab_size} ids, its model "
                        f"{config.vocab_size}, so it is the tokenizer of a different model")
    return tokenizer


# These two return how to encode and decode, the known and the special ids, and BOS, as Tokenizer
# has them.

def read_sentencepiece(path, config):
    """A SentencePiece model (Llama 2, TinyLlama), whose control tokens have no text."""
    import sentencepiece
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    known = range(model.vocab_size())
    special = {model.id_to_piece(i): i for i in known if model.is_control(i)}
    # The file does not say whether a text begins with BOS. transformers' LlamaTokenizer, which
    # reads it there, begins with it unless tokenizer_config.json says otherwise.
    bos_id = None
    if config.get("add_bos_token", True):
        name = token_name(config.get("bos_token", "<s>"))
        bos_id = special.get(name)
    return model.encode, model.decode, known, special, bos_id


def read_tokenizer_json(path, _):
    """
    A tokenizer.json. The corpus of tiny.sh has words. Byte-level BPE is tiktoken's if that gives
    the same ids. Everything else takes the tokenizers library.
    """
    spec = read_json(path)
    special = {}  # {name: id}
    always = {}   # of tokens that count in any text
    for token in spec["added_tokens"]:
        names = special if token["special"] else always
        names[token["content"]] = token["id"]
    pattern = word_pattern(spec)
    if pattern == "words":
        ids = spec["model"]["vocab"]  # {word: id}
        words = {i: word for word, i in ids.items()}
        encode = lambda text: [ids.get(word, ids["<unk>"]) for word in text.split()]
        decode = lambda ids: " ".join(map(words.get, ids))
        known = set(words)
    elif pattern:
        encode, decode, known = byte_level(spec, pattern, special, always)
    else:
        encode, decode, known = library(path)
    return encode, decode, known, special, added_first(path, spec.get("post_processor"))


def added_first(path, processor):
    """
    The id of the token that a tokenizer.json's post_processor puts before a text, or None. It alone
    decides in transformers, too, whatever tokenizer_config.json says. What it puts after a text is
    ignored: a prompt is to be continued.
    """
    ids = []
    match processor or {}:
        case {"type": "TemplateProcessing", "single": template, "special_tokens": tokens}:
            for piece in template:
                if "Sequence" in piece:  # the text
                    break
                ids += tokens[piece["SpecialToken"]["id"]]["ids"]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, i]}:
            ids = [i]
        case {"type": "Sequence", "processors": several}:
            ids = [added_first(path, one) for one in several]
            ids = [i for i in ids if i is not None]
    if len(ids) > 1:
        raise UserError(f"{path}: begins a text with {len(ids)} tokens; only one is supported")
    return ids[0] if ids else None


def word_pattern(spec):
    """
    The regular expression of a tokenizer.json's words, if byte-level BPE of these is all that it
    asks for (Llama 3, OLMo 2, Qwen); "words" for one of whole words; None for others.
    """
    model = spec["model"]
    match spec | {"normalizer": spec.get("normalizer")}:
        case {"model": {"type": "WordLevel"}, "normalizer": None,
              "pre_tokenizer": {"type": "WhitespaceSplit"}}:
            return "words"
        case {"model": {"type": "BPE"}, "normalizer": None | {"type": "NFC"},
              "pre_tokenizer": {"pretokenizers": [
                  {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
                  | {"pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True},
                  {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}}:
            pass
        case _:
            return None
    for token in spec["added_tokens"]:
        strips = token["lstrip"] or token["rstrip"]
        if not token["special"] and (strips or token["single_word"] or token["normalized"]):
            return None
    for key in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return None
    # tiktoken needs a piece for each byte, and merges in the order of ids.
    ids = model["vocab"]
    made = [ids["".join(pair).replace(" ", "")] for pair in model["merges"]]
    if made != sorted(made) or sum(len(piece) == 1 for piece in ids) < 256:
        return None
    return pattern


# Byte-level BPE writes a printable byte as itself, the n-th of the others as character 256 + n.
BYTES = [*range(256), *(b for b in range(256) if b == 32 or not chr(b).isprintable())]


def byte_level(spec, pattern, special, always):
    """Byte-level BPE of the words of a regular expression -> how to encode, decode; known ids."""
    import tiktoken
    pieces = {bytes(BYTES[ord(c)] for c in text): i for text, i in spec["model"]["vocab"].items()
              if text not in special | always}
    coder = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=pieces,
                              special_tokens=special | always)
    names = sorted(map(re.escape, always), key=len, reverse=True)
    split = re.compile(f"({'|'.join(names)})" if names else "$^").split

    def encode(text):
        ids = []
        for part in split(text):
            if part in always:
                ids.append(always[part])
                continue
            if spec.get("normalizer"):
                part = unicodedata.normalize("NFC", part)
            # The regex gives up on a million blanks in a row, so long text is encoded in pieces. A
            # piece ends where a line begins, if it can, since a word begins there anyway.
            for piece in re.findall(r"(?s).{1,400000}(?:(?<=\n)(?=\S)|\Z)|.{1,400000}", part):
                ids += coder.encode_ordinary(piece)
        return ids

    return encode, coder.decode, {*pieces.values(), *special.values(), *always.values()}


def library(path):
    """A tokenizer.json of any kind -> how to encode, decode; known ids."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{path}: a tokenizer of this kind takes pip install tokenizers")
    coder = tokenizers.Tokenizer.from_file(path)
    coder.encode_special_tokens = True  # as text
    coder.no_truncation()
    coder.no_padding()
    return (lambda text: coder.encode(text, add_special_tokens=False).ids,
            lambda ids: coder.decode(ids, skip_special_tokens=False),
            {*coder.get_vocab().values()})


def legible_tokens(folder):
    """
    {id: text} of the tokens in a folder's tokenizer, for people to read: a blank is "▁", and what
    cannot be printed is escaped, such as "\\n", or "\\xe6" for a byte that is only a part of a
    character.
    """
    path = tokenizer_file(folder)
    if path.suffix == ".model":
        import sentencepiece
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = {}
        for i in range(model.vocab_size()):
            piece = model.id_to_piece(i)
            pieces[i] = bytes([int(piece[3:5], 16)]) if model.is_byte(i) else piece  # "<0xE6>"
    else:
        spec = read_json(path)
        vocab = spec["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [piece, score], in the order of ids
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        pieces = {i: piece for piece, i in vocab.items()}
        if '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")]):
            for i, piece in pieces.items():
                with contextlib.suppress(IndexError):  # an added token, which is plain text
                    pieces[i] = bytes(BYTES[ord(c)] for c in piece)
        pieces |= {token["id"]: token["content"] for token in spec["added_tokens"]}
    texts = {}
    for i, piece in pieces.items():
        if isinstance(piece, bytes):
            piece = piece.decode(errors="backslashreplace")
        escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in piece.replace(" ", "▁"))
        texts[i] = "".join(escaped)
    return texts


# ---- prepare ---------------------------------------------------------------------------------
# What --strip_roles removes: `User:`, `### User:`, <|user|>, <|im_start|>user or <extra_id_1>User
# at the start of a line, with the line's end if nothing follows, and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
TAGS = rf"#* *{ROLE}:|<\|{ROLE}\|>|<(?:\|im_start\||extra_id_\d)>{ROLE}\b"
ROLES = re.compile(rf"(?im)^[ \t]*(?:{TAGS})[ \t]*\n?|<\|im_end\|>")


def read_rows(path):
    """Yield the rows of a file: dicts, or bytes of JSON."""
    kind = Path(path).suffix
    if kind in (".txt", ".md", ".rst"):
        yield {"text": read_text(path)}
    elif kind == ".jsonl":
        with open(path, "rb") as file:
            yield from filter(bytes.strip, file)  # leaves out empty lines
    elif kind == ".parquet":
        try:
            from pyarrow import parquet
            for batch in parquet.ParquetFile(path).iter_batches(256):
                yield from batch.to_pylist()
        except ImportError:
            raise UserError(f"{path}: parquet takes pip install pyarrow")
        except ValueError as e:
            raise UserError(f"{path}: is damaged ({e})")
    else:
        raise UserError(f"{path}: is not .txt, .md, .rst, .jsonl or .parquet")


def read_text(path):
    """Read a text file. Raises UserError, with the line number, if it is not UTF-8."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = 1 + content.count(b"\n", 0, e.start)
        raise UserError(f"{path}: line {line} is not UTF-8 text, so convert the file (with iconv, "
                        f"say): {e.reason}, byte {content[e.start]:#x}")


def batches(rows):
    """Lists of rows, to be tokenized at a time, each of about 4 MB."""
    batch = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(str(row))
        if size > 2**22:
            yield batch
            batch = []
            size = 0
    yield batch


def find(row, column):
    """The value in a column of a row. "a.b" is the column b of dicts that stand in column a."""
    if row is None:
        return None
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    if not dot or first not in row:
        raise KeyError(f"there is no {column}, only {', '.join(row)}")
    return find(row[first], rest)


def is_dropped(row, rule):
    """Whether a rule of --drop, COLUMN=TEXT, leaves out a row. A list has TEXT if a value has."""
    column, _, text = rule.partition("=")
    value = find(row, column)
    values = value if isinstance(value, list) else [value]
    return any(text.lower() in str(x).lower() for x in values if x is not None)


def as_text(value):
    """A number, true or false as text; other values, such as text and lists of ids, unchanged."""
    return json.dumps(value) if isinstance(value, (bool, int, float)) else value


def read_field(row, field):
    """
    [(role, text or ids), ...] of a column, which may be text, a number, ids or a chat. A message of
    a chat may have parts.
    """
    value = as_text(find(row, field))
    if isinstance(value, str) or isinstance(value[0], int):
        return [("", value)]
    messages = []
    for message in value:
        content = message["content"] or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part["type"] == "text")
        messages.append((message.get("role"), content))
    return messages


def document(tokenizer, row, args):
    """
    A row -> ids and targets (2, N) of [BOS] text EOS; ids stay as they are. A text without loss and
    one with loss are encoded by themselves, so that a prompt has the ids that it is asked with.
    """
    pieces = []  # (text or ids, whether it carries loss)
    for field in args.field.split(","):
        pieces += [(text, args.loss in ("all", role)) for role, text in read_field(row, field)]
    if args.loss == "all" and isinstance(pieces[0][0], str):
        pieces = [("\n".join(text for text, _ in pieces), True)]
    if args.prompt:
        pieces = [(as_text(find(row, args.prompt)), False), *pieces]
    parts = [np.empty((2, 0), np.int32)]
    for text, loss in pieces:
        ids = text
        if isinstance(text, str):
            text = ROLES.sub("", text) if args.strip_roles else text
            text = text.strip() if loss else text
            if not text:
                continue
            first = len(parts) == 1
            ids = tokenizer.encode(text if first else "\n" + text, bos=first)
            if loss:
                ids = [*ids, tokenizer.eos_id]
        part = np.tile(np.array(ids, np.int32), (2, 1))
        assert part.min() >= 0 and part.max() < tokenizer.vocab_size, "ids of another tokenizer"
        if not loss:
            part[1] = IGNORE
        parts.append(part)
    tokens = np.concatenate(parts, axis=1)
    tokens[1] = np.append(tokens[1, 1:], IGNORE)[:tokens.shape[1]]
    assert len(parts) == 1 or tokens[1].max() >= 0, "nothing carries loss"
    return tokens


def count_rows(args):
    """1, ids, or 2, ids and targets, where the next token is not always the target."""
    return 2 if args.prompt or args.loss != "all" else 1


def tokenize(tokenizer, args, row):
    """A row -> ("kept", its ids, and targets), ("dropped", nothing) or ("bad", why)."""
    try:
        if isinstance(row, bytes):
            row = json.loads(row)
        if any(is_dropped(row, rule) for rule in args.drop):
            return "dropped", None
        return "kept", document(tokenizer, row, args)[:count_rows(args)].copy()
    except Exception as e:  # not JSON, or a field is missing or of another kind
        return "bad", f"{row!r:.80} ({e!r:.300})"


def write_shard(folder, name, tokens):
    """Write an array -> [name, length, digest], the entry in meta.json."""
    with whole(f"{folder}/{name}") as new:
        np.save(new, tokens)
    return [name, tokens.shape[-1], hashlib.sha256(tokens).hexdigest()]


def cut_validation(documents, share):
    """
    The tokens of a shard's documents, a list of arrays (1 or 2, N) -> those for training and those
    for validation. The last documents are for validation: this share of them, and at least 32, or a
    tenth if they are few. Fewer than 10 documents, such as a book, are cut by tokens instead.
    """
    count = len(documents)
    tokens = np.concatenate(documents, axis=1)
    if count < 10:
        kept = round(share * tokens.shape[1])
    else:
        last = max(math.ceil(share * count), min(32, count // 10))
        kept = sum(document.shape[1] for document in documents[-last:])
    return np.split(tokens, [tokens.shape[1] - kept], axis=1)


def write_shards(args, progress, documents):
    """Write the next shard for training, the next one for validation, and the progress so far."""
    number = len(progress["shards"]["train"])
    for split, part in zip(("train", "val"), cut_validation(documents, args.val)):
        if len(part) == 1:
            part = part[0].astype(np.uint16 if progress["vocab_size"] <= 65536 else np.uint32)
        if part.size:
            entry = write_shard(args.out, f"{split}_{number:06d}.npy", part.copy())
            progress["shards"][split].append(entry)
            print(f"{args.out}: {entry[0]}, {entry[1]:,} tokens")
    write_json(f"{args.out}/progress.json", progress)


def pack(args, tokenizer, progress):
    """
    Tokenize the rows that are still to be read, and write shards as they fill up. Tokenizers are
    native code that releases Python's lock, so threads are enough.
    """
    counts = Counter(progress["counts"])
    progress["counts"] = counts
    rows = itertools.chain.from_iterable(map(read_rows, args.input))
    rows = itertools.islice(rows, counts.total(), None)
    documents = []
    size = 0
    why = None
    work = functools.partial(tokenize, tokenizer, args)
    with ThreadPoolExecutor() as pool:
        for batch in batches(rows):
            for kind, found in pool.map(work, batch):
                counts[kind] += 1
                if kind == "bad":
                    why = found
                elif kind == "kept":
                    documents.append(found)
                    size += found.shape[1]
                    progress["longest"] = max(progress["longest"], found.shape[1])
                if size >= args.shard_tokens:
                    write_shards(args, progress, documents)
                    documents.clear()
                    size = 0
            if counts["bad"] > args.max_bad * counts.total():
                raise UserError(f"{args.out}: {counts['bad']} of {counts.total()} documents so far "
                                f"are bad, more than --max_bad={args.max_bad}, such as {why}")
    if documents:
        write_shards(args, progress, documents)
    if not progress["shards"]["train"]:
        raise UserError(f"{args.out}: no text is left of these documents: {dict(counts)}")


def prepare(args):
    """
    Pack files of rows, or of text (one document each), into shards of token ids. After a kill the
    same command resumes at the next shard and writes the same bytes. It reads the rows before that
    again, but does not tokenize them.
    """
    if not all(rule.partition("=")[2] for rule in args.drop):
        raise UserError("--drop: each rule is COLUMN=TEXT")
    out = Path(args.out)
    for checkpoint in checkpoints(args.tokenizer):  # of a run; all of them have the same tokenizer
        args.tokenizer = str(checkpoint)
    tokenizer = Tokenizer.load(args.tokenizer)
    if tokenizer.eos_id is None:
        raise UserError(f"{args.tokenizer}: its tokenizer_config.json names no eos_token, which "
                        "ends a document")
    arguments = vars(args) | {
        "input": [[os.path.basename(path), digest(path)] for path in args.input],
        "tokenizer": tokenizer.fingerprint,
        "out": None, "max_bad": None}  # may change
    started = out / "progress.json"
    meta = out / "meta.json"
    progress = {
        "arguments": arguments,
        "counts": {},
        "longest": 0,
        "shards": {"train": [], "val": []},
        "row": None,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "prompt": "The",
    }
    if meta.exists() or started.exists():
        progress = read_json(meta if meta.exists() else started)
        check_settings(out, progress.get("arguments", {}), arguments, "choose another --out")
    elif {*out.glob("*")} - {out / ".lock", *out.glob("*.tmp-*")}:  # a kill may leave these
        raise UserError(f"{out}: holds other files; choose another --out")
    if meta.exists():
        return print(f"{out} is already complete")
    with locked(out):
        try:
            write_json(started, progress)
            pack(args, tokenizer, progress)
        except BaseException:
            if not progress["shards"]["train"]:  # nothing that the next try could use
                started.unlink(missing_ok=True)
                (out / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other files stay
                    out.rmdir()
            raise
        copy_tokenizer(args.tokenizer, out)
        started.rename(meta)
    print(f"{out}: complete, documents {dict(progress['counts'])}, the longest of "
          f"{progress['longest']:,} tokens")


# ---- the loader ------------------------------------------------------------------------------

class Shards:
    """
    Rows of T tokens of a folder's split, "train" or "val"; .num_rows of them are an epoch. Each
    epoch has a random order of its own, made when it begins; the last two are kept in memory. At
    25 million rows (26 billion tokens in windows of 1,024) an order takes 1 to 2 s and 200 MB.
    """

    def __init__(self, folder, split, T):
        path = f"{folder}/meta.json"
        if not os.path.exists(path):
            raise UserError(f"{folder}: not a finished data set (no meta.json). Create it with "
                            "`python data.py prepare`, or the one of runs/tiny.sh with "
                            "`python runs/tiny_corpus.py --out out/tiny/data`")
        self.T = T
        self.meta = read_json(path)
        self.shards = []  # tokens and targets of each
        self.starts = []  # the first row of each
        self.num_rows = 0
        row = self.meta["row"]
        if row not in (None, T):
            raise UserError(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        for name, *_ in self.meta["shards"][split]:
            path = f"{folder}/{name}"
            try:
                tokens = np.load(path, mmap_mode="r")
            except (ValueError, EOFError) as e:
                raise UserError(f"{path}: is cut short; make the data set again ({e})")
            shard = tokens if tokens.ndim == 2 else (tokens, tokens[1:])
            self.shards.append(shard)
            self.starts.append(self.num_rows)
            self.num_rows += len(shard[1]) // T
        if not self.num_rows:
            raise UserError(f"{folder}: has no {split} window of {T} tokens; use a smaller "
                            "--context")
        self.order = functools.lru_cache(maxsize=2)(self.shuffle)

    def shuffle(self, seed, epoch):
        """The rows in the random order of an epoch."""
        return np.random.default_rng((seed, epoch)).permutation(self.num_rows)

    def sample(self, seed, number):
        """Ids and targets, (2, T) int64, of a sample; numbers go on from epoch to epoch."""
        epoch, index = divmod(number, self.num_rows)
        row = self.order(seed, epoch)[index]
        shard = bisect.bisect(self.starts, row) - 1
        start = (row - self.starts[shard]) * self.T
        return np.array([x[start:start + self.T] for x in self.shards[shard]], np.int64)


class Dataset:
    """
    The rows of a folder, or of several in fixed shares: "A:1,B:1,C:2" takes 1/4 from A, 1/4 from B
    and 1/2 from C. Each round of sum(weights) samples has exactly weights[k] from folder k, evenly
    spread. Each folder has epochs of its own. .num_rows: samples until the first folder is through.
    .folders: all of them; they share one tokenizer (check_tokenizer() sees to it).
    """

    def __init__(self, data, split, T):
        self.folders = []
        self.parts = []  # (Shards, weight)
        turns = []       # (when, of folder k, which of its samples)
        for k, part in enumerate(data.split(",")):
            folder, _, weight = part.partition(":")
            if not re.fullmatch(r"([1-9]\d*)?", weight):
                raise UserError(f"--data: {part}: a weight is a whole number, 1 or more")
            weight = int(weight or 1)
            self.folders.append(folder)
            self.parts.append((Shards(folder, split, T), weight))
            turns += [((i + 0.5) / weight, k, i) for i in range(weight)]
        self.turns = sorted(turns)
        self.num_rows = min(part.num_rows * len(turns) // weight for part, weight in self.parts)

    def label_shares(self):
        """
        {folder: its share of the labels}, from the first 64 rows of each. It differs from the share
        of the rows where one folder's rows have fewer labels, as those of questions and answers.
        """
        labels = {}
        for folder, (shards, weight) in zip(self.folders, self.parts):
            count = 0
            for number in range(64):
                _, targets = shards.sample(0, number)
                count += (targets != IGNORE).sum()
            labels[folder] = labels.get(folder, 0) + weight * count
        total = max(1, sum(labels.values()))
        return {folder: count / total for folder, count in labels.items()}

    def fingerprint(self):
        """A digest of the shards and weights: the same tokens have the same one in any folder."""
        content = json.dumps([(shards.meta["shards"], weight) for shards, weight in self.parts])
        return hashlib.sha256(content.encode()).hexdigest()

    def batch(self, seed, step, rank, world, B):
        """
        Returns idx and targets (-100: no loss), both (B, T) int64, and numbers (B,) int64: the
        rows' global sample indices.
        """
        numbers = (step * world + rank) * B + np.arange(B)
        samples = []
        for number in numbers:
            cycle, turn = divmod(number, len(self.turns))
            _, k, i = self.turns[turn]
            shards, weight = self.parts[k]
            samples.append(shards.sample(seed, cycle * weight + i))
        idx, targets = torch.from_numpy(np.stack(samples, axis=1))
        return idx, targets, numbers


def main():
    parser = Parser(description=opening(__doc__))
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser(
        "prepare", help="pack files into a data set", description=opening(__doc__),
        usage="data.py prepare --input FILE ... --tokenizer FOLDER --out FOLDER [flags]",
        epilog="The same command resumes after a kill, at the next shard.")
    what, how, output = preparing.groups()
    flag = what.add_argument
    flag("--input", nargs="+", action="extend", required=True, metavar="FILE",
         help="files: .jsonl or .parquet of rows; .txt, .md or .rst of text")
    flag("--tokenizer", required=True, metavar="FOLDER",
         help="a checkpoint, a run, or a folder with tokenizer.model or tokenizer.json")
    flag("--field", default="text", metavar="COLUMN",
         help="one column (default: text) or several, a,b: text, chat messages, or token ids")
    flag("--prompt", metavar="COLUMN",
         help="text that comes first and carries no loss, such as the question; a newline joins it "
              "to --field, the answer")
    flag("--loss", choices=("all", "assistant"), default="all",
         help="assistant: of chats, only the assistant's messages carry loss")
    flag("--drop", nargs="+", action="extend", default=[], metavar="COLUMN=TEXT",
         help="leave out rows whose COLUMN contains TEXT, in any case; the name of a column in "
              "another one is a.b, here and in --field")
    flag("--strip_roles", action="store_true",
         help="remove a chat's tags: `User:`, `### Human:`, <|im_start|>system and so on")
    flag = how.add_argument
    flag("--val", type=fraction, default=0.01, metavar="X",
         help="share of the documents for validation (0.01), but at least 32, or a tenth if they "
              "are few")
    flag("--max_bad", type=fraction, default=0.01, metavar="X",
         help="share of documents that may be unreadable (0.01); they are counted and left out")
    flag("--shard_tokens", type=positive, default=100_000_000, metavar="N",
         help="about this many tokens in a file (10^8)")
    output.add_argument("--out", required=True, metavar="FOLDER", help="the data set")
    prepare(parser.parse_args())


if __name__ == "__main__":
    cli(main)
