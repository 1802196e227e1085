"""
Turn a pretrained model into a depth-recurrent one. Early layers become the prelude, and later
layers the recurrent block and the coda; the layers in between are dropped, and a new adapter feeds
the prelude's output into the loop.

    python surgery.py out/tiny/pretrain out/cut --shape 1,2,1 --verify
    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21 --verify
    python surgery.py SRC OUT --feed_forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --feed_forward --shape 4,8,4      those layers in a row, no recurrence
    python surgery.py SRC OUT --export hf                       a checkpoint in Hugging Face layout
    python surgery.py FILE.gguf OUT --shape 13,4,13             a parent in llama.cpp's format
    python surgery.py - --preset tinyllama-4-8-4                print the sizes; reads no weights
    python surgery.py - OUT --preset tinyllama-4-8-4            config.json alone, to plan training

SRC is a folder, or a hub id, org/name or org/name@REVISION (pip install huggingface_hub). It holds
a Llama, Mistral, SmolLM2, Qwen2, Qwen3 or OLMo-2 in Hugging Face layout, one of our checkpoints or
runs, a released Recurrent-* model, or Huginn-0125. A .gguf file of these architectures is read with
transformers. A SRC that is already recurrent takes no layer flags. OUT is a loopgraft checkpoint. With --export hf it is in Hugging Face layout instead: in that
of its parent if it has no recurrent block, and otherwise in that of the released models, with a
model card and the code that lets transformers load it (assets/modeling_loopgraft.py). Tensors are
stacked or split on the way, but never rounded.

Paper: arXiv 2511.07384, section 3 and Tables 6-8. --shape follows its rule: the prelude comes from
the first layers, core and coda from the last ones. --prelude, --core and --coda override what
--preset or --shape would take.

The file is in this order: config.json, tensor names, download, reading, choosing layers, the
retrofit, export, the model card, the command. To support a parent of another architecture, add its
model_type to SUPPORTED, its config.json to from_hf() and to_hf(), and its tensors to HF_BLOCK and
HF_NORMS here, its layers to model.py and to assets/modeling_loopgraft.py, and its sizes to
assets/parents.toml.
"""
import atexit
import functools
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import (Parser, UserError, cli, natural, opening, positive, read_json,
                    write_atomically, write_json)
from data import TOKENIZER_FILES, Tokenizer, check_tokenizer, copy_tokenizer
from model import (ADAPTERS, Config, RecurrentLM, find_checkpoint, load_config, presets,
                   retrofitted)

PARTS = ("prelude", "core", "coda")
ASSETS = Path(__file__).parent / "assets"


# ------------------------------------------------------------------------------------- config.json

SUPPORTED = {  # the values that we support; a missing key means the first one
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "huginn_raven"),
    "rope_type": ("default", "llama3"),
    "type": ("default", "llama3"),  # the name of rope_type in older files
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "injection_type": ADAPTERS,
}


def read_config(folder, names):
    """
    Read the config.json of a folder, in any layout. names: the names of all tensors, which tell
    where the released models have their norms.

    Returns (model_type, Config). In the Config of an ordinary model, all layers are prelude. Raises
    UserError if config.json asks for something that is not supported.
    """
    path = Path(folder, "config.json")
    raw = read_json(path)
    try:
        kind = raw.get("model_type")
        if kind == "loopgraft":
            return kind, load_config(folder)
        check_supported(path, raw)
        if kind == "huginn_raven":
            return kind, from_raven(raw, names)
        return kind, from_hf(path, raw)
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is damaged, or describes an unknown kind of model ({e!r})")


def check_supported(path, raw):
    """
    Raise UserError if a config.json, `raw`, read from `path`, has a value that is not in SUPPORTED.
    """
    values = raw | read_rope(raw)
    for key, supported in SUPPORTED.items():
        value = values.get(key, supported[0])
        if value not in supported:
            raise UserError(f"{path}: {key} = {value!r} is not supported, only {supported}")


def read_rope(raw):
    """
    Return the RoPE section of a config.json: rope_parameters in transformers 5, rope_scaling in
    older files, {} if there is neither.
    """
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def rope_theta(raw):
    """Return the base frequency of RoPE, which older files have at the top level."""
    return read_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))


def rope_scaling(raw):
    """Return the "llama3" scaling as a dict, or None if a config.json has no scaling."""
    scaling = {key: value for key, value in read_rope(raw).items() if key != "rope_theta"}
    return scaling if "factor" in scaling else None


def from_hf(path, raw):
    """Return the Config of an ordinary model from its config.json, `raw`, read from `path`."""
    kind = raw["model_type"]
    context = raw.get("max_position_embeddings", 2048)
    # Qwen's files have a window, too, but switch it off with use_sliding_window.
    window = raw.get("sliding_window")
    if kind == "mistral" and window and window < context:
        raise UserError(f"{path}: a sliding_window of {window} tokens, shorter than the context of "
                        f"{context}, is not supported")
    eos_token_id = raw.get("eos_token_id")
    generation = path.with_name("generation_config.json")
    if generation.exists():  # for chat models it lists more ids that end a text
        ends = read_json(generation).get("eos_token_id")
        if ends is not None:
            eos_token_id = ends
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
    """Return config.json in Hugging Face layout, a dict, for the Config of an ordinary model."""
    if c.embed_scale != 1:
        raise UserError(f"embed_scale = {c.embed_scale}: Hugging Face's layouts for ordinary "
                        "models have no such setting")
    kind = "llama"  # a Mistral without a window is the same
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
    """
    Return the keys that have the same name in both layouts. A value of None is written as null on
    purpose: transformers fills a missing key with a default of its own.
    """
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
    Return the Config of a released Recurrent-* model, of Huginn-0125, or of one of our exports,
    from its config.json, `raw`. names: the names of all tensors, which tell where the norms are;
    only our exports say so in config.json.
    """
    norm = "pre"
    if any(".qk_bias" in name for name in names):
        norm = "sandwich"
    elif any(".q_norm." in name for name in names):
        norm = "post"
    ours = "norm" in raw
    init = raw.get("init_values", {})
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
        # Huginn's key is rope_base. The other models' files have it too, but their code never
        # reads it.
        rope_theta=raw["rope_base"] if norm == "sandwich" else rope_theta(raw),
        rope_scaling=rope_scaling(raw),
        context=raw.get("max_position_embeddings") or raw["block_size"],
        tie_embeddings=raw.get("tie_embeddings", raw.get("tie_word_embeddings", False)),
        adapter=raw.get("injection_type", "linear"),
        state_std=init.get("std", Config.state_std),
        embed_scale=init.get("embed_scale", Config.embed_scale),
        mean_recurrence=raw["mean_recurrence"],
        backprop_depth=raw["mean_backprop_depth"],
        # The paper's released files keep Huginn's ids, whatever their tokenizer is.
        bos_token_id=raw.get("bos_token_id") if ours else None,
        eos_token_id=raw.get("eos_token_id") if ours else None,
    )


def to_raven(c):
    """Return config.json in the released models' layout, a dict, for a recurrent model's Config."""
    config = shared_keys(c) | {
        "model_type": "huginn_raven",
        "n_embd": c.n_embd,
        "n_heads": c.n_head,
        "n_layers_in_prelude": c.n_prelude,
        "n_layers_in_recurrent_block": c.n_core,
        "n_layers_in_coda": c.n_coda,
        # the number of slots of a cache
        "num_hidden_layers": c.n_prelude + c.mean_recurrence * c.n_core + c.n_coda,
        "norm": c.norm,
        "head_norm": c.head_norm,
        "qkv_bias": c.qkv_bias,
        "norm_eps": c.norm_eps,
        "tie_embeddings": c.tie_embeddings,
        "injection_type": c.adapter,
        "mean_recurrence": c.mean_recurrence,
        "mean_backprop_depth": c.backprop_depth,
        "init_values": {"std": c.state_std, "embed_scale": c.embed_scale},
        # keys that only the paper's own code reads
        "padded_vocab_size": c.vocab_size,
        "block_size": c.context,
        "qk_bias": c.norm == "sandwich",
    }
    if c.norm == "sandwich":  # these files are for Huginn's own code
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

# The beginning or the end of our tensor names, and what the other layouts have there. Where there
# are several names, our tensor is these tensors, stacked along dim 0.
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
    """
    Map each of our tensor names to its names in the layout `kind` (a model_type), in stacking
    order, such as {"prelude.0.mlp.fc.weight": ["model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight"]}.
    """
    names = {}
    for ours, _ in RecurrentLM.empty(config).named_parameters():
        first, _, rest = ours.partition(".")
        if kind == "loopgraft":
            theirs = [ours]
        elif kind == "huginn_raven":
            if first not in RAVEN_NAMES:
                raise UserError(f"the parameter {ours!r} has no name in the released layout. Add "
                                "one to RAVEN_NAMES in surgery.py, and the computation to "
                                "assets/modeling_loopgraft.py")
            theirs = [f"{RAVEN_NAMES[first]}.{rest}".replace("attn.qkv", "attn.Wqkv")]
        elif first in HF_NAMES:
            theirs = [f"{HF_NAMES[first]}.{rest}"]
        else:
            layer, _, rest = rest.partition(".")    # "0", "attn.qkv.weight"
            module, _, leaf = rest.rpartition(".")  # "attn.qkv", "weight" or "bias"
            block = HF_BLOCK | HF_NORMS[config.norm]
            theirs = [f"model.layers.{layer}.{name}.{leaf}" for name in block[module]]
        names[ours] = theirs
    return names


def rotary_order(c, name, t, back=False):
    """
    Reorder a tensor of a Huginn model from Huginn's rotary order to ours, or back. Huginn rotates
    adjacent channels of a head as pairs, where Llama pairs the two halves of the head; the rows of
    q and k are the same, in another order. name: our name of the tensor t. All other tensors, and
    those of other models, are returned unchanged.
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
    Download a model from the Hugging Face hub, "org/name" or "org/name@REVISION". Returns the
    folder in huggingface_hub's cache with its config.json, tokenizer and safetensors. Files are
    downloaded once; after that they open without the hub, too. Raises UserError if that fails.
    """
    repo, _, revision = spec.partition("@")
    # Where the folder out/ exists, out/typo is a misspelled folder, not a hub id.
    if repo.count("/") != 1 or Path(repo).parent.exists():
        raise UserError(f"{spec}: no such folder. (A model on the Hugging Face hub is org/name or "
                        "org/name@REVISION.)")
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(repo, revision=revision or None, allow_patterns=MODEL_FILES)
    except ImportError:
        raise UserError(f"{spec}: no such folder. To download it from the Hugging Face hub, run "
                        "`pip install huggingface_hub` first")
    except Exception as e:  # a full disk, or an error of one of several libraries
        one_line = " ".join(str(e).split())
        raise UserError(f"{spec}: no such folder, and the download from the Hugging Face hub "
                        f"failed (private and gated models need HF_TOKEN): {one_line}")


# -------------------------------------------------------------------------------------------- gguf

def find_gguf(src):
    """Return the .gguf file that SRC is, or the only one that it holds, as a Path; else None."""
    path = Path(src)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{src}: no such file")
        return path
    if Path(path, "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{src}: holds {len(found)} .gguf files. Name one of them, such as "
                        f"{found[0]}")
    return found[0] if found else None


def read_gguf(path):
    """
    Read a .gguf file with transformers, which dequantizes its weights.

    Returns a temporary folder with config.json and the tokenizer in Hugging Face layout, deleted
    when the process ends, and the weights {name: tensor} in float32. Raises UserError if the file
    is damaged or not supported, or a package is missing.
    """
    try:
        import gguf
        import transformers
    except ImportError as e:
        raise UserError(f"{path}: needs `pip install transformers accelerate gguf` ({e})")
    transformers.logging.set_verbosity_error()
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    try:
        file = gguf.GGUFReader(path)
        matrices = [tensor for tensor in file.tensors if len(tensor.shape) > 1]
        stored = Counter(matrix.tensor_type.name for matrix in matrices)
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    except Exception as e:  # each of the libraries has errors of its own
        one_line = " ".join(str(e).split())
        raise UserError(f"{path}: damaged, or not supported by transformers ({one_line:.200})")
    config = model.config.to_dict()
    config.pop("quantization_config")  # the weights are dequantized
    write_json(f"{folder}/config.json", config)
    if stored.keys() - {"F32", "F16", "BF16"}:
        counts = ", ".join(f"{kind} ({n})" for kind, n in stored.most_common())
        print(f"note: {path.name} has quantized matrices: {counts}. What quantization lost is not "
              "restored")
    return folder, {name: p.detach() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------- reading

@dataclass
class Source:
    """
    A checkpoint of any layout. Its tensors are memory-mapped, so they are read only when they are
    used, except those of a .gguf file.
    """
    folder: str
    config: Config
    kind: str      # model_type in its config.json
    tensors: dict  # {name: tensor}, as stored
    stored: dict   # {our tensor name: names of the stored tensors that are stacked to make it}
    tokenizer: Tokenizer | None = None


def open_source(src):
    """
    Open a checkpoint folder, a run's folder or a hub id as a Source. Raises UserError if it is
    missing, damaged or not supported.
    """
    gguf_file = find_gguf(src)
    if gguf_file:
        folder, tensors = read_gguf(gguf_file)
    else:
        folder = find_checkpoint(src if Path(src).exists() else download(src))
        tensors = map_tensors(folder)
    kind, config = read_config(folder, tensors)
    stored = tensor_names(config, kind)
    used = {name for names in stored.values() for name in names}
    if ignored := sorted(tensors.keys() - used):
        print("note: the model does not use these tensors:", *map(repr, ignored[:5]))
    odd = [name for name in ignored if name.endswith((".bias", "_norm.weight"))]
    if odd and kind not in ("huginn_raven", "loopgraft"):  # released files have stale ones
        raise UserError(f"{folder}: tensor {odd[0]!r} has no counterpart in the model that "
                        "config.json describes")
    tokenizer = None
    if any(Path(folder, name).exists() for name in ("tokenizer.model", "tokenizer.json")):
        tokenizer = check_tokenizer(config, folder)
        if kind == "huginn_raven" and not config.ends:  # from_raven() ignores the released ids
            config = replace(
                config,
                bos_token_id=tokenizer.bos_id,
                eos_token_id=tokenizer.eos_id,
            )
    return Source(folder, config, kind, tensors, stored, tokenizer)


def map_tensors(folder):
    """Return {name: tensor} of a folder's safetensors files, of which there may be several."""
    tensors = {}
    for path in Path(folder).glob("model*.safetensors"):
        try:
            of_file = load_file(path)
        except SafetensorError as e:
            raise UserError(f"{path} is truncated or damaged ({e}). Download it again")
        if twice := tensors.keys() & of_file.keys():
            raise UserError(f"{path}: {min(twice)!r} is in another file of this folder, too. Are "
                            "these files of two models?")
        tensors |= of_file
    if not tensors:
        raise UserError(f"{folder} has no model.safetensors. Loading pickled weights (.bin, .pt) "
                        "can run arbitrary code, so loopgraft never does. Look for a version in "
                        "safetensors")
    return tensors


def read_all(source):
    """
    Return {our name: tensor} of a Source, all cast to the smallest dtype that holds every one of
    them exactly.
    """
    tensors = {}
    for name, pieces in source.stored.items():
        if missing := set(pieces) - source.tensors.keys():
            raise UserError(f"{source.folder}: tensor {min(missing)!r} is missing. The checkpoint "
                            "is incomplete, or belongs to a different model than config.json "
                            "describes")
        t = torch.cat([source.tensors[piece] for piece in pieces])
        if source.kind == "huginn_raven":
            t = rotary_order(source.config, name, t)
        tensors[name] = t
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors.values()})
    return {name: t.to(dtype) for name, t in tensors.items()}


def pass_through(C):
    """Return the weights [0 | I], (C, 2C), of an adapter that ignores the state."""
    return torch.eye(C, 2 * C).roll(C, 1)


def build(source, adapter_init="identity"):
    """
    Build the RecurrentLM of a Source, with its weights as they are stored. A recurrent model whose
    Source has no adapter gets a new one for [state, prelude output]: "identity" is [0 | I], which
    passes the prelude's output through; "torch" is the default initialisation of torch's Linear, as
    in the paper, with seed 0.
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
    except RuntimeError as e:  # a tensor has another shape than the parameter that it is for
        raise UserError(f"{source.folder}: the weights are not the model of its config.json "
                        f"({e!r:.300})")
    return model


# ------------------------------------------------------------------------------------ which layers

def layer_list(text):
    """Parse the numbers of layers: '0-3,7' -> [0, 1, 2, 3, 7], '' -> []. Else raises ValueError."""
    layers = []
    for piece in filter(None, text.split(",")):
        first, _, last = piece.partition("-")
        chosen = range(int(first), int(last or first) + 1)
        if not chosen:
            raise ValueError
        layers += chosen
    return layers


def shape(text):
    """
    Parse the sizes of prelude, core and coda: '4,8,4' -> (4, 8, 4). For a model without a recurrent
    block, '8' -> (8, 0, 0). Raises ValueError for anything else, and if there are no layers.
    """
    if "," not in text:
        text += ",0,0"
    n_prelude, n_core, n_coda = map(natural, text.split(","))
    if n_prelude + n_core + n_coda == 0:
        raise ValueError
    return n_prelude, n_core, n_coda


def choose_layers(args, source):
    """
    Choose the layers of SRC for prelude, core and coda.

    Returns three lists of layer numbers: those of --preset or --shape, unless --prelude, --core or
    --coda override them; with --feed_forward all of them are in the first list. Returns None if OUT
    is to have all parts of SRC as they are. Raises UserError if the flags contradict SRC or each
    other.
    """
    if source.config.n_core:
        for flag in (*PARTS, "preset", "shape", "feed_forward", "adapter"):
            if getattr(args, flag):
                raise UserError(f"--{flag}: SRC is already recurrent, so it takes no layer flags")
        return None
    everything = list(range(source.config.n_prelude))
    last = len(everything) - 1
    layers = [None, None, None]
    sizes = args.shape
    if args.preset:
        _, sizes = presets()[args.preset]
    if sizes:
        n_prelude, n_core, n_coda = sizes
        if sum(sizes) > len(everything):
            raise UserError(f"a shape of {sum(sizes)} layers does not fit: SRC has layers 0-{last}")
        coda_begins = len(everything) - n_coda
        layers = [
            everything[:n_prelude],
            everything[coda_begins - n_core:coda_begins],
            everything[coda_begins:],
        ]
    for i, part in enumerate(PARTS):
        chosen = getattr(args, part)
        if chosen is not None:
            layers[i] = chosen
    if args.feed_forward:
        if layers == [None, None, None]:
            layers[0] = everything
        in_a_row = [layer for chosen in layers if chosen for layer in chosen]
        if not in_a_row:
            raise UserError("--feed_forward: these flags leave no layer to keep")
        layers = [in_a_row, [], []]
    elif args.export and not any(layers):  # an ordinary model is exported as it is
        return None
    elif None in layers or not layers[1]:
        raise UserError("no layers chosen. Give --preset or --shape, or all of --prelude, --core "
                        "(at least one layer) and --coda; or --feed_forward for a model without a "
                        "recurrent block")
    taken = sum(layers, [])
    if len(set(taken) & set(everything)) < len(taken):
        raise UserError(f"layers {taken}: SRC has layers 0-{last}, and each can be taken only once")
    return layers


# --------------------------------------------------------------------------------------- retrofit

def retrofit(source, layers, adapter="linear", untie=False):
    """
    Return the Source with the given layers, three lists of its layer numbers such as ([0, 1],
    [4, 5], [7]), as prelude, core and coda. A recurrent model gets a copy of a tied head, and so
    does an ordinary one with `untie`. build() adds the adapter, which is of the kind `adapter`.
    """
    sizes = [len(chosen) for chosen in layers]
    config = retrofitted(source.config, sizes, adapter)
    tied = source.config.tie_embeddings and not config.n_core and not untie
    config = replace(config, tie_embeddings=tied)
    stored = {name: source.stored[name] for name in ("embed.weight", "norm_f.weight")}
    if not tied:
        stored["head.weight"] = source.stored.get("head.weight", stored["embed.weight"])
    for part, chosen in zip(PARTS, layers):
        for i, layer in enumerate(chosen):
            old = f"prelude.{layer}."
            for name, pieces in source.stored.items():
                if name.startswith(old):
                    stored[f"{part}.{i}.{name.removeprefix(old)}"] = pieces
    return replace(source, config=config, stored=stored)


def print_sizes(source, result):
    """Print a table of the parameters of SRC and OUT, counted as in the paper's Tables 6-8."""
    if source.config.tie_embeddings and not result.config.tie_embeddings:
        size = RecurrentLM.empty(source.config).num_params()["total"]
        print(f"SRC's head is tied to its embeddings, so SRC has {size:,} parameters. OUT gets a "
              "separate head, which starts as a copy. The table counts a head for both, as the "
              "paper does.")
    # If OUT has a head of its own, the paper counts one for a tied SRC, too.
    counted = replace(source.config, tie_embeddings=result.config.tie_embeddings)
    src = RecurrentLM.empty(counted).num_params()
    out = RecurrentLM.empty(result.config).num_params()
    print("parameters            SRC            OUT")
    for part in ("embeddings", "body", *PARTS, "adapter", "total"):
        print(f"{part:10}{src[part]:15,}{out[part]:15,}")


def probe(vocab_size):
    """Return 64 token ids, (1, 64), that are spread over the vocabulary."""
    return torch.arange(64)[None] * 7 % vocab_size


@torch.no_grad()
def verify(args, source, layers):
    """
    Read OUT back from disk and compare it with the kept layers of SRC in a row: on 64 tokens,
    at r = 1, and with an adapter that passes the prelude's output through, all logits must be equal
    to the last bit. If SRC is recurrent, both run at r = 2 with their own adapter. layers: see
    choose_layers(). Raises UserError if any logit differs.
    """
    ids = probe(source.config.vocab_size)
    kept = source
    if layers:
        in_a_row = sum(layers, [])
        kept = retrofit(source, [in_a_row, [], []])
    expected = build(kept).float()
    written = build(open_source(args.out)).float()
    if layers and hasattr(written, "adapter"):
        written.adapter.weight.data = pass_through(written.config.n_embd)
    # Zeros, so that the "add" adapter passes the prelude's output through as well.
    state = torch.zeros(1, 64, written.config.n_embd)
    steps = 1 if layers else 2
    wanted, _ = expected(ids, steps=steps, state=state)
    found, _ = written(ids, steps=steps, state=state)
    if not found.equal(wanted):  # NaN is not equal to itself, either
        raise UserError(f"{args.out} differs from {source.folder}: their logits are not equal. "
                        f"Delete {args.out} and try again")
    print("verify: all logits of 64 tokens are equal to the last bit, in float32")


# ------------------------------------------------------------------------------------------ export

def export(model, folder):
    """
    Write model.safetensors and config.json for other software: in Hugging Face's layout if the
    model has no recurrent block, otherwise in the released models' layout, with our code for
    transformers. folder: a Path, which is created.
    """
    c = model.config
    config = to_raven(c) if c.n_core else to_hf(c)
    tensors = model.state_dict()
    out = {}
    for ours, names in tensor_names(c, config["model_type"]).items():
        t = rotary_order(c, ours, tensors[ours], back=True)
        if len(names) == 3:  # q, k and v, whose sizes may differ
            sizes = model.prelude[0].attn.split
        else:
            sizes = len(t) // len(names)
        out.update(zip(names, t.split(sizes)))
    folder.mkdir()
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    dtype = str(tensors["embed.weight"].dtype).removeprefix("torch.")  # build() gives all this one
    write_json(folder / "config.json", config | {"torch_dtype": dtype})
    if "auto_map" in config:
        shutil.copy(ASSETS / "modeling_loopgraft.py", folder)


@torch.no_grad()
def compare_export(model, folder):
    """
    Load an export with transformers and compare its logits, in float32, with the model's. Converts
    `model` to float32. Prints a note where the comparison is not possible.

    Raises UserError if the logits differ: the two files that compute them, model.py and
    modeling_loopgraft.py, must change together.
    """
    if model.config.norm == "sandwich":
        print("The export was not checked: that takes Huginn's own code, which is not part of "
              "loopgraft.")
        return
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("The export was not checked against the model. To have it checked, "
              "`pip install transformers`.")
        return
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32)
    except Exception as e:  # of transformers, or of the code that it loads
        raise UserError(f"transformers cannot load the export ({e!r:.300})")
    idx = probe(model.config.vocab_size)[:, :model.config.context]
    flags = {}
    state = None
    if model.config.n_core:
        state = model.initial_state(1, idx.shape[1], 0)
        flags = {"num_steps": 3, "initial_state": state}
    wanted, _ = model.float()(idx, steps=3, state=state)
    found = theirs(idx, **flags).logits
    error = ((found - wanted).norm() / wanted.norm()).item()
    if not error < 1e-3:  # NaN fails, too
        raise UserError("transformers computes other logits from the export (relative error "
                        f"{error:.2g}). What changes in model.py must also change in "
                        "assets/modeling_loopgraft.py")
    print("transformers computes the same logits from the export (relative error "
          f"{error:.1g})")


def copy_text_files(source, folder, config):
    """
    Copy the tokenizer's files and generation_config.json, with the BOS and EOS ids of `config` in
    the latter.
    """
    copy_tokenizer(source.folder, folder)
    path = folder / "generation_config.json"
    if path.exists():
        generation = read_json(path)
        generation["bos_token_id"] = config.bos_token_id
        generation["eos_token_id"] = config.eos_token_id
        if source.kind == "huginn_raven":  # Huginn's id, which means nothing to this tokenizer
            generation.pop("pad_token_id", None)
        write_json(path, generation)


def write_tokenizer_config(tokenizer, folder):
    """
    Write tokenizer_config.json: the names of BOS and EOS, and the transformers class that reads the
    tokenizer. For a tokenizer.json that is the class which follows the file to the letter and so
    gives our ids; the classes for Llama and GPT-2 split spaces and digits in ways of their own. For
    a tokenizer.model alone, Llama's class comes closest (assets/model_card.md says where it
    differs).
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    config.pop("auto_map", None)  # it names code that is not in OUT
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
    Write a model card, README.md, from assets/model_card.md. It says what is known about the origin
    of the model. It names data sets and files, but no paths of this machine.
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
    """
    Return what is known about a checkpoint: the base model or None, a list of lines about how it
    was made and how it scored, and an example prompt.
    """
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
    stages = run.get("stages", [])
    if stages:  # a stage says how many updates were planned; this checkpoint may be an earlier one
        stages[-1]["updates"] = run["update"]
    for stage in stages:
        lines.append(f"Trained for {stage['updates']:,} updates on {', '.join(stage['data'])}, "
                     f"with mean_recurrence = {stage['mean_recurrence']}.")
    if run:
        data = Path(run["config"]["data"].split(",")[0].split(":")[0], "meta.json")
        if data.exists():
            prompt = read_json(data)["prompt"]
    evaluated = [folder]
    if folder.name.startswith("step_"):  # evaluations of a run are in the run's folder
        evaluated.append(folder.parent)
    for place in evaluated:
        for path in sorted(place.glob("eval_*.json")):
            lines += describe_scores(read_json(path))
    return base, lines, prompt


def describe_scores(summary):
    """
    Return a line for each task and metric of an evaluation, with its values over r. summary: the
    content of an eval_*.json.
    """
    values = {}  # {title: ["0.95 at r = 4", ...]}
    for row in summary["results"]:
        title = f"{row.get('task', summary['task'])}, {row['metric']}"
        values.setdefault(title, []).append(f"{row['value']:.3g} at r = {row['steps']}")
    return [f"{title}: {'; '.join(over_r)}." for title, over_r in values.items()]


# ------------------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(usage="surgery.py SRC [OUT] [flags]", description=opening(__doc__, 3))
    what, how, output = parser.groups()
    add = what.add_argument
    add("src", metavar="SRC", help="a checkpoint, or - for the shape of a preset, without weights")
    add("out", metavar="OUT", nargs="?", type=Path, help="default: only print the sizes")
    rule = what.add_mutually_exclusive_group().add_argument
    rule("--preset", choices=presets(), metavar="NAME",
         help=f"a known parent and a choice of its layers, one of {', '.join(presets())}")
    rule("--shape", type=shape,
         help="sizes of prelude, core and coda, such as 4,8,4, chosen by the paper's rule; or 8 "
              "with --feed_forward")
    for part in PARTS:
        add(f"--{part}", type=layer_list, help="layers such as 0-3 or 0,2,5-7; '' for none")
    add("--feed_forward", action="store_true",
        help="make a model without a recurrent block: of all layers, or of those that the other "
             "flags choose, in a row")
    add = how.add_argument
    add("--untie", action="store_true",
        help="with --feed_forward: if the head is tied to the embeddings, give it its own copy")
    add("--adapter", choices=ADAPTERS,
        help="how the loop's state s and the prelude's output e are merged: linear (default), a "
             "matrix on both; or add, s + e")
    add("--adapter_init", choices=["identity", "torch"], default="identity",
        help="identity (default): pass the prelude's output through, so that r = 1 equals the kept "
             "layers in a row; torch: the default of torch's Linear, as in the paper")
    add("--mean_recurrence", type=positive,
        help="default r of OUT; set it for released models, whose config.json always says 32")
    add = output.add_argument
    add("--export", choices=["hf"], help="write OUT in Hugging Face layout")
    add("--verify", action="store_true",
        help="check that OUT has exactly the logits of the layers of SRC that it keeps")
    args = parser.parse_args()
    if args.src == "-" and not args.preset:
        parser.error("SRC - needs a --preset")
    if not args.out and (args.verify or args.export):
        parser.error("--verify and --export need an OUT")
    if args.out and args.out.exists():
        raise UserError(f"{args.out} exists already. Choose another OUT")
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
    with write_atomically(args.out) as folder:
        if args.export:
            export(model, folder)
        else:
            model.save(folder)
        copy_text_files(source, folder, result.config)
        if args.export and source.tokenizer:
            write_tokenizer_config(source.tokenizer, folder)
        if layers and not args.export:
            base_model = None
            if not Path(args.src).exists():  # a hub id; a path would mean nothing to others
                base_model, _, _ = args.src.partition("@")
            write_json(folder / "surgery.json", {"base_model": base_model, "layers": layers})
        if (folder / "modeling_loopgraft.py").exists():  # exported with our code for transformers
            write_card(folder, result.config, source)
        if args.export:
            compare_export(model, folder)
    print(f"wrote {args.out}")
    if args.verify:
        verify(args, source, layers)


if __name__ == "__main__":
    cli(main)
