"""
Turn a pretrained model into a depth-recurrent one: early layers become the prelude, later ones the
recurrent block and the coda, those in between are dropped, and a fresh adapter joins them.

    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21 --verify
    python surgery.py SRC OUT --shape 4,8,4 --select angular --text corpus.txt
    python surgery.py SRC OUT --feed-forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --export hf                       a checkpoint of ours, back in Hugging Face layout
    python surgery.py --preset tinyllama-4-8-4 --dry-run        the paper's tables, without weights

SRC is a folder, or a hub id (org/name or org/name@REVISION) that is downloaded once. It holds a Llama or OLMo-2 in
Hugging Face layout, a checkpoint or run of our own, or a released Recurrent-* model or Huginn-0125, which are recurrent
already and take no layer flags. OUT is a nanoloop checkpoint; with --export hf, a Llama or OLMo-2 in Hugging Face layout
if feed-forward, else in the layout of the released models. Tensors are only stacked and taken apart, never rounded; those
of dropped layers are not read.

Paper: arXiv 2511.07384, section 3 and Tables 6-8. Its rule, the default, takes core and coda from the end.
"""
import argparse
import functools
import itertools
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from data import INDEX, Tokenizer, download, weight_map
from model import (FLOATS, LLAMA3_ROPE, STATE_STD, TOKENIZER_FILES, Config, InputError, RecurrentLM, check_tensors, cli,
                   find_checkpoint, load_config, open_safetensors, read_json, save_folder, write_json)

PARTS = ("prelude", "core", "coda")
TINYLLAMA = Config(32000, 2048, 32, 4, 5632, 22, 0, 0)
LLAMA = Config(128256, 2048, 32, 8, 8192, 16, 0, 0, tie_embeddings=True)
OLMO2 = Config(100352, 2048, 16, 16, 8192, 16, 0, 0, norm="post")
PRESETS = {  # name: the source, and the numbers of its layers in the three parts (the paper's Table 8, 0-based)
    "tinyllama-2-4-2": (TINYLLAMA, "0-1", "16-19", "20-21"),
    "tinyllama-4-8-4": (TINYLLAMA, "0-3", "10-17", "18-21"),
    "tinyllama-6-10-6": (TINYLLAMA, "0-5", "6-15", "16-21"),
    "llama-3.2-1b-2-4-2": (LLAMA, "0-1", "10-13", "14-15"),
    "llama-3.2-1b-4-6-4": (LLAMA, "0-3", "6-11", "12-15"),
    "olmo-2-1b-4-6-4": (OLMO2, "0-3", "6-11", "12-15"),
}
LLAMA_TOKENIZER = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False,
                   "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # of a folder that does not say
SAMPLE = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("src", nargs="?")
    add("out", nargs="?")
    for part in PARTS:
        add(f"--{part}", metavar="LAYERS", help="such as 0-3 or 0,2,5-7; '' for none")
    add("--preset", choices=PRESETS, help="the paper's choices of layers")
    add("--shape", metavar="P,R,C", help="sizes of the parts; the paper's rule takes the layers, or ...")
    add("--select", choices=("block-influence", "angular"), help="... how much each changes the hidden state on --text: "
        "ShortGPT's measure (arXiv 2403.03853; with --feed-forward --shape is the depth) or Encode-Think-Decode's "
        "(2510.07358, which can find the sizes itself)")
    add("--text", metavar="FILE", help="of which --select reads up to 16,384 tokens, in ...")
    add("--window", type=int, default=1024, help="... windows of so many (default: %(default)s): the model's own context")
    add("--feed-forward", action="store_true", help="a model without recurrent block: all layers, or ...")
    add("--layers", help="... these")
    add("--adapter", choices=("linear", "add"), help="default: linear")
    add("--adapter-init", choices=("identity", "default"), help="identity (default): pass the prelude's output "
        "through, so that r = 1 equals the kept layers run in a row; default: torch's Linear init, as the paper")
    add("--seed", type=int, default=0, help="of the adapter's default init")
    add("--mean_recurrence", type=int, help="the result's default r (the released models' config.json always says 32)")
    add("--export", choices=("hf",), help="write OUT in Hugging Face layout")
    add("--verify", action="store_true", help="compare all hidden states of SRC's layers in a row and of OUT at r = 1 with "
        "the identity adapter, in float32")
    add("--dry-run", action="store_true", help="say what would be done; SRC may be left out if there is a --preset")
    add("--overwrite", action="store_true", help="replace OUT")
    args = parser.parse_args()
    for wrong, why in (
            (not args.src and not (args.preset and args.dry_run), "SRC: is missing: a folder or a hub id"),
            (not args.out and not args.dry_run, "OUT: is missing: name the folder to write"),
            (not 0 <= args.seed < 2**31, f"--seed {args.seed}: lies between 0 and 2^31 - 1"),
            (not 2 <= args.window <= 16384, f"--window {args.window}: lies between 2 and 16384"),
            (args.mean_recurrence is not None and args.mean_recurrence < 1,
             f"--mean_recurrence {args.mean_recurrence}: must be at least 1")):
        if wrong:
            raise InputError(why)
    if args.out and os.path.lexists(args.out):
        if not args.overwrite:
            raise InputError(f"{args.out}: exists already: choose another OUT or add --overwrite")
        if not os.path.exists(os.path.join(args.out, "model.safetensors")):
            raise InputError(f"{args.out}: is not a checkpoint folder, so --overwrite leaves it: choose another OUT")
    return args


def main():
    args = parse_args()
    if not args.src:
        source, tokenizer = Source(args.preset, config := PRESETS[args.preset][0], {}, stacks(config, "llama")), None
    else:
        source = open_source(args.src)
        if args.out and f"{os.path.realpath(source.folder)}/".startswith(f"{os.path.realpath(args.out)}/"):
            raise InputError(f"{args.out}: holds {source.folder}, which would be lost: choose another OUT")
        tokenizer = load_tokenizer(source)
    given = lambda *names: [name for name in names if getattr(args, name) not in (None, False)]
    flags = given("feed_forward", *PARTS, "preset", "shape", "select", "layers")
    if source.config.n_core and (idle := flags + given("adapter", "adapter_init")):
        raise InputError(f"--{idle[0].replace('_', '-')}: {source.folder} is recurrent already: drop the flag")
    result, layers = source, None
    if flags or not (source.config.n_core or args.export):
        layers = choose_layers(args, source, tokenizer)
        result = retrofit(source, layers, args.adapter or "linear")
    if args.mean_recurrence:
        if not result.config.n_core:
            raise InputError("--mean_recurrence: the result is feed-forward: drop the flag")
        result.config.mean_recurrence = args.mean_recurrence
    dtype = check(result) if args.src else None  # before shapes that are wrong are counted
    print_sizes(args, source, result, layers)
    if args.dry_run:
        return print("dry run: nothing was written")
    if layers and result.config.n_core and args.adapter != "add":
        result.parts["adapter.weight"] = init_adapter(result.config.n_embd, args.adapter_init or "identity", args.seed)
    config, extra = {"model_type": "nanoloop"} | asdict(result.config), {}
    tensors = {name: read(result, name, dtype) for name in result.parts}
    if args.export:
        config, tensors = export(result.config, tensors, dtype)
        if tokenizer and {"<s>", "</s>"} <= tokenizer.special.keys() and len(tokenizer.files) == 1:
            extra["tokenizer_config.json"] = lambda path: write_json(path, LLAMA_TOKENIZER)
    save_folder(os.path.realpath(args.out), config, tensors, source.folder, extra)  # what a link leads to is replaced
    print(f"wrote {args.out}")
    if args.verify:
        verify(source, layers, args.out, tokenizer)


def load_tokenizer(source):
    """The source's Tokenizer, or None, saying so. InputError if its ids exceed the model's vocabulary."""
    if not any(os.path.exists(os.path.join(source.folder, file)) for file in TOKENIZER_FILES):
        return print(f"note: {source.folder} has no {' or '.join(TOKENIZER_FILES)}: OUT will have no tokenizer")
    tokenizer, V = Tokenizer.load(source.folder), source.config.vocab_size
    if tokenizer.vocab_size > V:
        raise InputError(f"{source.folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the vocabulary of "
                         f"config.json ends at {V - 1}: the tokenizer is of another model")
    return tokenizer


def print_sizes(args, source, result, layers):
    """The result's rows of the paper's Tables 6-8: parameters, and layers of the source."""
    def row(name, n, *columns):
        print(f"{name:20s}" + "".join(f"{n[k]:15,d}" if n else f"{k:>15s}" for k in columns))

    count = lambda config: RecurrentLM.empty(config).num_params()
    row("parameters", None, "embeddings", "body", *PARTS)
    if layers:  # the paper counts the heads of tied sources, as all of its models have one
        untied = replace(source.config, tie_embeddings=False)
        row(f"source, {untied.n_prelude} layers", count(untied), "embeddings", "body")
    c, n = result.config, count(result.config)
    row(f"result ({c.n_prelude},{c.n_core},{c.n_coda})", n, "embeddings", "body", *PARTS)
    print(f"and adapter {n['adapter']:,}, final norm {n['norm_f']:,}: {n['total']:,} in all")
    if args.preset == "tinyllama-2-4-2":
        print("note: the paper's Table 7 has a row TinyLlama (2,4,2) with a body of 486,572,032: these are 8 layers of "
              "Llama-3.2-1B (8 x 60,821,504), as in llama-3.2-1b-2-4-2")
    if layers:
        flags = " ".join(f"--{part} {ranges(chosen) or repr('')}" for part, chosen in zip(PARTS, layers)) if layers[1] else \
            f"--feed-forward --layers {ranges(layers[0])}"
        dropped = ranges(sorted(set(range(source.config.n_prelude)) - set(sum(layers, []))))
        print(f"layers: {flags}; dropped: {dropped or 'none'}")


# ---------------------------------------------------------------- which layers

def parse_layers(flag, text, source):
    """'0-3,7' -> [0, 1, 2, 3, 7]; '' -> []"""
    layers, L = [], source.config.n_prelude
    for piece in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InputError(f"--{flag} {text}: write layers as 0-3 or 0,2,5-7")
        if last >= L:
            raise InputError(f"--{flag}: layer {max(first, L)} does not exist: {source.folder} has layers 0-{L - 1}")
        layers += range(first, last + 1)
    return layers


def ranges(layers):
    """[0, 1, 2, 3, 7] -> '0-3,7': parse_layers() the other way"""
    runs = []
    for i in layers:
        runs = runs[:-1] + [(runs[-1][0], i)] if runs and runs[-1][1] == i - 1 else runs + [(i, i)]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def choose_layers(args, source, tokenizer):
    """Lists of the source's layers for prelude, core and coda, as the flags say; InputError if they cannot be."""
    L, shape, texts = source.config.n_prelude, None, (args.prelude, args.core, args.coda)
    ways = {"prelude" if f in PARTS else f for f in ("preset", "shape", "layers", *PARTS) if getattr(args, f) is not None}
    fitting = {"shape"} if args.select else {"layers"} if args.feed_forward else {"preset", "shape", "prelude"}
    if len(ways) > 1 or ways - fitting:
        raise InputError(f"--{sorted(ways - fitting or ways)[0]}: give one of --preset, --shape or --prelude --core --coda; "
                         "for --feed-forward --layers; for --select --shape alone")
    if args.shape is not None:
        try:
            shape = [int(n) for n in args.shape.split(",")]
        except ValueError:
            shape = []
        if len(shape) != (1 if args.feed_forward else 3) or min(shape) < 0 or not 0 < sum(shape) <= L:
            raise InputError(f"--shape {args.shape}: write {'one number' if args.feed_forward else 'P,R,C'}, together at "
                             f"most the {L} layers of {source.folder}")
    if args.select:
        layers = select(args, source, tokenizer, shape)
    elif args.feed_forward:
        layers = list(range(L)) if args.layers is None else parse_layers("layers", args.layers, source), [], []
    elif shape:  # the paper's rule
        layers = list(range(shape[0])), list(range(L - sum(shape[1:]), L - shape[2])), list(range(L - shape[2], L))
    else:
        expected, *texts = PRESETS[args.preset] if args.preset else (source.config, *texts)
        if None in texts:
            raise InputError(f"--{PARTS[texts.index(None)]}: is missing: give all three parts, or --preset, --shape or "
                             "--feed-forward")
        if expected.n_prelude != L:
            raise InputError(f"--preset {args.preset}: is for {expected.n_prelude} layers, {source.folder} has {L}")
        layers = [parse_layers(part, text, source) for part, text in zip(PARTS, texts)]
    flags, taken = "--layers" if args.feed_forward else "--prelude --core --coda", sum(layers, [])
    if twice := [i for i in taken if taken.count(i) > 1]:
        raise InputError(f"{flags}: layer {twice[0]} is taken twice")
    if not layers[0 if args.feed_forward else 1]:
        raise InputError("--layers: names none" if args.feed_forward else
                         "--core: needs at least one layer (--feed-forward makes a model without recurrent block)")
    return layers


def select(args, source, tokenizer, shape):
    """
    Layers by measurement. block-influence keeps the most influential ones, in order. angular keeps the first and
    the last layers, and as the core those between the two knees of the distances, where the state changes steadily.
    """
    if args.text is None or tokenizer is None:
        raise InputError("--select: needs --text FILE and a source with a tokenizer")
    try:
        with open(args.text, encoding="utf-8") as f:
            ids = tokenizer.encode(f.read(1_000_000), bos=True)
    except UnicodeDecodeError as e:
        raise InputError(f"{args.text}: is not UTF-8 text ({e})")
    L, T = source.config.n_prelude, min(args.window, source.config.context, len(ids))
    if T < 2:
        raise InputError(f"{args.text}: has no text to measure on")
    windows = torch.tensor(ids[:min(16384, len(ids)) // T * T]).view(-1, T)
    influence, angle = measure(build(source), windows)
    if not math.isfinite(sum(influence)):
        raise InputError(f"{source.folder}: computes NaN on {args.text}: take another model")
    if args.feed_forward or args.select == "block-influence":
        if shape is None:
            raise InputError(f"--select {args.select}: needs --shape here: how many layers to keep")
        score = influence if args.select == "block-influence" else angle
        kept = iter(sorted(sorted(range(L), key=lambda i: score[i])[L - sum(shape):]))
        layers = [list(itertools.islice(kept, n)) for n in (*shape, 0, 0)[:3]]
    else:
        first, last = max(1, knee(angle)), min(L - 2, L - 1 - knee(angle[::-1]))  # of the steady middle
        if first > last and shape is None:
            raise InputError(f"--select angular: finds no steady middle in {source.folder} on {args.text}: give --shape")
        P, R, C = shape or (first, last + 1 - first, L - 1 - last)
        inside = lambda s: len({*range(s, s + R)} & {*range(first, last + 1)})
        start = max(range(P, L - C - R + 1), key=lambda s: (inside(s), -sum(angle[s:s + R])))
        layers = list(range(P)), list(range(start, start + R)), list(range(L - C, L))
    print(f"{'layer':>5s} {'block influence':>16s} {'angular distance':>17s}")
    places = {i: "kept" if args.feed_forward else part for part, chosen in zip(PARTS, layers) for i in chosen}
    for i in range(L):
        print(f"{i:5d} {influence[i]:16.6f} {angle[i]:17.6f}  {places.get(i, 'dropped')}")
    return layers


@torch.no_grad()
def measure(model, idx):
    """
    How much each layer of a feed-forward model changes the hidden state: two lists, means over all tokens of
    idx (B, T). Block influence: 1 - cosine of its input and output (ShortGPT; the last layer's before the final
    norm). Angular distance: arccos(cosine) / pi. Cosines are in float64.
    """
    sums = torch.zeros(2, len(model.prelude), dtype=torch.float64)
    for row in idx:
        x, rope = model.embed_idx(row[None]), model.rope(len(row))
        for i, block in enumerate(model.prelude):
            y = block(x, rope)
            cosine = F.cosine_similarity(x.double(), y.double(), dim=-1, eps=0).clamp(-1, 1)
            sums[:, i] += torch.stack([(1 - cosine).sum(), cosine.acos().sum() / math.pi])
            x = y
    return (sums / idx.numel()).tolist()


def knee(y):
    """Kneedle (Satopää et al., 2011): where a falling convex curve, scaled to 0-1, is farthest below its chord."""
    low, high = min(y), max(y)
    return max(range(len(y)), key=lambda i: 1 - i / max(1, len(y) - 1) - (y[i] - low) / ((high - low) or 1))


# ---------------------------------------------------------------- sources: tensors by name, not yet read

class Part(NamedTuple):
    """A tensor in a file. One of ours is one of them, or several, stacked."""
    name: str
    shape: tuple             # that config.json promises
    change: object = None    # function(tensor), applied after reading


@dataclass
class Source:
    """A checkpoint of any layout as one of ours. A feed-forward one has all of its layers in the prelude."""
    folder: str
    config: Config
    files: dict              # tensor name -> path
    parts: dict              # our tensor name -> list of Part, or a tensor


def open_source(src):
    """The Source of a folder, a run's folder or a hub id, of any of the three layouts. InputError."""
    if not os.path.exists(src):
        try:
            src = download(src)
        except InputError as e:
            raise InputError(f"{src}: no such folder here; as a model on the hub: {e}")
    folder = find_checkpoint(src)
    raw, files = read_json(path := os.path.join(folder, "config.json")), tensor_files(folder)
    kind = raw.get("model_type")
    config = load_config(folder) if kind == "nanoloop" else None
    try:
        config = config or (raven_config if kind == "huginn_raven" else hf_config)(raw, files)
        check_values(config)
        if config.n_prelude + config.n_core + config.n_coda > len(files):  # looked at before so many are counted
            raise ValueError(f"promises more layers than there are tensors ({len(files)}): incomplete, or of another model")
        parts = stacks(config, kind)
    except (InputError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
        why = str(e) if isinstance(e, (InputError, ValueError)) else f"a value is of the wrong kind ({e!r:.200})"
        raise InputError(f"{path}: {why.removeprefix('config.json: ')}")
    if extra := sorted(files.keys() - {part.name for stack in parts.values() for part in stack}):
        print(f"note: ignored {len(extra)} tensors that the model does not use: {' '.join(extra[:4])}")
    if not config.n_core:  # a coda after no core is more prelude
        for name in [name for name in parts if name.startswith("coda.")]:
            _, i, rest = name.split(".", 2)
            parts[f"prelude.{config.n_prelude + int(i)}.{rest}"] = parts.pop(name)
        config = replace(config, n_prelude=config.n_prelude + config.n_coda, n_coda=0)
    return Source(folder, config, files, parts)


def stacks(config, kind):
    """The parts of a Source of that model_type."""
    if kind == "nanoloop":
        return {name: [Part(name, shape)] for name, shape in RecurrentLM.empty(config).state_shapes().items()}
    names = (raven_names if kind == "huginn_raven" else hf_names)(config)
    return {ours: [Part(*item, rotary_order(config, ours)) for item in theirs.items()] for ours, theirs in names.items()}


def check_values(c):
    """InputError for what Config takes as it comes, but the model cannot compute with."""
    number = lambda x: type(x) in (int, float) and 0 <= x < 1e18
    scaling = [c.rope_scaling[key] for key in LLAMA3_ROPE if c.rope_scaling]
    for ok, key in ((type(c.tie_embeddings) is bool, "tie_embeddings"),
                    (all(number(x) and x > 0 for x in scaling), "rope_scaling"),
                    *((number(getattr(c, key)), key) for key in ("norm_eps", "rope_theta", "state_std", "embed_scale")),
                    *((type(getattr(c, key)) in (int, type(None)), key) for key in ("bos_token_id", "eos_token_id"))):
        if not ok:
            raise InputError(f"{key}={getattr(c, key)!r} is not a value that it can have: fetch it again")


def tensor_files(folder):
    """Tensor name -> path of its safetensors file: model.safetensors, or the shards of an index."""
    index, path = (os.path.join(folder, file) for file in (INDEX, "model.safetensors"))
    if os.path.exists(index):
        return {name: os.path.join(folder, file) for name, file in weight_map(index).items()}
    pickles = sorted(f for f in os.listdir(folder) if f.endswith((".bin", ".pth", ".pt")))
    if pickles and not os.path.exists(path):
        raise InputError(f"{folder}: has its weights only as {pickles[0]}, a pickle, which may run any code when it is "
                         "loaded and never is here: get the model's safetensors")
    with open_safetensors(path) as f:
        return dict.fromkeys(f.keys(), path)


def retrofit(source, layers, adapter="linear"):
    """
    The Source with the given layers (numbers of the source's, three lists) as prelude, core and coda; feed-forward
    where the core is empty. A tied head becomes a copy in a recurrent model. adapter: "linear", whose weight is still
    to be added, or "add".
    """
    n = dict(zip((f"n_{part}" for part in PARTS), map(len, layers)))
    tied = source.config.tie_embeddings
    config = replace(source.config, **n, adapter=adapter, tie_embeddings=tied and not n["n_core"])
    parts = {name: stack for name, stack in source.parts.items() if not name.startswith("prelude.")}
    if tied and not config.tie_embeddings:
        parts["head.weight"] = parts["embed.weight"]
    for part, chosen in zip(PARTS, layers):
        for i, layer in enumerate(chosen):
            prefix = f"prelude.{layer}."
            parts |= {f"{part}.{i}.{name.removeprefix(prefix)}": stack
                      for name, stack in source.parts.items() if name.startswith(prefix)}
    return Source(source.folder, config, source.files, parts)


def init_adapter(C, kind, seed=0):
    """(C, 2C) float32 on [state, prelude output]. identity: [0 | I]; default: as nn.Linear's own."""
    if kind == "identity":
        return torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1)
    bound = (2 * C) ** -0.5
    return torch.empty(C, 2 * C).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def check(source):
    """Look at all headers before anything is read or written: InputError, or the dtype that holds all tensors exactly."""
    stored = [part for stack in source.parts.values() if isinstance(stack, list) for part in stack]
    if missing := sorted({part.name for part in stored} - source.files.keys()):
        raise InputError(f"{source.folder}: {len(missing)} tensors are missing, such as {missing[0]}: incomplete, or of "
                         "another model than config.json says")
    kinds = set()
    for path in dict.fromkeys(source.files[part.name] for part in stored):
        with open_safetensors(path) as f:
            kinds |= set(check_tensors(f, path, {p.name: p.shape for p in stored if source.files[p.name] == path}).values())
    dtypes = [FLOATS[kind] for kind in sorted(kinds)]
    dtype = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
        print(f"note: {source.folder} mixes {' and '.join(sorted(kinds))}: OUT is {dtype}, which holds all of them exactly")
    return dtype


def read(source, name, dtype=None):
    """One tensor of a checked Source. A file is opened for each, or its pages would count as memory until it is closed."""
    stack = source.parts[name]
    if isinstance(stack, torch.Tensor):
        return stack.to(dtype)
    read = []
    for part in stack:
        with open_safetensors(source.files[part.name]) as f:
            t = f.get_tensor(part.name)
        read.append(part.change(t) if part.change else t)
    return (torch.cat(read) if len(read) > 1 else read[0]).to(dtype)


def build(source, dtype=torch.float32):
    """The Source as a model. InputError."""
    check(source)
    model = RecurrentLM.empty(source.config)
    model.fill({name: read(source, name, dtype) for name in source.parts})
    return model.eval()


# ---------------------------------------------------------------- verification

@torch.no_grad()
def verify(source, layers, out, tokenizer):
    """
    Run the kept layers of the source in a row, and the checkpoint in OUT at r = 1 with the identity adapter (and
    zero state) on the same tokens, and print the largest difference of every hidden state. InputError if there is one.
    layers: None, if all of the source was taken as it is.
    """
    ids = torch.tensor(tokenizer.encode(SAMPLE, bos=True) if tokenizer else range(min(32, source.config.vocab_size)))[None]
    one = build(source if layers is None else retrofit(source, (sum(layers, []), [], [])))
    two, states = build(open_source(out)), ([], [])
    for model, seen in zip((one, two), states):
        if layers is not None and hasattr(model, "adapter"):
            model.adapter.weight.data = init_adapter(model.config.n_embd, "identity")
        seen.append(model.embed_idx(ids))
        for block in (*model.prelude, *model.core, *model.coda):
            block.register_forward_hook(lambda _, x, y, seen=seen: seen.append(y))
        state = torch.full((*ids.shape, model.config.n_embd), float(layers is None))  # 1: the adapter's other half counts
        seen.append(model(ids, steps=1, state=state)[0])
    differences = [(a - b).abs().max().item() for a, b in zip(*states, strict=True)]
    kept = range(len(differences) - 2) if layers is None else sum(layers, [])
    for name, x in zip(("embedding", *(f"layer {i}" for i in kept), "logits"), differences):
        print(f"verify: {name:10s} {x}")
    if wrong := [x for x in differences if x != 0]:  # NaN, too, which max() may pass over
        raise InputError(f"{out}: differs from {source.folder} by {wrong[0]}: delete it and try again, or report it")
    print(f"verify: OUT at r = 1 equals the source's layers in a row on {ids.numel()} tokens, in float32")


# ---------------------------------------------------------------- Hugging Face layout

def first_id(value):
    """A token id of config.json: an integer, a list of them, or null."""
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def need(raw, *keys):
    """The first of `keys` that config.json has."""
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    raise InputError(f"lacks {keys[0]}")


def hf_config(raw, files):
    """
    Config of a feed-forward model from config.json as transformers 4 or 5 writes it. InputError for
    an architecture that this model class is not.
    """
    kind = raw.get("model_type")
    if kind not in ("llama", "olmo2"):
        raise InputError(f"model_type {kind!r} is not supported: only llama, olmo2 and huginn_raven are")
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key, wanted) != wanted:
            raise InputError(f"{key}={raw[key]!r} is not supported, only {wanted!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    n_head = need(raw, "num_attention_heads")
    return Config(
        vocab_size=need(raw, "vocab_size"), n_embd=need(raw, "hidden_size"), n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head, n_ffn=need(raw, "intermediate_size"),
        n_prelude=need(raw, "num_hidden_layers"), n_core=0, n_coda=0, head_dim=raw.get("head_dim") or 0,
        norm="post" if kind == "olmo2" else "pre",
        norm_eps=raw.get("rms_norm_eps", 1e-6 if kind == "llama" else 1e-5),  # and 2048, below: transformers' defaults
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=None if plain else {k: v for k, v in rope.items() if k != "rope_theta"},
        context=raw.get("max_position_embeddings", 2048), tie_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=first_id(raw.get("bos_token_id")), eos_token_id=first_id(raw.get("eos_token_id")))


def hf_names(c):
    """Our tensor name -> {name in Hugging Face layout: shape}, in the order in which they are stacked."""
    norms = ("input_layernorm", "post_attention_layernorm") if c.norm == "pre" else \
        ("post_attention_layernorm", "post_feedforward_layernorm")
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    block = {
        "norm_1": {norms[0]: (c.n_embd,)}, "norm_2": {norms[1]: (c.n_embd,)},
        "attn.qkv": {f"self_attn.{x}_proj": (n, c.n_embd) for x, n in (("q", q), ("k", kv), ("v", kv))},
        "attn.proj": {"self_attn.o_proj": (c.n_embd, q)},
        "mlp.fc": {f"mlp.{x}_proj": (c.n_ffn, c.n_embd) for x in ("gate", "up")},
        "mlp.proj": {"mlp.down_proj": (c.n_embd, c.n_ffn)}}
    if c.norm == "post":
        block |= {f"attn.{x}_norm": {f"self_attn.{x}_norm": (n,)} for x, n in (("q", q), ("k", kv))}
    names = {"embed": {"model.embed_tokens": (c.vocab_size, c.n_embd)}, "norm_f": {"model.norm": (c.n_embd,)}}
    if not c.tie_embeddings:
        names["head"] = {"lm_head": (c.vocab_size, c.n_embd)}
    for i in range(c.n_prelude):
        for ours, theirs in block.items():
            names[f"prelude.{i}.{ours}"] = {f"model.layers.{i}.{k}": shape for k, shape in theirs.items()}
    return {f"{ours}.weight": {f"{k}.weight": v for k, v in theirs.items()} for ours, theirs in names.items()}


# ---------------------------------------------------------------- the released models' layout

RAVEN_NAMES = {"embed": "transformer.wte", "norm_f": "transformer.ln_f", "head": "lm_head", "adapter": "transformer.adapter",
               "prelude": "transformer.prelude", "core": "transformer.core_block", "coda": "transformer.coda"}
RAVEN_CONFIG = {  # what the released configs hold and the models do not depend on
    "activation_checkpoint_impl": "per-iteration", "architecture_class_name": "RecurrentGPT",
    "architectures": ["RavenForCausalLM"], "auto_map": {
        "AutoConfig": "raven_config_minimal.RavenConfig", "AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "bias": False, "block_class_name": "SandwichBlock", "block_size": 4096, "effective_expected_depth": 132,
    "init_orthogonal": False, "init_strategy": "takase", "mlp_class_name": "GatedMLP", "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama", "padding_multiple": 4096, "rope_base": 500000.0,
    "sampling_scheme": "poisson-lognormal-filling", "state_init": "like-init", "test_time_noise": 0,
    "test_time_noise_type": "fixed", "transformers_version": "4.51.0"}
RAVEN_STDS = {"embedding": STATE_STD, "out_proj": 0.0005356869554443541}  # Huginn's, whatever the width


def raven_config(raw, files):
    """Config of a released Recurrent-* model or Huginn-0125; facts from their modelling code."""
    init = raw.get("init_values", {})
    huginn = raw.get("qk_bias") or any(name.endswith("qk_bias") for name in files)
    theta = raw.get("rope_base") if huginn else raw.get("rope_theta")  # the others' rope_base is never read
    return Config(
        vocab_size=need(raw, "vocab_size", "padded_vocab_size"), n_embd=need(raw, "n_embd"),
        n_head=need(raw, "n_heads"), n_kv_head=need(raw, "num_key_value_heads", "n_heads"),
        n_ffn=need(raw, "intermediate_size"), n_prelude=need(raw, "n_layers_in_prelude"),
        n_core=need(raw, "n_layers_in_recurrent_block"), n_coda=need(raw, "n_layers_in_coda"),
        head_dim=raw.get("head_dim") or 0,
        norm="sandwich" if huginn else "post" if any(".q_norm." in name for name in files) else "pre",
        norm_eps=need(raw, "norm_eps"), rope_theta=theta or 10000.0, rope_scaling=raw.get("rope_scaling"),
        context=raw.get("max_position_embeddings") or need(raw, "block_size"),
        tie_embeddings=raw.get("tie_embeddings", raw.get("tie_word_embeddings", False)),
        adapter=raw.get("injection_type") or ("linear" if "transformer.adapter.weight" in files else "add"),
        state_std=init.get("std", STATE_STD), embed_scale=init.get("embed_scale", 1.0),
        mean_recurrence=raw.get("mean_recurrence", 32), backprop_depth=raw.get("mean_backprop_depth", 8),
        bos_token_id=first_id(raw.get("bos_token_id")), eos_token_id=first_id(raw.get("eos_token_id")))


def raven_names(c):
    """Our tensor name -> {name in the released layout: shape}; one each."""
    names = {}
    for ours, shape in RecurrentLM.empty(c).state_shapes().items():
        first, _, rest = ours.partition(".")
        names[ours] = {f"{RAVEN_NAMES[first]}.{rest}".replace("attn.qkv", "attn.Wqkv"): shape}
    return names


def rotary_order(c, name, back=False):
    """
    Huginn rotates adjacent pairs where Llama pairs the halves of a head: the same numbers in another order of the rows of
    q and k. The function(tensor) that reorders our tensor `name` from pairs to halves (back: the other way), or None.
    """
    if c.norm != "sandwich" or not name.endswith(("attn.qkv.weight", "attn.qk_bias")):
        return None
    rows = 2 * c.n_head * c.head_dim  # q and k; v stays

    def change(t):
        flat = t.reshape(-1, t.shape[-1] if name.endswith("weight") else 1)
        split = flat[:rows].unflatten(0, (-1, 2, c.head_dim // 2) if back else (-1, c.head_dim // 2, 2))
        return torch.cat((split.transpose(1, 2).reshape(rows, -1), flat[rows:])).reshape(t.shape)

    return change


def export(c, tensors, dtype):
    """(config.json as a dict, {name: tensor}) of our tensors in Hugging Face layout; a recurrent model's as released."""
    config = {"vocab_size": c.vocab_size, "intermediate_size": c.n_ffn, "num_key_value_heads": c.n_kv_head,
              "head_dim": c.head_dim, "rope_theta": c.rope_theta, "max_position_embeddings": c.context,
              "torch_dtype": str(dtype).removeprefix("torch.")}
    optional = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "rope_scaling": c.rope_scaling}
    config |= {key: value for key, value in optional.items() if value is not None}
    if c.n_core and c.start != "noise":
        raise InputError(f"--export hf: the released layout knows no start={c.start!r}")
    if c.n_core:
        names = raven_names(c)
        config |= RAVEN_CONFIG | {
            "n_layers": c.n_prelude + c.n_core + c.n_coda, "n_layers_in_prelude": c.n_prelude,
            "n_layers_in_recurrent_block": c.n_core, "n_layers_in_coda": c.n_coda,
            "n_embd": c.n_embd, "n_heads": c.n_head, "norm_eps": c.norm_eps,
            "init_values": RAVEN_STDS | {"std": c.state_std, "embed_scale": c.embed_scale}, "injection_type": c.adapter,
            "mean_recurrence": c.mean_recurrence, "mean_backprop_depth": c.backprop_depth, "model_type": "huginn_raven",
            "padded_vocab_size": c.vocab_size, "tie_embeddings": c.tie_embeddings, "qk_bias": c.norm == "sandwich"}
        config |= {"initial_state_mode": "random"} if c.norm == "post" else {}
        config |= {"rope_base": c.rope_theta} if c.norm == "sandwich" else {}
    elif c.norm == "sandwich" or c.embed_scale != 1:
        raise InputError(f"--export hf: no layout is known for a feed-forward model with norm={c.norm!r} and "
                         f"embed_scale={c.embed_scale}")
    else:
        names, kind = hf_names(c), "Olmo2" if c.norm == "post" else "Llama"
        config |= {"architectures": [kind + "ForCausalLM"], "model_type": kind.lower(), "hidden_size": c.n_embd,
                   "num_attention_heads": c.n_head, "num_hidden_layers": c.n_prelude, "rms_norm_eps": c.norm_eps,
                   "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": c.tie_embeddings,
                   "bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id}  # null, or transformers takes 1 and 2
    out = {}
    for ours, theirs in names.items():
        change = rotary_order(c, ours, back=True)
        pieces = tensors[ours].split([shape[0] for shape in theirs.values()])
        out |= {name: change(t) if change else t for name, t in zip(theirs, pieces, strict=True)}
    return dict(sorted(config.items())), out


if __name__ == "__main__":
    cli(main)
