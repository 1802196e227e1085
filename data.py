"""
Text to tokens to batches: tokenizers, `prepare`, and the loader.

    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out ...

Files on the hub come here with `hf download ORG/NAME --repo-type dataset --include "data/*.parquet"
--local-dir data/NAME` (pip install huggingface_hub).

A data set is a folder. `train_000000.npy` is one row of token ids (uint16, or uint32 if the
vocabulary exceeds 65,536): documents, each [BOS] text EOS, one after another. The loader cuts it
into windows of T tokens wherever they fall, so nothing is padded. The target at each position is
the next token. In a data set of rows ("row" in meta.json is T), the file has two rows (int32):
token ids, and targets, already shifted, -100 for no loss. `meta.json` is written last, so a folder
that has one is complete.

Unusual: the loader has no state. A batch is a pure function of (seed, step, rank, world), so a run
resumes from its step alone, and 2 ranks see what 1 rank with twice the batch size sees.
"""
import argparse
import bisect
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import sys
import tempfile
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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


def between(lowest, highest=math.inf, kind=int):
    """The type of a flag that takes numbers from `lowest` to `highest`."""
    def number(text):
        value = kind(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{text} is not between {lowest} and {highest}")
        return value
    return number


natural = between(0)
positive = between(1)
rate = between(0, kind=float)
fraction = between(0, 1, float)
seeds = between(0, 2**31 - 1)

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's


def say(text, file=None):
    """Print a line on rank 0."""
    if RANK == 0:
        print(text, file=file, flush=True)


def find_gpu():
    """Whether torch can use a GPU. Says so if there is one that it cannot use."""
    if torch.cuda.is_available():
        return True
    if os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd"):
        say(f"note: this machine has a GPU, but torch {torch.__version__} cannot use it, so the CPU "
            "works: README.md has the install lines", file=sys.stderr)
    return False


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
    """
    Make a folder and hold it until what is returned is closed: a second process is refused. What a
    killed process left half-written there is deleted.
    """
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/.lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing it; wait, or choose another folder")
    except OSError as e:  # a network's file system may have no locks
        say(f"{folder}: cannot be locked ({e}), so let no other process write there")
        return file
    for half in Path(folder).glob("*.tmp-????????/"):
        shutil.rmtree(half, ignore_errors=True)
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


def check_settings(path, earlier, settings, way_out="choose another name for the new one"):
    """Refuse output made with different settings: UserError if those that made `path` differ."""
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise UserError(f"{path}: was made with {key} = {earlier.get(key)!s:.80}, not "
                            f"{value!s:.80}: {way_out}")


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

@dataclass
class Tokenizer:
    """
    Text to ids and back. It also has .eos_id, which ends a document, and .bos_id, which begins it,
    or None.
    """
    encode_text: callable  # text -> ids; names of control tokens are text like any other
    decode_ids: callable   # list of ids, each less than vocab_size -> text
    vocab_size: int        # the highest id + 1
    special: dict          # {name: id} of control tokens

    def __post_init__(self):
        find = self.special.get
        self.bos_id = find("<s>", find("<|begin_of_text|>"))
        self.eos_id = find("</s>", find("<|end_of_text|>", find("<|endoftext|>")))

    @staticmethod
    def load(folder):
        """The Tokenizer in a folder."""
        path = tokenizer_file(folder)
        read = read_tokenizer_json if path.suffix == ".json" else read_sentencepiece
        try:
            return read(str(path))
        except Exception as e:  # the libraries raise no narrower one
            raise UserError(f"{path}: is damaged or of an unknown kind: fetch it again ({e})")

    def encode(self, text, bos=False):
        """Token ids. "</s>" in a text is four characters, not EOS. bos: begin with BOS, if any."""
        ids = self.encode_text(text)
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def decode(self, ids):
        """The text of a list of ids. A model's padding is left out."""
        return self.decode_ids([i for i in ids if i < self.vocab_size])


def tokenizer_file(folder):
    """The file of a folder that defines its tokenizer: tokenizer.model before tokenizer.json."""
    for name in ("tokenizer.model", "tokenizer.json"):
        path = Path(folder, name)
        if path.exists():
            return path
    raise UserError(f"{folder}: is no folder with a tokenizer.model or tokenizer.json")


def check_tokenizer(config, folder, *others):
    """
    The Tokenizer of a model's folder. UserError if it has more ids than the model, or if that of
    another folder, such as a data set's, differs.
    """
    for other in others:
        if digest(tokenizer_file(other)) != digest(tokenizer_file(folder)):
            raise UserError(f"{other}: its tokenizer is not {folder}'s: prepare it with that one")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {tokenizer.vocab_size} ids, its model "
                        f"{config.vocab_size}: it is the tokenizer of another model")
    return tokenizer


def read_sentencepiece(path):
    """The Tokenizer in a SentencePiece model (Llama 2, TinyLlama). Control tokens have no text."""
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    size = model.vocab_size()
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i)}
    return Tokenizer(model.encode, model.decode, size, special)


def read_tokenizer_json(path):
    """
    The Tokenizer in a tokenizer.json: the embedded corpus's words, or byte-level BPE (Llama 3,
    OLMo 2). Of two pieces the lower id is merged first, as in all that were trained merge by merge.
    """
    spec = read_json(path)
    vocab = spec["model"]["vocab"]  # {piece: id}
    special, always = {}, {}  # {name: id}; the latter count in any text
    for token in spec["added_tokens"]:
        names = special if token["special"] else always
        names[token["content"]] = token["id"]
    if spec["model"]["type"] == "WordLevel":
        words = list(vocab)
        return Tokenizer(lambda text: [vocab.get(word, vocab["<unk>"]) for word in text.split()],
                         lambda ids: " ".join(words[i] for i in ids), len(words), special)
    assert not spec["normalizer"], "text is normalized first"
    split, _ = spec["pre_tokenizer"]["pretokenizers"]  # into words by a regex, then into bytes
    # A printable byte is written as itself, the n-th of the others as character 256 + n.
    byte = [*range(256), *(b for b in range(256) if b == 32 or not chr(b).isprintable())]
    pieces = {bytes(byte[ord(c)] for c in text): i for text, i in vocab.items()}
    coder = tiktoken.Encoding("", pat_str=split["pattern"]["Regex"], mergeable_ranks=pieces,
                              special_tokens=special | always)

    def encode(text):
        # The regex gives up on a million blanks in a row, so long text is encoded in parts. A part
        # ends where a line begins, if it can, since a word begins there anyway.
        parts = re.findall(r"(?s).{1,400000}(?:(?<=\n)(?=\S)|\Z)|.{1,400000}", text)
        return [i for part in parts
                for i in coder.encode(part, allowed_special=set(always), disallowed_special=())]

    return Tokenizer(encode, coder.decode, coder.n_vocab, special)


# ---- prepare ---------------------------------------------------------------------------------
# What --strip_roles removes: `User:`, `### User:`, <|user|>, <|im_start|>user or <extra_id_1>User
# at the start of a line, with the line's end if nothing follows, and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
TAGS = rf"#* *{ROLE}:|<\|{ROLE}\|>|<(?:\|im_start\||extra_id_\d)>{ROLE}\b"
ROLES = re.compile(rf"(?im)^[ \t]*(?:{TAGS})[ \t]*\n?|<\|im_end\|>")


def read_rows(path):
    """Yield the rows of a file: dicts, or bytes of JSON."""
    if path.endswith(".txt"):
        yield {"text": Path(path).read_text("utf-8-sig", "replace")}
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


def find(row, column):
    """The value in a column of a row. "a.b" is the column b of dicts that stand in column a."""
    for name in column.split("."):
        if row is None:
            return None
        if name not in row:
            raise KeyError(f"there is no {column}, only {', '.join(row)}")
        row = row[name]
    return row


def document_ids(tokenizer, row, fields, strip_roles):
    """
    Token ids of a document: [BOS] text EOS. A field is text or a chat, a list of {"content": text};
    or a list of ids, which are taken as they are.
    """
    texts = []
    for field in fields:
        value = find(row, field)
        if isinstance(value, str):
            value = [{"content": value}]
        elif isinstance(value[0], int):
            assert max(value) < tokenizer.vocab_size, "ids of another tokenizer"
            return value
        texts += [message["content"] for message in value]
    text = "\n".join(texts)
    text = ROLES.sub("", text).strip() if strip_roles else text.strip()
    return [*tokenizer.encode(text, bos=True), tokenizer.eos_id] if text else []


def tokenize(tokenizer, args, row):
    """A row -> ("kept", its ids), ("dropped", []) or ("bad", why)."""
    try:
        if isinstance(row, bytes):
            row = json.loads(row)
        for rule in args.drop:
            column, _, text = rule.partition("=")
            if text.lower() in str(find(row, column)).lower():
                return "dropped", []
        ids = document_ids(tokenizer, row, args.field.split(","), args.strip_roles)
        return "kept", array("I", ids)
    except Exception as e:  # not JSON, or a field is missing or of another kind
        return "bad", f"{row!r:.80} ({e!r:.300})"


def write_shard(folder, name, tokens):
    """Write an array -> [name, length, digest], the entry in meta.json."""
    with whole(f"{folder}/{name}") as new:
        np.save(new, tokens)
    return [name, tokens.shape[-1], hashlib.sha256(tokens).hexdigest()]


def write_shards(args, state, tokens):
    """Write the next shard, its last 1% apart for validation, then the progress so far."""
    number, cut = len(state["shards"]["train"]), len(tokens) - len(tokens) // 100
    dtype = np.uint16 if state["vocab_size"] <= 65536 else np.uint32
    for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
        if part:
            entry = write_shard(args.out, f"{split}_{number:06d}.npy", np.array(part, dtype))
            state["shards"][split].append(entry)
            print(f"{args.out}: {entry[0]}, {len(part):,} tokens")
    write_json(f"{args.out}/progress.json", state)


def pack(args, tokenizer, state):
    """
    Tokenize the rows that are still to be read, and write shards as they fill up. Threads do, since
    tokenizers are native code that runs beside Python's.
    """
    state["counts"] = counts = Counter(state["counts"])
    rows = itertools.chain.from_iterable(map(read_rows, args.input))
    rows = itertools.islice(rows, counts.total(), None)
    tokens, why = array("I"), None
    work = functools.partial(tokenize, tokenizer, args)
    with ThreadPoolExecutor() as pool:
        while some := list(itertools.islice(rows, 1000)):
            for kind, found in pool.map(work, some):
                counts[kind] += 1
                if kind == "bad":
                    why = found
                else:
                    tokens.extend(found)
                if len(tokens) >= args.shard_tokens:
                    write_shards(args, state, tokens)
                    del tokens[:]
            if counts["bad"] > args.max_bad * counts.total():
                raise UserError(f"{args.out}: {counts['bad']} of {counts.total()} documents so far "
                                f"are bad, more than --max_bad={args.max_bad}, such as {why}")
    write_shards(args, state, tokens)
    if not state["shards"]["train"]:
        raise UserError(f"{args.out}: no text is left of these documents: {dict(counts)}")


def prepare(args):
    """
    Pack .jsonl, .parquet and .txt files (one document each) into shards of token ids. After a kill
    the same command resumes at the next shard and writes the same bytes. It reads the rows before
    that again, but does not tokenize them.
    """
    if not all(rule.partition("=")[2] for rule in args.drop):
        raise UserError("--drop: each rule is COLUMN=TEXT")
    tokenizer, out = Tokenizer.load(args.tokenizer), Path(args.out)
    arguments = vars(args) | {
        "input": [[os.path.basename(path), os.path.getsize(path)] for path in args.input],
        "tokenizer": digest(tokenizer_file(args.tokenizer)),
        "out": None, "max_bad": None}  # may change
    state = dict(arguments=arguments, counts={}, shards=dict(train=[], val=[]), row=None,
                 vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, prompt="The")
    meta, progress = out / "meta.json", out / "progress.json"
    if meta.exists() or progress.exists():
        state = read_json(meta if meta.exists() else progress)
        check_settings(out, state["arguments"], arguments)
    elif {*out.glob("*")} - {out / ".lock", *out.glob("*.tmp-*")}:  # a kill may leave these
        raise UserError(f"{out}: holds other files; choose another --out")
    if meta.exists():
        return print(f"{out}: is complete, nothing to do")
    with locked(out):
        try:
            write_json(progress, state)
            pack(args, tokenizer, state)
        except BaseException:
            if not state["shards"]["train"]:  # nothing that the next try could use
                progress.unlink(missing_ok=True)
                (out / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other files stay
                    out.rmdir()
            raise
        copy_tokenizer(args.tokenizer, out)
        progress.rename(meta)
    print(f"{out}: complete, {dict(state['counts'])}")


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
            raise UserError(f"{folder}: is no finished data set, without meta.json: make it by "
                            "data.py prepare, or by runs/tiny_corpus.py --out out/tiny/data")
        # Each shard stays open, and there may be more than the usual limit of 1,024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.T, self.meta = T, read_json(path)
        self.shards, row = [], self.meta["row"]  # tokens and targets of each
        if row not in (None, T):
            raise UserError(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        try:
            for name, *_ in self.meta["shards"][split]:
                path = f"{folder}/{name}"
                tokens = np.load(path, mmap_mode="r")
                self.shards.append(tokens if row else (tokens, tokens[1:]))
        except (ValueError, EOFError) as e:
            raise UserError(f"{path}: is cut short; make the data set again ({e})")
        rows = (len(targets) // T for _, targets in self.shards)
        *self.starts, self.num_rows = itertools.accumulate(rows, initial=0)  # first row of each
        if not self.num_rows:
            raise UserError(f"{folder}: has no {split} window of {T} tokens; use a smaller "
                            "--context")
        # The rows in the random order of an epoch, given (seed, epoch).
        self.order = functools.lru_cache(maxsize=2)(
            lambda *key: np.random.default_rng(key).permutation(self.num_rows))

    def sample(self, seed, number):
        """Ids and targets, (2, T) int64, of a sample; numbers go on from epoch to epoch."""
        epoch, index = divmod(number, self.num_rows)
        row = self.order(seed, epoch)[index]
        shard = bisect.bisect(self.starts, row) - 1
        start = (row - self.starts[shard]) * self.T
        return np.array([x[start:start + self.T] for x in self.shards[shard]], np.int64)


class Dataset:
    """
    The rows of a folder, or of several in fixed shares: of "A:1,B:1,C:2" 1/4 is from A, 1/4 from B
    and 1/2 from C. Of sum(weights) samples in a row, counted from 0, exactly weights[k] are of
    folder k, evenly spread; each folder has epochs of its own. .num_rows: samples until the first
    is through. .folders: all of them, which have one tokenizer (check_tokenizer() sees to it).
    """

    def __init__(self, data, split, T):
        self.folders = []
        self.parts = []  # (Shards, weight)
        for part in data.split(","):
            folder, _, weight = part.partition(":")
            if not re.fullmatch(r"([1-9]\d*)?", weight):
                raise UserError(f"--data: {part}: a weight is a whole number, 1 or more")
            self.folders.append(folder)
            self.parts.append((Shards(folder, split, T), int(weight or 1)))
        self.turns = sorted(((i + 0.5) / weight, k, i) for k, (_, weight) in enumerate(self.parts)
                            for i in range(weight))
        self.num_rows = min(shards.num_rows * len(self.turns) // weight
                            for shards, weight in self.parts)

    def fingerprint(self):
        """What tells these tokens from others, wherever they lie: a digest of their digests."""
        content = json.dumps([(shards.meta["shards"], weight) for shards, weight in self.parts])
        return hashlib.sha256(content.encode()).hexdigest()

    def batch(self, seed, step, rank, world, B):
        """-> idx, targets (-100: no loss), both (B, T) int64; numbers (B,), which decide them."""
        numbers, samples = (step * world + rank) * B + np.arange(B), []
        for number in numbers:
            cycle, turn = divmod(number, len(self.turns))
            _, k, i = self.turns[turn]
            shards, weight = self.parts[k]
            samples.append(shards.sample(seed, cycle * weight + i))
        idx, targets = torch.from_numpy(np.stack(samples, axis=1))
        return idx, targets, numbers


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    flag = commands.add_parser("prepare", description=prepare.__doc__).add_argument
    flag("--input", nargs="+", action="extend", required=True, help="files of rows or text")
    flag("--tokenizer", required=True, help="folder with tokenizer.model or tokenizer.json")
    flag("--out", required=True, help="folder of the data set")
    flag("--field", default="text",
         help="one column (text) or several, a,b: text, chat messages, or token ids")
    flag("--drop", nargs="+", action="extend", default=[],
         help="COLUMN=TEXT: leave out rows whose COLUMN contains TEXT, in any case; the name of a "
              "column in another one is a.b, here and in --field")
    flag("--strip_roles", action="store_true",
         help="remove a chat's tags: `User:`, `### Human:`, <|im_start|>system and so on")
    flag("--max_bad", type=fraction, default=0.01,
         help="share of documents that may be bad (0.01); they are counted and left out")
    flag("--shard_tokens", type=positive, default=100_000_000, help="tokens a shard, about (10^8)")
    prepare(parser.parse_args())


if __name__ == "__main__":
    cli(main)
