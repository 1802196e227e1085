"""
Text to tokens to batches: tokenizers, `prepare`, the loader and the embedded corpus.

    python data.py tiny --out out/tiny/data            # the embedded corpus: seconds, no download
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web --procs 8
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out ...

Files on the hub come here with `hf download ORG/NAME --repo-type dataset --include "data/*.parquet"
--local-dir data/NAME` (pip install huggingface_hub).

A data set is a folder. `train_000000.npy` is one row of token ids (uint16, or uint32 if the
vocabulary exceeds 65,536): documents, each [BOS] text EOS, one after another. The loader cuts it
into windows of T tokens wherever they fall, so nothing is padded. The target at each position is
the next token. In a data set of rows ("row" in meta.json is T), it stands in
`train_000000.targets.npy` (int32), already shifted, -100 for no loss. `meta.json` is written last,
so a folder that has one is complete.

Unusual: the loader has no state. A batch is a pure function of (seed, step, rank, world), so a run
resumes from its step alone, and 2 ranks see what 1 rank with twice the batch size sees.
"""
import argparse
import base64
import bisect
import contextlib
import fcntl
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import sentencepiece
import tiktoken
import torch
from safetensors import SafetensorError

from model import UserError

# ---- errors and whole files ------------------------------------------------------------------


def cli(main):
    """
    Run a script's main() and exit with what it returns. A user's mistake, UserError or OSError,
    ends in one line on stderr and exit code 1. A bug keeps its traceback.
    """
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")


class Parser(argparse.ArgumentParser):
    """The command line of a script: a mistake in it is a UserError, and no flag is guessed."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **options)

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def at_least(lowest):
    """The type of a flag that takes whole numbers from `lowest` on."""
    def number(text):
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return int(text)
    return number


natural, positive = at_least(0), at_least(1)

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's


def say(text, renew=False, file=None):
    """Print a line on rank 0. In a terminal, the next line replaces one that is to be renewed."""
    file = file or sys.stdout
    if RANK == 0:
        end = "\r" if renew and file.isatty() else "\n"
        width = 79 * file.isatty()  # the blanks cover a longer line
        print(f"{text:{width}}", end=end, file=file, flush=True)


@contextlib.contextmanager
def whole(path):
    """
    Write a file or a folder completely or not at all. Yields a Path in a temporary folder beside
    `path`, where the caller creates the file or folder. On a clean exit it is flushed to disk and
    renamed to `path`; on an error `path` stays as it was. A full disk ends in one line that names
    `path`. A kill leaves the temporary folder, `path`.tmp-*, behind.
    """
    target = Path(path).resolve()
    try:
        os.makedirs(target.parent, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.tmp-") as folder:
            new = Path(folder, target.name)
            yield new
            for item in (*new.rglob("*"), new):
                if item.is_file():  # safetensors writes files that only their owner can read
                    item.chmod(new.stat().st_mode & 0o666)
                    with open(item) as file:
                        os.fsync(file)
            if target.is_dir():
                target.rename(f"{folder}/old")  # is deleted with the temporary folder
            new.rename(target)
    except (OSError, SafetensorError) as e:  # the latter is how safetensors reports a full disk
        raise UserError(f"{path}: cannot be written ({e}); what was there before is untouched")


def locked(folder):
    """Make a folder and hold it until what is returned is closed. A second process exits."""
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/.lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing it; wait, or choose another folder")
    return file


def read_json(path):
    """The value in a JSON file."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})")


def write_json(path, value):
    """Write a whole JSON file. NaN and infinity, which JSON does not have, become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with whole(path) as new:
        new.write_text(json.dumps(value, indent=1) + "\n")


def digest(path):
    """What tells a file from others, wherever it lies and whenever it was written: its SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def check_settings(path, earlier, settings):
    """Results of other settings are not mixed: UserError if the earlier ones in `path` differ."""
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise UserError(f"{path}: has {key} = {earlier.get(key)}, not {value}: name another "
                            "file with --out")


def describe(model):
    """(device, dtype) of a model in words, to stand beside a measurement."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device)
    return device, str(weight.dtype)[6:]  # without "torch."


def write_result(path, script, model, task, results, seconds, tokens, **more):
    """
    The JSON file of a measurement. results: a list of {"steps": r, "metric": name, "value": x,
    "standard_error": se, "n": count, ...}. tokens: what `seconds` were spent on. With `training`,
    a picture needs neither the model nor its folder.
    """
    device, dtype = describe(model)
    trained = Path(model.folder, "train.json")
    trained = read_json(trained) if trained.exists() else {}
    write_json(path, dict(
        script=script, model=model.folder, config=asdict(model.config), task=task,
        device=device, dtype=dtype, torch=torch.__version__,
        training={key: trained.get(key) for key in ("update", "flops")},
        seconds=seconds, tokens_per_second=tokens / seconds, **more, results=results))


def copy_tokenizer(source, target):
    """Copy the tokenizer's files from one folder to another."""
    for path in Path(source).glob("*token*"):  # tokenizer*, special_tokens_map.json
        shutil.copy(path, target)


# ---- tokenizers ------------------------------------------------------------------------------
# How Llama 3's byte-level BPE cuts text into words, before it merges bytes.
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Llama 3.1's and 3.2's names of the ids from 128,000 on.
LLAMA3_NAMES = ("begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 "
                "finetune_right_pad_id reserved_special_token_2 start_header_id end_header_id "
                "eom_id eot_id python_tag").split()
LLAMA3_NAMES += [f"reserved_special_token_{i}" for i in range(3, 248)]


@dataclass
class Tokenizer:
    """
    Text to ids and back. It also has .eos_id, which ends a document, and .bos_id, which begins it,
    or None.
    """
    encode_text: callable  # text without names -> ids
    decode: callable       # list of ids -> text; SentencePiece leaves out control tokens
    vocab_size: int        # the highest id + 1
    special: dict          # {name: id} of control tokens
    always: dict           # {name: id} of other names, which count in any text

    def __post_init__(self):
        find = self.special.get
        self.bos_id = find("<s>", find("<|begin_of_text|>"))
        self.eos_id = find("</s>", find("<|end_of_text|>", find("<|endoftext|>")))

    @staticmethod
    def load(folder):
        """From tokenizer.model (SentencePiece, or Llama 3's base64 lines), else tokenizer.json."""
        path = Path(folder, "tokenizer.model")
        if not path.exists():
            return read_byte_level(f"{folder}/tokenizer.json")
        content = path.read_bytes()
        if content.startswith(b"IQ== 0\n"):
            return read_llama3(content)
        try:
            return read_sentencepiece(content)
        except RuntimeError as e:
            raise UserError(f"{path}: is damaged or no tokenizer: fetch it again ({e})")

    def encode(self, text, bos=False, special=False):
        """Token ids. "</s>" is four characters, or EOS if special. bos: begin with BOS, if any."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates
        names, ids = self.always | (self.special if special else {}), []
        # The pattern splits text at names. Of two that begin alike, the longer one wins.
        pattern = "|".join(map(re.escape, sorted(names, reverse=True))) or "(?!)"
        for part in re.split(f"({pattern})", text):
            ids += [names[part]] if part in names else self.encode_text(part)
        if bos and self.bos_id not in (None, *ids[:1]):
            ids.insert(0, self.bos_id)
        return ids


def read_sentencepiece(content):
    """The Tokenizer in the bytes of a SentencePiece model (Llama 1 and 2, TinyLlama)."""
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    size = model.vocab_size()
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i)}
    return Tokenizer(model.encode, model.decode, size, special, {})


def read_llama3(content):
    """The Tokenizer in the bytes of Llama 3's tokenizer.model: lines of a piece and its id."""
    lines = map(bytes.split, content.splitlines())
    pieces = {base64.b64decode(piece): int(i) for piece, i in lines}
    special = {f"<|{name}|>": 128000 + i for i, name in enumerate(LLAMA3_NAMES)}
    return byte_level(LLAMA3_SPLIT, pieces, special, {})


def read_byte_level(path):
    """The Tokenizer in a tokenizer.json of byte-level BPE (Llama 3, OLMo 2)."""
    spec = read_json(path)
    match spec:
        case {"normalizer": None, "pre_tokenizer": {"pretokenizers": [
                {"pattern": {"Regex": split}}, {"type": "ByteLevel", "add_prefix_space": False}]}}:
            special, always = {}, {}
        case _:
            raise UserError(f"{path}: is not byte-level BPE as Llama 3 has it; put the model's "
                            "tokenizer.model beside it")
    for token in spec["added_tokens"]:
        names = special if token["special"] else always
        names[token["content"]] = token["id"]
    # A printable byte is written as itself, the n-th of the others as character 256 + n.
    byte = [*range(256), *(b for b in range(256) if b == 32 or not chr(b).isprintable())]
    pieces = {bytes(byte[ord(c)] for c in text): i for text, i in spec["model"]["vocab"].items()
              if text not in special and text not in always}
    return byte_level(split, pieces, special, always)


def byte_level(split, pieces, special, always):
    """
    A Tokenizer of byte-level BPE. split: the regex that cuts text into words. pieces: {bytes: id};
    the lower id is merged first, as in every tokenizer that was trained merge by merge.
    """
    names = special | always
    coder = tiktoken.Encoding("bpe", pat_str=split, mergeable_ranks=pieces, special_tokens=names)

    def encode(text):
        # The regex gives up on a million blanks in a row, so long text is encoded in parts. A part
        # ends where a line begins, if it can, since a word begins there anyway.
        parts = re.findall(r"(?s).{1,400000}(?:(?<=\n)(?=\S)|\Z)|.{1,400000}", text)
        return [i for part in parts for i in coder.encode_ordinary(part)]

    def decode(ids):  # leaves out the padding of a model's vocabulary
        return coder.decode([i for i in ids if i < coder.n_vocab])

    return Tokenizer(encode, decode, coder.n_vocab, special, always)


# prepare loads the tokenizer before it forks, so its workers have it already.
load_once = functools.cache(Tokenizer.load)


# ---- prepare ---------------------------------------------------------------------------------
# What --strip_roles removes: `User:`, `### User:`, <|user|> or <|im_start|>user at the start of a
# line, with the line's end if nothing follows, and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
ROLES = re.compile(rf"(?im)^[ \t]*(?:#* *{ROLE}:|<\|{ROLE}\|>|<\|im_start\|>{ROLE}\b)[ \t]*\n?"
                   r"|<\|im_end\|>")


def read_rows(path):
    """
    Yield the rows of a file: dicts, or bytes of JSON.
    """
    if path.endswith(".txt"):
        yield {"text": Path(path).read_bytes().decode("utf-8-sig", "replace")}
    elif path.endswith(".jsonl"):
        with open(path, "rb") as file:
            yield from filter(bytes.strip, file)  # leaves out empty lines
    else:
        try:
            from pyarrow import parquet
            for batch in parquet.ParquetFile(path).iter_batches(256):
                yield from batch.to_pylist()
        except (ImportError, ValueError) as e:
            raise UserError(f"{path}: is not .txt, .jsonl or .parquet, or it is damaged, or "
                            f"pyarrow is missing: pip install pyarrow ({e})")


def document_ids(tokenizer, row, fields, strip_roles):
    """
    Token ids of a document: [BOS] text EOS. A field is text or a chat, a list of {"content": text};
    or a list of ids, which are taken as they are.
    """
    texts = []
    for field in fields:
        value = row[field]
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value[0], int):
            assert max(value) < tokenizer.vocab_size
            return value
        else:
            texts += [message["content"] for message in value]
    text = "\n".join(texts)
    text = ROLES.sub("", text).strip() if strip_roles else text.strip()
    return [*tokenizer.encode(text, bos=True), tokenizer.eos_id] if text else []


def write_shard(folder, name, *arrays):
    """Write tokens, and targets if given -> [name, tokens, digest], the entry in meta.json."""
    digest = hashlib.sha256()
    for x, path in zip(arrays, (name, name.replace(".npy", ".targets.npy"))):
        with whole(f"{folder}/{path}") as new:
            np.save(new, x)
        digest.update(x)
    return [name, len(arrays[0]), digest.hexdigest()]


def write_shards(out, state, tokens, val):
    """Write the next shard, its last share `val` apart for validation, then the progress so far."""
    number, cut = len(state["shards"]["train"]), len(tokens) - int(len(tokens) * val)
    for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
        if part:
            entry = write_shard(out, f"{split}_{number:06d}.npy", np.array(part))
            state["shards"][split].append(entry)
            print(f"{out}: {entry[0]}, {len(part):,} tokens")
    write_json(out / "progress.json", state)


def tokenize(folder, fields, drop, strip_roles, row):
    """A worker's share: a row -> its ids, and whether it was "kept", "dropped" or "bad"."""
    try:
        if isinstance(row, bytes):
            row = json.loads(row)
        for rule in drop:
            column, text = rule.split("=", 1)
            if text.lower() in str(row[column]).lower():
                return [], "dropped"
        return document_ids(load_once(folder), row, fields, strip_roles), "kept"
    except Exception as e:  # not JSON, or a field is missing or of another kind
        print(f"left out {row!r:.80} ({e!r:.200})")
        return [], "bad"


def prepare(tokenizer, out, input=(), field="text", drop=(), strip_roles=False, max_bad=0.01,
            val=0.01, shard_tokens=10**8, procs=8):
    """
    Pack .jsonl, .parquet and .txt files (one document each) into shards of token ids. After a kill
    the same command resumes at the next shard and writes the same bytes. It reads the rows before
    that again, but does not tokenize them.

    --input          files of rows or text
    --tokenizer      folder with tokenizer.model or tokenizer.json
    --field          one column (text) or several, a,b: text, chat messages, or token ids
    --drop           COLUMN=TEXT ...: leave out rows whose COLUMN contains TEXT, in any case
    --strip_roles    remove a chat's tags: `User:`, `### Human:`, <|im_start|>system and the like
    --max_bad        share of documents that may be bad (0.01); they are printed, counted, left out
    --val            share of each shard for validation (0.01)
    --shard_tokens   tokens a shard, about (10^8)
    --procs          processes (8), at most one a core
    """
    arguments = dict(input=[[path, os.path.getsize(path)] for path in input], field=field,
                     drop=list(drop), strip_roles=strip_roles, val=val, shard_tokens=shard_tokens,
                     tokenizer=tokenizer)
    coder, out = load_once(tokenizer), Path(out)
    state = dict(arguments=arguments, counts={}, shards=dict(train=[], val=[]), row=None,
                 vocab_size=coder.vocab_size, eos_id=coder.eos_id, prompt="The")
    meta, progress = out / "meta.json", out / "progress.json"
    if meta.exists() or progress.exists():
        state = read_json(meta if meta.exists() else progress)
    elif any(out.glob("[!.]*")):
        raise UserError(f"{out}: holds other files; choose another --out")
    if state["arguments"] != arguments:
        raise UserError(f"{out}: was made with other arguments; delete it or change --out")
    if meta.exists():
        return print(f"{out}: is complete, nothing to do")
    work = functools.partial(tokenize, tokenizer, field.split(","), drop, strip_roles)
    tokens = array("H" if coder.vocab_size <= 65536 else "I")
    counts = state["counts"] = Counter(state["counts"])
    ignore = signal.SIGINT, signal.SIG_IGN  # leaves Ctrl-C to this process
    with locked(out), Pool(min(procs, os.cpu_count()), signal.signal, ignore) as pool:
        write_json(progress, state)
        rows = itertools.chain(*map(read_rows, input))
        rows = itertools.islice(rows, counts.total(), None)
        for ids, kind in pool.imap(work, rows, chunksize=64):
            tokens.extend(ids)
            counts[kind] += 1
            if len(tokens) >= shard_tokens:
                write_shards(out, state, tokens, val)
                del tokens[:]
        write_shards(out, state, tokens, val)
    if counts["bad"] > max_bad * counts.total() or not state["shards"]["train"]:
        raise UserError(f"{out}: {counts['bad']} of {counts.total()} documents are bad, more than "
                        f"--max_bad={max_bad} allows, or all are empty (--input, --field, --drop)")
    copy_tokenizer(tokenizer, out)
    progress.rename(meta)
    print(f"{out}: complete, {counts}")


# ---- the loader ------------------------------------------------------------------------------

class Shards:
    """
    Windows of T tokens of a data set's split, "train" or "val"; .num_rows of them are an epoch.
    Each epoch has a random order of its own, made when it begins; the last two are kept in memory. At
    25 million rows (26 billion tokens in windows of 1,024) an order takes 1 to 2 s and 200 MB.
    """

    def __init__(self, folder, split, T):
        self.folder, self.T, self.num_rows = folder, T, 0
        self.meta = read_json(f"{folder}/meta.json")
        self.shards, self.starts = [], []  # (tokens, targets) of each shard; its first row
        row = self.meta["row"]
        if row not in (None, T):
            raise UserError(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        try:
            for name, *_ in self.meta["shards"][split]:
                path = f"{folder}/{name}"
                tokens = np.load(path, mmap_mode="r")
                targets = tokens[1:]
                if row:
                    targets = np.load(path.replace(".npy", ".targets.npy"), mmap_mode="r")
                self.shards.append((tokens, targets))
                self.starts.append(self.num_rows)
                self.num_rows += len(targets) // T
        except (ValueError, EOFError) as e:
            raise UserError(f"{path}: is cut short; make the data set again ({e})")
        if not self.num_rows:
            raise UserError(f"{folder}: has no {split} window of {T} tokens; use a smaller "
                            "--context")
        self.order = functools.lru_cache(maxsize=2)(self.order)

    def fingerprint(self):
        """
        What tells these tokens from others: their vocabulary, and a digest of meta.json's list of
        shards, which has a digest of each.
        """
        digest = hashlib.sha256(json.dumps(self.meta["shards"]).encode())
        return {"vocab_size": self.meta["vocab_size"], "digest": digest.hexdigest()}

    def order(self, seed, epoch):
        """The rows in the random order of an epoch."""
        return np.random.default_rng([seed, epoch]).permutation(self.num_rows)

    def batch(self, seed, step, rank, world, B):
        """-> idx, targets (-100: no loss), both (B, T) int64; numbers (B,), which decide them."""
        numbers = (step * world + rank) * B + np.arange(B)
        samples = [self.sample(seed, number) for number in numbers]
        idx, targets = torch.from_numpy(np.stack(samples, axis=1))
        return idx, targets, numbers

    def sample(self, seed, number):
        """Ids and targets, (2, T) int64, of a sample; numbers go on from epoch to epoch."""
        epoch, place = divmod(number, self.num_rows)
        row = self.order(seed, epoch)[place]
        shard = bisect.bisect(self.starts, row) - 1
        start = (row - self.starts[shard]) * self.T
        return np.array([x[start:start + self.T] for x in self.shards[shard]], np.int64)


class Mixture(Shards):
    """
    Several data sets in fixed shares. Of sum(weights) samples in a row, counted from 0, exactly
    weights[k] are of set k, evenly spread; each set has epochs of its own. .num_rows: samples until
    the first set is through. .meta, .folder: the first set's.
    """

    def __init__(self, sets, weights):
        self.sets, self.weights = sets, weights
        self.meta, self.folder = sets[0].meta, sets[0].folder
        self.num_rows = min(s.num_rows * sum(weights) // weight for s, weight in zip(sets, weights))
        self.turns = sorted(((i + 0.5) / weight, k, i) for k, weight in enumerate(weights)
                            for i in range(weight))
        if len({tokenizer_bytes(s.folder) for s in sets}) > 1:
            raise UserError("the data sets have different tokenizers: prepare them with one "
                            "(--data)")

    def fingerprint(self):
        return {"weights": self.weights, "sets": [s.fingerprint() for s in self.sets]}

    def sample(self, seed, number):
        cycle, place = divmod(number, len(self.turns))
        _, k, i = self.turns[place]
        return self.sets[k].sample(seed, cycle * self.weights[k] + i)


def tokenizer_bytes(folder):
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob("tokenizer.*")))


def open_data(data, split, T):
    """"FOLDER" -> Shards; "A:1,B:1,C:2" -> Mixture, 1/4, 1/4 and 1/2 of it from A, B and C."""
    folders, weights = zip(*(f"{part}:1".split(":")[:2] for part in data.split(",")))
    sets = [Shards(folder, split, T) for folder in folders]
    return Mixture(sets, list(map(int, weights))) if len(sets) > 1 else sets[0]


# ---- the embedded corpus ---------------------------------------------------------------------
# A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1. The
# answer needs every sentence in order, so a model shallower than the story must reuse its layers.
WORDS = ["<unk>", "</s>", "has", "gets", "loses", "times", "so", *"0123456789"]  # in order of id
EOS, HAS, GETS, SO, ZERO = 1, 2, 3, 6, 7
PROMPT = "has 7 loses 4 times 3 gets 2 gets 1 loses 4 times 2 loses 3 gets 4 times 3 loses 1 gets 2"
# A tokenizer.model of WORDS, as SentencePieceTrainer wrote it (model_type="word", no BOS).
TOKENIZER_MODEL = (
    b'\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\r\n\x04</s>\x15\x00\x00\x00\x00\x18\x03'
    b'\n\r\n\x06\xe2\x96\x81has\x15\x92\x15\x05\xc0\n\x0e\n\x07\xe2\x96\x81gets\x15\xf3\x7f\t\xc0'
    b'\n\x0f\n\x08\xe2\x96\x81loses\x15#>\x0e\xc0\n\x0f\n\x08\xe2\x96\x81times\x15\x8e]\x13\xc0'
    b'\n\x0c\n\x05\xe2\x96\x81so\x15&\xef\x18\xc0\n\x0b\n\x04\xe2\x96\x810\x15\xb6\x08\x1f\xc0'
    b'\n\x0b\n\x04\xe2\x96\x811\x15\xf0\xc6%\xc0\n\x0b\n\x04\xe2\x96\x812\x15\xb2P-\xc0'
    b'\n\x0b\n\x04\xe2\x96\x813\x15z\xdc5\xc0\n\x0b\n\x04\xe2\x96\x814\x15\x14\xba?\xc0'
    b'\n\x0b\n\x04\xe2\x96\x815\x15<eK\xc0\n\x0b\n\x04\xe2\x96\x816\x158\xadY\xc0'
    b'\n\x0b\n\x04\xe2\x96\x817\x15\x9a\x16l\xc0\n\x0b\n\x04\xe2\x96\x818\x15\xdf\x04\x83\xc0'
    b'\n\x0b\n\x04\xe2\x96\x819\x15"3\x99\xc0'
    b'\x12"\x18\x03 \x11\xc0\x02\x00\xc8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\xd0\x02\x01'
    b'\xd8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x1a\x0c\n\x08identity\x12\x00')


def make_stories(rng, n, length):
    """n stories of `length` sentences: each the ids of a verb, a number, "so", the answer then."""
    verbs, numbers = (rng.integers(most, size=(n, length)) for most in (3, 4))
    stories = []
    for count, story_verbs, story_numbers in zip(rng.integers(10, size=n), verbs, numbers):
        story = [(HAS, ZERO + count, SO, ZERO + count)]
        for verb, x in zip(story_verbs[1:], story_numbers[1:]):
            x = 2 + x % 2 if verb == 2 else 1 + x
            count = (count + x, count - x, count * x)[verb] % 10
            story.append((GETS + verb, ZERO + x, SO, ZERO + count))
        stories.append(story)
    return stories


def worked(story):
    """A document that says each answer, `so has 3 so 3 loses 4 so 9 EOS`: [(id, target), ...]."""
    if not story:
        return [(EOS, -100)] * 2
    ids = [SO, *itertools.chain(*story), EOS]
    return list(zip(ids, [*ids[1:], -100]))


def direct(story, labelled):
    """`has 3 loses 4 ... 9 EOS`; the first `labelled` numbers have the answer so far as target."""
    document = []
    for i, (verb, number, _, answer) in enumerate(story):
        document += [(verb, -100), (number, answer if i < labelled else -100)]
    return [*document, (answer, EOS if labelled == 12 else -100), (EOS, -100)]


def pretraining(rng, stories):
    """
    Rows of two documents, 52 tokens, in random order. Half of the stories are worked and cut so
    that a row has 12 sentences; the others are direct, with three targets.
    """
    rows, quarter = [], len(stories) // 4
    for a, b, n in zip(stories, stories[quarter:], rng.integers(1, 13, size=quarter)):
        del a[n:], b[12 - n:]
        rows.append(worked(a) + worked(b))
    rest = (direct(story, 3) for story in stories[2 * quarter:])
    rows += [a + b for a, b in zip(rest, rest)]
    return [rows[i] for i in rng.permutation(len(rows))]


def tiny(out, seed=0, rows=80_000):
    """
    Write the embedded corpus, which follows from the seed: data sets OUT/pretrain (rows of two
    stories) and OUT/task (direct stories of 12 sentences with all answers), OUT/tokenizer,
    OUT/test.jsonl and OUT/test18.jsonl. --rows: training stories of each data set (80,000).
    """
    out, arguments = Path(out), dict(seed=seed, rows=rows)
    meta = out / "task" / "meta.json"
    if meta.exists() and read_json(meta)["arguments"] == arguments:
        return print(f"{out}: is complete, nothing to do")
    if out.exists():
        raise UserError(f"{out}: holds something else; choose another --out")
    with whole(out) as new:
        seen = set()  # how training stories begin, from 6 sentences on
        for kind, T, prompt in (("pretrain", 52, "so has 7 so"), ("task", 26, PROMPT)):
            shards = {}
            for split, n in (("train", rows), ("val", 1024)):
                rng = np.random.default_rng([seed, kind == "task", split == "val"])
                stories = make_stories(rng, n, 12)
                if kind == "pretrain":
                    documents = pretraining(rng, stories)
                else:
                    documents = [direct(story, 12) for story in stories]
                if split == "train":
                    seen |= {tuple(s[:n]) for s in stories for n in range(6, len(s) + 1)}
                ids, targets = np.concatenate(documents).T
                shards[split] = [write_shard(f"{new}/{kind}", f"{split}_000000.npy",
                                             ids.astype(np.uint16), targets.astype(np.int32))]
            write_json(f"{new}/{kind}/meta.json", dict(
                vocab_size=17, eos_id=EOS, row=T, shards=shards, arguments=arguments,
                prompt=prompt))
        for kind in ("pretrain", "task", "tokenizer"):
            os.makedirs(f"{new}/{kind}", exist_ok=True)
            Path(f"{new}/{kind}/tokenizer.model").write_bytes(TOKENIZER_MODEL)
        for length in (*range(1, 13), 18):
            name, n = ("test18.jsonl", 300) if length == 18 else ("test.jsonl", 100)
            stories = make_stories(np.random.default_rng([seed, 2, length]), 10 * n, length)
            fresh = [story for story in stories if tuple(story) not in seen]
            with open(f"{new}/{name}", "a") as file:
                for story in fresh[:n]:
                    question = " ".join(WORDS[i] for sentence in story for i in sentence[:2])
                    row = dict(question=question, answer=WORDS[story[-1][3]], difficulty=length)
                    file.write(json.dumps(row) + "\n")
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    options = {tuple: dict(nargs="+", action="extend"), bool: dict(action="store_true"),
               type: dict(required=True)}  # keys: the default's type, `type` if there is none
    for command in (prepare, tiny):
        p = commands.add_parser(command.__name__, description=command.__doc__,
                                argument_default=argparse.SUPPRESS,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        p.set_defaults(command=command)
        for name, flag in inspect.signature(command).parameters.items():
            kind = type(flag.default)
            p.add_argument(f"--{name}", **options.get(kind, dict(type=kind)))
    args = vars(parser.parse_args())
    args.pop("command")(**args)


if __name__ == "__main__":
    cli(main)
