"""
Turn a pretrained model into a depth-recurrent one. Early layers become the prelude, later ones the
recurrent block and the coda, those in between are dropped, and a fresh adapter joins them.

    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21 --verify
    python surgery.py SRC OUT --shape 4,8,4 --select block-influence --text corpus.txt
    python surgery.py SRC OUT --feed_forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --export hf                       ours, back in Hugging Face layout
    python surgery.py --preset tinyllama-4-8-4 --dry_run        the paper's tables, without weights

SRC is a folder, or a hub id (org/name or org/name@REVISION) that is downloaded once. It holds a
Llama or OLMo-2 in Hugging Face layout, a checkpoint or run of our own, or a released Recurrent-*
model or Huginn-0125, which are recurrent already and take no layer flags. OUT is a nanoloop
checkpoint. With --export hf it has the Hugging Face layout if it is feed-forward, else that of the
released models. Tensors are stacked and taken apart, never rounded.

Paper: arXiv 2511.07384, section 3 and Tables 6-8. Its rule, the default, takes core and coda from
the end.
"""
import argparse
import functools
import math
import os
import re
import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data import Tokenizer, cli, copy_tokenizer, download, read_json, whole, write_json
from model import STATE_STD, Config, RecurrentLM, find_checkpoint, load_config

PARTS = ("prelude", "core", "coda")
TINYLLAMA = Config(32000, 2048, 32, 4, 5632, 22, 0, 0)
LLAMA = Config(128256, 2048, 32, 8, 8192, 16, 0, 0, tie_embeddings=True)
OLMO2 = Config(100352, 2048, 16, 16, 8192, 16, 0, 0, norm="post")
PRESETS = {  # the source, and its layers in the three parts (the paper's Table 8, 0-based)
    "tinyllama-2-4-2": (TINYLLAMA, "0-1", "16-19", "20-21"),
    "tinyllama-4-8-4": (TINYLLAMA, "0-3", "10-17", "18-21"),
    "tinyllama-6-10-6": (TINYLLAMA, "0-5", "6-15", "16-21"),
    "llama-3.2-1b-2-4-2": (LLAMA, "0-1", "10-13", "14-15"),
    "llama-3.2-1b-4-6-4": (LLAMA, "0-3", "6-11", "12-15"),
    "olmo-2-1b-4-6-4": (OLMO2, "0-3", "6-11", "12-15"),
}


@dataclass
class Source:
    """A checkpoint of any layout, not yet read. A feed-forward one is all prelude."""
    folder: str
    config: Config
    kind: str    # model_type in its config.json
    files: dict  # tensor name -> path
    parts: dict  # our tensor name -> the names of the tensors that are stacked to make it


# ------------------------------------------------------------------------------------- the layouts

HF_NAMES = {"embed": "model.embed_tokens", "norm_f": "model.norm", "head": "lm_head"}
HF_BLOCK = {"attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attn.proj": ["self_attn.o_proj"], "mlp.fc": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.proj": ["mlp.down_proj"]}
HF_NORMS = {"pre": {"norm_1": ["input_layernorm"], "norm_2": ["post_attention_layernorm"]},
            "post": {"norm_1": ["post_attention_layernorm"],
                     "norm_2": ["post_feedforward_layernorm"],
                     "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"]}}
RAVEN_NAMES = {"embed": "transformer.wte", "norm_f": "transformer.ln_f", "head": "lm_head",
               "adapter": "transformer.adapter", "prelude": "transformer.prelude",
               "core": "transformer.core_block", "coda": "transformer.coda"}
RAVEN_CONFIG = {  # what the released configs hold and the models do not depend on
    "activation_checkpoint_impl": "per-iteration", "architecture_class_name": "RecurrentGPT",
    "architectures": ["RavenForCausalLM"], "auto_map": {
        "AutoConfig": "raven_config_minimal.RavenConfig",
        "AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "bias": False, "block_class_name": "SandwichBlock", "block_size": 4096,
    "effective_expected_depth": 132, "init_orthogonal": False, "init_strategy": "takase",
    "mlp_class_name": "GatedMLP", "nonlin_name": "SiLU", "norm_class_name": "RMSNorm_llama",
    "padding_multiple": 4096, "rope_base": 500000.0, "sampling_scheme": "poisson-lognormal-filling",
    "state_init": "like-init", "test_time_noise": 0, "test_time_noise_type": "fixed",
    "transformers_version": "4.51.0"}
RAVEN_STDS = {"embedding": STATE_STD, "out_proj": 0.0005356869554443541}  # Huginn's, at any width
LLAMA_TOKENIZER = {  # tokenizer_config.json for a folder that has none
    "tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True,
    "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def tensor_names(config, kind):
    """Our tensor name -> the names in the layout of that model_type, in stacking order."""
    names = {}
    for ours in RecurrentLM.empty(config).state_shapes():
        first, _, rest = ours.partition(".")
        if kind == "nanoloop":
            names[ours] = [ours]
        elif kind == "huginn_raven":
            names[ours] = [f"{RAVEN_NAMES[first]}.{rest}".replace("attn.qkv", "attn.Wqkv")]
        elif first in HF_NAMES:
            names[ours] = [f"{HF_NAMES[first]}.weight"]
        else:
            layer, _, rest = rest.partition(".")
            block = HF_BLOCK | HF_NORMS[config.norm]
            theirs = block[rest.removesuffix(".weight")]
            names[ours] = [f"model.layers.{layer}.{name}.weight" for name in theirs]
    return names


def first_id(value):
    """A token id of config.json: an integer, a list of them, or null."""
    return value[0] if isinstance(value, list) else value


def hf_config(raw):
    """Config of a feed-forward model from config.json as transformers 4 or 5 writes it."""
    kind = raw.get("model_type")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    for key, value, supported in (
            ("model_type", kind, ("llama", "olmo2")),
            ("rope_type", rope_kind, ("default", "llama3")),
            ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
            ("a bias", raw.get("attention_bias") or raw.get("mlp_bias"), (None, False))):
        if value not in supported:
            sys.exit(f"config.json: {key} {value!r} is not supported, only {supported}")
    n_head = raw["num_attention_heads"]
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return Config(
        vocab_size=raw["vocab_size"], n_embd=raw["hidden_size"], n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head, n_ffn=raw["intermediate_size"],
        n_prelude=raw["num_hidden_layers"], n_core=0, n_coda=0,
        head_dim=raw.get("head_dim") or 0, norm="post" if kind == "olmo2" else "pre",
        norm_eps=raw.get("rms_norm_eps", 1e-6 if kind == "llama" else 1e-5),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=None if rope_kind == "default" else scaling,
        context=raw.get("max_position_embeddings", 2048),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=first_id(raw.get("bos_token_id")),
        eos_token_id=first_id(raw.get("eos_token_id")))


def raven_config(raw, files):
    """Config of a released Recurrent-* model or Huginn-0125; facts from their modelling code."""
    init = raw.get("init_values", {})
    huginn = raw.get("qk_bias") or any(name.endswith("qk_bias") for name in files)
    olmo = any(".q_norm." in name for name in files)
    theta = raw.get("rope_base" if huginn else "rope_theta")  # the others' rope_base is never read
    adapter = "linear" if "transformer.adapter.weight" in files else "add"
    return Config(
        vocab_size=raw["vocab_size"], n_embd=raw["n_embd"],
        n_head=raw["n_heads"], n_kv_head=raw.get("num_key_value_heads") or raw["n_heads"],
        n_ffn=raw["intermediate_size"], n_prelude=raw["n_layers_in_prelude"],
        n_core=raw["n_layers_in_recurrent_block"], n_coda=raw["n_layers_in_coda"],
        head_dim=raw.get("head_dim") or 0,
        norm="sandwich" if huginn else "post" if olmo else "pre", norm_eps=raw["norm_eps"],
        rope_theta=theta or 10000.0, rope_scaling=raw.get("rope_scaling"),
        context=raw.get("max_position_embeddings") or raw["block_size"],
        tie_embeddings=raw.get("tie_embeddings", raw.get("tie_word_embeddings", False)),
        adapter=raw.get("injection_type") or adapter, state_std=init.get("std", STATE_STD),
        embed_scale=init.get("embed_scale", 1.0), mean_recurrence=raw.get("mean_recurrence", 32),
        backprop_depth=raw.get("mean_backprop_depth", 8),
        bos_token_id=first_id(raw.get("bos_token_id")),
        eos_token_id=first_id(raw.get("eos_token_id")))


def rotary_order(c, name, t, back=False):
    """
    Huginn rotates adjacent pairs where Llama pairs the halves of a head. These are the same numbers
    in another order of q's and k's rows. Reorders our tensor `name` from pairs to halves, or back.
    """
    if not name.endswith(("attn.qkv.weight", "attn.qk_bias")):
        return t
    rows = 2 * c.n_head * c.head_dim  # q and k; v stays
    flat = t.reshape(-1, t.shape[-1] if name.endswith("weight") else 1)
    pairs = (2, c.head_dim // 2) if back else (c.head_dim // 2, 2)
    turned = flat[:rows].unflatten(0, (-1, *pairs)).transpose(1, 2).reshape(rows, -1)
    return torch.cat((turned, flat[rows:])).reshape(t.shape)


# ----------------------------------------------------------------------------------------- reading

def open_source(src):
    """The Source of a folder, a run's folder or a hub id."""
    folder = find_checkpoint(src if os.path.exists(src) else download(src))
    raw, files = read_json(os.path.join(folder, "config.json")), tensor_files(folder)
    kind = raw.get("model_type")
    try:
        if kind == "nanoloop":
            config = load_config(folder)
        else:
            config = raven_config(raw, files) if kind == "huginn_raven" else hf_config(raw)
    except KeyError as e:
        sys.exit(f"{folder}/config.json: lacks {e}")
    parts = tensor_names(config, kind)
    known = {name for names in parts.values() for name in names}
    if extra := sorted(files.keys() - known):
        print(f"note: ignored {len(extra)} tensors that the model does not use, such as {extra[0]}")
    return Source(folder, config, kind, files, parts)


def tensor_files(folder):
    """Tensor name -> path of its safetensors file: model.safetensors, or the shards of an index."""
    path = os.path.join(folder, "model.safetensors")
    index = path + ".index.json"
    if os.path.exists(index):
        shards = read_json(index)["weight_map"]
        return {name: os.path.join(folder, file) for name, file in shards.items()}
    if not os.path.exists(path):
        sys.exit(f"{folder}: has no model.safetensors. Pickled weights (.bin, .pt) may run any "
                 "code when they are loaded, so they never are: get a conversion to safetensors")
    with open_tensors(path) as f:
        return dict.fromkeys(f.keys(), path)


def open_tensors(path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, FileNotFoundError) as e:
        sys.exit(f"{path}: is missing, truncated or damaged ({e}): fetch it again")


def read(source, name, shape):
    """Our tensor `name` of a Source, as stored."""
    stacked = []
    for part in source.parts[name]:
        if part not in source.files:
            sys.exit(f"{source.folder}: tensor {part} is missing: incomplete, or of another model "
                     "than config.json says")
        # Opened for each tensor: pages of an open file would count as memory.
        with open_tensors(source.files[part]) as f:
            stacked.append(f.get_tensor(part))
    t = torch.cat(stacked) if len(stacked) > 1 else stacked[0]
    if t.shape != shape or not t.is_floating_point():
        sys.exit(f"{source.folder}: {name} is {t.dtype} of shape {tuple(t.shape)}; config.json "
                 f"asks for floats of shape {tuple(shape)}")
    if source.kind == "huginn_raven" and source.config.norm == "sandwich":
        t = rotary_order(source.config, name, t)
    return t


def read_all(source):
    """{our name: tensor} of a Source, all in the one dtype that holds all of them exactly."""
    shapes = RecurrentLM.empty(source.config).state_shapes()
    tensors = {name: read(source, name, shapes[name]) for name in source.parts}
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors.values()})
    return {name: t.to(dtype) for name, t in tensors.items()}


def build(source):
    """The Source as a float32 model, its adapter the identity if it has none yet."""
    tensors = {name: t.float() for name, t in read_all(source).items()}
    model = RecurrentLM.empty(source.config)
    if "adapter.weight" in model.state_shapes():
        tensors.setdefault("adapter.weight", init_adapter(source.config.n_embd, "identity"))
    model.fill(tensors)
    return model


# ------------------------------------------------------------------------------------ which layers

def parse_layers(flag, text, L):
    """'0-3,7' -> [0, 1, 2, 3, 7]; '' -> []"""
    layers = []
    for piece in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece.strip())
        if not match:
            sys.exit(f"--{flag} {text}: write layers as 0-3 or 0,2,5-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < L:
            sys.exit(f"--{flag} {text}: the source has layers 0-{L - 1}, {first}-{last} are not")
        layers += range(first, last + 1)
    return layers


def choose_layers(args, source, tokenizer):
    """Lists of the source's layers for prelude, core and coda, as the flags say."""
    L = source.config.n_prelude
    fitting = {"shape"} if args.select else {"preset", "shape", "prelude"}
    if args.feed_forward and not args.select:
        fitting = {"layers"}
    ways = {"preset", "shape", "prelude", "layers"}
    ways = {way for way in ways if getattr(args, way) is not None}
    if len(ways) > 1 or ways - fitting:
        sys.exit(f"--{' --'.join(sorted(ways))}: give one of --{', --'.join(sorted(fitting))} here")
    texts = [args.prelude, args.core, args.coda]
    if args.preset:
        expected, *texts = PRESETS[args.preset]
        if expected.n_prelude != L:
            sys.exit(f"--preset {args.preset}: is for {expected.n_prelude} layers, SRC has {L}")
    shape = parse_shape(args, L)
    if args.select:
        if shape is None or not args.text or tokenizer is None:
            sys.exit("--select: needs --shape, --text FILE and a source with a tokenizer")
        kept = most_influential(args, source, tokenizer, sum(shape))
        layers = split_layers(kept, shape)
    elif args.feed_forward:
        layers = list(range(L)) if args.layers is None else parse_layers("layers", args.layers, L)
        layers = [layers, [], []]
    elif shape:  # the paper's rule
        P, R, C = shape
        layers = split_layers([*range(P), *range(L - R - C, L)], shape)
    else:
        if None in texts:
            sys.exit(f"--{PARTS[texts.index(None)]}: is missing: give --prelude, --core and "
                     "--coda, or --preset, --shape or --feed_forward")
        layers = [parse_layers(part, text, L) for part, text in zip(PARTS, texts)]
    taken = sum(layers, [])
    if len(set(taken)) < len(taken):
        sys.exit(f"--prelude --core --coda: a layer of {taken} is taken twice")
    if not layers[0 if args.feed_forward else 1]:
        sys.exit("--core: needs at least one layer (--feed_forward makes a model without one)")
    return layers


def parse_shape(args, L):
    """--shape 4,8,4, or with --feed_forward one number, as three; None if it is not given."""
    if args.shape is None:
        return None
    numbers = [int(n) for n in re.findall(r"\d+", args.shape)]
    if len(numbers) != (1 if args.feed_forward else 3) or not 0 < sum(numbers) <= L:
        sys.exit(f"--shape {args.shape}: write P,R,C (with --feed_forward one number), together at "
                 f"most the {L} layers of SRC")
    return (numbers + [0, 0])[:3]


def split_layers(layers, shape):
    P, R, _ = shape
    return [layers[:P], layers[P:P + R], layers[P + R:]]


def most_influential(args, source, tokenizer, count):
    """The `count` layers that change the hidden state most on --text (ShortGPT, 2403.03853)."""
    with open(args.text, encoding="utf-8") as f:
        ids = tokenizer.encode(f.read(1_000_000), bos=True)[:16384]
    T = min(args.window, source.config.context, len(ids))
    influence = block_influence(build(source), torch.tensor(ids[:len(ids) // T * T]).view(-1, T))
    kept = sorted(sorted(range(len(influence)), key=lambda i: influence[i])[-count:])
    for i, value in enumerate(influence):
        print(f"layer {i:2d}  block influence {value:.6f}  {'kept' if i in kept else 'dropped'}")
    return kept


@torch.no_grad()
def block_influence(model, idx):
    """
    For each layer of a feed-forward model 1 - the mean cosine of its input and output over all
    tokens of idx (B, T), the last layer's output taken before the final norm.
    """
    sums = torch.zeros(len(model.prelude), dtype=torch.float64)
    for row in idx:
        x, rope = model.embed_idx(row[None]), model.rope(len(row))
        for i, block in enumerate(model.prelude):
            y = block(x, rope)
            sums[i] += (1 - F.cosine_similarity(x.double(), y.double(), dim=-1)).sum()
            x = y
    return (sums / idx.numel()).tolist()


# --------------------------------------------------------------------------------------- retrofit

def retrofit(source, layers, adapter="linear", untie=False):
    """
    The Source with the given layers (three lists of its layer numbers) as prelude, core and coda. A
    tied head becomes a copy in a recurrent model. The adapter is still to be added.
    """
    sizes = dict(zip(("n_prelude", "n_core", "n_coda"), map(len, layers)))
    tied = source.config.tie_embeddings and not layers[1] and not untie
    config = replace(source.config, **sizes, adapter=adapter, tie_embeddings=tied)
    parts = {name: v for name, v in source.parts.items() if not name.startswith("prelude.")}
    if not tied:
        parts.setdefault("head.weight", parts["embed.weight"])
    for part, chosen in zip(PARTS, layers):
        for i, layer in enumerate(chosen):
            prefix = f"prelude.{layer}."
            for name, theirs in source.parts.items():
                if name.startswith(prefix):
                    parts[f"{part}.{i}.{name.removeprefix(prefix)}"] = theirs
    return Source(source.folder, config, source.kind, source.files, parts)


def init_adapter(C, kind, seed=0):
    """(C, 2C) float32 on [state, prelude output]. identity: [0 | I]; default: nn.Linear's own."""
    if kind == "identity":
        return torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1)
    bound = (2 * C) ** -0.5
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(C, 2 * C).uniform_(-bound, bound, generator=generator)


def print_sizes(source, result, layers):
    """The result's rows of the paper's Tables 6-8: parameters, and layers of the source."""
    columns = ("embeddings", "body", *PARTS)
    print(f"{'parameters':20s}" + "".join(f"{column:>15s}" for column in columns))
    rows = {}
    if layers:  # the paper counts the heads of tied sources, as all of its models have one
        untied = replace(source.config, tie_embeddings=False)
        rows[f"source, {untied.n_prelude} layers"] = untied
    c = result.config
    rows[f"result ({c.n_prelude},{c.n_core},{c.n_coda})"] = c
    for name, config in rows.items():
        n = RecurrentLM.empty(config).num_params()
        print(f"{name:20s}" + "".join(f"{n[column]:15,d}" for column in columns))
    print(f"and adapter {n['adapter']:,}, final norm {n['norm_f']:,}: {n['total']:,} in all")
    if layers:
        first, core, last = (",".join(map(str, chosen)) for chosen in layers)
        flags = f"--prelude {first} --core {core} --coda {last}"
        if not core:
            flags = f"--feed_forward --layers {first}"
        dropped = sorted(set(range(source.config.n_prelude)) - set(sum(layers, [])))
        print(f"layers: {flags}; dropped: {dropped}")


# ------------------------------------------------------------------------------------------ verify

@torch.no_grad()
def verify(source, layers, out):
    """
    Run 64 tokens through the source's kept layers in a row and through OUT's layers, read back from
    the disk. Every hidden state must be the same. With the identity adapter OUT at r = 1 must give
    the same logits, too; if SRC was recurrent, the same at r = 2.
    """
    ids = torch.arange(64)[None] * 7 % source.config.vocab_size
    one = build(retrofit(source, layers) if layers else source)
    two = build(open_source(out))
    pairs = list(zip(hidden(one, ids), hidden(two, ids), strict=True))
    state = torch.ones(*ids.shape, one.config.n_embd)
    identity = init_adapter(one.config.n_embd, "identity")
    if layers and hasattr(two, "adapter") and torch.equal(two.adapter.weight, identity):
        pairs.append((pairs[-1][0], two(ids, steps=1, state=state)[0]))
    if not layers and one.config.n_core:
        pairs.append([model(ids, steps=2, state=state)[0] for model in (one, two)])
    largest = max((a - b).abs().max().nan_to_num(math.inf).item() for a, b in pairs)
    print(f"verify: {len(pairs)} hidden states and logits differ by at most {largest} in float32")
    if largest:
        sys.exit(f"{out}: differs from {source.folder}: delete it and try again, or report it")


def hidden(model, ids):
    """[embedding, the output of each layer in a row (adapter left out), logits]"""
    states, rope = [model.embed_idx(ids)], model.rope(ids.shape[1])
    for block in (*model.prelude, *model.core, *model.coda):
        states.append(block(states[-1], rope))
    return [*states, model.head(model.norm_f(states[-1]))]


# ------------------------------------------------------------------------------------------ export

def export(c, tensors):
    """(config.json as a dict, {name: tensor}) of our tensors in Hugging Face or released layout."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = {"vocab_size": c.vocab_size, "intermediate_size": c.n_ffn, "torch_dtype": dtype,
              "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim,
              "rope_theta": c.rope_theta, "max_position_embeddings": c.context}
    if c.rope_scaling is not None:
        config["rope_scaling"] = c.rope_scaling
    if c.n_core:
        kind = "huginn_raven"
        config |= raven_export(c)
    elif c.norm == "sandwich" or c.embed_scale != 1:
        sys.exit(f"--export hf: there is no layout for a feed-forward model with norm={c.norm} and "
                 f"embed_scale={c.embed_scale}")
    else:
        kind = "olmo2" if c.norm == "post" else "llama"
        config |= {
            "architectures": [kind.capitalize() + "ForCausalLM"], "hidden_size": c.n_embd,
            "num_attention_heads": c.n_head, "num_hidden_layers": c.n_prelude,
            "rms_norm_eps": c.norm_eps, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": c.tie_embeddings,
            "bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id}  # null: not 1 and 2
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    out = {}
    for ours, theirs in tensor_names(c, kind).items():
        t = tensors[ours]
        if c.norm == "sandwich":
            t = rotary_order(c, ours, t, back=True)
        sizes = {1: [len(t)], 2: [c.n_ffn] * 2, 3: [q, kv, kv]}[len(theirs)]
        out |= {name: part.contiguous() for name, part in zip(theirs, t.split(sizes))}
    return dict(sorted((config | {"model_type": kind}).items())), out


def raven_export(c):
    """The keys of config.json in the released layout."""
    config = RAVEN_CONFIG | {
        "n_layers": c.n_prelude + c.n_core + c.n_coda, "n_layers_in_prelude": c.n_prelude,
        "n_layers_in_recurrent_block": c.n_core, "n_layers_in_coda": c.n_coda,
        "n_embd": c.n_embd, "n_heads": c.n_head, "norm_eps": c.norm_eps,
        "init_values": RAVEN_STDS | {"std": c.state_std, "embed_scale": c.embed_scale},
        "injection_type": c.adapter, "mean_recurrence": c.mean_recurrence,
        "mean_backprop_depth": c.backprop_depth, "padded_vocab_size": c.vocab_size,
        "tie_embeddings": c.tie_embeddings, "qk_bias": c.norm == "sandwich"}
    for key in ("bos_token_id", "eos_token_id"):
        if getattr(c, key) is not None:
            config[key] = getattr(c, key)
    if c.norm == "post":
        config["initial_state_mode"] = "random"
    if c.norm == "sandwich":
        config["rope_base"] = c.rope_theta
    return config


# ------------------------------------------------------------------------------------- the command

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("src", nargs="?")
    add("out", nargs="?")
    for part in PARTS:
        add(f"--{part}", help="layers such as 0-3 or 0,2,5-7; '' for none")
    add("--preset", choices=PRESETS, help="the paper's choices of layers")
    add("--shape", help="sizes of the parts, such as 4,8,4; the paper's rule takes the layers")
    add("--select", choices=("block-influence",),
        help="keep the layers that change the hidden state most on --text (with --shape)")
    add("--text", help="a file of which --select reads up to 16,384 tokens")
    add("--window", type=int, default=1024, help="... in windows of so many (%(default)s)")
    add("--feed_forward", "--feed-forward", action="store_true",
        help="a model without recurrent block: all layers, or --layers")
    add("--layers", help="the layers of a feed-forward model, such as 0-5,12-13")
    add("--untie", action="store_true", help="give a tied feed-forward model a head of its own")
    add("--adapter", choices=("linear", "add"), help="default: linear")
    add("--adapter_init", "--adapter-init", choices=("identity", "default"),
        help="identity (default): pass the prelude's output through, so that r = 1 equals the kept "
             "layers in a row; default: torch's Linear init, as the paper")
    add("--seed", type=int, default=0, help="of the adapter's default init")
    add("--mean_recurrence", type=int,
        help="the result's default r (the released models' config.json always says 32)")
    add("--export", choices=("hf",), help="write OUT in Hugging Face layout")
    add("--verify", action="store_true", help="compare hidden states of SRC and of OUT")
    add("--dry_run", "--dry-run", action="store_true",
        help="say what would be done; without SRC for a --preset")
    add("--overwrite", action="store_true", help="replace OUT, if it is a checkpoint")
    args = parser.parse_args()
    if not args.src and not (args.preset and args.dry_run):
        sys.exit("SRC is missing: give a folder or a hub id")
    if not args.out and not args.dry_run:
        sys.exit("OUT is missing: name the folder to write")
    if args.out and os.path.lexists(args.out):
        inside = f"{os.path.realpath(args.src or '')}/".startswith(f"{os.path.realpath(args.out)}/")
        ours = os.path.exists(os.path.join(args.out, "model.safetensors"))
        if not args.overwrite or not ours or inside:
            sys.exit(f"{args.out}: exists already: choose another OUT (--overwrite replaces a "
                     "checkpoint that is not SRC)")
    return args


def load_tokenizer(source):
    """The source's Tokenizer, or None, saying so. Exits if its ids exceed the vocabulary."""
    if not any(name.startswith("tokenizer.") for name in os.listdir(source.folder)):
        print(f"note: {source.folder} has no tokenizer, so OUT will have none")
        return None
    tokenizer = Tokenizer.load(source.folder)
    if tokenizer.vocab_size > source.config.vocab_size:
        sys.exit(f"{source.folder}: the tokenizer has {tokenizer.vocab_size} ids, the model "
                 f"{source.config.vocab_size}: it is the tokenizer of another model")
    return tokenizer


def main():
    args = parse_args()
    if args.src:
        source = open_source(args.src)
        tokenizer = load_tokenizer(source)
    else:
        config = PRESETS[args.preset][0]
        names = tensor_names(config, "llama")
        source, tokenizer = Source(args.preset, config, "llama", {}, names), None
    layers, result = None, source
    flags = [flag for flag in (*PARTS, "preset", "shape", "select", "feed_forward", "layers")
             if getattr(args, flag)]
    if source.config.n_core:
        if flags or args.adapter or args.adapter_init:
            sys.exit(f"--{(flags or ['adapter'])[0]}: SRC is recurrent already: drop the flag")
    elif flags or not args.export:
        layers = choose_layers(args, source, tokenizer)
        result = retrofit(source, layers, args.adapter or "linear", args.untie)
    if args.mean_recurrence:
        result.config.mean_recurrence = args.mean_recurrence
    print_sizes(source, result, layers)
    if args.dry_run:
        return
    tensors = read_all(result)
    if "adapter.weight" in RecurrentLM.empty(result.config).state_shapes().keys() - tensors.keys():
        adapter = init_adapter(result.config.n_embd, args.adapter_init or "identity", args.seed)
        tensors["adapter.weight"] = adapter.to(tensors["embed.weight"].dtype)
    with whole(os.path.realpath(args.out)) as folder:
        if args.export:
            os.makedirs(folder)
            config, tensors = export(result.config, tensors)
            save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
            write_json(os.path.join(folder, "config.json"), config)
            copy_tokenizer(source.folder, folder)
            spm = os.path.exists(os.path.join(folder, "tokenizer.model")) and tokenizer.bos_id == 1
            if spm and not os.path.exists(path := os.path.join(folder, "tokenizer_config.json")):
                write_json(path, LLAMA_TOKENIZER)
        else:
            RecurrentLM.empty(result.config).save(folder, source.folder, tensors)
    print(f"wrote {args.out}")
    if args.verify:
        verify(source, layers, args.out)


if __name__ == "__main__":
    cli(main)
