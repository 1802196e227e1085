"""
Turn a pretrained model into a depth-recurrent one. Early layers become the prelude, later ones the
recurrent block and the coda, those in between are dropped, and a fresh adapter joins them.

    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21 --verify
    python surgery.py SRC OUT --feed_forward                    all layers, unchanged: the parent
    python surgery.py SRC OUT --feed_forward --shape 4,8,4      those layers in a row, no recurrence
    python surgery.py SRC OUT --export hf                       ours, back in Hugging Face layout
    python surgery.py - --preset tinyllama-4-8-4                the sizes of its parts, no weights
    python surgery.py - OUT --preset tinyllama-4-8-4            config.json alone, to plan training

SRC is a folder, or a hub id: org/name or org/name@REVISION (pip install huggingface_hub). It holds
a Llama, Mistral, SmolLM2, Qwen2, Qwen3 or OLMo-2 in Hugging Face layout, a checkpoint or run of our
own, or a released Recurrent-* model or Huginn-0125, which are recurrent already and take no layer
flags. OUT is a loopgraft checkpoint. With --export hf it has the Hugging Face layout if it is
feed-forward, else that of the released models, with code that lets transformers load it
(assets/modeling_loopgraft.py) and a model card. Tensors are stacked and taken apart, never rounded.

Paper: arXiv 2511.07384, section 3 and Tables 6-8. Its rule, which --shape follows, takes the
prelude from the start, and core and coda from the end. --prelude, --core and --coda replace what
--preset or --shape would take.
"""
import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import Parser, UserError, cli, natural, positive, read_json, whole, write_json
from data import TOKENIZER_FILES, Tokenizer, check_tokenizer, copy_tokenizer
from model import Config, RecurrentLM, find_checkpoint, load_config, presets

PARTS = ("prelude", "core", "coda")
ASSETS = Path(__file__).parent / "assets"


# ------------------------------------------------------------------------------------- the layouts

# The fields of our Config and their keys in config.json, for import and export. What is None here
# is null there: where a key is missing, transformers would take a default of its own.
SAME = ("vocab_size", "head_dim", "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id")
HF_KEYS = dict(zip(SAME, SAME)) | {
    "n_ffn": "intermediate_size",
    "n_kv_head": "num_key_value_heads",
    "context": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_prelude": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
RAVEN_KEYS = HF_KEYS | {  # of the released models; only ours have those that say where norms are
    "n_embd": "n_embd",
    "n_head": "n_heads",
    "n_prelude": "n_layers_in_prelude",
    "n_core": "n_layers_in_recurrent_block",
    "n_coda": "n_layers_in_coda",
    "norm": "norm",
    "head_norm": "head_norm",
    "qkv_bias": "qkv_bias",
    "norm_eps": "norm_eps",
    "tie_embeddings": "tie_embeddings",
    "adapter": "injection_type",
    "mean_recurrence": "mean_recurrence",
    "backprop_depth": "mean_backprop_depth",
    "state_std": "std",            # in init_values
    "embed_scale": "embed_scale",  # in init_values
}
SUPPORTED = {  # what config.json may say; a missing key means the first
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "huginn_raven"),
    "rope_type": ("default", "llama3"),
    "type": ("default", "llama3"),  # rope_type in old files
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "injection_type": ("linear", "add"),
}

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
    """Our tensor name -> the names in the layout of that model_type, in stacking order."""
    names = {}
    for ours, _ in RecurrentLM.empty(config).named_parameters():
        first, _, rest = ours.partition(".")
        if kind == "loopgraft":
            theirs = [ours]
        elif kind == "huginn_raven":
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


def read_config(folder, names):
    """
    (model_type, Config) of a folder in any layout. A feed-forward model is all prelude. The names
    of the tensors tell where the norms are. UserError if config.json asks for what we lack.
    """
    path = Path(folder, "config.json")
    raw = read_json(path)
    try:
        kind = raw.get("model_type")
        if kind == "loopgraft":
            return kind, load_config(folder)
        return kind, convert_config(path, {"rms_norm_eps": 1e-6} | raw, " ".join(names))
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path}: is damaged, or of an unknown kind ({e!r})")


def convert_config(path, raw, names):
    """The content of another layout's config.json -> Config. names: of all tensors."""
    kind = raw["model_type"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    raw |= rope | raw.get("init_values", {})  # transformers 5 has rope_theta in rope_parameters
    for key, supported in SUPPORTED.items():
        if raw.get(key, supported[0]) not in supported:
            raise UserError(f"{path}: {key} {raw[key]!r} is not supported, only {supported}")
    rope.pop("rope_theta", None)
    raw["rope_scaling"] = rope if "factor" in rope else None
    raw.setdefault("max_position_embeddings", raw.get("block_size"))
    raw.setdefault("tie_embeddings", raw.get("tie_word_embeddings"))
    window = raw.get("sliding_window")  # Qwen's is used if use_sliding_window says so
    if kind == "mistral" and window and window < raw["max_position_embeddings"]:
        raise UserError(f"{path}: a sliding_window of {window} tokens, shorter than the context of "
                        f"{raw['max_position_embeddings']}, is not supported")
    if kind == "huginn_raven":
        keys = RAVEN_KEYS
        if "norm" not in raw:  # the paper's file: its ids are Huginn's, whatever the tokenizer
            raw |= {"norm": "post" if ".q_norm." in names else "pre",
                    "bos_token_id": None, "eos_token_id": None}
        if ".qk_bias" in names:  # Huginn; others have a rope_base, too, and never read it
            raw |= {"norm": "sandwich", "rope_theta": raw["rope_base"]}
    else:
        keys = HF_KEYS | {key: key for key in ("norm", "head_norm", "qkv_bias")}
        raw |= {"norm": "post" if kind == "olmo2" else "pre",
                "head_norm": kind == "qwen3", "qkv_bias": kind == "qwen2"}
        generation = path.with_name("generation_config.json")
        if generation.exists():  # a chat model's names more ends of a text
            ends = read_json(generation).get("eos_token_id")
            raw["eos_token_id"] = raw.get("eos_token_id") if ends is None else ends
    fields = {ours: raw[key] for ours, key in keys.items() if raw.get(key) is not None}
    return Config(**{"n_kv_head": fields["n_head"]} | fields)


def rotary_order(c, name, t, back=False):
    """
    Huginn rotates adjacent pairs where Llama pairs the halves of a head. These are the same numbers
    in another order of q's and k's rows. Reorders our tensor `name` from pairs to halves, or back;
    one of another model stays as it is.
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
            config.bos_token_id = source.tokenizer.bos_id
            config.eos_token_id = source.tokenizer.eos_id
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
            raise UserError(f"{source.folder}: tensor {min(missing)!r} is missing: incomplete, or "
                            "of another model than config.json says")
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
    The Source as a model, its weights as stored. An adapter that it lacks is made, for
    [state, prelude output]: [0 | I] for "identity", torch's Linear init for "default".
    """
    model = RecurrentLM.empty(source.config)
    C = source.config.n_embd
    try:
        tensors = read_all(source)
        if hasattr(model, "adapter") and "adapter.weight" not in tensors:
            adapter = pass_through(C)
            if adapter_init == "default":
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
    """'4,8,4' -> (4, 8, 4); '8', of a feed-forward model, -> (8, 0, 0)."""
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
    """The numbers of parameters of SRC and OUT, as the paper's Tables 6-8 have them."""
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
    Write model.safetensors and config.json for others: in the released layout, with our code for
    transformers, or in Hugging Face's of its kind if the model is feed-forward.
    """
    c = model.config
    tensors = model.state_dict()
    out = {}
    config = export_config(c)
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


def export_config(c):
    """The config.json for others as a dict, without torch_dtype."""
    keys = RAVEN_KEYS if c.n_core else HF_KEYS
    config = {theirs: getattr(c, ours) for ours, theirs in keys.items()}
    if not c.n_core:
        if c.embed_scale != 1:
            raise UserError(f"embed_scale {c.embed_scale}: no feed-forward layout has it")
        kind = "llama"  # Mistral without a window is one, too
        if c.norm == "post":
            kind = "olmo2"
        elif c.head_norm or c.qkv_bias:
            kind = "qwen3" if c.head_norm else "qwen2"
        return config | {"model_type": kind, "hidden_act": "silu",
                         "architectures": [kind.capitalize() + "ForCausalLM"]}
    config |= {
        "model_type": "huginn_raven",
        "num_hidden_layers": c.n_prelude + c.mean_recurrence * c.n_core + c.n_coda,  # in a cache
        "init_values": {key: config.pop(key) for key in ("std", "embed_scale")},
        # What the paper's code reads besides.
        "padded_vocab_size": c.vocab_size,
        "block_size": c.context,
        "qk_bias": c.norm == "sandwich",
    }
    if c.norm == "sandwich":  # Huginn has code of its own
        return config | {"rope_base": config.pop("rope_theta")}
    return config | {"architectures": ["LoopgraftForCausalLM"], "auto_map": {
        "AutoConfig": "modeling_loopgraft.LoopgraftConfig",
        "AutoModel": "modeling_loopgraft.LoopgraftModel",
        "AutoModelForCausalLM": "modeling_loopgraft.LoopgraftForCausalLM"}}


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
    blanks and digits in ways of their own. For a tokenizer.model alone Llama's comes nearest (see
    CARD).
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

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [loopgraft, depth-recurrent]
---
# {name}

A depth-recurrent language model ([arXiv 2511.07384](https://arxiv.org/abs/2511.07384)) of
({c.n_prelude},{c.n_core},{c.n_coda}) layers: prelude, recurrent block and coda. The recurrent block
runs `num_steps` times (default {c.mean_recurrence}).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "ORGANISATION/{name}"
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
out = model.generate(**inputs, num_steps={c.mean_recurrence}, max_new_tokens=32)
print(tokenizer.decode(out[0], skip_special_tokens=True))
```

- `from_pretrained(name, trust_remote_code=True, mean_recurrence=8)` sets the default of
  `num_steps`, which `generate_batch` and an assistant model take.
- A cache belongs to one `num_steps`: it has keys and values of each layer of each recurrence.
- `output_hidden_states=True` gives the initial state and the state after each recurrence.
- LoRA: `target_modules=["Wqkv", "fc", "proj", "adapter"]`.
- vLLM serves one `num_steps`, {c.mean_recurrence} by default; another depth takes another server:
  `vllm serve name --trust-remote-code --hf-overrides '{{"mean_recurrence": 8}}' --port 8001`
- The tokenizer reads `</s>` and the like in a text as control tokens, whoever wrote the text. If
  it is a tokenizer.model alone, it takes `pip install sentencepiece protobuf`, and transformers
  splits blanks that lead or repeat, and what follows a control token, in ways of its own.
- The weights are under the licence of the model and the data that they were made from, the code
  under MIT.
"""


# ------------------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("src", help="a checkpoint, or - for a preset's shape without weights")
    add("out", nargs="?", type=Path, help="default: only print the sizes")
    rule = parser.add_mutually_exclusive_group().add_argument
    rule("--preset", choices=presets(), help="a known parent, and the choice of its layers")
    rule("--shape", type=shape, help="sizes of the parts, such as 4,8,4, or 8 with "
         "--feed_forward, by the paper's rule")
    for part in PARTS:
        add(f"--{part}", type=layer_list, help="layers such as 0-3 or 0,2,5-7; '' for none")
    add("--feed_forward", action="store_true",
        help="a model without recurrent block: all layers, or those of the other flags in a row")
    add("--untie", action="store_true", help="give a tied feed-forward model a head of its own")
    add("--adapter", choices=["linear", "add"], help="default: linear")
    add("--adapter_init", choices=["identity", "default"], default="identity",
        help="identity (default): pass the prelude's output through, so that r = 1 equals the kept "
             "layers in a row; default: torch's Linear init, as the paper")
    add("--mean_recurrence", type=positive,
        help="the result's default r (the released models' config.json always says 32)")
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
        result.config.mean_recurrence = args.mean_recurrence
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
            write_json(folder / "surgery.json", {"source": args.src, "layers": layers})
        if (folder / "modeling_loopgraft.py").exists():
            card = CARD.format(name=folder.name, c=result.config)
            (folder / "README.md").write_text(card, "utf-8")
    print(f"wrote {args.out}")
    if args.verify:
        verify(args, source, layers)


if __name__ == "__main__":
    cli(main)
