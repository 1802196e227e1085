"""
Turn a pretrained model into a depth-recurrent one. Early layers become the prelude, later layers
the recurrent block and the coda; layers in between are dropped, and a new adapter joins the parts.

    python surgery.py out/tiny/pretrain out/cut --shape 1,2,1 --verify
    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21 --verify
    python surgery.py SRC OUT --feed_forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --feed_forward --shape 4,8,4      those layers in a row, no recurrence
    python surgery.py SRC OUT --export hf                       ours, back in Hugging Face layout
    python surgery.py - --preset tinyllama-4-8-4                print the sizes; reads no weights
    python surgery.py - OUT --preset tinyllama-4-8-4            config.json alone, to plan training

SRC is a folder, or a hub id: org/name or org/name@REVISION (pip install huggingface_hub). It holds
a Llama, Mistral, SmolLM2, Qwen2, Qwen3 or OLMo-2 in Hugging Face layout, one of our checkpoints or
runs, or a released Recurrent-* model or Huginn-0125. These last two are recurrent already and take
no layer flags. OUT is a loopgraft checkpoint. With --export hf, OUT has the Hugging Face layout if
it has no recurrent block. If it has one, OUT has the layout of the released models, with code that
lets transformers load it (assets/modeling_loopgraft.py) and a model card. Tensors are stacked or
taken apart on the way, but never rounded.

Paper: arXiv 2511.07384, section 3 and Tables 6-8. --shape follows its rule: the prelude comes from
the first layers, core and coda from the last ones. --prelude, --core and --coda override what
--preset or --shape would take.

The file reads in this order: config.json in other layouts, names of tensors, reading, choosing
layers, the retrofit, export, the command. To support a parent of another architecture, add its
config.json to from_hf() and to_hf() and its tensors to HF_BLOCK and HF_NORMS here, its layers to
model.py and to assets/modeling_loopgraft.py, and its sizes to assets/parents.toml.
"""
import functools
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import Parser, UserError, cli, natural, opening, positive, read_json, whole, write_json
from data import TOKENIZER_FILES, Tokenizer, check_tokenizer, copy_tokenizer
from model import (ADAPTERS, Config, RecurrentLM, find_checkpoint, load_config, presets)

PARTS = ("prelude", "core", "coda")
ASSETS = Path(__file__).parent / "assets"


# ------------------------------------------------------------------------------------- config.json

SUPPORTED = {  # the values that we support; a missing key means the first
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "huginn_raven"),
    "rope_type": ("default", "llama3"),
    "type": ("default", "llama3"),  # rope_type in old files
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "injection_type": ADAPTERS,
}


def read_config(folder, names):
    """
    (model_type, Config) of a folder in any layout. A model without recurrent block is all prelude.
    names: those of all tensors, which tell where the released models have their norms. Raises
    UserError if config.json asks for something that we do not have.
    """
    path = Path(folder, "config.json")
    raw = read_json(path)
    try:
        kind = raw.get("model_type")
        if kind == "loopgraft":
            return kind, load_config(folder)
        check_supported(path, raw)
        if kind == "huginn_raven":
            return kind, from_raven(raw, " ".join(names))
        return kind, from_hf(path, raw)
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path}: is damaged, or of an unknown kind ({e!r})")


def check_supported(path, raw):
    """Raise UserError if the content of a config.json has a value that is not in SUPPORTED."""
    said = raw | read_rope(raw)
    for key, supported in SUPPORTED.items():
        if said.get(key, supported[0]) not in supported:
            raise UserError(f"{path}: {key} {said[key]!r} is not supported, only {supported}")


def read_rope(raw):
    """The rotary embedding's part of config.json: transformers 5's key, or that of older files."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def rope_theta(raw):
    return read_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))


def rope_scaling(raw):
    """The "llama3" scaling, or None."""
    scaling = {key: value for key, value in read_rope(raw).items() if key != "rope_theta"}
    return scaling if "factor" in scaling else None


def from_hf(path, raw):
    """Hugging Face's config.json (`raw`, read from `path`) -> the Config of the parent."""
    kind = raw["model_type"]
    context = raw.get("max_position_embeddings", 2048)
    window = raw.get("sliding_window")  # Qwen's file has one that is off: use_sliding_window
    if kind == "mistral" and window and window < context:
        raise UserError(f"{path}: a sliding_window of {window} tokens, shorter than the context of "
                        f"{context}, is not supported")
    eos_token_id = raw.get("eos_token_id")
    generation = path.with_name("generation_config.json")
    if generation.exists():  # a chat model's names more ends of a text
        ends = read_json(generation).get("eos_token_id")
        eos_token_id = eos_token_id if ends is None else ends
    return Config(
        vocab_size=raw["vocab_size"],
        n_embd=raw["hidden_size"],
        n_head=raw["num_attention_heads"],
        n_kv_head=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        n_ffn=raw["intermediate_size"],
        n_prelude=raw["num_hidden_layers"],
        head_dim=raw.get("head_dim") or 0,
        norm="post" if kind == "olmo2" else "pre",
        head_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(raw),
        rope_scaling=rope_scaling(raw),
        context=context,
        tie_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_id=eos_token_id,
    )


def to_hf(c):
    """The Config of a model without recurrent block -> Hugging Face's config.json (a dict)."""
    if c.embed_scale != 1:
        raise UserError(f"embed_scale {c.embed_scale}: no feed-forward layout has it")
    kind = "llama"  # Mistral without a window is one, too
    if c.norm == "post":
        kind = "olmo2"
    elif c.head_norm:
        kind = "qwen3"
    elif c.qkv_bias:
        kind = "qwen2"
    return shared_keys(c) | {
        "model_type": kind,
        "architectures": [kind.capitalize() + "ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": c.n_embd,
        "num_attention_heads": c.n_head,
        "num_hidden_layers": c.n_prelude,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_embeddings,
    }


def shared_keys(c):
    """What both layouts name alike. null is written: transformers has defaults for missing keys."""
    return {
        "vocab_size": c.vocab_size,
        "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim,
        "intermediate_size": c.n_ffn,
        "max_position_embeddings": c.context,
        "rope_scaling": c.rope_scaling,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
    }


def from_raven(raw, names):
    """
    config.json of a released Recurrent-* model, of Huginn-0125 or of our export -> Config. Only our
    exports say where the norms are. names: those of all tensors, in one string.
    """
    norm = "pre"
    if ".qk_bias" in names:
        norm = "sandwich"
    elif ".q_norm." in names:
        norm = "post"
    ours = "norm" in raw
    init = raw.get("init_values", {})
    default = Config.__dataclass_fields__
    return Config(
        vocab_size=raw["vocab_size"],
        n_embd=raw["n_embd"],
        n_head=raw["n_heads"],
        n_kv_head=raw.get("num_key_value_heads") or raw["n_heads"],
        n_ffn=raw["intermediate_size"],
        n_prelude=raw["n_layers_in_prelude"],
        n_core=raw["n_layers_in_recurrent_block"],
        n_coda=raw["n_layers_in_coda"],
        head_dim=raw.get("head_dim") or 0,
        norm=raw.get("norm", norm),
        head_norm=raw.get("head_norm", False),
        qkv_bias=raw.get("qkv_bias", False),
        norm_eps=raw["norm_eps"],
        # Huginn's is rope_base. The others' files have one, too, which their code never reads.
        rope_theta=raw["rope_base"] if norm == "sandwich" else rope_theta(raw),
        rope_scaling=rope_scaling(raw),
        context=raw.get("max_position_embeddings") or raw["block_size"],
        tie_embeddings=raw.get("tie_embeddings", raw.get("tie_word_embeddings", False)),
        adapter=raw.get("injection_type", "linear"),
        state_std=init.get("std", default["state_std"].default),
        embed_scale=init.get("embed_scale", default["embed_scale"].default),
        mean_recurrence=raw["mean_recurrence"],
        backprop_depth=raw["mean_backprop_depth"],
        # The paper's files have Huginn's ids, whatever the tokenizer.
        bos_token_id=raw.get("bos_token_id") if ours else None,
        eos_token_id=raw.get("eos_token_id") if ours else None,
    )


def to_raven(c):
    """The Config of a recurrent model -> config.json (a dict) in the released models' layout."""
    config = shared_keys(c) | {
        "model_type": "huginn_raven",
        "n_embd": c.n_embd,
        "n_heads": c.n_head,
        "n_layers_in_prelude": c.n_prelude,
        "n_layers_in_recurrent_block": c.n_core,
        "n_layers_in_coda": c.n_coda,
        "num_hidden_layers": c.n_prelude + c.mean_recurrence * c.n_core + c.n_coda,  # in a cache
        "norm": c.norm,
        "head_norm": c.head_norm,
        "qkv_bias": c.qkv_bias,
        "norm_eps": c.norm_eps,
        "tie_embeddings": c.tie_embeddings,
        "injection_type": c.adapter,
        "mean_recurrence": c.mean_recurrence,
        "mean_backprop_depth": c.backprop_depth,
        "init_values": {"std": c.state_std, "embed_scale": c.embed_scale},
        # What the paper's code reads besides.
        "padded_vocab_size": c.vocab_size,
        "block_size": c.context,
        "qk_bias": c.norm == "sandwich",
    }
    if c.norm == "sandwich":  # Huginn's own code reads these files
        return config | {"rope_base": c.rope_theta}
    return config | {
        "rope_theta": c.rope_theta,
        "architectures": ["LoopgraftForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_loopgraft.LoopgraftConfig",
            "AutoModel": "modeling_loopgraft.LoopgraftModel",
            "AutoModelForCausalLM": "modeling_loopgraft.LoopgraftForCausalLM",
        },
    }


# ----------------------------------------------------------------------------------- tensor names

# How our tensors' names begin or end, and what the other layouts have there. Several names: our
# tensor is their stack.
HF_NAMES = {"embed": "model.embed_tokens", "norm_f": "model.norm", "head": "lm_head"}
HF_BLOCK = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "mlp.fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.proj": ("mlp.down_proj",),
}
HF_NORMS = {  # Llama's, OLMo-2's
    "pre": {"norm_1": ("input_layernorm",), "norm_2": ("post_attention_layernorm",)},
    "post": {"norm_1": ("post_attention_layernorm",), "norm_2": ("post_feedforward_layernorm",)},
}
RAVEN_NAMES = {
    "embed": "transformer.wte",
    "prelude": "transformer.prelude",
    "adapter": "transformer.adapter",
    "core": "transformer.core_block",
    "coda": "transformer.coda",
    "norm_f": "transformer.ln_f",
    "head": "lm_head",
}


def tensor_names(config, kind):
    """{our tensor name: [names in the layout of that model_type, in stacking order]}"""
    names = {}
    for ours, _ in RecurrentLM.empty(config).named_parameters():
        first, _, rest = ours.partition(".")
        if kind == "loopgraft":
            theirs = [ours]
        elif kind == "huginn_raven":
            if first not in RAVEN_NAMES:
                raise UserError(f"the parameter {ours!r} has no name in the released layout: add "
                                "one to RAVEN_NAMES in surgery.py, and the computation to "
                                "assets/modeling_loopgraft.py")
            theirs = [f"{RAVEN_NAMES[first]}.{rest}".replace("attn.qkv", "attn.Wqkv")]
        elif first in HF_NAMES:
            theirs = [f"{HF_NAMES[first]}.{rest}"]
        else:
            layer, _, rest = rest.partition(".")
            rest, _, kind_of = rest.rpartition(".")  # weight or bias
            block = HF_BLOCK | HF_NORMS[config.norm]
            theirs = [f"model.layers.{layer}.{name}.{kind_of}" for name in block[rest]]
        names[ours] = theirs
    return names


def rotary_order(c, name, t, back=False):
    """
    Huginn rotates adjacent pairs where Llama pairs the halves of a head. These are the same numbers
    in another order of q's and k's rows. Reorders our tensor `name` from pairs to halves, or back;
    all other tensors stay as they are.
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


# ---------------------------------------------------------------------------------------- download

MODEL_FILES = ["config.json", "model*.safetensors*", *TOKENIZER_FILES]


def download(spec):
    """
    "org/name" or "org/name@REVISION" on the Hugging Face hub -> the folder of config.json,
    tokenizer and safetensors in huggingface_hub's cache. It needs the hub only once.
    """
    repo, _, revision = spec.partition("@")
    if repo.count("/") != 1 or Path(repo).parent.exists():
        raise UserError(f"{spec}: no such folder (on the hub names are org/name or "
                        "org/name@REVISION)")
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(repo, revision=revision or None, allow_patterns=MODEL_FILES)
    except ImportError:
        raise UserError(f"{spec}: is no folder, and the hub needs pip install huggingface_hub")
    except Exception as e:  # a full disk, or an error of one of several libraries
        raise UserError(f"{spec}: is no folder, and does not come from the hub (HF_TOKEN opens "
                        f"private and gated ones): {' '.join(str(e).split())}")


# ----------------------------------------------------------------------------------------- reading

@dataclass
class Source:
    """A checkpoint of any layout. Its tensors are mapped to memory, and read when they are used."""
    folder: str
    config: Config
    kind: str      # model_type in its config.json
    tensors: dict  # {name: tensor}, as stored
    parts: dict    # our tensor name -> the names of the tensors that are stacked to make it
    tokenizer: Tokenizer | None = None


def open_source(src):
    """The Source of a folder, a run's folder or a hub id."""
    folder = find_checkpoint(src if Path(src).exists() else download(src))
    tensors = map_tensors(folder)
    kind, config = read_config(folder, tensors)
    parts = tensor_names(config, kind)
    used = {name for names in parts.values() for name in names}
    if ignored := sorted(tensors.keys() - used):
        print("note: the model does not use these tensors:", *map(repr, ignored[:5]))
    odd = [name for name in ignored if name.endswith((".bias", "_norm.weight"))]
    if odd and kind not in ("huginn_raven", "loopgraft"):  # released files have stale ones
        raise UserError(f"{folder}: {odd[0]!r} has no place in the model of its config.json")
    source = Source(folder, config, kind, tensors, parts)
    if any(Path(folder, name).exists() for name in TOKENIZER_FILES[:2]):
        source.tokenizer = check_tokenizer(config, folder)
        if kind == "huginn_raven" and not config.ends:
            source.config = replace(config, bos_token_id=source.tokenizer.bos_id,
                                    eos_token_id=source.tokenizer.eos_id)
    return source


def map_tensors(folder):
    """{name: tensor} of a folder's safetensors files, of which there may be several."""
    tensors = {}
    for path in Path(folder).glob("model*.safetensors"):
        try:
            more = load_file(path)
        except SafetensorError as e:
            raise UserError(f"{path}: is truncated or damaged ({e}): fetch it again")
        if twice := tensors.keys() & more.keys():
            raise UserError(f"{path}: has {min(twice)!r}, as another file: of two models?")
        tensors |= more
    if not tensors:
        raise UserError(f"{folder}: has no model.safetensors. Pickled weights (.bin, .pt) may "
                        "run any code when they are loaded, so they never are: get a conversion "
                        "to safetensors")
    return tensors


def read_all(source):
    """{our name: tensor} of a Source, all in the one dtype that holds all of them exactly."""
    tensors = {}
    for name, parts in source.parts.items():
        if missing := set(parts) - source.tensors.keys():
            raise UserError(f"{source.folder}: tensor {min(missing)!r} is missing. The checkpoint "
                            "is incomplete, or not of the model in config.json")
        t = torch.cat([source.tensors[part] for part in parts])
        if source.kind == "huginn_raven":
            t = rotary_order(source.config, name, t)
        tensors[name] = t
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors.values()})
    return {name: t.to(dtype) for name, t in tensors.items()}


def pass_through(C):
    """The weights [0 | I] of an adapter (C, 2C) that ignores the state."""
    return torch.eye(C, 2 * C).roll(C, 1)


def build(source, adapter_init="identity"):
    """
    The Source as a model, with its weights as they are stored. An adapter that it lacks is made.
    It reads [state, prelude output]: "identity" makes it [0 | I], "torch" takes the default of
    torch's Linear, as the paper does.
    """
    model = RecurrentLM.empty(source.config)
    C = source.config.n_embd
    try:
        tensors = read_all(source)
        if hasattr(model, "adapter") and "adapter.weight" not in tensors:
            adapter = pass_through(C)
            if adapter_init == "torch":
                torch.manual_seed(0)
                adapter = torch.nn.Linear(2 * C, C, bias=False).weight.data
            tensors["adapter.weight"] = adapter.to(tensors["embed.weight"].dtype)
        model.fill(tensors)
    except RuntimeError as e:  # shapes
        raise UserError(f"{source.folder}: is not the model of its config.json ({e!r:.300})")
    return model


# ------------------------------------------------------------------------------------ which layers

def layer_list(text):
    """'0-3,7' -> [0, 1, 2, 3, 7]; '' -> []. ValueError if it is neither."""
    layers = []
    for piece in filter(None, text.split(",")):
        first, _, last = piece.partition("-")
        chosen = range(int(first), int(last or first) + 1)
        if not chosen:
            raise ValueError
        layers += chosen
    return layers


def shape(text):
    """'4,8,4' -> (4, 8, 4); '8', for a model without recurrent block, -> (8, 0, 0)."""
    P, R, C = map(natural, (text if "," in text else f"{text},0,0").split(","))
    if not P + R + C:
        raise ValueError("no layers")
    return P, R, C


def choose_layers(args, source):
    """
    The layers of SRC for prelude, core and coda, as three lists: those of --preset or --shape,
    unless --prelude, --core or --coda say otherwise. With --feed_forward they all make the prelude.
    None: OUT is SRC as it is.
    """
    if source.config.n_core:
        for flag in (*PARTS, "preset", "shape", "feed_forward", "adapter"):
            if getattr(args, flag):
                raise UserError(f"--{flag}: SRC is recurrent already: drop the flag")
        return None
    L = source.config.n_prelude
    layers = [None] * 3
    sizes = presets()[args.preset][1] if args.preset else args.shape
    if sizes:
        P, R, C = sizes
        if P + R + C > L:
            raise UserError(f"a shape of {P + R + C} layers: SRC has layers 0-{L - 1}")
        everything = list(range(L))
        layers = [everything[:P], everything[L - R - C:L - C], everything[L - C:]]
    for i, part in enumerate(PARTS):
        if getattr(args, part) is not None:
            layers[i] = getattr(args, part)
    if args.feed_forward:
        if all(part is None for part in layers):
            layers[0] = list(range(L))
        layers = [sum(filter(None, layers), []), [], []]
        if not layers[0]:
            raise UserError("--feed_forward: these flags leave no layer")
    elif args.export and not any(layers):
        return None
    elif None in layers or not layers[1]:
        raise UserError("which layers? Give --prelude, --core (at least one layer) and --coda, "
                        "or --preset, or --shape; or --feed_forward for a model without "
                        "recurrent block")
    taken = sum(layers, [])
    if len(set(taken) & set(range(L))) < len(taken):
        raise UserError(f"layers {taken}: SRC has layers 0-{L - 1}, and each can be taken once")
    return layers


# --------------------------------------------------------------------------------------- retrofit

def retrofit(source, layers, adapter="linear", untie=False):
    """
    The Source with the given layers (three lists of its layer numbers) as prelude, core and coda. A
    tied head becomes a copy in a recurrent model. The adapter is still to be added.
    """
    P, R, C = map(len, layers)
    tied = source.config.tie_embeddings and not R and not untie
    config = replace(source.config, n_prelude=P, n_core=R, n_coda=C, adapter=adapter,
                     tie_embeddings=tied)
    parts = {name: source.parts[name] for name in ("embed.weight", "norm_f.weight")}
    if not tied:
        parts["head.weight"] = source.parts.get("head.weight", parts["embed.weight"])
    for part, chosen in zip(PARTS, layers):
        for i, layer in enumerate(chosen):
            old = f"prelude.{layer}."
            for name in source.parts:
                if name.startswith(old):
                    parts[name.replace(old, f"{part}.{i}.")] = source.parts[name]
    return replace(source, config=config, parts=parts)


def print_sizes(source, result):
    """Print the numbers of parameters of SRC and OUT, as the paper's Tables 6-8 have them."""
    if source.config.tie_embeddings and not result.config.tie_embeddings:
        size = RecurrentLM.empty(source.config).num_params()["total"]
        print(f"SRC's head is tied to its embeddings: it has {size:,} parameters. OUT gets a head "
              "of its own, a copy. The table counts a head for both, as the paper does.")
    # The paper counts the heads of tied sources, as all of its models have one.
    untied = replace(source.config, tie_embeddings=False)
    src, out = (RecurrentLM.empty(config).num_params() for config in (untied, result.config))
    print("parameters            SRC            OUT")
    for part in ("embeddings", "body", *PARTS, "adapter", "total"):
        print(f"{part:10}{src[part]:15,}{out[part]:15,}")


@torch.no_grad()
def verify(args, source, layers):
    """
    Run 64 tokens through SRC's kept layers in a row, and through OUT as it is read back from the
    disk, at r = 1 and with an adapter that passes the prelude's output through. The logits must be
    equal to the last bit. If SRC is recurrent, both take r = 2 and their own adapter.
    """
    ids = torch.arange(64)[None] * 7 % source.config.vocab_size
    kept = retrofit(source, [sum(layers, []), [], []]) if layers else source
    one = build(kept).float()
    two = build(open_source(args.out)).float()
    if layers and hasattr(two, "adapter"):
        two.adapter.weight.data = pass_through(two.config.n_embd)
    state = torch.zeros(1, 64, two.config.n_embd)  # an adapter that adds passes e through
    wanted, found = (model(ids, None, 1 if layers else 2, state)[0] for model in (one, two))
    if not found.equal(wanted):  # NaN is not equal to itself, either
        raise UserError(f"{args.out}: differs from {source.folder}: delete it and try again")
    print("verify: all logits of 64 tokens are equal to the last bit of float32")


# ------------------------------------------------------------------------------------------ export

def export(model, folder):
    """
    Write model.safetensors and config.json for others: in Hugging Face's layout if the model has no
    recurrent block, else in the released models' layout, with our code for transformers.
    """
    c = model.config
    config = to_raven(c) if c.n_core else to_hf(c)
    tensors = model.state_dict()
    out = {}
    for ours, names in tensor_names(c, config["model_type"]).items():
        t = rotary_order(c, ours, tensors[ours], back=True)
        sizes = model.prelude[0].attn.split if len(names) == 3 else len(t) // len(names)
        out |= zip(names, t.split(sizes))
    folder.mkdir()
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    dtype = str(t.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config | {"torch_dtype": dtype})
    if "auto_map" in config:
        shutil.copy(ASSETS / "modeling_loopgraft.py", folder)


@torch.no_grad()
def compare_export(model, folder):
    """
    Load an export with transformers and compare its logits, in float32, with the model's. Raises
    UserError if they differ: the two files that compute them, model.py and modeling_loopgraft.py,
    must change together. Says so where the comparison is not possible.
    """
    if model.config.norm == "sandwich":
        return print("the export was not compared: Huginn's own code, which reads it, is not here")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return print("the export was not compared with the model: that takes pip install "
                     "transformers")
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32)
    except Exception as e:  # of transformers, or of the code that it loads
        raise UserError(f"transformers cannot load the export ({e!r:.300})")
    ours = model.float()
    idx = torch.arange(64)[None] * 7 % model.config.vocab_size
    idx = idx[:, :model.config.context]
    flags = {}
    state = None
    if model.config.n_core:
        state = model.initial_state(1, idx.shape[1], 0)
        flags = {"num_steps": 3, "initial_state": state}
    wanted, _ = ours(idx, steps=3, state=state)
    found = theirs(idx, **flags).logits
    off = ((found - wanted).norm() / wanted.norm()).item()
    if not off < 1e-3:
        raise UserError(f"transformers computes other logits from the export (off by {off:.2g}): "
                        "a change of model.py has to be made in assets/modeling_loopgraft.py, too")
    print(f"transformers computes the model's logits from the export (off by {off:.1g})")


def copy_text_files(source, folder, config):
    """Copy the tokenizer's files and the rest that belongs to text. The ends of text are ours."""
    copy_tokenizer(source.folder, folder)
    path = folder / "generation_config.json"
    if path.exists():
        said = read_json(path) | {key: getattr(config, key)
                                  for key in ("bos_token_id", "eos_token_id")}
        if source.kind == "huginn_raven":
            said.pop("pad_token_id", None)  # Huginn's
        write_json(path, said)


def export_tokenizer(tokenizer, folder):
    """
    Name the class of transformers that reads the tokenizer in a folder. For a tokenizer.json it is
    the one that follows the file, and so gives our ids: the classes for Llama and GPT-2 split
    blanks and digits in ways of their own. For a tokenizer.model alone Llama's comes nearest
    (assets/model_card.md says where it differs).
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    config.pop("auto_map", None)  # names code that is not here
    names = {i: name for name, i in tokenizer.special.items()}
    for key, i in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if i in names:
            config.setdefault(key, names[i])
    if (folder / "tokenizer.json").exists():
        config |= {"tokenizer_class": "PreTrainedTokenizerFast",
                   "model_input_names": ["input_ids", "attention_mask"]}
    else:
        config |= {"tokenizer_class": "LlamaTokenizer",
                   "add_bos_token": tokenizer.bos_id is not None}
    write_json(path, config)


# -------------------------------------------------------------------------------------- model card

def write_card(folder, config, source):
    """
    Write a model card: README.md, from assets/model_card.md. It says what is known of the model's
    origin, and names data sets and files, but no path of this machine.
    """
    template = Template((ASSETS / "model_card.md").read_text("utf-8"))
    base, origin, prompt = describe_origin(Path(source.folder))
    header = f"base_model: {base}\n" if base else ""
    card = template.substitute(
        header=header,
        name=folder.name,
        layers=f"({config.n_prelude},{config.n_core},{config.n_coda})",
        mean_recurrence=config.mean_recurrence,
        origin="".join(f"- {line}\n" for line in origin) or "- Not known to the exporter.\n",
        prompt=json.dumps(prompt, ensure_ascii=False),
    )
    (folder / "README.md").write_text(card, "utf-8")


def describe_origin(folder):
    """(base model or None, lines about a checkpoint's making and scores, an example prompt)."""
    base = None
    lines = []
    prompt = "Once upon a time"
    run = {}
    if (folder / "train.json").exists():
        run = read_json(folder / "train.json")
    surgery = run.get("surgery")
    if (folder / "surgery.json").exists():
        surgery = read_json(folder / "surgery.json")
    if surgery:
        base = surgery["base_model"]
        prelude, core, coda = surgery["layers"]
        parent = base or "the parent"
        lines.append(f"Layers of {parent}: prelude {prelude}, recurrent block {core}, coda {coda}.")
    for stage in run.get("stages", []):
        lines.append(f"Trained for {stage['updates']:,} updates on {', '.join(stage['data'])}, "
                     f"with a mean of r = {stage['mean_recurrence']}.")
    if run:
        data = Path(run["config"]["data"].split(",")[0].split(":")[0], "meta.json")
        if data.exists():
            prompt = read_json(data)["prompt"]
    folders = [folder]
    if folder.name.startswith("step_"):  # evaluations of a run lie in the run's folder
        folders.append(folder.parent)
    for place in folders:
        for path in sorted(place.glob("eval_*.json")):
            lines += describe_scores(read_json(path))
    return base, lines, prompt


def describe_scores(summary):
    """A line for each task and metric of an evaluation's summary: its values over r."""
    values = {}
    for row in summary["results"]:
        title = f"{row.get('task', summary['task'])}, {row['metric']}"
        values.setdefault(title, []).append(f"{row['value']:.3g} at r = {row['steps']}")
    return [f"{title}: {'; '.join(found)}." for title, found in values.items()]


# ------------------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(usage="surgery.py SRC [OUT] [flags]", description=opening(__doc__, 3))
    what, how, output = parser.groups()
    add = what.add_argument
    add("src", metavar="SRC", help="a checkpoint, or - for a preset's shape without weights")
    add("out", metavar="OUT", nargs="?", type=Path, help="default: only print the sizes")
    rule = what.add_mutually_exclusive_group().add_argument
    rule("--preset", choices=presets(), metavar="NAME",
         help=f"a known parent, and the choice of its layers: {', '.join(presets())}")
    rule("--shape", type=shape, help="sizes of the parts, such as 4,8,4, or 8 with "
         "--feed_forward, by the paper's rule")
    for part in PARTS:
        add(f"--{part}", type=layer_list, help="layers such as 0-3 or 0,2,5-7; '' for none")
    add("--feed_forward", action="store_true",
        help="a model without recurrent block: all layers, or those of the other flags in a row")
    add = how.add_argument
    add("--untie", action="store_true",
        help="with --feed_forward: where the embeddings also serve as the head, give the head a "
             "copy of its own")
    add("--adapter", choices=ADAPTERS,
        help="how the loop's state s and the prelude's output e are joined: linear (default), a "
             "matrix on both; or add, s + e")
    add("--adapter_init", choices=["identity", "torch"], default="identity",
        help="identity (default): pass the prelude's output through, so that r = 1 equals the kept "
             "layers in a row; torch: the default of torch's Linear, as in the paper")
    add("--mean_recurrence", type=positive,
        help="the result's default r (the released models' config.json always says 32)")
    add = output.add_argument
    add("--export", choices=["hf"], help="write OUT in Hugging Face layout")
    add("--verify", action="store_true", help="compare the logits of SRC's layers and of OUT")
    args = parser.parse_args()
    if args.src == "-" and not args.preset:
        parser.error("without a checkpoint it takes a --preset")
    if args.out and args.out.exists():
        raise UserError(f"{args.out}: exists already: choose another OUT")
    return args


def main():
    args = parse_args()
    if args.src == "-":
        config, _ = presets()[args.preset]
        source = Source("", config, "llama", {}, tensor_names(config, "llama"))
    else:
        source = open_source(args.src)
    result = source
    layers = choose_layers(args, source)
    if layers:
        print("layers for prelude, core and coda:", *layers)
        result = retrofit(source, layers, args.adapter or "linear", args.untie)
    if args.mean_recurrence:
        config = replace(result.config, mean_recurrence=args.mean_recurrence)
        result = replace(result, config=config)
    print_sizes(source, result)
    if not args.out:
        return
    if args.src == "-":  # a preset's shape, for train.py --dry_run
        write_json(args.out / "config.json", {"model_type": "loopgraft", **vars(result.config)})
        return
    model = build(result, args.adapter_init)
    with whole(args.out) as folder:
        if args.export:
            export(model, folder)
        else:
            model.save(folder)
        copy_text_files(source, folder, result.config)
        if args.export and source.tokenizer:
            export_tokenizer(source.tokenizer, folder)
        if layers and not args.export:
            base_model = None if Path(args.src).exists() else args.src.partition("@")[0]
            write_json(folder / "surgery.json", {"base_model": base_model, "layers": layers})
        if (folder / "modeling_loopgraft.py").exists():
            write_card(folder, result.config, source)
        if args.export:
            compare_export(model, folder)
    print(f"wrote {args.out}")
    if args.verify:
        verify(args, source, layers)


if __name__ == "__main__":
    cli(main)
