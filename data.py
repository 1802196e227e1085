"""
Turn text, chats, or questions and answers into tokens to train on. A data set is a folder of
shards, which train.py takes as --data.

    python data.py prepare --input asked.jsonl --prompt question --field answer \\
        --tokenizer out/tiny/task --out out/data/asked
    python data.py prepare --input web/*.parquet --tokenizer out/tinyllama --out out/data/web
    python data.py prepare --input chats.jsonl --field messages --loss assistant --tokenizer ...

In the folder, `train_000000.npy` is an array of token ids (uint16, or uint32 if the vocabulary
exceeds 65,536): documents, each [BOS] text EOS, one after another. The loader cuts it into rows of
T tokens, regardless of where documents begin and end, so nothing is padded. The target at each
position is the next token. If only some tokens carry loss (--prompt, --loss assistant), the file is
an int32 array (2, N) instead: token ids, and targets, which are already shifted, with -100 for no
loss. It consists of rows of T tokens that hold whole documents and some padding, so that no answer
loses its question. `meta.json` lists the shards. It is written last, so a folder that has one is
complete. Its "row_length" is that T, or null if any T is allowed.
"""
import bisect
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import (Parser, UserError, between, check_settings, cli, creating, digest, paths,
                    positive, read_json, reading, say, write_atomically, write_json)

import numpy as np
import torch

from model import IGNORE, checkpoints


# --------------------------------------------------------------------------------------- the loader
# It has no state. A batch is a pure function of the arguments of batch(), where index counts
# micro-batches. So a run can resume from its update alone, and 2 ranks see the same samples as 1
# rank with twice the batch size.

class Dataset:
    """
    The rows of one data set, or a mixture of several: "A:1,B:1,C:2" takes 1/4 of the samples
    from A, 1/4 from B and 1/2 from C.

    A round is sum(weights) samples: exactly weights[k] from source k, evenly spread. Each source
    has its own epochs. .num_rows: the number of samples until the first source completes an epoch.
    """

    def __init__(self, data, split, T):
        self.folders, weights = zip(*read_mixture(data))
        self.sources = [Shards(folder, split, T) for folder in self.folders]
        self.weights = [weight // math.gcd(*weights) for weight in weights]
        # Each sample of a round is its source, k, and how many of that source precede it, i.
        # Weights 1 and 2 give B A B.
        places = [((i + 0.5) / weight, k, i) for k, weight in enumerate(self.weights)
                  for i in range(weight)]
        self.round = [(k, i) for _, k, i in sorted(places)]
        self.num_rows = min(shards.num_rows * len(self.round) // weight
                            for shards, weight in zip(self.sources, self.weights))

    def fingerprint(self):
        """A digest of the contents and the weights of all sources, not of their paths."""
        content = [(shards.meta["shards"], k) for shards, k in zip(self.sources, self.weights)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def batch(self, seed, index, rank, world, B, first=0):
        """
        Return one rank's B rows of micro-batch number `index`, from 0: idx and targets (-100: no
        loss), both (B, T) int64, and numbers (B,) int64, the rows' sample numbers. rank: from 0 to
        world - 1. first: the sample with which micro-batch 0 begins.
        """
        numbers = first + (index * world + rank) * B + np.arange(B)
        samples = []
        for number in numbers:
            rounds, place = divmod(number, len(self.round))
            k, earlier = self.round[place]
            samples.append(self.sources[k].sample(seed, earlier + rounds * self.weights[k]))
        idx, targets = torch.from_numpy(np.stack(samples, axis=1))
        return idx, targets, numbers


class Shards:
    """
    The rows of T tokens of a data set's split, "train" or "val". Each epoch goes through all
    .num_rows of them in a new random order; that of 25 million takes 1 to 2 s, and 200 MB.
    """

    def __init__(self, folder, split, T):
        self.T = T
        self.meta = read_json(f"{folder}/meta.json")
        self.shards = []  # (ids, targets) of each, memory-mapped
        self.starts = []  # the first row of each
        self.num_rows = 0
        fixed = self.meta["row_length"]
        if fixed not in (None, T):
            raise UserError(f"{folder}: its rows have {fixed} tokens. Use --context={fixed}")
        for name, *_ in self.meta["shards"][split]:
            with reading(f"{folder}/{name}") as path:
                tokens = np.load(path, mmap_mode="r")
            ids, targets = tokens if tokens.ndim == 2 else (tokens, tokens[1:])
            self.shards.append((ids, targets))
            self.starts.append(self.num_rows)
            self.num_rows += len(targets) // T
        if not self.num_rows:
            raise UserError(f"{folder}: has too few {split} tokens for one row of {T}. Use a "
                            "smaller --context, more data, or a larger --val")
        self.order = functools.lru_cache(maxsize=2)(self.shuffle)

    def shuffle(self, seed, epoch):
        """The rows in the random order of an epoch."""
        return np.random.default_rng((seed, epoch)).permutation(self.num_rows)

    def sample(self, seed, number):
        """Sample `number`, ids and targets (2, T) int64. Epoch e begins with e * num_rows."""
        epoch, place = divmod(number, self.num_rows)
        row = self.order(seed, epoch)[place]
        shard = bisect.bisect(self.starts, row) - 1
        start = (row - self.starts[shard]) * self.T
        window = slice(start, start + self.T)
        return np.array([tokens[window] for tokens in self.shards[shard]], np.int64)


def row_length(data):
    """The T of a data set or mixture: that of its rows if it has some, otherwise 1,024."""
    metas = [Path(source.partition(":")[0], "meta.json") for source in data.split(",")]
    # tools.plan may name data that does not exist yet.
    lengths = [read_json(meta)["row_length"] for meta in metas if meta.exists()]
    return next(filter(None, lengths), 1024)


def read_mixture(data):
    """Parse --data, such as "A:1,B:1,C:2". Returns [(folder, weight), ...]."""
    mixture = []
    for source in data.split(","):
        folder, _, weight = source.partition(":")
        if not os.path.exists(f"{folder}/meta.json"):
            raise UserError(f"{folder}: not a finished data set. Run `python data.py prepare`")
        if not re.fullmatch("[1-9][0-9]*|", weight):
            raise UserError(f"--data={data}: weights must be whole numbers above 0")
        mixture.append((folder, int(weight or 1)))
    return mixture


# ---------------------------------------------------------------------------------------- documents
# A record, which becomes a document, is a line of .jsonl, a row of .parquet, or a whole text file.

ABSENT = None, "", [], {}  # what parquet files hold where there is nothing
BESIDE = "labels", "attention_mask", "system", "tools"  # columns that would change ids or chats


def read_records(path, args):
    """Yield the records of a file: dicts, or lines as bytes. args: the flags of prepare."""
    suffix = Path(path).suffix
    if suffix in (".txt", ".md", ".rst"):
        with reading(path):
            text = Path(path).read_text("utf-8-sig")
        yield {"text": text}
    elif suffix == ".jsonl":
        with open(path, "rb") as file:
            yield from filter(bytes.strip, file)
    elif suffix == ".parquet":
        from pyarrow import parquet
        dropped_by = [rule.partition("=")[0] for rule in args.drop]
        columns = [args.field, args.prompt or args.field, *dropped_by, *BESIDE]
        with reading(path):
            for batch in parquet.ParquetFile(path).iter_batches(256, columns=columns):
                yield from batch.to_pylist()
    else:
        raise UserError(f"{path}: is not a .txt, .md, .rst, .jsonl or .parquet file")


def column_value(record, column):
    """The value of a column. "a.b" is that, or column b of the dict in a; None if a is null."""
    for name in [column] if column in record else column.split("."):
        if record is not None:
            record = record[name]
    return record


SPEAKERS = "system", "developer", "user", "tool", "assistant"
SHAREGPT = """\
ShareGPT's from and value are not read. Convert each row: role = dict(system='system', \
human='user', gpt='assistant', function_call='assistant', observation='tool'); row['messages'] = \
[dict(role=role[m['from']], content=m['value']) for m in row['conversations']]"""


def read_message(message):
    """Return (role, text) of a chat's message. Refuses a key that would be lost."""
    if not isinstance(message, dict):
        raise TypeError(f"{message!r:.40} is not a message with a role and a content")
    if message.get("from"):
        raise ValueError(SHAREGPT)
    role, content = str(message["role"]).lower(), message["content"]
    if role not in SPEAKERS:
        raise ValueError(f"a message has the role {role}, which is none of {', '.join(SPEAKERS)}")
    for key, value in message.items():
        if key not in ("role", "content", "name", "id") and value not in ABSENT:
            raise ValueError(f"a message has {key}, which is not read: {value!r:.40}. Move it into "
                             "the text, or remove it")
    if isinstance(content, list):
        raise ValueError(f"a message's content is a list of parts, not a text: {content!r:.80}")
    return role, "" if content is None else as_text(content)


def read_chat(value):
    """Return the read_message() of each message of a chat, which may be a string of JSON."""
    return [*map(read_message, value if isinstance(value, list) else json.loads(value))]


def as_text(value):
    """The text of a value or a chat. Raises ValueError, KeyError or TypeError if it has none."""
    if isinstance(value, list):
        return "\n".join(text for _, text in read_chat(value))
    if isinstance(value, bytes):  # from parquet files that do not say that a column is text
        return value.decode()
    if isinstance(value, (bool, int, float)):
        return json.dumps(value, allow_nan=False).removesuffix(".0")  # pandas makes 7 a 7.0
    str.encode(value)
    return value


# What --strip_roles removes: `User:`, `### User:`, <|user|>, <|im_start|>user or <extra_id_1>User
# at the start of a line, with the newline if nothing else is on that line, and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
TAGS = rf"#* *{ROLE}:|<\|{ROLE}\|>|<(?:\|im_start\||extra_id_\d)>{ROLE}\b"
ROLES = re.compile(rf"(?im)^[ \t]*(?:{TAGS})[ \t]*\n?|<\|im_end\|>")

NOTED = set()  # functools.cache would let each thread say it until the first call returns


def note(text):
    """Say something about the input, once."""
    if text not in NOTED:
        NOTED.add(text)
        say(f"note: {text}", sys.stderr)


def read_parts(record, args, vocab_size):
    """
    Return the parts of a record's document, [(text or ids, has_loss), ...], none of them empty; []
    if --drop names it. Raises ValueError, KeyError or TypeError if the record is bad.
    """
    if isinstance(record, bytes):
        record = json.loads(record.decode("utf-8-sig"))  # not in UTF-16, as json would allow
    for rule in args.drop:
        column, _, text = rule.partition("=")
        value = column_value(record, column)
        if value is not None and text.lower() in str(value).lower():
            return []
    value = column_value(record, args.field)
    parts = []
    if args.prompt:
        parts.append((as_text(column_value(record, args.prompt)), False))
    if args.loss == "assistant":
        parts += [(text, role == "assistant") for role, text in read_chat(value)]
    elif isinstance(value, list) and all(type(item) is int for item in value) and not args.prompt:
        if value and not 0 <= min(value) <= max(value) < vocab_size:
            raise ValueError("ids that the tokenizer does not have")
        parts.append((value, True))
    else:
        parts.append((as_text(value), True))
    for name in BESIDE if args.loss == "assistant" or isinstance(value, list) else ():
        if record.get(name) not in ABSENT and name not in (args.field, args.prompt):
            note(f"records have {name} beside {args.field}, which is not read")
    for i, (part, has_loss) in enumerate(parts):
        if isinstance(part, str):
            part = ROLES.sub("", part) if args.strip_roles else part
            parts[i] = part.strip() if has_loss else part, has_loss
    parts = [part for part in parts if part[0]]
    if parts and not any(has_loss for _, has_loss in parts):
        raise ValueError("no token carries loss")
    return parts


def document(tokenizer, parts, args):
    """
    Turn the parts of a record into an array of token ids (1, N) int32; or, if only a part carries
    loss, (2, N), with targets, which are already shifted, with -100 for no loss.

    It begins with BOS, a newline separates its parts, and EOS follows each text that carries loss.
    Each part is tokenized separately: a prompt has the same ids here as at inference.
    """
    ids, labels = [], []
    for part, has_loss in parts:
        if isinstance(part, str):
            part = tokenizer.encode("\n" + part if ids else part, bos=not ids)
            part += [tokenizer.eos_id] * has_loss
        ids += part
        labels += part if has_loss else [IGNORE] * len(part)
    if not args.prompt and args.loss == "all":
        return np.array([ids], np.int32)
    return np.array([ids, [*labels, IGNORE][1:]], np.int32)  # the target is the next token


def tokenize(tokenizer, record, path, args):
    """Return ("kept", document() of a record), ("dropped", None), or ("bad", why)."""
    try:
        # Only this call may fail on bad input; any other error is a bug.
        parts = read_parts(record, args, tokenizer.vocab_size)
    except (ValueError, KeyError, TypeError) as e:
        return "bad", f"{path}: {record!r:.80} ({e!r:.400})"
    return ("kept", document(tokenizer, parts, args)) if parts else ("dropped", None)


# ------------------------------------------------------------------------------------------ prepare

MAX_BAD = 0.01  # a larger fraction of bad records means that something else is wrong
BUFFER = 4096  # documents that fill_rows() distributes at once


def collect(args, tokenizer, counts):
    """Yield the documents of one shard after another. counts: {outcome of tokenize(): records}."""
    documents, size = [], 0  # those of the next shard, and their tokens
    records = ((record, path) for path in args.input for record in read_records(path, args))
    with ThreadPoolExecutor() as pool:  # the tokenizer libraries release the GIL
        while group := list(itertools.islice(records, 1000)):
            for outcome, result in pool.map(lambda item: tokenize(tokenizer, *item, args), group):
                counts[outcome] += 1
                if outcome == "kept":
                    documents.append(result)
                    size += result.shape[1]
                elif outcome == "bad":
                    bad = result
                if size >= args.shard_tokens:
                    yield documents
                    documents, size = [], 0
            if counts["bad"] > MAX_BAD * sum(counts.values()):
                raise UserError(f"{args.out}: {counts['bad']} of {sum(counts.values())} records so "
                                f"far are bad. Check the flags that name columns. The last: {bad}")
    if counts["bad"]:
        say(f"warning: left out {counts['bad']} bad records. The last: {bad}", sys.stderr)
    if documents:
        yield documents


def choose_row_length(documents, tokenizer):
    """
    Return the smallest power of two, from 256 on, that is at least twice the length of 99% of the
    documents, but at most the context of the tokenizer's model.
    """
    config = read_optional(tokenizer.folder, "config.json")  # in our layout, or Hugging Face's
    context = config.get("context") or config.get("max_position_embeddings") or math.inf
    usual = max(256, 2 * np.quantile([tokens.shape[1] for tokens in documents], 0.99))
    return min(1 << math.ceil(math.log2(usual)), context)


def hold_out(documents, share, T):
    """
    Split a shard's documents into those for training and those for validation: the fraction
    `share`, but at least 32 or a tenth, whichever is fewer; a single one stays for training.
    They are drawn, since files may be sorted, or their rows come in a cycle. Of fewer than 10, such
    as a single book, it is the last tokens instead, unless rows of T tokens hold whole documents.
    """
    count = len(documents)
    if count < 10 and not T:
        tokens = np.concatenate(documents, axis=1)
        rest = max(1, tokens.shape[1] - round(share * tokens.shape[1]))
        return [tokens[:, :rest]], [tokens[:, rest:]]
    number = min(max(math.ceil(share * count), min(32, count // 10)), count - 1)
    drawn = np.random.default_rng(0).permutation(count)
    return [[documents[i] for i in sorted(part)] for part in (drawn[number:], drawn[:number])]


def fill_rows(documents, T, eos_id):
    """
    Pack whole documents, arrays (2, N) of at most T tokens, into rows of T. The longest go first,
    each into the fullest row that has room for it (best fit), among BUFFER documents at a time. A
    row holds its documents in their original order, then EOS without loss. Returns (2, rows * T).
    """
    sizes = [tokens.shape[1] for tokens in documents]
    rows = []
    for first in range(0, len(documents), BUFFER):
        room = []  # in the rows of these documents, sorted: (free tokens, row)
        some = range(len(documents))[first:first + BUFFER]
        for i in sorted(some, key=lambda i: -sizes[i]):
            fit = bisect.bisect(room, (sizes[i],))
            if fit == len(room):
                room.append((T, len(rows)))
                rows.append([])
            free, row = room.pop(fit)
            rows[row].append(i)
            bisect.insort(room, (free - sizes[i], row))
    filled = np.full((2, len(rows), T), IGNORE, np.int32)
    filled[0] = eos_id
    for i, row in enumerate(rows):
        tokens = np.concatenate([documents[j] for j in sorted(row)], axis=1)
        filled[:, i, :tokens.shape[1]] = tokens
    return filled.reshape(2, -1)


def write_shard(folder, name, tokens):
    """Write an array, (N) or (2, N), as a shard. Returns meta.json's [name, tokens, SHA-256]."""
    with write_atomically(f"{folder}/{name}") as new:
        np.save(new, tokens)
    return [name, tokens.shape[-1], hashlib.sha256(tokens).hexdigest()]


def write_meta(folder, tokenizer, shards, row_length, **made_from):
    """
    Write meta.json, which completes a data set: see the top. made_from: what check_settings() will
    compare with those of a later command, and counts.
    """
    write_json(f"{folder}/meta.json", made_from | {
        "shards": shards,
        "row_length": row_length,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    })


def prepare(args):
    """Turn the records of files into a data set. args: the command's flags."""
    in_rows = bool(args.prompt) or args.loss == "assistant"  # only a part carries loss
    if args.row_length and not in_rows:
        raise UserError("--row_length: only for --prompt or --loss assistant")
    for rule in args.drop:
        if "=" not in rule:
            raise UserError(f"--drop {rule}: must be COLUMN=TEXT")
    tokenizer = Tokenizer.load(args.tokenizer)
    if tokenizer.eos_id is None:
        raise UserError(f"{args.tokenizer}: has no known end-of-text token to end a document with. "
                        "Name it as eos_token in tokenizer_config.json")
    arguments = vars(args) | {
        "input": [[os.path.basename(path), digest(path)] for path in args.input],
        "tokenizer": tokenizer.fingerprint,
        "out": None,  # it may be moved
    }
    finished = f"{args.out}/meta.json"
    if os.path.exists(finished):
        earlier = read_json(finished).get("arguments", {})
        check_settings(args.out, earlier, arguments, "Choose another --out")
        say(f"{args.out} is already complete")
        return
    say(f"{tokenizer_file(tokenizer.folder)}: {tokenizer.fingerprint}")
    T = args.row_length
    counts = {"kept": 0, "dropped": 0, "bad": 0, "long": 0}  # records
    shards = {"train": [], "val": []}
    with creating(args.out):
        copy_tokenizer(tokenizer.folder, args.out)
        for number, documents in enumerate(collect(args, tokenizer, counts)):
            if in_rows:
                T = T or choose_row_length(documents, tokenizer)  # by those of the first shard
                short = [tokens for tokens in documents if tokens.shape[1] <= T]
                counts["kept"] -= len(documents) - len(short)
                counts["long"] += len(documents) - len(short)
                documents = short
                if counts["long"] > MAX_BAD * sum(counts.values()):
                    raise UserError(f"{args.out}: {counts['long']} records are longer than the {T} "
                                    "tokens of a row. Use --row_length")
            for split, part in zip(shards, hold_out(documents, args.val, T)):
                tokens = fill_rows(part, T, tokenizer.eos_id) if T else np.concatenate(part, axis=1)
                if len(tokens) == 1:  # ids alone
                    small = tokenizer.vocab_size <= 65536
                    tokens = tokens[0].astype(np.uint16 if small else np.uint32)
                if tokens.size:
                    shard = write_shard(args.out, f"{split}_{number:06d}.npy", tokens)
                    shards[split].append(shard)
                    say(f"{args.out}: {shard[0]}, {shard[1]:,} tokens")
        if not shards["train"]:
            raise UserError(f"{args.out}: no text is left to train on. Records: {counts}. Check "
                            "--field and --drop")
        write_meta(args.out, tokenizer, shards, T, arguments=arguments, counts=counts)
    say(f"{args.out}: complete. Records: {counts}. Tokens in a row: {T or 'any number'}")


def main():
    parser = Parser(__doc__, usage="data.py prepare --input FILE ... --tokenizer FOLDER --out OUT")
    flag = parser.add_argument
    flag("command", choices=["prepare"],
         help="pack files into a data set. If it is killed, it begins again (two hours for 120 "
              "billion tokens). To risk less, prepare parts and mix them: --data=A:1,B:1")
    flag("--input", type=paths, nargs="+", action="extend", required=True, metavar="FILE",
         help="input files: .jsonl or .parquet with records; .txt, .md or .rst, each one record")
    flag("--tokenizer", type=paths, required=True, metavar="FOLDER",
         help="a checkpoint, or another folder with tokenizer.model or tokenizer.json")
    flag("--field", default="text", metavar="COLUMN",
         help="the column to train on (text): a text, a chat's messages, or token ids")
    flag("--prompt", metavar="COLUMN",
         help="a column of text before --field, such as the question, which carries no loss")
    flag("--loss", choices=("all", "assistant"), default="all",
         help="assistant: in a chat, only the assistant's messages carry loss")
    flag("--drop", nargs="+", action="extend", default=[], metavar="COLUMN=TEXT",
         help="skip records whose COLUMN contains TEXT, ignoring case; a.b is column b inside "
              "column a, here and in --field")
    flag("--strip_roles", action="store_true",
         help="remove a chat's tags: `User:`, `### Human:`, <|im_start|>system and so on")
    flag("--val", type=between(0.001, 0.9, float), default=0.01,
         help="fraction of each shard's documents to hold out for validation (0.01)")
    flag("--row_length", type=positive, metavar="T",
         help="with --prompt or --loss assistant: tokens in a row; default: enough for two typical "
              "documents")
    flag("--shard_tokens", type=positive, default=100_000_000,
         help="approximate number of tokens in a shard (100 million)")
    flag("--out", type=paths, required=True, metavar="FOLDER", help="folder of the new data set")
    prepare(parser.parse_args())


# --------------------------------------------------------------------------------------- tokenizers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "generation_config.json")

# Usual names of the end-of-text token, tried in this order if no file names one.
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|end_text|>", "<|endoftext|>")


def read_tokenizer_files(folder):
    """Read those of TOKENIZER_FILES that exist in a folder. Returns {name: bytes}."""
    paths = [Path(folder, name) for name in TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def copy_tokenizer(source, target):
    """Copy a folder's TOKENIZER_FILES to a folder that has none."""
    for name, content in read_tokenizer_files(source).items():
        Path(target, name).write_bytes(content)


@dataclass
class Tokenizer:
    """Turns text into ids, and ids into text."""
    folder: str            # that it was loaded from
    encode_text: Callable  # text -> ids; the name of a control token is ordinary text
    decode_ids: Callable   # list of ids below vocab_size -> text
    vocab_size: int        # the highest id + 1; there may be gaps
    special: dict          # {name: id} of control tokens
    bos_id: int | None     # put before a text; None if nothing is
    eos_id: int | None     # ends a document; None if the tokenizer has no such token
    unknown: int | None    # stands for any word that the vocabulary lacks
    control: re.Pattern    # the names of control tokens, and the usual end-of-text marks
    fingerprint: str       # equal for tokenizers with the same file, BOS and EOS

    @staticmethod
    def load(folder):
        """
        Load the Tokenizer of a folder, or of a run's newest checkpoint. Raises UserError if its
        config names a token that it lacks.
        """
        folder = str([folder, *checkpoints(folder)][-1])
        path = tokenizer_file(folder)
        if not path:
            raise UserError(f"{folder}: has no tokenizer.json or tokenizer.model. Make one with "
                            "transformers' AutoTokenizer and save_pretrained()")
        config = read_optional(folder, "tokenizer_config.json")
        if path.suffix == ".json":
            spec = read_json(path)
            model, tokens = spec["model"], all_tokens(spec)
            special = {token["content"]: token["id"] for token in spec["added_tokens"]
                       if token["special"]}
            encode, decode = read_tokenizer_json(path, spec)
            bos_id = template_bos(path, spec)
            # Unigram gives the id of its unknown token, others its name.
            unknown = model.get("unk_id", tokens.get(model.get("unk_token")))
        else:
            model, tokens = read_sentencepiece(path)
            special = {name: i for name, i in tokens.items() if model.is_control(i)}
            encode, decode = model.encode, model.decode
            # As in transformers' LlamaTokenizer, since the file itself does not say.
            bos = config.get("bos_token", "<s>" if "<s>" in special else None)
            bos_id = token_id(path, special, bos) if config.get("add_bos_token", True) else None
            unknown = model.unk_id()
        eos = next((name for name in EOS_NAMES if name in special), None)
        eos_id = token_id(path, tokens, config.get("eos_token") or eos)
        control = re.compile("|".join(map(re.escape, [*special, *EOS_NAMES])))
        return Tokenizer(folder, encode, decode, max(tokens.values()) + 1, special, bos_id, eos_id,
                         unknown, control, f"{digest(path)}, BOS {bos_id}, EOS {eos_id}")

    def encode(self, text, bos=False):
        """
        Turn a text into a list of ids, after BOS if `bos` and the tokenizer has one. "</s>" in the
        text is four characters, not EOS, unless the tokenizer has only whole words. Raises
        UserError if the text is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"a text has a lone surrogate, which cannot be encoded in UTF-8 ({e})")
        ids = self.encode_text(text)
        found = self.control.search(text)
        if found and self.special.get(found[0]) not in ids:
            note(f"{found[0]} in a text is read as plain text, not as a control token")
        unknown = self.unknown
        if unknown in ids:
            self.unknown = None  # once is enough
            word = next((w for w in text.split() if unknown in self.encode_text(w)), text)
            say(f"warning: {self.folder}: its tokenizer lacks {word!r:.100}. The model cannot tell "
                "one unknown word from another", sys.stderr)
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def decode(self, ids):
        """Turn ids into text. Skips ids beyond the vocabulary, with which a model may be padded."""
        return self.decode_ids([i for i in ids if i < self.vocab_size])


def load_tokenizer(folder, config):
    """Load the Tokenizer of a model's folder, and add its EOS to config.eos_token_id."""
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {tokenizer.vocab_size} ids, its model only "
                        f"{config.vocab_size}. Use the tokenizer that belongs to the model")
    if tokenizer.eos_id is not None and tokenizer.eos_id not in config.ends:
        ends = [*sorted(config.ends), tokenizer.eos_id]
        config.eos_token_id = ends if len(ends) > 1 else tokenizer.eos_id
    return tokenizer


def check_same_tokenizer(tokenizer, folder):
    """Raise UserError if a data set was made with another tokenizer than the model's."""
    theirs = read_json(f"{folder}/meta.json").get("tokenizer")  # None: made by an older version
    if theirs != tokenizer.fingerprint:
        raise UserError(f"{folder}: its tokenizer ({theirs}) differs from the model's "
                        f"({tokenizer.fingerprint}). Prepare it again with the model's")


def tokenizer_file(folder):
    """A folder's tokenizer.json, which decides, as in transformers 5, or its tokenizer.model."""
    paths = Path(folder, "tokenizer.json"), Path(folder, "tokenizer.model")
    return next(filter(Path.exists, paths), None)


def read_optional(folder, name):
    """Read the dict in a folder's JSON file; {} if there is no such file."""
    path = Path(folder, name)
    return read_json(path) if path.exists() else {}


def token_id(path, tokens, token):
    """The id of a token that tokenizer_config.json names, as text or a dict; None gives None."""
    name = token.get("content") if isinstance(token, dict) else token
    if name and name not in tokens:
        raise UserError(f"{path}: lacks the token {name}, which tokenizer_config.json names")
    return tokens.get(name)


def read_sentencepiece(path):
    """Read a SentencePiece model. Returns it and {name: id}."""
    import sentencepiece
    with reading(path):
        model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    return model, {model.id_to_piece(i): i for i in range(model.vocab_size())}


def all_tokens(spec):
    """{name: id} of a tokenizer.json."""
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs (name, score)
        vocab = {name: i for i, (name, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in spec["added_tokens"]}


def template_bos(path, spec):
    """The id that a tokenizer.json puts before a text, or None; one after it is left out."""
    processor = spec.get("post_processor") or {"type": "ByteLevel"}  # which only moves offsets
    for step in processor.get("processors", [processor]):
        if step["type"] not in ("ByteLevel", "TemplateProcessing"):
            raise UserError(f"{path}: a post-processor {step['type']} is not supported")
        first = step.get("single", [{}])[0]  # {"Sequence": ...} is the text
        if "SpecialToken" in first:
            return step["special_tokens"][first["SpecialToken"]["id"]]["ids"][0]


def read_tokenizer_json(path, spec):
    """
    Return encode_text and decode_ids of a tokenizer.json: from one of our readers, which give the
    same ids, if it knows this kind, else from the tokenizers library, which is slower and optional.
    """
    in_text = {token["content"]: token for token in spec["added_tokens"] if not token["special"]}
    for reader in whole_words, byte_level, sentencepiece_beside:
        if found := reader(path, spec, in_text):
            return found
    import tokenizers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # prepare() uses its own threads
    with reading(path):
        coder = tokenizers.Tokenizer.from_file(str(path))
    coder.no_truncation()
    coder.no_padding()
    coder.encode_special_tokens = True  # as ordinary text
    # Unlike encode(), encode_batch_fast() releases the GIL, so that threads encode in parallel.
    return (lambda text: coder.encode_batch_fast([text], add_special_tokens=False)[0].ids,
            lambda ids: coder.decode(ids, skip_special_tokens=False))


def whole_words(path, spec, in_text):
    """Read a vocabulary of whole words between blanks, such as that of assets/tiny."""
    match spec:
        case {"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab},
              "pre_tokenizer": {"type": "WhitespaceSplit"},
              } if not (in_text or spec.get("normalizer") or spec.get("decoder")):
            words = {i: word for word, i in all_tokens(spec).items()}
            split = re.compile(r"[\S\x1c-\x1f]+").findall  # only Python counts these as whitespace
            return (lambda text: [vocab.get(word, vocab["<unk>"]) for word in split(text)],
                    lambda ids: " ".join(words[i] for i in ids if i in words))


def sentencepiece_beside(path, spec, in_text):
    """Read Llama 2's BPE, with SentencePiece, if tokenizer.model beside it has the same tokens."""
    match spec:
        case {"model": {"byte_fallback": True},
              "normalizer": {"normalizers": [
                  {"prepend": "▁"},
                  {"pattern": {"String": " "}, "content": "▁"}]},
              "pre_tokenizer": None,
              } if not in_text and (beside := path.with_name("tokenizer.model")).exists():
            model, tokens = read_sentencepiece(beside)
            if tokens == all_tokens(spec):  # unlike a fine-tune's for ChatML, which has two more
                return model.encode, model.decode


# Byte-level BPE writes each byte as a character: a printable one as itself, the n-th of the others
# (from 0) as character 256 + n.
UNPRINTABLE = [b for b in range(256) if b == 32 or not chr(b).isprintable()]
BYTES = {chr(256 + UNPRINTABLE.index(b) if b in UNPRINTABLE else b): b for b in range(256)}

# How Llama 3 and OLMo 2 split a text into words, and Qwen, which splits off every digit.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = WORDS, WORDS.replace("{1,3}", "")

# What tiktoken gets at a time, because it fails on a million spaces in a row. If possible, a piece
# ends between a letter or digit and whitespace, where words end anyway.
PIECE = re.compile(r"(?s).{1,400000}(?:(?<=[^\W_])(?=\s)|\Z)|.{1,400000}")


def byte_level(path, spec, in_text):
    """Byte-level BPE with the words of Llama 3, OLMo 2 or Qwen, with tiktoken."""
    match spec:
        case {"model": {"merges": merges, "vocab": vocab},
              "normalizer": None | {"type": "NFC"},
              "pre_tokenizer": {"pretokenizers": [
                  {"pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
                  | {"pattern": {"Regex": words}, "behavior": "Removed", "invert": True},
                  {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
              } if words in PATTERNS:
            pass
        case _:
            return None
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens = sorted(vocab.keys() - added.keys(), key=vocab.get)
    # tiktoken needs a token for each byte (SmolLM2 lacks 21), then merges, in the order of ids.
    merged = {"".join(pair).replace(" ", ""): None for pair in merges}  # each is "a b" or [a, b]
    if set(tokens[:256]) != BYTES.keys() or tokens[256:] != list(merged):
        return None
    # Added tokens that are recognized in a text must need no preprocessing.
    if any(flag is True for token in in_text.values() for flag in token.values()):
        return None
    import tiktoken
    ranks = {bytes(map(BYTES.get, token)): vocab[token] for token in tokens}
    coder = tiktoken.Encoding("", pat_str=words, mergeable_ranks=ranks, special_tokens=added)
    names = re.compile("|".join(sorted(map(re.escape, added), key=len, reverse=True)))

    def encode_ordinary(text):
        text = unicodedata.normalize("NFC", text) if spec["normalizer"] else text
        return [*itertools.chain.from_iterable(map(coder.encode_ordinary, PIECE.findall(text)))]

    def encode(text):
        ids = []
        start = 0
        for match in names.finditer(text) if in_text else ():
            if match[0] in in_text:  # not the name of a control token, which is ordinary text
                ids += [*encode_ordinary(text[start:match.start()]), added[match[0]]]
                start = match.end()
        return ids + encode_ordinary(text[start:])

    known = {*vocab.values(), *added.values()}
    return encode, lambda ids: coder.decode([i for i in ids if i in known])


if __name__ == "__main__":
    cli(main)
