"""
Text to tokens to batches: tokenizers, `prepare`, the loader, and a small corpus made from nothing.

    python data.py tiny --out out/tiny/data            # the embedded corpus: seconds, no download
    python data.py prepare --input web/*.parquet --tokenizer TinyLlama --out out/data/web --procs 8
    python data.py prepare --input gsm8k.jsonl --field question,answer --tokenizer Llama --out out/data/gsm8k
    python data.py prepare --input "hf://datasets/ORG/NAME/data/*.parquet" --drop generator=deepseek --strip_roles ...

A data set is a folder. `train_000000.npy` is a row of tokens (uint16, or uint32 for vocabularies above 65536):
documents, [BOS] text EOS, one after another. The loader cuts windows of T tokens wherever they fall, so nothing
is padded. `train_000000.targets.npy` (int32, optional) is what the model shall predict AT each token, already
shifted, -100 for no loss; without it, the next token. `meta.json` is written last: a folder that has one is whole.

Unusual: the loader has no state, a batch is a pure function of (seed, step, rank, world). So resuming needs only
the step, 2 ranks see what 1 rank with twice the batch sees, and each epoch's order is computed, never stored. So is
the mixture of several data sets, "A:1,B:1,C:2".
"""
import argparse
import base64
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
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import requests
import sentencepiece
import tiktoken
import torch
import urllib3

from model import CARRIED_FILES, TOKENIZER_FILES, InputError, cli, read_json, whole_folder, write_json

# ---- tokenizers ------------------------------------------------------------------------------
SPLIT_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_NAMES = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",  # 3.1, 3.2
                7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}  # others: reserved_special_token_0, ...


class Tokenizer:
    """
    .vocab_size: highest id + 1; .bos_id: None where the tokenizer adds none; .special: {name: id} of special tokens;
    .files: to copy along, the tokenizer's own first.
    """

    def __init__(self, path, encode, decode, vocab_size, bos_id, eos_id, plain, special):
        """encode: of text without names; plain, special: {name: id} read always, and where encode() is asked to."""
        if eos_id is None:
            raise InputError(f"{path}: has no end-of-text token")
        more = (os.path.join(os.path.dirname(path), file) for file in CARRIED_FILES)
        self.files, self._encode, self._decode = [path, *filter(os.path.exists, more)], encode, decode
        self.vocab_size, self.bos_id, self.eos_id, self.special = vocab_size, bos_id, eos_id, special
        self._names = plain | special
        self._find = [re.compile(f"({'|'.join(map(re.escape, sorted(names, reverse=True))) or chr(0) + '(?!)'})")
                      for names in (plain, self._names)]  # of two that begin alike the longer first

    @staticmethod
    def load(folder):
        """From tokenizer.model (SentencePiece, or Llama-3's lines of "base64 rank"), else tokenizer.json."""
        path = next((p for file in TOKENIZER_FILES if os.path.isfile(p := os.path.join(folder, file))), None)
        if path is None:
            raise InputError(f"{folder}: no tokenizer.model or tokenizer.json here (--tokenizer)")
        content = Path(path).read_bytes() or b"empty"  # of which SentencePiece would make a tokenizer
        try:
            if path.endswith(".json"):
                return _byte_level(path, *_read_byte_level(path, json.loads(content)))
            if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content):
                pieces = [base64.b64decode(piece) for piece, _ in map(bytes.split, content.splitlines())]
                assert len(pieces) == 128000, f"{len(pieces)} lines, not 128000"
                spare = (f"reserved_special_token_{i}" for i in range(256))
                special = {f"<|{LLAMA3_NAMES.get(i) or next(spare)}|>": 128000 + i for i in range(256)}
                return _byte_level(path, SPLIT_LLAMA3, pieces, range(128000), {}, special, 128000)
            sp = sentencepiece.SentencePieceProcessor(model_proto=content)
            bos, eos = (i if i >= 0 else None for i in (sp.bos_id(), sp.eos_id()))
            special = {sp.id_to_piece(i): i for i in range(sp.vocab_size()) if sp.is_control(i)}
            return Tokenizer(path, sp.encode, sp.decode, sp.vocab_size(), bos, eos, {}, special)
        except (InputError, KeyboardInterrupt):
            raise
        except BaseException as e:  # a panic in tiktoken's Rust is no Exception
            raise InputError(f"{path}: is no tokenizer, or damaged: fetch it again ({e!r:.200})")

    def encode(self, text, bos=False, special=False):
        """Token ids. "</s>" in text is four characters, and EOS only with special. bos: begin with BOS, if any."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON's "\\ud83d" alone
        ids = []
        for i, part in enumerate(self._find[special].split(text)):
            ids += [self._names[part]] if i % 2 else self._encode(part)
        return [self.bos_id] * (bos and self.bos_id not in (None, *ids[:1])) + ids

    def decode(self, ids):
        try:
            return self._decode([int(i) for i in ids])  # special ones: their name (byte-level) or nothing
        except (KeyError, IndexError, OverflowError, TypeError):
            raise InputError(f"{self.files[0]}: {ids} are not all ids below {self.vocab_size}")


def _read_byte_level(path, spec):
    """tokenizer.json of Llama-3.2, OLMo-2, GPT-2 (split regex, vocabulary, merges) -> _byte_level's arguments."""
    model, pre, post = spec["model"], spec["pre_tokenizer"] or {}, spec.get("post_processor") or {}
    *split, level = pre.get("pretokenizers", [pre])
    splits = [(s["type"], s.get("behavior"), s.get("invert"), *s.get("pattern", ())) for s in split]
    kind, normalizer = model.get("type", "BPE"), spec.get("normalizer")  # old files leave the type out
    if ((kind, normalizer, level.get("type"), level.get("add_prefix_space"), level.get("use_regex", True)) !=
            ("BPE", None, "ByteLevel", False, not split) or splits not in (  # the two known ones do the same
                [], [("Split", "Removed", True, "Regex")], [("Split", "Isolated", False, "Regex")])):
        parts = re.findall(r'"type": "(?!Sequence)(\w+)"', json.dumps([normalizer, pre]))
        raise InputError(f"{path}: holds {' with '.join([kind, *parts[:1]])}, not plain byte-level BPE: put the model's "
                         "tokenizer.model (SentencePiece) beside it, or name a folder that has one")
    # GPT-2's alphabet writes the 188 printable bytes as themselves, the others as characters from 256 on.
    order = sorted(range(256), key=lambda b: not chr(b).isprintable() or b == 32)
    byte = {chr(b if i < 188 else 68 + i): b for i, b in enumerate(order)}
    merged = ("".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"])
    pieces = list(dict.fromkeys([*byte, *merged]))
    ids = [model["vocab"][piece] for piece in pieces]
    plain, special = ({t["content"]: t["id"] for t in spec["added_tokens"] if t["special"] == s} for s in (False, True))
    first = [s["single"][0] for s in post.get("processors", [post]) if s.get("type") == "TemplateProcessing"]
    bos = next((special[s["SpecialToken"]["id"]] for s in first if "SpecialToken" in s), None)
    pattern = split[0]["pattern"]["Regex"] if split else SPLIT_GPT2
    return pattern, [bytes(byte[c] for c in piece) for piece in pieces], ids, plain, special, bos


def _byte_level(path, pattern, pieces, ids, plain, special, bos_id):
    """pieces: bytes in merge order; ids: theirs; plain, special: as Tokenizer's."""
    ids = [*ids, *(added := plain | special).values()]
    code = {i: c for c, i in enumerate(ids)}  # tiktoken's: it merges in the order of its codes
    coder = tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks={p: c for c, p in enumerate(pieces)},
                              special_tokens={name: code[i] for name, i in added.items()})
    text = list(map(chr, range(256)))
    assert coder.decode_batch(coder.encode_ordinary_batch(text)) == text, "lacks a byte, or the regex drops one"

    def encode(text):  # cut, as the regex gives up on 10^6 blanks in a row; before a line, as there a token begins
        parts = re.findall(r"(?s).{1,400000}(?:(?<=\n)(?=\S)|\Z)|.{1,400000}", text)
        return [ids[c] for part in parts for c in coder.encode_ordinary(part)]

    eos = next((added[n] for n in ("<|endoftext|>", "<|end_of_text|>", "</s>") if n in added), None)
    return Tokenizer(path, encode, lambda i: coder.decode([code[x] for x in i]), max(ids) + 1, bos_id, eos, plain, special)


# ---- the hub: checkpoints by name ------------------------------------------------------------
# The cache is laid out as huggingface.co/docs/hub/local-cache says, shared with every tool that keeps to it.
TRIES, FIRST_WAIT, THREADS, CHUNK = 5, 1.0, 4, 1 << 17  # in a row; seconds, doubling; files at once; bytes
INDEX, TOKENIZER = "model.safetensors.index.json", " or ".join(TOKENIZER_FILES)
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, "tokenizer_config.json",
               "special_tokens_map.json", INDEX)
SPEC = re.compile(r"(?![^@]*--)(?!.*\.\.)(\w[\w.-]*/\w[\w.-]*)(?:@(\w(?:[\w./+-]*\w)?))?", re.ASCII)
INSIDE = re.compile(r"(?!/)(?!(?:.*/)?\.\.(?:/|$))[^\0]+", re.DOTALL)  # a name that stays in the folder it is joined to


def _whole(path, size):
    return os.path.isfile(path) and os.path.getsize(path) == size


def weight_map(index):
    """{tensor name: file} of an index, all of them .safetensors of its folder. InputError."""
    files = read_json(index).get("weight_map")
    names = files.values() if isinstance(files, dict) else ()
    if not names or not all(isinstance(n, str) and INSIDE.fullmatch(n) and n.endswith(".safetensors") for n in names):
        raise InputError(f"{index}: names other files than .safetensors of its own folder: choose another model")
    return files


def _lacking(snapshot):
    """What a snapshot folder needs to be a checkpoint and does not have."""
    def has(name):
        return os.path.isfile(os.path.join(snapshot, name))  # not so where a link's blob is gone
    weights = weight_map(os.path.join(snapshot, INDEX)).values() if has(INDEX) else ["model.safetensors"]
    lacking = [name for name in sorted({"config.json", *weights}) if not has(name)]
    return lacking if any(map(has, TOKENIZER_FILES)) else [*lacking, TOKENIZER]


def _pause(error, failures):
    """Seconds until the next try: 1, 2, 4, ... or what the server asks for (docs/hub/rate-limits), a minute at most."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    asked = headers.get("Retry-After") or "".join(re.findall(r"\bt=(\d+)", headers.get("RateLimit", ""))[:1])
    try:
        asked = urllib3.Retry().parse_retry_after(asked)
    except (urllib3.exceptions.HTTPError, ValueError, OverflowError):
        asked = 0
    return min(60, max(asked, FIRST_WAIT * 2**(failures - 1)))


class _Hub:
    """A repository, org/name or datasets/org/name, at a revision: its list of files, and those files into .folder."""

    def __init__(self, repo, revision):
        env, (kind, name) = os.environ.get, ("datasets", repo[9:]) if repo.startswith("datasets/") else ("models", repo)
        self.home = env("HF_HOME") or os.path.join(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        cache = Path(env("HF_HUB_CACHE") or os.path.join(self.home, "hub")).expanduser()
        self.repo, self.revision, self.api = repo, revision, f"api/{kind}/{name}"
        self.folder = os.path.join(cache, kind + "--" + name.replace("/", "--"))
        self.endpoint = (env("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.offline = env("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        self.session, self.stop, self.done = requests.Session(), threading.Event(), {}  # done: {hash: bytes on disk}
        self.session.headers["Accept-Encoding"] = "identity"  # offsets and sizes are the file's own
        self.session.auth = lambda request: request  # or ~/.netrc would come before the token

    def log_in(self):
        file = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(self.home, "token")).expanduser()
        self.token = (os.environ.get("HF_TOKEN") or (file.read_text("latin-1") if file.is_file() else "")).strip()
        if not re.fullmatch("[!-~]*", self.token):  # checked here, as requests would print it
            raise InputError("HF_TOKEN (or the token's file): holds blanks or other signs that no token has: correct it")
        if self.token:  # redirected to another host, requests takes it out again
            self.session.headers["Authorization"] = f"Bearer {self.token}"

    def get(self, path, start=0):
        """An answer, its body unread. What may pass is a RequestException, what will not an InputError."""
        try:
            r = self.session.get(f"{self.endpoint}/{path}", stream=True, timeout=(10, 30),
                                 headers={"Range": f"bytes={start}-"} if start else None)
        except ValueError as e:  # so requests refuses addresses
            raise InputError(f"HF_ENDPOINT={self.endpoint}: leads to what is no address ({e!r:.200}): correct it")
        if r.status_code in (200, 206, 416):
            return r
        r.close()
        status, host, page = f"{r.status_code} {r.reason}", urlsplit(r.url).netloc, f"{self.endpoint}/{self.repo}"
        storage = host != urlsplit(self.endpoint).netloc  # whose links expire: the hub gives a new one
        if storage or r.status_code in (408, 429) or r.status_code >= 500:
            raise requests.HTTPError(f"{host} answers {status}", response=r)
        mend = "set HF_TOKEN to one that may read it" if self.token else "set HF_TOKEN"
        gated = f"gated: check the name, accept the terms on {page} and {mend}"
        why = {"GatedRepo": f"is {gated}",
               "RevisionNotFound": f"has no revision {self.revision}: see {page}/tree/main for its revisions",
               "EntryNotFound": f"has no {path.rpartition('/resolve/')[2]}: choose another revision"}
        other = {401: f"is missing, private or {gated}", 403: f"is {gated}",
                 404: f"no such model on {self.endpoint}: check the name"}
        raise InputError(f"{self.repo}: " + (why.get(r.headers.get("X-Error-Code")) or other.get(
            r.status_code, f"{host} answers {status}: check HF_ENDPOINT")))

    def retry(self, attempt, what, sha=None):
        """attempt() until it is through; InputError when TRIES in a row did not bring a byte more of blob sha."""
        failures, best = 0, self.done.get(sha, 0)
        while True:
            try:
                return attempt()
            except (requests.RequestException, urllib3.exceptions.HTTPError) as e:  # few of the latter come through
                failures = 1 if self.done.get(sha, 0) > best else failures + 1
                best, wait = max(best, self.done.get(sha, 0)), _pause(e, failures)
                why = " ".join(str(e).rpartition("Caused by ")[2].split())[:200]  # less urllib3's preamble
                if failures == TRIES:
                    raise InputError(f"{what}: {TRIES} tries at {self.endpoint} failed ({why}): check the connection "
                                     "and HF_ENDPOINT (the same command goes on), or name a local folder")
                print(f"{what}: {why}; next try in {wait:.0f} s", file=sys.stderr)
                if self.stop.wait(wait):
                    raise InterruptedError

    def listing(self):
        """-> commit, {file: (bytes, hash)}. The hash names the blob: sha256 of LFS files, git's sha1 of others."""
        self.log_in()
        path = f"{self.api}/revision/{quote(self.revision, safe='')}?blobs=true"
        content, files = self.retry(lambda: self.get(path).content, f"the list of {self.repo}"), {}
        try:
            info = json.loads(content)
            for entry in info["siblings"]:
                lfs, name = entry.get("lfs"), entry["rfilename"]
                size, sha = (lfs["size"], lfs["sha256"]) if lfs else (entry["size"], entry["blobId"])
                sound = INSIDE.fullmatch(name) and re.fullmatch("[0-9a-f]{64}" if lfs else "[0-9a-f]{40}", sha)
                if not sound or size < 0:
                    raise ValueError(entry)
                files[name] = size, sha
            return re.fullmatch("[0-9a-f]{40}", info["sha"])[0], files
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise InputError(f"{self.endpoint}: sends no list of {self.repo}'s files ({e!r:.200}): check HF_ENDPOINT")

    def fetch(self, path, size, sha):
        """A file into blobs/sha, whichever process is the first to do it."""
        blob, (cache, folder) = os.path.join(self.folder, "blobs", sha), os.path.split(self.folder)
        os.makedirs(locks := os.path.join(cache, ".locks", folder), exist_ok=True)
        with open(os.path.join(locks, sha + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as huggingface_hub does
            if not _whole(blob, size):
                with open(blob + ".incomplete", "a+b") as part:
                    self.complete(part, path, size, sha)
                os.replace(part.name, blob)
        self.done[sha] = size

    def complete(self, part, path, size, sha):
        """Go on where an earlier run ended; on return the file is checked and on the disk."""
        def drop():
            part.seek(0)
            self.done[sha] = part.truncate()

        def attempt():
            if (have := part.seek(0, os.SEEK_END)) == size:
                return
            with self.get(path, have) as r:
                span = re.fullmatch(rf"bytes {have}-\d+/({size}|\*)", r.headers.get("Content-Range", ""))
                if r.status_code != 206 or not span:
                    drop()
                    if r.status_code != 200:  # which is the file from its start
                        raise requests.RequestException(f"asked for the bytes from {have} on, it does not send them")
                for chunk in r.iter_content(CHUNK):
                    if self.stop.is_set():
                        raise InterruptedError
                    if part.tell() + len(chunk) > size:
                        drop()
                        raise requests.RequestException(f"it sends more than the {size} bytes that were promised")
                    part.write(chunk)
                    self.done[sha] = part.tell()
            if part.tell() < size:
                raise requests.RequestException(f"it ends after {part.tell()} of {size} bytes")

        if part.tell() > size:  # opened to append, it stands at its end
            drop()
        for _ in range(2):  # once more, as what the earlier run left may be wrong
            self.retry(attempt, path, sha)
            part.seek(0)
            begin = hashlib.sha256 if len(sha) == 64 else lambda: hashlib.sha1(b"blob %d\0" % size)
            if (found := hashlib.file_digest(part, begin).hexdigest()) == sha:
                return os.fsync(part.fileno())
            drop()
        os.remove(part.name)
        raise InputError(f"{path}: its hash is {found}, not {sha}: check HF_ENDPOINT, or try again later")

    def fetch_all(self, commit, files):
        """{name: (bytes, hash)} into blobs/, then, all being whole, into snapshots/commit, which is returned."""
        try:
            self.fetch_blobs(commit, files)
            return self.link(commit, files)
        except OSError as e:
            raise InputError(f"{self.folder}: fetching into it failed ({e}): make room or set HF_HOME; "
                             "the same command goes on")

    def fetch_blobs(self, commit, files):
        """Those that are not there yet, THREADS at a time."""
        blobs = os.path.join(self.folder, "blobs")
        os.makedirs(blobs, exist_ok=True)
        todo = {sha: (f"{self.repo}/resolve/{commit}/{quote(name)}", size, sha)
                for name, (size, sha) in files.items() if not _whole(os.path.join(blobs, sha), size)}
        for _, size, sha in todo.values():
            part = os.path.join(blobs, sha + ".incomplete")
            self.done[sha] = min(size, os.path.getsize(part)) if os.path.exists(part) else 0
        total, before, begun = sum(size for _, size, _ in todo.values()), sum(map(self.done.get, todo)), time.time()
        if (free := shutil.disk_usage(blobs).free) < total - before:
            raise InputError(f"{blobs}: needs {(total - before) / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free: "
                             "make room or set HF_HOME to a folder on another disk")
        shown, screen = begun, sys.stderr.isatty()

        def show(end):
            have, seconds = sum(map(self.done.get, todo)), time.time() - begun
            rate = max(1, have - before) / max(1e-3, seconds)
            minutes, rest = divmod(int((total - have) / rate), 60)
            text = f"{have / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.1f} MB/s, ETA {minutes}:{rest:02d}"
            print(f"\r{text}\x1b[K" if screen else text, end=end, file=sys.stderr, flush=True)

        left = len(todo)
        self.stop.clear()
        with ThreadPool(THREADS) as pool:  # of daemons: neither its end nor an exit waits for one that hangs
            ended = pool.imap_unordered(lambda file: self.fetch(*file), todo.values())
            try:
                while left:
                    with contextlib.suppress(multiprocessing.TimeoutError):
                        ended.next(0.2)
                        left -= 1
                    if total >= 10**8 and time.time() - shown > (1 if screen else 10):
                        shown = time.time()
                        show("" if screen else "\n")
            finally:  # of Ctrl-C, too
                self.stop.set()
                if total >= 10**8:
                    show("\n")

    def link(self, commit, files):
        """Names for the blobs of {name: (bytes, hash)}: snapshots/commit, which is returned."""
        snapshot = os.path.join(self.folder, "snapshots", commit)
        for name, (_, sha) in files.items():
            blob, link = os.path.join(self.folder, "blobs", sha), os.path.join(snapshot, name)
            # Of this process alone, pids being the same in two containers, and where nobody lists names.
            new = f"{blob}.{os.urandom(4).hex()}"
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.symlink(os.path.relpath(blob, os.path.dirname(link)), new)
            except OSError:  # a file system without links
                shutil.copyfile(blob, new)
            os.replace(new, link)
        return snapshot


def download(spec):
    """
    "org/name" or "org/name@REVISION" of the Hugging Face hub -> a folder with its config.json, safetensors and
    tokenizer, complete and checked. A complete one in the usual cache (HF_HOME) is taken without any request.
    """
    if not (match := SPEC.fullmatch(spec)):
        raise InputError(f"{spec}: neither a folder here nor org/name or org/name@REVISION as on the hub")
    hub = _Hub(match[1], revision := match[2] or "main")
    folder = hub.folder
    ref = Path(folder, "refs", revision)
    commit = re.match("[0-9a-f]{40}|", ref.read_text("latin-1") if ref.is_file() else "")[0] or revision
    snapshot = os.path.join(folder, "snapshots", commit)
    lacking = _lacking(snapshot)
    if not lacking or hub.offline and lacking == [TOKENIZER]:
        print(f"{spec}: taken from {snapshot}; delete that folder to fetch it anew", file=sys.stderr)
        return snapshot
    if hub.offline:
        raise InputError(f"{spec}: {snapshot} lacks {', '.join(lacking)}, but HF_HUB_OFFLINE is set: unset it")
    commit, files = hub.listing()
    weights = [name for name in (INDEX, "model.safetensors") if name in files][:1]
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
    for wrong, why in (("config.json" not in files, "has no config.json, so it is no checkpoint of transformers"),
                       (not weights and pickled, "has pickled weights only, which are never loaded, as unpickling "
                                                 "can run any code; take a conversion to safetensors"),
                       (not weights, "has no model.safetensors")):
        if wrong:
            raise InputError(f"{spec}: {why}: choose another revision or model")
    snapshot = hub.fetch_all(commit, {name: files[name] for name in SMALL_FILES if name in files})
    weights = weight_map(os.path.join(snapshot, INDEX)).values() if INDEX in weights else weights
    if absent := set(weights) - files.keys():
        raise InputError(f"{spec}: has no {min(absent)}, which its {INDEX} names: choose another revision")
    hub.fetch_all(commit, {name: files[name] for name in sorted(weights)})
    if revision != commit:
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot


def hub_inputs(spec):
    """
    "hf://datasets/ORG/NAME/GLOB" (or NAME@REVISION) -> {"hf://datasets/ORG/NAME@COMMIT/FILE": (bytes, function() that
    fetches that file into the usual cache and returns its path)}. InputError.
    """
    if not (match := re.fullmatch(r"hf://(datasets/\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w.-]*))?/(.+)", spec, re.ASCII)):
        raise InputError(f"{spec}: is not hf://datasets/ORG/NAME/FILES or hf://datasets/ORG/NAME@REVISION/FILES")
    hub = _Hub(match[1], match[2] or "main")
    if hub.offline:
        raise InputError(f"{spec}: HF_HUB_OFFLINE is set: unset it, or name local files")
    commit, files = hub.listing()
    fetch = lambda name: os.path.join(hub.fetch_all(commit, {name: files[name]}), name)
    return {f"hf://{match[1]}@{commit}/{name}": (files[name][0], functools.partial(fetch, name))
            for name in fnmatch.filter(sorted(files), match[3])}


# ---- prepare: text files to shards -----------------------------------------------------------
load_once = functools.cache(Tokenizer.load)  # once a process
# What --strip_roles takes out where a line begins with it, `User:`, `### User:`, <|user|>, <|im_start|>user, with the
# line's end if nothing follows; and any <|im_end|>.
ROLE = "(?:user|human|assistant|system)"
ROLES = re.compile(rf"(?im)^[ \t]*(?:#* *{ROLE}:|<\|{ROLE}\|>|<\|im_start\|>{ROLE}\b)[ \t]*\n?|<\|im_end\|>")


def _chunks(sources, columns, most, start):
    """
    Yield (path, number of the first document, documents: about `most` bytes, or 256 rows, the place after them) from
    a place on: [input, document, byte], all from 0. So a resumed run reads nothing twice, or a row group at most.
    """
    _, first, byte = start
    for number, (path, (size, local)) in itertools.islice(enumerate(sources.items()), start[0], None):
        end, here = [number + 1, 0, 0], local()  # fetches it, if it lies on the hub
        if path.endswith(".txt"):
            yield path, 0, [Path(here).read_bytes()], end
        elif path.endswith(".jsonl"):
            with open(here, "rb") as f:
                f.seek(byte)
                for lines in iter(lambda: f.readlines(most), []):
                    place = [number, first + len(lines), f.tell()]
                    yield path, first, lines, place if place[2] < size else end
                    first += len(lines)
        else:
            try:
                from pyarrow import parquet
                with parquet.ParquetFile(here, buffer_size=1 << 20) as file:  # else all of a row group comes at once
                    if lacking := set(columns) - set(file.schema_arrow.names):
                        raise InputError(f"{path}: has no column {sorted(lacking)} (--field, --drop), but "
                                         f"{file.schema_arrow.names}")
                    row, rows = 0, file.metadata.num_rows
                    for group in range(file.num_row_groups):
                        if row + file.metadata.row_group(group).num_rows <= first:
                            row += file.metadata.row_group(group).num_rows
                            continue
                        for batch in file.iter_batches(256, [group], columns):
                            row += len(batch)
                            if row > first:
                                place = [number, row, size * row // rows] if row < rows else end
                                yield path, row - len(batch), batch, place
            except (ImportError, ValueError, OSError) as e:
                raise InputError(f"{path}: get it again, or `pip install pyarrow` ({str(e).splitlines()[0]})")
        first = byte = 0


def _text(path, row, fields, drop):
    """The text of a document, bytes or a dict; None where --drop takes it out."""
    if isinstance(row, bytes):
        row = row.decode("utf-8-sig")  # bad UTF-8 is refused, never replaced
        if path.endswith(".txt") or not row.strip():
            return row
        row = json.loads(row)
    if any(part.lower() in str(row[column]).lower() for column, part in drop):
        return None
    parts = (row[field] for field in fields)  # texts, or a chat's lists of {"role": ..., "content": ...}
    return "\n".join(p if isinstance(p, str) else "\n".join(m["content"] for m in p) for p in parts)


def _tokenize(folder, fields, drop, strip_roles, chunk):
    """-> tokens of a chunk, its path, its place, counts of documents, [what is bad about one]. Blank ones are skipped."""
    (path, first, documents, place), tokenizer, tokens, dropped, bad = chunk, load_once(folder), [], 0, []
    for i in range(len(documents)):
        try:
            row = documents[i] if isinstance(documents, list) else documents.slice(i, 1).to_pylist()[0]
            text = _text(path, row, fields, drop)
        except (ValueError, RecursionError, KeyError, TypeError) as e:
            bad.append(f"{path}:{first + i + 1}: not UTF-8, not JSON or not what --field and --drop name ({e!r:.200})")
            continue
        dropped += text is None
        if strip_roles and text:
            text = ROLES.sub("", text)
        if text and text.strip():
            tokens += tokenizer.encode(text, bos=True)
            tokens.append(tokenizer.eos_id)
    tokens = np.array(tokens, np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32)
    return tokens, path, place, {"documents": len(documents), "bad": len(bad), "dropped": dropped}, bad


def _start_worker():
    """Ctrl-C is the parent's to handle; and a worker whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def prepare(inputs, tokenizer, out, field="text", drop=(), strip_roles=False, max_bad=0.01, val=0.01,
            shard_tokens=10**8, procs=1):
    """
    Pack .txt (a file is a document), .jsonl and .parquet files into shards of about shard_tokens, the last `val`
    of each for validation. The same call again goes on after the last whole shard and writes the same bytes. Bad
    documents (not UTF-8, not JSON, no text) are left out; how many, and the first ones, stands in meta.json.
    """
    if not 0 <= val < 1 or not 0 <= max_bad < 1 or shard_tokens < 1 or procs < 1:
        raise InputError(f"--val {val} or --max_bad {max_bad} is not in [0, 1), or --shard_tokens or --procs is below 1")
    if wrong := [text for text in drop if not re.fullmatch("(?s)[^=]+=.+", text)]:
        raise InputError(f"--drop {wrong[0]}: is not COLUMN=TEXT")
    sources = {}  # name: bytes, and the function that gives its path on this disk
    for name in inputs:
        more = hub_inputs(name) if name.startswith("hf://") else {
            name: (os.path.isfile(name) and os.path.getsize(name), functools.partial(str, name))}
        for path, (size, _) in more.items() or [(name, (0, None))]:
            if not (size and path.endswith((".txt", ".jsonl", ".parquet"))):
                raise InputError(f"{path}: missing, empty or not .txt, .jsonl or .parquet (--input)")
        sources |= more
    sizes = [size for size, _ in sources.values()]
    arguments = {"input": [[path if "://" in path else os.path.abspath(path), n] for path, n in zip(sources, sizes)],
                 "field": field, "drop": list(drop), "strip_roles": strip_roles, "tokenizer": os.path.abspath(tokenizer),
                 "val": val, "shard_tokens": shard_tokens}
    fields, drop, folder = field.split(","), [text.split("=", 1) for text in drop], tokenizer
    tokenizer = load_once(folder)
    os.makedirs(out, exist_ok=True)
    done = {"place": [0, 0, 0], "counts": {}, "shards": {"train": [], "val": []}, "arguments": arguments}
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
    shown = begun
    start = sum(sizes[:done["place"][0]]) + done["place"][2]

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

    work = functools.partial(_tokenize, folder, fields, drop, strip_roles)
    columns = list(dict.fromkeys(fields + [column for column, _ in drop]))
    chunks = _chunks(sources, columns, min(shard_tokens, 1 << 18), done["place"])
    with ProcessPoolExecutor(procs, None, _start_worker) as pool:
        tasks = (pool.submit(work, chunk) for chunk in chunks)
        ahead = deque(itertools.islice(tasks, 8 * procs))  # so no worker waits, and memory holds no more than these
        while ahead:
            try:
                tokens, path, done["place"], more, bad = ahead.popleft().result()
                ahead.extend(itertools.islice(tasks, 1))
            except BrokenProcessPool:
                raise InputError("a worker was killed (memory?): the same command with fewer --procs goes on")
            counts = done["counts"].setdefault(path, {"documents": 0, "bad": 0, "dropped": 0, "first": []})
            counts |= {name: counts[name] + n for name, n in more.items()}
            for line in bad[:3 - len(counts["first"])]:
                print(f"left out: {line}")
                counts["first"].append(line)
            ended = done["place"][1] == 0  # or all of it seems to be bad, and nobody shall wait for its end
            if counts["bad"] > max_bad * counts["documents"] and (ended or counts["bad"] == counts["documents"] > 1000):
                raise InputError(f"{counts['first'][0]}; {counts['bad']} of {counts['documents']} documents are bad there, "
                                 f"more than --max_bad={max_bad} allows")
            pieces.append(tokens)
            packed += len(tokens)
            if sum(map(len, pieces)) >= shard_tokens:
                close_shard()
            if time.time() - shown > 5 or not ahead:
                have, shown = sum(sizes[:done["place"][0]]) + done["place"][2], time.time()
                print(f"{have / sum(sizes):.0%} of the input, {packed / (shown - begun):,.0f} tokens/s, "
                      f"ETA {(sum(sizes) - have) * (shown - begun) / max(1, have - start) / 60:.1f} min")
    if sum(map(len, pieces)):
        close_shard()
    if not shards["train"]:
        raise InputError(f"{inputs[0]}: no text in the input (--input)")
    for path in tokenizer.files:
        shutil.copyfile(path, os.path.join(out, os.path.basename(path)))
    opening = np.load(os.path.join(out, "train_000000.npy"), mmap_mode="r")[:12]
    prompt = tokenizer.decode(i for i in opening if i not in (tokenizer.bos_id, tokenizer.eos_id))
    done |= {"prompt": prompt.strip("\ufffd \n").split("\n")[0], "row": None}
    write_json(progress + ".tmp", done | {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id})
    os.replace(progress + ".tmp", meta)
    os.remove(progress)
    documents, bad, dropped = (sum(c[name] for c in done["counts"].values()) for name in ("documents", "bad", "dropped"))
    print(f"{out}: complete; this run packed {packed:,} tokens; of {documents:,} documents {bad:,} were bad and left out, "
          f"{dropped:,} dropped")


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
        self.folder, path = folder, os.path.join(folder, "meta.json")
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

    def fingerprint(self):
        """What tells this data set from another, as JSON: tokens and arguments, long ones as a hash."""
        known = {"vocab_size": self.vocab_size, **{k: sum(n for _, n in v) for k, v in self.meta["shards"].items()}}
        for key, value in self.meta.get("arguments", {}).items():
            long = json.dumps(value)
            known[key] = value if len(long) < 100 else hashlib.sha256(long.encode()).hexdigest()[:16]
        return known

    def batch(self, seed, step, rank, world, B):
        """-> idx, targets (-100: no loss): (B, T) int64; index: (B,), sample numbers, which alone decide them."""
        index = (step * world + rank) * B + np.arange(B)
        return *map(torch.from_numpy, self.take(seed, index)), index

    def take(self, seed, numbers):
        """Sample numbers (B,) -> (2, B, T) int64: idx and targets."""
        idx, targets = both = np.empty((2, len(numbers), self.T), np.int64)
        for b, row in enumerate(_shuffled(numbers, seed, self.rows)):
            shard = np.searchsorted(self.starts, row, "right") - 1
            path, tokens, labels = self.shards[shard]
            i = (row - self.starts[shard]) * self.T
            idx[b] = tokens[i:i + self.T]
            targets[b] = tokens[i + 1:i + 1 + self.T] if labels is None else labels[i:i + self.T]
            if max(idx[b].max(), targets[b].max()) >= self.vocab_size:
                raise InputError(f"{path}: ids beyond the vocabulary of {self.vocab_size}; make it again")
        return both


class Mixture(Shards):
    """
    Several data sets in fixed shares: of sum(weights) samples in a row from 0, exactly weights[k] are of set k, which
    has its own shuffled epochs. .rows: samples until the first set is through. .meta, .folder: the first set's.
    """

    def __init__(self, sets, weights):
        self.sets, self.weights, first = sets, weights, sets[0]
        self.meta, self.folder, self.T = first.meta, first.folder, first.T
        self.rows = min(s.rows * sum(weights) // w for s, w in zip(sets, weights))
        for other in sets[1:]:
            here, there = ([s.meta["vocab_size"], s.meta["eos_id"], *(p.is_file() and p.read_bytes() for p in (
                Path(s.folder, file) for file in TOKENIZER_FILES))] for s in (first, other))
            if here != there:
                raise InputError(f"{first.folder}, {other.folder}: have different tokenizers; prepare both with the same")

    def fingerprint(self):
        return {f"{i} {key}": value for i, (s, weight) in enumerate(zip(self.sets, self.weights))
                for key, value in {"weight": weight, **s.fingerprint()}.items()}

    def take(self, seed, numbers):
        both, rest, todo = np.empty((2, len(numbers), self.T), np.int64), np.array(numbers), np.arange(len(numbers))
        for k, (s, weight) in enumerate(zip(self.sets, self.weights)):  # of the samples that the sets before it leave
            left = sum(self.weights[k:])                                # it takes every left/weight-th, rounded
            before = rest * weight // left
            mine = (rest + 1) * weight // left > before
            both[:, todo[mine]] = s.take(seed, before[mine])
            rest, todo = (rest - before)[~mine], todo[~mine]
        return both


def open_data(data, split, T):
    """"FOLDER" -> its Shards; "A:1,B:1,C:2" -> a Mixture of which 1/4, 1/4 and 1/2 are of A, B and C; "A,B": 1/2 each."""
    parts = [re.fullmatch(r"(?s)(.*?)(?::([1-9]\d{0,5}))?", part).groups() for part in data.split(",")]
    sets = [Shards(folder, split, T) for folder, _ in parts]
    return Mixture(sets, [int(weight or 1) for _, weight in parts]) if len(sets) > 1 else sets[0]


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


def _worked(story, n):
    """The first n sentences, `so has 3 so 3 loses 4 so 9 EOS`: 4 n + 2 ids, and targets, every next token; none if n = 0."""
    ids = [SO, *itertools.chain(*story[:n]), EOS] if n else [EOS, EOS]
    return ids, [*ids[1:], -100] if n else [-100, -100]


def _direct(story, labelled):
    """`has 3 loses 4 ... 9 EOS`: 26 ids, and targets, at the first `labelled` numbers the answer so far."""
    ids = [*itertools.chain(*(sentence[:2] for sentence in story)), story[11][3], EOS]
    targets = [-100] * 26
    targets[1:2 * labelled:2] = [sentence[3] for sentence in story[:labelled]]
    targets[24] = EOS if labelled == 12 else -100
    return ids, targets


def tiny(out, seed=0, rows=80_000):
    """
    Write the data sets out/{pretrain,task}, out/tokenizer, out/test.jsonl and out/test18.jsonl from the seed.
    pretrain: rows of two documents; half of them worked stories of 1-12 sentences, half direct stories of 12
    with the first 3 answers as targets. task: direct stories of 12 with all answers. rows: stories to train on, of each.
    """
    arguments, sizes, seen = {"seed": seed, "rows": rows}, {"train": rows, "val": 1024}, []
    meta = os.path.join(out, "task", "meta.json")
    if os.path.exists(meta) and read_json(meta).get("arguments") == arguments:
        return print(f"{out}: is complete, nothing to do")
    if rows < 8 or rows % 4:  # pretrain's documents come in fours: two worked, two direct
        raise InputError(f"--rows {rows}: must be a multiple of 4, and at least 8")
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
                if kind == "pretrain":  # two documents fill a row: worked stories of 12 sentences together, or direct ones
                    lengths[:quarter] = rng.integers(1, 13, size=quarter)
                    lengths[quarter:2 * quarter] = 12 - lengths[:quarter]
                    documents = [_worked(stories[i].tolist(), lengths[i])
                                 for pair in zip(range(quarter), range(quarter, 2 * quarter)) for i in pair]
                    documents += [_direct(story, 3) for story in stories[2 * quarter:].tolist()]
                else:
                    documents = [_direct(story, 12) for story in stories.tolist()]
                table = np.array([[*itertools.chain(*part)] for part in zip(*documents)]).reshape(2, -1, T)
                idx, targets = table[:, rng.permutation(n // 2)] if kind == "pretrain" else table
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
    p.add_argument("--input", nargs="+", required=True, dest="inputs",
                   help=".txt, .jsonl or .parquet files; also hf://datasets/ORG/NAME@REVISION/GLOB")
    p.add_argument("--tokenizer", required=True, help="folder with tokenizer.model or tokenizer.json")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--field", default="text", help="one or several, comma separated; text or chat messages (default: text)")
    p.add_argument("--drop", action="append", default=[], metavar="COLUMN=TEXT",
                   help="leave out rows whose column contains the text, in any case; may be given several times")
    p.add_argument("--strip_roles", action="store_true",
                   help="take out a chat's tags: `User:`, `### Human:`, <|assistant|>, <|im_start|>system and the like")
    p.add_argument("--max_bad", type=float, default=0.01,
                   help="share of an input's documents that may be bad; they are left out (default: 0.01)")
    p.add_argument("--val", type=float, default=0.01, help="validation share (default: 0.01)")
    p.add_argument("--shard_tokens", type=int, default=10**8, help="tokens a shard (default: 10^8)")
    p.add_argument("--procs", type=int, default=min(os.cpu_count(), 8), help="processes (default: cores, up to 8)")
    p = commands.add_parser("tiny", help="make the embedded corpus", description=tiny.__doc__)
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rows", type=int, default=80_000, help="stories to train on, of each kind (default: %(default)s)")
    args = vars(parser.parse_args())
    {"prepare": prepare, "tiny": tiny}[args.pop("command")](**args)


if __name__ == "__main__":
    cli(main)
