"""
Turn a pretrained model into a depth-recurrent one (arXiv 2511.07384, section 3): its first layers
become the prelude, its last ones the recurrent block and the coda, and a new adapter feeds the
prelude's output into the loop. The layers in between are dropped.

    python surgery.py SRC OUT --shape 4,8,4 --verify            the paper's layers for this shape
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21
    python surgery.py SRC OUT --feed_forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --feed_forward --shape 4,8,4      those layers in a row, no recurrence

A model that has lost layers needs a lot of training to recover. If the sizes of --shape add up to
the number of layers, all are kept, and OUT at r = 1 is its parent, bit by bit in float32.

SRC is a folder or a hub id, org/name or org/name@REVISION (pip install huggingface_hub): a Llama,
Mistral, SmolLM2, Qwen2, Qwen3 or OLMo-2 in Hugging Face layout, one of our checkpoints or runs, a
released Recurrent-* model, or Huginn-0125. Weights may be stacked in OUT, but are never rounded.

To support another architecture, start with DEFAULTS; runs/README.md lists what else to change.
"""
import functools
import os
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from common import (Parser, UserError, cli, creating, natural, new_folder, positive, read_json,
                    reading, refuse_idle, say)

import torch
from safetensors.torch import load_file

from data import TOKENIZER_FILES, copy_tokenizer, load_tokenizer, read_optional, tokenizer_file
from model import ADAPTERS, LLAMA3_ROPE, Config, RecurrentLM, find_checkpoint, load_config

PARTS = ("prelude", "core", "coda")


# ---------------------------------------------------------------------------------- choosing layers

def layer_list(text):
    """Parse layer numbers: '0-3,7' -> [0, 1, 2, 3, 7], '' -> []."""
    layers = []
    for piece in filter(None, text.split(",")):
        first, last = map(int, piece.split("-") if "-" in piece else (piece, piece))
        if last < first:
            raise ValueError  # argparse names the flag and the text
        layers += range(first, last + 1)
    return layers


def shape(text):
    """Parse the sizes of prelude, core and coda: '4,8,4' -> (4, 8, 4)."""
    n_prelude, n_core, n_coda = map(natural, text.split(","))
    return n_prelude, n_core, n_coda


def choose_layers(args, n):
    """
    Choose among the n layers of an ordinary SRC. Returns three lists of layer numbers, for prelude,
    core and coda; with --feed_forward, all are in the first list. Raises UserError if the flags do
    not describe a valid model.
    """
    layers = [args.prelude, args.core, args.coda]
    if args.shape:
        n_prelude, n_core, n_coda = args.shape
        parts = range(n_prelude), range(n - n_coda - n_core, n - n_coda), range(n - n_coda, n)
        layers = [list(part) for part in parts]
    taken = sum(layers, [])
    if args.feed_forward:
        taken = taken or [*range(n)]
        layers = [taken, [], []]
    elif not layers[1]:
        raise UserError("no layers chosen for the recurrent block. Give --shape, or --prelude, "
                        "--core and --coda; or --feed_forward for a model without one")
    if len(set(taken) & set(range(n))) < len(taken):
        raise UserError(f"layers {taken}: SRC has layers 0-{n - 1}, each to be taken only once")
    return layers


# ----------------------------------------------------------------------------------------- retrofit

def retrofit_config(parent, sizes, adapter="linear"):
    """
    Return the Config of the model that keeps (n_prelude, n_core, n_coda) layers of an ordinary
    parent. A loop unties the head from the embeddings.
    """
    n_prelude, n_core, n_coda = sizes
    return replace(parent, n_prelude=n_prelude, n_core=n_core, n_coda=n_coda, adapter=adapter,
                   tie_embeddings=parent.tie_embeddings and not n_core)


def new_weights(config, how="identity"):
    """
    Return {name: tensor} of the weights that a loop has and its parent lacks: those of a linear
    adapter. how: "identity" passes the prelude's output through, so that r = 1 equals the kept
    layers in a row; "torch" is torch's default initialization of a Linear, as in the paper, with
    seed 0. If a fork adds a weight to the loop, its initial value belongs here.
    """
    weights = {}
    C = config.n_embd
    if config.n_core and config.adapter == "linear":
        weight = torch.eye(C, 2 * C).roll(C, 1)  # [0 | I] on [state, prelude output]
        if how == "torch":
            torch.manual_seed(0)
            weight = torch.nn.Linear(2 * C, C, bias=False).weight.data
        weights["adapter.weight"] = weight
    return weights


def retrofit(parent, layers, adapter="linear", adapter_init="identity"):
    """
    Build a model from layers of an ordinary parent. layers: three lists of layer numbers, for
    prelude, core and coda, such as ([0, 1], [4, 5], [7]). adapter_init: the `how` of
    new_weights().
    """
    config = retrofit_config(parent.config, map(len, layers), adapter)
    weights = {"embed.weight": parent.embed.weight.data, "norm_f.weight": parent.norm_f.weight.data}
    if not config.tie_embeddings:
        weights["head.weight"] = parent.head.weight.data.clone()  # may be tied to the embeddings
    for part, chosen in zip(PARTS, layers):
        for i, layer in enumerate(chosen):
            for name, p in parent.prelude[layer].named_parameters():
                weights[f"{part}.{i}.{name}"] = p.data
    for name, t in new_weights(config, adapter_init).items():
        weights[name] = t.to(parent.embed.weight.dtype)
    model = RecurrentLM.empty(config)
    model.fill(weights)
    return model


@torch.no_grad()
def verify(source, layers, folder):
    """
    Read a written OUT back from its folder and compare it with the kept layers of SRC in a row: at
    r = 1, with an adapter that passes the prelude's output through, all logits must be
    bit-identical. With layers=None, OUT has all of SRC, and both run at r = 2, each with its own
    adapter. Raises UserError if any logit differs.
    """
    written = open_source(folder).float()
    config = written.config
    expected, steps = source, 2
    if layers:
        expected, steps = retrofit(source, [sum(layers, []), [], []]), 1
        written.load_state_dict(new_weights(config), strict=False)
    T = min(64, config.context)
    ids = torch.arange(T)[None] * 7 % config.vocab_size
    state = torch.zeros(1, T, config.n_embd)  # so that an additive adapter passes only e on
    wanted, _ = expected.float()(ids, steps=steps, state=state)
    found, _ = written(ids, steps=steps, state=state)
    if not found.equal(wanted):  # also catches NaN, which equals nothing
        raise UserError("--verify: the logits of OUT differ from those of SRC, so it is not kept")
    say(f"verify: all logits of {T} tokens are equal to the last bit, in float32")


# ------------------------------------------------------------------------------------------ reading

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_source(src):
    """
    Read a model from whatever SRC may be. Returns a RecurrentLM with the weights as they are stored
    and its files in .folder; all layers of an ordinary model are prelude. Raises UserError if SRC
    is missing, corrupt or not supported.
    """
    folder = Path(src)
    if not folder.exists() and folder.suffix != ".gguf":
        folder = Path(download(src))
    refuse_others(folder)
    folder = find_checkpoint(folder)
    tensors = read_tensors(folder)
    layout, config = read_config(folder, tensors)
    if tokenizer_file(folder):
        tokenizer = load_tokenizer(folder, config)
        if layout == "huginn_raven" and config.bos_token_id is None:  # see from_raven()
            config.bos_token_id = tokenizer.bos_id
    model = RecurrentLM.empty(config)
    model.folder = folder
    model.fill(to_ours(folder, layout, config, tensors))
    return model


def refuse_others(path):
    """Say what to do with a .gguf file, a folder that has only such weights, or an adapter."""
    for file in (path, *path.glob("*.gguf")):
        if file.suffix == ".gguf" and not any(path.glob("*.safetensors")):
            raise UserError(f"{path}: run `python -m tools.from_gguf {file} OUT` first, then "
                            "surgery.py on its OUT")
    for file in path.glob("adapter_*"):
        raise UserError(f"{file}: an adapter, whose weights are not in {SINGLE}. Merge the "
                        "two with PEFT's merge_and_unload(), and remove the adapter")


# Tensors in released files that no model uses; the second line has those of Recurrent-*.
STALE = re.compile(r"rotary_emb\.inv_freq$|freqs_cis$"
                   r"|^transformer\..*\.(norm_[34]\.weight|attn\.Wqkv\.bias)$")


def read_tensors(folder):
    """Return {name: tensor} of the shards that a folder's index names, or of model.safetensors."""
    present = {*os.listdir(folder)}
    files = read_json(Path(folder, INDEX)).get("weight_map") if INDEX in present else {}
    if not isinstance(files, dict) or not {*map(type, files.values())} <= {str}:
        raise UserError(f"{folder}/{INDEX}: weight_map must give the file of each tensor")
    if files and SINGLE in present - {*files.values()}:
        raise UserError(f"{folder} has {SINGLE}, and {INDEX}, which does not name it. Remove the "
                        "one that is out of date")
    if not files and SINGLE not in present:
        raise UserError(f"{folder} has no {SINGLE}, nor {INDEX}. No other weights are loaded: "
                        "shards need the index, and .bin and .pt files can run code")
    tensors = {}
    for file in sorted(set(files.values())) or [SINGLE]:
        with reading(Path(folder, file)) as path:
            found = load_file(path)
        tensors |= {name: t for name, t in found.items() if files.get(name, file) == file}
    return tensors


def to_ours(folder, layout, config, tensors):
    """
    Convert a checkpoint's {name: tensor} to {our name: tensor}, all in the smallest dtype that
    represents every one exactly. layout: its model_type. folder: for messages. Raises UserError if
    config.json describes other tensors.
    """
    names = tensor_names(config, layout)
    described = {name: size for pieces in names.values() for name, size in pieces.items()}
    if config.tie_embeddings and "lm_head.weight" in tensors:  # perhaps without the embeddings
        (embed,), head = names["embed.weight"], tensors.pop("lm_head.weight")
        if not head.equal(tensors.setdefault(embed, head)):
            raise UserError(f"{folder}: lm_head.weight differs from the embeddings. If it is the "
                            "right head, config.json must not tie the two")
    check_tensors(folder, described, tensors)
    dtype = functools.reduce(torch.promote_types, {tensors[name].dtype for name in described})
    ours = {}
    for name, pieces in names.items():
        t = torch.cat([tensors[piece] for piece in pieces]).to(dtype)
        ours[name] = rotary_order(config, name, t) if layout == "huginn_raven" else t
    return ours


def check_tensors(folder, described, tensors):
    """
    Raise UserError if the {name: tensor} of a checkpoint lacks one of `described`, {name: shape},
    or has one in another shape, or quantized, or not finite, or one more that is not known to be
    stale.
    """
    for name, t in tensors.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise UserError(f"{folder}: tensor {name!r} is {t.dtype}, as in a quantized model, "
                            "which is not supported. Look for the original")
    unused = sorted(tensors.keys() - described.keys())
    missing = [name for name in described if name not in tensors]
    unknown = [name for name in unused if not STALE.search(name)]
    if missing or unknown:
        raise UserError(f"{folder}: its tensors do not match config.json: missing "
                        f"{missing[:2]}, unknown {unknown[:2]}")
    for name, size in described.items():
        if tensors[name].shape != size:
            raise UserError(f"{folder}: tensor {name!r} has the shape {(*tensors[name].shape,)}, "
                            f"but config.json describes {(*size,)}")
        if not torch.stack(tensors[name].aminmax()).isfinite().all():
            raise UserError(f"{folder}: tensor {name!r} contains NaN or infinity")
    if unused:
        say(f"note: the model does not use these tensors: {', '.join(unused[:5])}")


# ----------------------------------------------------------------------------------------- download

def download(spec):
    """
    Download a model from the Hugging Face hub, "org/name" or "org/name@REVISION". Returns the
    folder in huggingface_hub's cache with its config.json, tokenizer and safetensors. Files are
    downloaded only once; after that, this also works offline.
    """
    repo, _, revision = spec.partition("@")
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(
            repo, revision=revision or None, ignore_patterns=["*/*", "consolidated*"],
            allow_patterns=["*.safetensors", "*.json", *TOKENIZER_FILES])
    except Exception as e:  # of many kinds: no huggingface_hub, no hub id, no network
        raise UserError(f"{spec}: no such folder, nor loaded from the Hugging Face hub as org/name "
                        "or org/name@REVISION, which needs `pip install huggingface_hub` "
                        f"({' '.join(str(e).split()):.200})")


# -------------------------------------------------------------------------------------- config.json

# The architectures that we support in Hugging Face layout, each with transformers' defaults for
# keys that config.json may lack, besides OPTIONAL.
OPTIONAL = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": None}
DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1,
              "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "bos_token_id": 1,
                "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32,
              "head_dim": 128},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
}

SUPPORTED = {  # the values that we support; a missing key means the first one
    "model_type": (*DEFAULTS, "huginn_raven"),
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "injection_type": ADAPTERS,
}


# {field of Config: its key in config.json}
HF_KEYS = {
    "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads", "head_dim": "head_dim", "n_ffn": "intermediate_size",
    "n_prelude": "num_hidden_layers", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling", "context": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings", "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
RAVEN_KEYS = HF_KEYS | {
    "n_embd": "n_embd", "n_head": "n_heads", "n_prelude": "n_layers_in_prelude",
    "n_core": "n_layers_in_recurrent_block", "n_coda": "n_layers_in_coda", "norm": "norm",
    "head_norm": "head_norm", "qkv_bias": "qkv_bias", "norm_eps": "norm_eps",
    "tie_embeddings": "tie_embeddings", "adapter": "injection_type", "state_std": "std",
    "embed_scale": "embed_scale", "mean_recurrence": "mean_recurrence",
    "backprop_depth": "mean_backprop_depth",
}


def read_config(folder, names):
    """
    Read the config.json of a folder, in any layout. Returns (model_type, Config). names: those of
    the tensors, because a released model's config.json does not say which norms it has. Raises
    UserError if config.json lacks a key or asks for something that is not supported.
    """
    path = Path(folder, "config.json")
    raw = {"model_type": None} | read_json(path)
    layout = raw["model_type"]
    if layout == "loopgraft":
        return layout, load_config(folder)
    for key, supported in SUPPORTED.items():
        value = raw.get(key, supported[0])
        if value not in supported:
            raise UserError(f"{path}: {key} = {value!r} is not supported, only {supported}")
    if layout == "huginn_raven":
        return layout, from_raven(path, raw, names)
    return layout, from_hf(path, raw)


def from_hf(path, raw):
    """Return the Config of an ordinary model from its config.json, `raw`, read from `path`."""
    layout = raw["model_type"]
    raw = OPTIONAL | DEFAULTS[layout] | raw | read_rope(path, raw)
    # generation_config.json lists all ids that end a text of a chat model, config.json perhaps one.
    ends = read_optional(path.parent, "generation_config.json").get("eos_token_id")
    if ends is not None:
        raw["eos_token_id"] = ends
    config = make_config(path, raw, HF_KEYS, norm="post" if layout == "olmo2" else "pre",
                         head_norm=layout == "qwen3", qkv_bias=layout == "qwen2")
    if raw.get("layer_types") not in (None, [], ["full_attention"] * config.n_prelude):
        raise UserError(f"{path}: layer_types = {raw['layer_types']} is not supported, only full "
                        "attention")
    # Qwen's files have a window, too, but switch it off with use_sliding_window.
    window = raw.get("sliding_window")
    if layout == "mistral" and window and not (type(window) is int and window >= config.context):
        raise UserError(f"{path}: a sliding_window of {window} tokens, shorter than the context of "
                        f"{config.context}, is not supported")
    return config


def from_raven(path, raw, names):
    """
    Return the Config of a released Recurrent-* model, of Huginn-0125, or of one of our exports,
    from its config.json, `raw`, read from `path`, and the names of its tensors.
    """
    keys = RAVEN_KEYS
    if "norm" not in raw:  # a released model, whose tensors tell the norm
        parts = {part for name in names for part in name.split(".")}
        norm = "sandwich" if "qk_bias" in parts else "post" if "q_norm" in parts else "pre"
        # All of them carry Huginn's ids, whatever their tokenizer is.
        raw |= {"norm": norm, "bos_token_id": None, "eos_token_id": None}
    if raw["norm"] == "sandwich":
        # Huginn's own key. The other released files have it, too, but their code never reads it.
        keys = keys | {"rope_theta": "rope_base"}
    raw = OPTIONAL | {
        "max_position_embeddings": raw.get("block_size"), "head_norm": False, "qkv_bias": False,
        "tie_embeddings": raw.get("tie_word_embeddings", False),
    } | raw | read_rope(path, raw)
    if isinstance(raw.get("init_values"), dict):
        raw |= raw["init_values"]
    return make_config(path, raw, keys)


def make_config(path, raw, keys, **known):
    """
    Return the Config that a config.json describes. raw: what the file `path` holds. keys: {field of
    Config: key in raw}. known: other fields. Raises UserError if a key is missing, or if its value
    has another type or is too small.
    """
    described = {item.name: item for item in fields(Config)}
    for name, key in keys.items():
        if key not in raw:
            raise UserError(f"{path}: lacks {key}")
        item, value = described[name], raw[key]
        kinds = get_args(item.type) or (item.type,)  # types, or the values of a Literal
        least = 0 if item.default in (0, None) or name == "n_prelude" else 1
        fits = type(value) in kinds or value in kinds or (item.type, type(value)) == (float, int)
        if isinstance(value, list):  # of ids
            fits = fits and {*map(type, value)} <= {int}
        if not fits or (int in kinds and type(value) is int and value < least):
            names = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)
            raise UserError(f"{path}: {key} = {value!r:.80} must be {names}"
                            + f", at least {least}" * (int in kinds))
        known[name] = value
    try:
        return Config(**known)
    except UserError as e:
        raise UserError(f"{path}: {e}")


def read_rope(path, raw):
    """
    Return {"rope_theta": ..., "rope_scaling": ...} of a config.json, which has rope_parameters if
    transformers 5 wrote it, and rope_scaling if an older version did.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    rope = new or old or {}
    if not isinstance(rope, dict) or new and old and new != old:
        raise UserError(f"{path}: rope_parameters = {new} beside rope_scaling = {old} is not "
                        "supported")
    rope_type = rope.get("rope_type") or rope.get("type", "default")  # the name in older files
    unknown = rope.keys() - {"rope_type", "type", "rope_theta", *LLAMA3_ROPE}
    if unknown or rope_type not in ("default", "llama3"):
        raise UserError(f"{path}: RoPE {rope} is not supported, only the default and llama3's")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            "rope_scaling": scaling if rope_type == "llama3" else None}


# ------------------------------------------------------------------------------------- tensor names

# Parts of our tensor names, and their counterparts in the other layouts. Where several are listed,
# ours is their concatenation along dim 0.
HF_NAMES = {"embed": "model.embed_tokens", "norm_f": "model.norm", "head": "lm_head"}
HF_BLOCK = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "mlp.fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.proj": ("mlp.down_proj",),
}
HF_NORMS = {  # "pre": Llama's, "post": OLMo-2's
    "pre": {"norm_1": ("input_layernorm",), "norm_2": ("post_attention_layernorm",)},
    "post": {"norm_1": ("post_attention_layernorm",), "norm_2": ("post_feedforward_layernorm",)},
}
RAVEN_NAMES = {"embed": "transformer.wte", "prelude": "transformer.prelude",
               "adapter": "transformer.adapter", "core": "transformer.core_block",
               "coda": "transformer.coda", "norm_f": "transformer.ln_f", "head": "lm_head"}


def tensor_names(config, layout):
    """
    Map each of our tensor names to its names in a layout (a model_type), in stacking order, each
    with its shape, such as {"prelude.0.mlp.fc.weight": {"model.layers.0.mlp.gate_proj.weight":
    (96, 64), "model.layers.0.mlp.up_proj.weight": (96, 64)}}.
    """
    names = {}
    model = RecurrentLM.empty(config)
    for ours, p in model.named_parameters():
        first, _, rest = ours.partition(".")
        if layout == "loopgraft":
            theirs = [ours]
        elif layout == "huginn_raven":
            theirs = [f"{RAVEN_NAMES[first]}.{rest}".replace("attn.qkv", "attn.Wqkv")]
        elif first in HF_NAMES:
            theirs = [f"{HF_NAMES[first]}.{rest}"]
        else:
            layer, _, rest = rest.partition(".")    # "0", "attn.qkv.weight"
            module, _, leaf = rest.rpartition(".")  # "attn.qkv", "weight" or "bias"
            block = HF_BLOCK | HF_NORMS[config.norm]
            theirs = [f"model.layers.{layer}.{name}.{leaf}" for name in block[module]]
        # The sizes of q, k and v may differ.
        sizes = model.prelude[0].attn.split if len(theirs) == 3 else len(p) // len(theirs)
        names[ours] = {name: piece.shape for name, piece in zip(theirs, p.split(sizes))}
    return names


def rotary_order(c, name, t, back=False):
    """
    Reorder a tensor of a Huginn model from Huginn's rotary order to ours, or back. Huginn pairs
    adjacent channels of a head, and Llama the two halves of the head, so the rows of q and k differ
    only in their order. name: our name of the tensor t. All other tensors, and those of other
    models, are returned unchanged.
    """
    order = torch.arange(c.head_dim).view(-1, 2).T.flatten()  # 0 2 4 ... 1 3 5 ...
    if back:
        order = order.argsort()
    if name.endswith("attn.qk_bias"):  # (2, 1, H, D), and only Huginn has it
        return t[..., order]
    if c.norm == "sandwich" and name.endswith("attn.qkv.weight"):
        heads = t.unflatten(0, (3, c.n_head, -1))  # (3, H, D, C)
        return torch.cat((heads[:2, :, order], heads[2:])).flatten(0, 2)
    return t


# -------------------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(__doc__, usage="surgery.py SRC OUT [flags]")
    flag = parser.add_argument
    flag("src", metavar="SRC", help="a folder, a run, or a hub id")
    flag("out", metavar="OUT", type=new_folder, help="a new folder")
    flag("--shape", type=shape,
         help="sizes of prelude, core and coda, such as 4,8,4, chosen by the paper's rule. If they "
              "add up to all layers, r = 1 is the parent")
    for part in PARTS:
        flag(f"--{part}", type=layer_list, default=[], help="layers such as 0-3 or 0,2,5-7")
    flag("--feed_forward", action="store_true",
         help="build an ordinary model, without a loop, from all layers or from those that the "
              "other flags select")
    flag("--untie", action="store_true",
         help="with --feed_forward: if the head is tied to the embeddings, give it its own copy")
    flag("--adapter", choices=ADAPTERS,
         help="how the loop's state s and the prelude's output e are merged: linear (default), a "
              "matrix on both; or add, s + e")
    flag("--adapter_init", choices=["identity", "torch"],
         help="weights of a linear adapter: identity (default), with which r = 1 equals the kept "
              "layers in a row; torch, the default of torch's Linear, as in the paper")
    flag("--mean_recurrence", type=positive,
         help="default r of OUT; set it for released models, whose config.json always says 32")
    flag("--verify", action="store_true",
         help="check that OUT has exactly the logits of the layers of SRC that it keeps")
    return parser.parse_args()


def main():
    args = parse_args()
    source = model = open_source(args.src)
    refuse_idle([name for name, value in vars(args).items() if value], (
        (source.config.n_core,
         ("shape", *PARTS, "feed_forward", "untie", "adapter", "adapter_init"),
         "SRC is already recurrent, so its layers and adapter are fixed"),
        (args.shape, PARTS, "--shape chooses the layers"),
        (args.feed_forward, ("adapter", "adapter_init", "mean_recurrence"),
         "--feed_forward makes a model without a loop"),
        (not args.feed_forward, ["untie"], "only with --feed_forward, since a loop always unties"),
        (args.adapter == "add", ["adapter_init"], "--adapter add has no weights")))
    layers = None
    if not source.config.n_core:
        layers = choose_layers(args, source.config.n_prelude)
        say(f"layers for prelude, core and coda: {' '.join(map(str, layers))}")
        if args.untie:
            source.config.tie_embeddings = False
        model = retrofit(source, layers, args.adapter or "linear", args.adapter_init or "identity")
    if args.mean_recurrence:
        model.config.mean_recurrence = args.mean_recurrence
    sizes = model.num_params()
    say(f"OUT has {sizes.total():,} parameters: "
        + ", ".join(f"{part} {size:,}" for part, size in sizes.items()))
    with creating(args.out):
        copy_tokenizer(source.folder, args.out)
        record = Path(source.folder, "train.json")
        if record.exists() and not layers:  # OUT has all weights of a run, so it has its history
            shutil.copyfile(record, args.out / record.name)
        model.save(args.out)
        if args.verify:
            verify(source, layers, args.out)
    say(f"wrote {args.out}")


if __name__ == "__main__":
    cli(main)
