"""
Write a model for other software: a folder in Hugging Face layout, which transformers and vLLM load.

    python -m tools.export RUN OUT             of a run, a checkpoint, or whatever surgery.py reads
    python -m tools.export RUN OUT --verify    read OUT back and compare its logits with RUN's

An ordinary model gets its parent's layout. One with a recurrent block gets the released models'
layout, with a model card and the code that lets transformers load it (modeling_loopgraft.py).
Tensors may be split, but are never rounded. Other software runs an export at one r unless it is
told otherwise: --mean_recurrence, by default that of its training.
"""
import re
import shutil
from dataclasses import fields
from pathlib import Path
from string import Template

from common import Parser, UserError, cli, creating, new_folder, positive, say, write_json

import torch

from data import PATTERNS, Tokenizer, copy_tokenizer, read_optional, tokenizer_file
from model import Config, RecurrentLM, save_tensors
from surgery import RAVEN_KEYS, open_source, rotary_order, tensor_names, verify

HERE = Path(__file__).parent


# ------------------------------------------------------------------------------------- config.json

def to_hf(c):
    """Convert an ordinary model's Config to a config.json dict in Hugging Face layout."""
    if c.embed_scale != 1:
        raise UserError(f"embed_scale = {c.embed_scale}: Hugging Face's layouts for ordinary "
                        "models have no such setting")
    layout = "qwen3" if c.head_norm else "qwen2" if c.qkv_bias else "llama"  # and Mistral
    layout = "olmo2" if c.norm == "post" else layout
    config = shared_keys(c) | {
        "model_type": layout,
        "architectures": [layout.capitalize() + "ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": c.n_embd,
        "num_attention_heads": c.n_head,
        "num_hidden_layers": c.n_prelude,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_embeddings,
    }
    if layout == "olmo2":  # by default pads with token 1, whose embedding would get no gradient
        config["pad_token_id"] = None
    return config


def shared_keys(c):
    """
    Return the keys that have the same name in both layouts. A value of None is written as null on
    purpose: transformers replaces a missing key with its own default.
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


def to_raven(c):
    """Convert a recurrent model's Config to a config.json dict in the released models' layout."""
    config = shared_keys(c) | {
        "model_type": "huginn_raven",
        "n_embd": c.n_embd,
        "n_heads": c.n_head,
        "n_layers_in_prelude": c.n_prelude,
        "n_layers_in_recurrent_block": c.n_core,
        "n_layers_in_coda": c.n_coda,
        "num_hidden_layers": c.depth(c.mean_recurrence),  # in its cache
        "norm": c.norm,
        "head_norm": c.head_norm,
        "qkv_bias": c.qkv_bias,
        "norm_eps": c.norm_eps,
        "tie_embeddings": c.tie_embeddings,
        "injection_type": c.adapter,
        "mean_recurrence": c.mean_recurrence,
        "mean_backprop_depth": c.backprop_depth,
        "init_values": {"std": c.state_std, "embed_scale": c.embed_scale},
        # keys that only the paper's code reads
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


# ------------------------------------------------------------------------------------------- files

# What other software's code and modeling_loopgraft.py know: the names of weights, and the logits of
# small models (see check_known).
KNOWN = re.compile(
    r"(embed|adapter|norm_f|head)\.weight|(prelude|core|coda)\.\d+\.(norm_[1-4]\.weight|"
    r"mlp\.(fc|proj)\.weight|attn\.(qk_bias|qkv\.(weight|bias)|(proj|[qk]_norm)\.weight))")
LOGITS = (
    ({}, (4.0898, 1.3905, -1.3089, -4.0082)),
    ({"norm": "post", "adapter": "add"}, (-0.6448, -0.8711, -1.0974, -1.3236)),
    ({"head_norm": True, "qkv_bias": True, "embed_scale": 3}, (3.1959, 1.4611, -0.2737, -2.0085)),
)


@torch.no_grad()
def check_known(model):
    """
    Raise UserError if model.py is a fork's, with weights, fields of Config or a forward pass that
    other software would ignore.
    """
    new = [name for name in model.state_dict() if not KNOWN.fullmatch(name)]
    new += [item.name for item in fields(Config) if item.name not in RAVEN_KEYS]
    if model.config.adapter not in ("linear", "add"):
        new.append(f"adapter = {model.config.adapter}")
    for more, known in () if new else LOGITS:
        small = RecurrentLM(Config(vocab_size=4, n_embd=8, n_head=2, n_kv_head=1, n_ffn=16,
                                   n_prelude=1, n_core=1, n_coda=1, **more))
        for p in small.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        logits, _ = small(torch.arange(4)[None], steps=3, state=small.initial_state(1, 4, seed=0))
        if not logits[0, -1].allclose(torch.tensor(known), atol=1e-3):
            new = ["other logits"]
    if new:
        raise UserError(f"model.py has changed ({', '.join(new[:3])}), so other software would "
                        "compute something else. Make the same change in modeling_loopgraft.py, "
                        "then adapt check_known() in tools/export.py")


# How to ask a model that train.py has trained, in its card.
TRAINED = """
It was trained without a chat template: a question, then a newline and its answer. So a prompt is
the question alone.
"""


def was_trained(model):
    return Path(model.folder, "train.json").exists()


def export(model, folder):
    """
    Write a model for other software: in Hugging Face's layout if it has no recurrent block,
    otherwise in the released models' layout, with our code for transformers and a model card.
    folder: the Path of an empty folder. config.json is written last.
    """
    check_known(model)
    c = model.config
    config = to_raven(c) if c.n_core else to_hf(c)
    write_text_files(model, folder, config["model_type"])
    tensors = model.state_dict()
    out = {}
    for ours, names in tensor_names(c, config["model_type"]).items():
        t = rotary_order(c, ours, tensors[ours], back=True)
        out.update(zip(names, t.split([rows for rows, *_ in names.values()])))
    if "auto_map" in config:
        shutil.copyfile(HERE / "modeling_loopgraft.py", folder / "modeling_loopgraft.py")
        card = Template((HERE / "model_card.md").read_text()).substitute(
            name=folder.name, layers=f"({c.n_prelude},{c.n_core},{c.n_coda})",
            mean_recurrence=c.mean_recurrence, slots=c.depth(c.mean_recurrence),
            trained=TRAINED if was_trained(model) else "")
        (folder / "README.md").write_text(card)
    save_tensors(folder / "model.safetensors", out)
    dtype = str(tensors["embed.weight"].dtype).removeprefix("torch.")  # all have this one
    write_json(folder / "config.json", config | {"torch_dtype": dtype})


def is_qwens(spec):
    """Whether a tokenizer.json splits a text as transformers' Qwen2Tokenizer does, whose words
    replace those of the file."""
    match spec:
        case {"model": {"type": "BPE"}, "normalizer": {"type": "NFC"},
              "pre_tokenizer": {"pretokenizers": [
                  {"pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
                  {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}}:
            return words == PATTERNS[1]
    return False


def write_text_files(model, folder, layout):
    """
    Copy the tokenizer's files and generation_config.json, and tell transformers what BOS and EOS
    are. If train.py has trained the model, its parent's chat template, which data.py never uses,
    and settings of sampling are left out. layout: the model_type of OUT.

    tokenizer_config.json names the class that reads the tokenizer as we do. PreTrainedTokenizerFast
    reproduces the ids of a tokenizer.json. With a tokenizer.model alone, LlamaTokenizer comes
    closest: it differs in leading and repeated spaces, and after control tokens.
    """
    copy_tokenizer(model.folder, folder)
    if generation := read_optional(folder, "generation_config.json"):
        generation |= {"bos_token_id": model.config.bos_token_id,
                       "eos_token_id": model.config.eos_token_id}
        if generation.get("pad_token_id") == 65509:  # Huginn's, whatever a released model's is
            del generation["pad_token_id"]
        if was_trained(model):
            generation = {key: generation[key] for key in generation if key.endswith("token_id")}
        write_json(folder / "generation_config.json", generation)
    if not tokenizer_file(folder):
        return
    spec = read_optional(folder, "tokenizer.json")
    if layout == "qwen2" and not is_qwens(spec):
        raise UserError(f"{model.folder}: transformers 5 reads any tokenizer of an ordinary Qwen2 "
                        "as Qwen's own, so it would split a text into other tokens. To export the "
                        "weights alone, copy this folder without its tokenizer")
    tokenizer = Tokenizer.load(folder)
    config = read_optional(folder, "tokenizer_config.json")
    config.pop("auto_map", None)  # it names code that is not in OUT
    if isinstance(config.get("extra_special_tokens"), list):  # of transformers 5; 4.57 needs a dict
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if was_trained(model):
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    names = {i: name for name, i in tokenizer.special.items()}
    for key, i in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if i in names and not config.get(key):
            config[key] = names[i]
    if (folder / "tokenizer.json").exists():
        config |= {"tokenizer_class": "PreTrainedTokenizerFast",
                   "model_input_names": ["input_ids", "attention_mask"]}
    else:
        config |= {"tokenizer_class": "LlamaTokenizer",
                   "add_bos_token": tokenizer.bos_id is not None}
    write_json(folder / "tokenizer_config.json", config)


def main():
    parser = Parser(__doc__, usage="python -m tools.export RUN OUT [--verify]")
    flag = parser.add_argument
    flag("run", metavar="RUN", help="a run, a checkpoint, or whatever surgery.py reads")
    flag("out", metavar="OUT", type=new_folder, help="a new folder")
    flag("--verify", action="store_true", help="check that OUT has exactly the logits of RUN")
    flag("--mean_recurrence", type=positive, metavar="R",
         help="the r at which other software runs OUT by default; default: that of the training")
    args = parser.parse_args()
    model = open_source(args.run)
    if args.mean_recurrence:
        if not model.config.n_core:
            raise UserError(f"--mean_recurrence: {args.run} has no recurrent block")
        model.config.mean_recurrence = args.mean_recurrence
    with creating(args.out):
        export(model, args.out)
        if args.verify:
            verify(model, None, args.out)
    say(f"wrote {args.out}")
    if (c := model.config).n_core:
        say(f"It runs at r = {c.mean_recurrence} by default and then caches keys and values of "
            f"{c.depth(c.mean_recurrence)} layers. For another r, give num_steps= in transformers, "
            f"or serve it with vllm's --hf-overrides '{{\"mean_recurrence\": 8}}'")


if __name__ == "__main__":
    cli(main)
