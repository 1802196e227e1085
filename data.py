"""
Text to tokens to batches: tokenizers, download, `prepare`, the loader and the embedded corpus.

    python data.py tiny --out out/tiny/data            # the embedded corpus: seconds, no download
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web --procs 8
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out ...
    python data.py prepare --input "hf://datasets/ORG/NAME/data/*.parquet" --tokenizer ... --out ...

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
import fnmatch
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import requests
import sentencepiece
import tiktoken
import torch
from safetensors import SafetensorError

# ---- errors and whole files ------------------------------------------------------------------


def cli(main):
    """
    Run a script's main(). A user's mistake ends in one line on stderr and exit code 1: scripts say
    sys.exit(line) where they see it, and an OSError becomes one here. A bug keeps its traceback.
    """
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as e:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: {e}")


def remove(path):
    """Delete a file or a folder, if there is one."""
    shutil.rmtree(path, ignore_errors=True)  # ignores that a file is no folder
    Path(path).unlink(missing_ok=True)


def flush(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def whole(path):
    """
    Write a file or a folder completely or not at all. Yields a path beside `path`, where the
    caller creates the file or folder; on a clean exit it is flushed to disk and renamed to `path`.
    On an error `path` stays as it was. A full disk becomes one line that names `path`.
    """
    target = os.path.realpath(path)
    new, old = f"{target}.tmp-{os.getpid()}", f"{target}.old-{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        remove(new)  # left by a killed process that had our id
        yield new
        for item in Path(new).rglob("*"):
            if item.is_file():  # safetensors writes files that only their owner can read
                item.chmod(os.stat(new).st_mode & 0o666)
            flush(item)
        flush(new)
        if os.path.isdir(new) and os.path.isdir(target):
            remove(old)
            os.rename(target, old)
        os.replace(new, target)
        flush(os.path.dirname(target))
    except (OSError, SafetensorError) as e:  # the latter is how safetensors reports a full disk
        sys.exit(f"{path}: cannot be written ({e}); what was there before is untouched")
    finally:
        remove(new)
    remove(old)


@contextlib.contextmanager
def locked(folder):
    """Make a folder and hold it for this process. A second process that wants it exits."""
    os.makedirs(folder, exist_ok=True)
    with open(Path(folder, ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{folder}: another process is writing it; wait, or choose another folder")
        yield


def read_json(path):
    """The JSON object in a file, as a dict."""
    try:
        return dict(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, TypeError) as e:
        sys.exit(f"{path}: cannot be read as a JSON object ({e})")


def write_json(path, value):
    """Write a whole JSON file. NaN and infinity, which JSON does not have, become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with whole(path) as new:
        Path(new).write_text(json.dumps(value, indent=1) + "\n")


def describe(model):
    """(device, dtype) of a model in words, to stand beside a measurement."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device)
    return device, str(weight.dtype).removeprefix("torch.")


def write_result(path, script, model, task, results, seconds, tokens, **more):
    """
    The JSON file of a measurement. results: a list of {"steps": r, "metric": name, "value": x,
    "standard_error": se, "n": count, ...}. tokens: what `seconds` were spent on.
    """
    device, dtype = describe(model)
    write_json(path, dict(
        script=script, model=model.folder, config=asdict(model.config), task=task,
        device=device, dtype=dtype, torch=torch.__version__,
        seconds=seconds, tokens_per_second=tokens / seconds, **more, results=results))


def copy_tokenizer(source, target):
    """Copy the tokenizer's files from one folder to another."""
    for path in Path(source).glob("*token*"):  # tokenizer*, special_tokens_map.json
        shutil.copy(path, target)


# ---- tokenizers ------------------------------------------------------------------------------
# How byte-level BPE cuts text into words, before it merges bytes.
SPLIT_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Llama 3.1's and 3.2's names of the ids from 128,000 on.
RESERVED = [f"reserved_special_token_{i}" for i in range(248)]
LLAMA3_NAMES = ["begin_of_text", "end_of_text", *RESERVED[:2], "finetune_right_pad_id",
                RESERVED[2], "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
                *RESERVED[3:]]


@dataclass
class Tokenizer:
    """Text to ids and back."""
    encode_text: Callable  # text without names -> ids
    decode: Callable       # list of ids -> text; SentencePiece leaves out control tokens
    vocab_size: int        # the highest id + 1
    bos_id: int | None     # None if the tokenizer puts no token before a text
    eos_id: int
    special: dict          # {name: id} of control tokens
    always: dict           # {name: id} of other names, which count in any text

    def __post_init__(self):
        self.names = self.always, self.always | self.special
        self.patterns = [names_pattern(names) for names in self.names]

    @staticmethod
    def load(folder):
        """From tokenizer.model (SentencePiece, or Llama 3's base64 lines), else tokenizer.json."""
        path = Path(folder, "tokenizer.model")
        if not path.exists():
            return read_byte_level(Path(folder, "tokenizer.json"))
        content = path.read_bytes()
        if content.startswith(b"IQ== 0\n"):
            return read_llama3(content)
        try:
            return read_sentencepiece(content)
        except RuntimeError as e:
            sys.exit(f"{path}: is damaged or no tokenizer; fetch it again ({e})")

    def encode(self, text, bos=False, special=False):
        """Token ids. "</s>" is four characters, or EOS if special. bos: begin with BOS, if any."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates
        names, ids = self.names[special], []
        for part in self.patterns[special].split(text):
            ids += [names[part]] if part in names else self.encode_text(part)
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids


def names_pattern(names):
    """A pattern that splits text at names. Of two that begin alike, the longer one wins."""
    choices = "|".join(map(re.escape, sorted(names, reverse=True)))
    return re.compile(f"({choices or '(?!)'})")


def read_sentencepiece(content):
    """The Tokenizer in the bytes of a SentencePiece model (Llama 1 and 2, TinyLlama)."""
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    size, bos_id = model.vocab_size(), model.bos_id()
    bos_id = None if bos_id < 0 else bos_id
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i)}
    return Tokenizer(model.encode, model.decode, size, bos_id, model.eos_id(), special, {})


def read_llama3(content):
    """The Tokenizer in the bytes of Llama 3's tokenizer.model."""
    lines = [line.split() for line in content.splitlines()]
    pieces = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    assert len(pieces) == 128000, f"tokenizer.model has {len(pieces)} tokens, not 128000"
    special = {f"<|{name}|>": 128000 + i for i, name in enumerate(LLAMA3_NAMES)}
    return byte_level(SPLIT_LLAMA3, pieces, 128000, special, {})


def read_byte_level(path):
    """The Tokenizer in a tokenizer.json of byte-level BPE (GPT-2, Llama 3, OLMo 2)."""
    spec = read_json(path)
    before = spec["pre_tokenizer"] or {}
    *splits, last = before.get("pretokenizers", [before])
    split = splits[0].get("pattern", {}).get("Regex") if splits else SPLIT_GPT2
    foreign = spec["normalizer"] or last.get("type") != "ByteLevel" or last["add_prefix_space"]
    if foreign or not split or len(splits) > 1:
        sys.exit(f"{path}: is not plain byte-level BPE; put the model's tokenizer.model beside it")
    # GPT-2 writes the 188 printable bytes as themselves and the others as characters from 256 on.
    order = sorted(range(256), key=lambda byte: not chr(byte).isprintable() or byte == 32)
    byte = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(order)}
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    merged = ("".join(merge).replace(" ", "") for merge in merges)  # of pairs, or of "a b"
    pieces = {bytes(map(byte.get, text)): vocab[text] for text in [*byte, *merged]}
    special, always = {}, {}
    for token in spec["added_tokens"]:
        names = special if token["special"] else always
        names[token["content"]] = token["id"]
    return byte_level(split, pieces, special.get("<|begin_of_text|>"), special, always)


def byte_level(pattern, pieces, bos_id, special, always):
    """A Tokenizer of byte-level BPE. pieces: {bytes: id} in the order in which they are merged."""
    codes = {piece: code for code, piece in enumerate(pieces)}  # tiktoken merges by lowest code
    coder = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=codes, special_tokens={})
    ids, names = list(pieces.values()), special | always
    content = dict(zip(ids, pieces)) | {i: name.encode() for name, i in names.items()}

    def encode(text):
        # The regex gives up on a million blanks in a row, so long text is encoded in parts. A part
        # ends where a line begins, if it can, since a word begins there anyway.
        parts = re.findall(r"(?s).{1,400000}(?:(?<=\n)(?=\S)|\Z)|.{1,400000}", text)
        return [ids[code] for part in parts for code in coder.encode_ordinary(part)]

    def decode(tokens):  # leaves out the padding of a model's vocabulary
        return b"".join(content.get(i, b"") for i in tokens).decode("utf-8", "replace")

    ends = ("<|endoftext|>", "<|end_of_text|>", "</s>")
    eos_id = next(names[name] for name in ends if name in names)
    return Tokenizer(encode, decode, max(content) + 1, bos_id, eos_id, special, always)


load_once = functools.cache(Tokenizer.load)  # once a process


# ---- download --------------------------------------------------------------------------------
# Where Hugging Face's programs keep their files; what we fetch goes to a folder nanoloop/ there.
HF_HOME = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
MODEL_FILES = (r"config\.json|model.*\.safetensors|model\.safetensors\.index\.json"
               r"|tokenizer.*|special_tokens_map\.json")


def hub_get(path, start=0):
    """GET a path of the hub; the body, from byte `start` on, is still to be read."""
    file = HF_HOME / "token"
    token = os.environ.get("HF_TOKEN") or (file.read_text() if file.exists() else None)
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-"}
    if token:
        headers["Authorization"] = f"Bearer {token.strip()}"
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/" + path
    answer = requests.get(url, headers=headers, stream=True, timeout=30)
    if answer.status_code in (401, 403, 404):
        sys.exit(f"{url}: {answer.status_code} {answer.reason}: missing, private or gated; check "
                 "the name, accept its terms on the hub, and set HF_TOKEN")
    answer.raise_for_status()
    return answer


def fetch(url, path, size, sha256):
    """Download a file from where an earlier try ended, check it, and only then give it its name."""
    part = Path(f"{path}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(part, "ab") as file:
            if file.tell() < size:
                for chunk in hub_get(url, file.tell()).iter_content(1 << 20):
                    file.write(chunk)
                    print(f"\r{path}: {file.tell() / size:.1%}", end="", file=sys.stderr)
    except OSError as e:  # a full disk, or one of requests' errors
        sys.exit(f"{path}: {e}; the same command resumes")
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if part.stat().st_size != size or sha256 not in (None, found):
        part.unlink()
        sys.exit(f"{path}: has another size or sha256 than the hub states; deleted, try again")
    part.rename(path)


def complete(folder):
    """Whether a folder has config.json and all files of weights."""
    index = folder / "model.safetensors.index.json"
    names = read_json(index)["weight_map"].values() if index.exists() else ["model.safetensors"]
    return all((folder / name).exists() for name in ("config.json", *names))


def download(spec, wanted=MODEL_FILES):
    """
    "org/name" or "org/name@REVISION" on the Hugging Face hub -> a folder with config.json,
    tokenizer and safetensors. A complete one in the usual cache, or in HF_HOME/nanoloop, where
    this function puts it, is taken without a request. "datasets/org/name": the `wanted` files.
    """
    match = re.fullmatch(r"((?:datasets/)?[\w.-]+/[\w.-]+)(?:@([\w./-]+))?", spec)
    if not match:
        sys.exit(f"{spec}: is neither a folder here nor org/name or org/name@REVISION on the hub")
    repo, revision = match[1], match[2] or "main"
    kind = repo if repo.startswith("datasets/") else f"models/{repo}"
    cache = Path(os.environ.get("HF_HUB_CACHE", HF_HOME / "hub"), kind.replace("/", "--"))
    ref, ours = cache / "refs" / revision, HF_HOME / "nanoloop" / spec.replace("/", "--")
    commit = ref.read_text() if ref.exists() else revision
    for folder in (cache / "snapshots" / commit, ours):
        if complete(folder):
            return str(folder)
    info = hub_get(f"api/{kind}/revision/{quote(revision, safe='')}?blobs=true").json()
    files = {file["rfilename"]: file for file in info["siblings"]}
    for name in sorted(files, reverse=True):  # config.json after tokenizer and weights
        path, size = ours / name, files[name]["size"]
        if not path.is_relative_to(ours) or ".." in path.parts:
            sys.exit(f"{spec}: its file {name} would leave {ours}; choose another")
        known = path.exists() and path.stat().st_size == size
        if re.fullmatch(wanted, name) and not known:
            sha256 = (files[name].get("lfs") or {}).get("sha256")
            fetch(f"{repo}/resolve/{info['sha']}/{quote(name)}", path, size, sha256)
    if kind != repo and not complete(ours):
        sys.exit(f"{spec}: lacks config.json or safetensors; weights that are only pickled (.bin, "
                 ".pth) are never loaded: choose a conversion to safetensors")
    return str(ours)


# ---- prepare ---------------------------------------------------------------------------------
# What --strip_roles removes: `User:`, `### User:`, <|user|> or <|im_start|>user at the start of a
# line, with the line's end if nothing follows, and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
ROLES = re.compile(rf"(?im)^[ \t]*(?:#* *{ROLE}:|<\|{ROLE}\|>|<\|im_start\|>{ROLE}\b)[ \t]*\n?"
                   r"|<\|im_end\|>")


def list_inputs(inputs):
    """Paths of the files to pack. Those of hf://datasets/ORG/NAME[@REVISION]/GLOB are fetched."""
    paths = []
    for name in inputs:
        on_hub = re.fullmatch("hf://(datasets/[^/]+/[^/]+)/(.+)", name)
        if on_hub:
            spec, pattern = on_hub.groups()
            folder = download(spec, fnmatch.translate(pattern))
            files = map(str, Path(folder).rglob("*"))
            paths += sorted(fnmatch.filter(files, f"{folder}/{pattern}"))
        else:
            paths.append(os.path.abspath(name))
    return paths


def list_tasks(paths, step):
    """
    The input in pieces for the workers: [(path, begin, end)], which are bytes of a .jsonl file,
    a row group of a .parquet file, or a whole .txt file.
    """
    tasks = []
    for path in paths:
        end = os.path.getsize(path)
        if path.endswith(".parquet"):
            groups = open_parquet(path).num_row_groups
            tasks += [(path, group, group + 1) for group in range(groups)]
        elif path.endswith(".txt"):
            tasks.append((path, 0, end))
        elif path.endswith(".jsonl"):
            tasks += [(path, begin, begin + step) for begin in range(0, end, step)]
        else:
            sys.exit(f"{path}: is not .txt, .jsonl or .parquet (--input)")
    return tasks


def open_parquet(path):
    try:
        from pyarrow import parquet
        return parquet.ParquetFile(path, buffer_size=1 << 20)
    except (ImportError, ValueError) as e:
        sys.exit(f"{path}: is damaged, or pyarrow is missing: pip install pyarrow ({e})")


def read_rows(path, begin, end, columns):
    """Yield the documents of a task: dicts (.parquet) or bytes (a text, or a line of JSON)."""
    if path.endswith(".parquet"):
        for batch in open_parquet(path).iter_batches(256, [begin], columns):
            yield from batch.to_pylist()
        return
    with open(path, "rb") as file:
        if path.endswith(".txt"):
            yield file.read()
        elif begin:
            file.seek(begin - 1)
            file.readline()  # this line began in the task before
        while file.tell() < end and (line := file.readline()):
            if line.strip():
                yield line


def document_ids(tokenizer, row, fields, strip_roles):
    """
    Token ids of a document: [BOS] text EOS. A field is text or a chat, a list of {"content": text};
    or it is a list of ids, which are taken as they are.
    """
    texts = []
    for value in (row[field] for field in fields):
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value[0], int):
            if not 0 <= min(value) <= max(value) < tokenizer.vocab_size:
                raise ValueError(f"ids outside the vocabulary of {tokenizer.vocab_size}")
            return value
        else:
            texts += [message["content"] for message in value]
    text = "\n".join(texts)
    text = ROLES.sub("", text).strip() if strip_roles else text.strip()
    return [*tokenizer.encode(text, bos=True), tokenizer.eos_id] if text else []


def tokenize(folder, fields, rules, strip_roles, task):
    """-> tokens of a task, and counts of its documents, dropped and bad ones."""
    path, tokenizer, counts = task[0], load_once(folder), Counter()
    dtype = np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32
    tokens = [np.empty(0, dtype)]
    columns = {*fields, *(column for column, _ in rules)}
    for row in read_rows(*task, list(columns)):
        counts["documents"] += 1
        try:
            if path.endswith(".txt"):
                row = {fields[0]: row.decode("utf-8-sig")}
            elif path.endswith(".jsonl"):
                row = json.loads(row)
            if any(text.lower() in str(row[column]).lower() for column, text in rules):
                counts["dropped"] += 1
            else:
                ids = document_ids(tokenizer, row, fields, strip_roles)
                tokens.append(np.array(ids, dtype))
        except (ValueError, LookupError, TypeError) as e:  # not UTF-8, not JSON or without a field
            counts["bad"] += 1
            if counts["bad"] <= 3:
                print(f"\n{path}: left out {row!r:.80} ({e!r:.200})")
    return np.concatenate(tokens), counts


def start_worker():
    """Leave Ctrl-C to the parent, and exit when it dies: else a worker would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def write_shard(folder, name, *arrays):
    """Write tokens, and targets if given -> [name, tokens, digest], the entry in meta.json."""
    digest = hashlib.sha256()
    for array, path in zip(arrays, (name, name.replace(".npy", ".targets.npy"))):
        with whole(folder / path) as new, open(new, "wb") as file:
            np.save(file, array)
        digest.update(array)
    return [name, len(arrays[0]), digest.hexdigest()]


def write_shards(out, state, tokens, val):
    """Write the next shard, its last `val` as one for validation, then the progress so far."""
    number, cut = len(state["shards"]["train"]), len(tokens) - int(len(tokens) * val)
    for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
        if len(part):
            entry = write_shard(out, f"{split}_{number:06d}.npy", part)
            state["shards"][split].append(entry)
    write_json(out / "progress.json", state)


def prepare(inputs, tokenizer, out, field="text", drop=(), strip_roles=False, max_bad=0.01,
            val=0.01, shard_tokens=10**8, procs=8):
    """
    Pack .txt (a file is a document), .jsonl and .parquet files into shards of token ids. The same
    call again resumes after the last whole shard and writes the same bytes.

    --input          files, or hf://datasets/ORG/NAME[@REVISION]/GLOB on the hub
    --tokenizer      folder with tokenizer.model or tokenizer.json
    --field          one column (text) or several, a,b: text, chat messages or token ids
    --drop           leave out rows whose COLUMN contains TEXT, in any case; may be repeated
    --strip_roles    remove a chat's tags: `User:`, `### Human:`, <|im_start|>system and the like
    --max_bad        share of documents that may be bad (0.01); they are left out and counted
    --val            share of each shard for validation (0.01)
    --shard_tokens   tokens a shard, about (10^8)
    --procs          processes (8), at most one a core
    """
    paths, rules, out = list_inputs(inputs), [rule.split("=", 1) for rule in drop], Path(out)
    arguments = dict(input=[[path, os.path.getsize(path)] for path in paths], field=field,
                     drop=list(drop), strip_roles=strip_roles, val=val, shard_tokens=shard_tokens,
                     tokenizer=os.path.abspath(tokenizer))
    state = dict(arguments=arguments, done=0, counts={}, shards=dict(train=[], val=[]))
    meta, progress = out / "meta.json", out / "progress.json"
    if meta.exists() or progress.exists():
        state = read_json(meta if meta.exists() else progress)
        if state["arguments"] != arguments:
            sys.exit(f"{out}: was made with other arguments; delete it or change --out")
    elif any(out.glob("[!.]*")):
        sys.exit(f"{out}: holds other files; choose another --out")
    if meta.exists():
        return print(f"{out}: is complete, nothing to do")
    tasks = list_tasks(paths, min(shard_tokens, 1 << 20))
    work = functools.partial(tokenize, tokenizer, field.split(","), rules, strip_roles)
    counts, pieces, start = Counter(state["counts"]), [], state["done"]
    procs = min(procs, os.cpu_count())
    with locked(out), ProcessPoolExecutor(procs, initializer=start_worker) as pool:
        write_json(progress, state)
        for done, (tokens, more) in enumerate(pool.map(work, tasks[start:]), start + 1):
            pieces.append(tokens)
            counts.update(more)
            print(f"\r{out}: {done / len(tasks):.1%}", end="")
            if sum(map(len, pieces)) >= shard_tokens or done == len(tasks):
                if counts["bad"] > max_bad * counts["documents"]:
                    sys.exit(f"{out}: {counts['bad']} of {counts['documents']} documents are bad, "
                             f"more than --max_bad={max_bad} allows (--field, --drop)")
                state.update(done=done, counts=counts)
                write_shards(out, state, np.concatenate(pieces), val)
                pieces = []
    if not state["shards"]["train"]:
        sys.exit(f"{out}: there is no text in {field} (--input, --field)")
    copy_tokenizer(tokenizer, out)
    tokenizer = load_once(tokenizer)
    opening = np.load(out / "train_000000.npy", mmap_mode="r")[:12]
    prompt = tokenizer.decode(opening[opening != tokenizer.bos_id].tolist())
    write_json(meta, dict(state, row=None, vocab_size=tokenizer.vocab_size,
                          eos_id=tokenizer.eos_id, prompt=prompt))
    progress.unlink()
    print(f"\n{out}: complete, {dict(counts)}")


# ---- the loader ------------------------------------------------------------------------------
EDGE = 1 << 21  # tokens at either end of a shard that fingerprint() reads


class Shards:
    """
    Windows of T tokens of a data set's split, "train" or "val"; .rows of them are an epoch. Each
    epoch has a random order of its own, made when it begins; the last two are kept in memory. At
    25 million rows (26 billion tokens in windows of 1,024) an order takes 1 to 2 s and 200 MB.
    """

    def __init__(self, folder, split, T):
        self.folder, self.T, self.rows = folder, T, 0
        self.meta = read_json(Path(folder, "meta.json"))
        self.shards, self.starts = [], []
        row = self.meta["row"]
        if row not in (None, T):
            sys.exit(f"{folder}: its rows have {row} tokens, not {T}; use --context={row}")
        for name, *_ in self.meta["shards"][split]:
            tokens = load_array(folder, name)
            targets = tokens[1:]
            if row:
                targets = load_array(folder, name.replace(".npy", ".targets.npy"))
            self.shards.append((tokens, targets))
            self.starts.append(self.rows)
            self.rows += len(targets) // T
        if not self.rows:
            sys.exit(f"{folder}: has no {split} window of {T} tokens; use a smaller --context")
        self.order = functools.lru_cache(maxsize=2)(self.order)

    def fingerprint(self):
        """
        What tells these tokens from others, as JSON. The digest covers meta.json's list of shards,
        which has a digest of all tokens, and, in case a shard changed after that was written, both
        ends of each shard as it is now: up to 4 million tokens.
        """
        digest = hashlib.sha256(json.dumps(self.meta["shards"]).encode())
        for array in itertools.chain(*self.shards):
            digest.update(array[:EDGE])
            digest.update(array[-EDGE:])
        return {"vocab_size": self.meta["vocab_size"], "digest": digest.hexdigest()}

    def order(self, seed, epoch):
        """The rows in the random order of an epoch."""
        return np.random.default_rng([seed, epoch]).permutation(self.rows)

    def batch(self, seed, step, rank, world, B):
        """-> idx, targets (-100: no loss), both (B, T) int64; numbers (B,), which decide them."""
        numbers = (step * world + rank) * B + np.arange(B)
        samples = [self.sample(seed, number) for number in numbers.tolist()]
        idx, targets = torch.from_numpy(np.stack(samples, axis=1))
        return idx, targets, numbers

    def sample(self, seed, number):
        """Ids and targets, (2, T) int64, of a sample; numbers go on from epoch to epoch."""
        epoch, place = divmod(number, self.rows)
        row = self.order(seed, epoch)[place]
        shard = bisect.bisect(self.starts, row) - 1
        start = (row - self.starts[shard]) * self.T
        return np.array([array[start:start + self.T] for array in self.shards[shard]], np.int64)


def load_array(folder, name):
    try:
        return np.load(Path(folder, name), mmap_mode="r")
    except (ValueError, EOFError) as e:
        sys.exit(f"{folder}/{name}: is cut short; make the data set again ({e})")


class Mixture(Shards):
    """
    Several data sets in fixed shares. Of sum(weights) samples in a row, counted from 0, exactly
    weights[k] are of set k, evenly spread; each set has epochs of its own. .rows: samples until
    the first set is through. .meta, .folder: the first set's.
    """

    def __init__(self, sets, weights):
        self.sets, self.weights = sets, weights
        self.meta, self.folder, self.T = sets[0].meta, sets[0].folder, sets[0].T
        self.rows = min(s.rows * sum(weights) // weight for s, weight in zip(sets, weights))
        self.turns = sorted(((i + 0.5) / weight, k, i) for k, weight in enumerate(weights)
                            for i in range(weight))
        if len({tokenizer_bytes(s.folder) for s in sets}) > 1:
            sys.exit(f"{', '.join(s.folder for s in sets)}: have different tokenizers")

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
    parts = [re.fullmatch(r"(.+?)(?::([1-9]\d*))?", part) for part in data.split(",")]
    sets = [Shards(part[1], split, T) for part in parts]
    return sets[0] if len(sets) == 1 else Mixture(sets, [int(part[2] or 1) for part in parts])


# ---- the embedded corpus ---------------------------------------------------------------------
# A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1. The
# answer needs every sentence in order, so a model shallower than the story must reuse its layers.
WORDS = ["<unk>", "</s>", "has", "gets", "loses", "times", "so", *"0123456789"]  # in order of id
EOS, HAS, GETS, SO, ZERO = 1, 2, 3, 6, 7
PROMPT = "has 7 loses 4 times 3 gets 2 gets 1 loses 4 times 2 loses 3 gets 4 times 3 loses 1 gets 2"


def make_stories(rng, n, length):
    """n stories of `length` sentences: each the ids of a verb, a number, "so", the answer then."""
    verbs, numbers = (rng.integers(most, size=(n, length)).tolist() for most in (3, 4))
    stories = []
    starts = rng.integers(10, size=n).tolist()
    for count, story_verbs, story_numbers in zip(starts, verbs, numbers):
        story = [(HAS, ZERO + count, SO, ZERO + count)]
        for verb, x in zip(story_verbs[1:], story_numbers[1:]):
            x = 2 + x % 2 if verb == 2 else 1 + x
            count = (count + x, count - x, count * x)[verb] % 10
            story.append((GETS + verb, ZERO + x, SO, ZERO + count))
        stories.append(story)
    return stories


def worked(story):
    """A document that says each answer, `so has 3 so 3 loses 4 so 9 EOS`, and its targets."""
    if not story:
        return [EOS, EOS], [-100, -100]
    ids = [SO, *itertools.chain(*story), EOS]
    return ids, [*ids[1:], -100]


def direct(story, labelled):
    """`has 3 loses 4 ... 9 EOS`; the first `labelled` numbers have the answer so far as target."""
    ids, targets = [], []
    for i, (verb, number, _, answer) in enumerate(story):
        ids += [verb, number]
        targets += [-100, answer if i < labelled else -100]
    return [*ids, answer, EOS], [*targets, EOS if labelled == 12 else -100, -100]


def pretraining(rng, stories):
    """
    Documents of which two fill a row of 52, the rows in random order. Half of the stories are
    worked and cut so that a row has 12 sentences; the others are direct, with three targets.
    """
    documents, quarter = [], len(stories) // 4
    for i, n in enumerate(rng.integers(1, 13, size=quarter)):
        del stories[i][n:], stories[quarter + i][12 - n:]
        documents += [worked(stories[i]), worked(stories[quarter + i])]
    documents += [direct(story, 3) for story in stories[2 * quarter:]]
    order = rng.permutation(2 * quarter)
    return [document for i in order for document in documents[2 * i:2 * i + 2]]


def word_tokenizer():
    """The bytes of a tokenizer.model of WORDS. SentencePiece gives ids by frequency."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(WORDS[2:i + 1]) for i in range(2, 17)), model_writer=model,
        model_type="word", vocab_size=17, bos_id=-1, pad_id=-1, unk_id=0, eos_id=1,
        normalization_rule_name="identity", minloglevel=2)
    return model.getvalue()


def tiny(out, seed=0, rows=80_000):
    """
    Write the embedded corpus, which follows from the seed: data sets OUT/pretrain (rows of two
    stories) and OUT/task (direct stories of 12 sentences with all answers), OUT/tokenizer,
    OUT/test.jsonl and OUT/test18.jsonl. --rows: training stories of each data set (80,000).
    """
    out, arguments = Path(out), {"seed": seed, "rows": rows}
    meta = out / "task" / "meta.json"
    if meta.exists() and read_json(meta)["arguments"] == arguments:
        return print(f"{out}: is complete, nothing to do")
    if out.is_file() or any(out.glob("*")):
        sys.exit(f"{out}: holds something else; choose another --out")
    assert rows >= 8 and rows % 4 == 0, f"--rows {rows} is not a multiple of 4, or below 8"
    with whole(out) as new:
        new, seen = Path(new), set()  # seen: how training stories begin, from 6 sentences on
        for kind, T in (("pretrain", 52), ("task", 26)):
            meta = dict(vocab_size=17, eos_id=EOS, row=T, shards={}, arguments=arguments,
                        prompt=PROMPT if kind == "task" else "so has 7 so")
            for split, n in (("train", rows), ("val", 1024)):
                rng = np.random.default_rng([seed, kind == "task", split == "val"])
                stories = make_stories(rng, n, 12)
                if kind == "task":
                    documents = [direct(story, 12) for story in stories]
                else:
                    documents = pretraining(rng, stories)
                if split == "train":
                    seen |= {tuple(s[:n]) for s in stories for n in range(6, len(s) + 1)}
                ids, targets = (np.concatenate(part) for part in zip(*documents))
                meta["shards"][split] = [write_shard(
                    new / kind, f"{split}_000000.npy", ids.astype(np.uint16),
                    targets.astype(np.int32))]
            write_json(new / kind / "meta.json", meta)
        for kind in ("pretrain", "task", "tokenizer"):
            os.makedirs(new / kind, exist_ok=True)
            (new / kind / "tokenizer.model").write_bytes(word_tokenizer())
        for length in (*range(1, 13), 18):
            name, n = ("test18.jsonl", 300) if length == 18 else ("test.jsonl", 100)
            stories = make_stories(np.random.default_rng([seed, 2, length]), 10 * n, length)
            fresh = [story for story in stories if tuple(story) not in seen]
            with open(new / name, "a") as file:
                for story in fresh[:n]:
                    question = " ".join(WORDS[i] for sentence in story for i in sentence[:2])
                    row = dict(question=question, answer=WORDS[story[-1][3]], difficulty=length)
                    print(json.dumps(row), file=file)
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = argparse.ArgumentParser(description="Make data sets: folders of token shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    options = dict(argument_default=argparse.SUPPRESS,  # the functions have the defaults
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    p = commands.add_parser("prepare", description=prepare.__doc__, **options)
    p.add_argument("--input", nargs="+", required=True, dest="inputs")
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--field")
    p.add_argument("--drop", action="append", metavar="COLUMN=TEXT")
    p.add_argument("--strip_roles", action="store_true")
    p.add_argument("--max_bad", type=float)
    p.add_argument("--val", type=float)
    p.add_argument("--shard_tokens", type=int)
    p.add_argument("--procs", type=int)
    p = commands.add_parser("tiny", description=tiny.__doc__, **options)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int)
    p.add_argument("--rows", type=int)
    args = vars(parser.parse_args())
    {"prepare": prepare, "tiny": tiny}[args.pop("command")](**args)


if __name__ == "__main__":
    cli(main)
