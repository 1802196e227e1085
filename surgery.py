"""
Turn a pretrained model into a depth-recurrent one: early layers become the prelude, later ones the
recurrent block and the coda, those in between are dropped, and a fresh adapter joins them.

    python surgery.py SRC OUT --prelude 0-3 --core 10-17 --coda 18-21
    python surgery.py SRC OUT --preset tinyllama-4-8-4
    python surgery.py SRC OUT --feed-forward            all layers, unchanged: the parent

SRC is a Hugging Face folder of the Llama or OLMo-2 architecture (config.json, safetensors, the
tokenizer's file), a feed-forward checkpoint or run of our own, or a released Recurrent-* model, which
already is recurrent and takes no layer flags. Only the tensors that are kept are read; their precision
stays. OUT is a nanoloop checkpoint.

Paper: arXiv 2511.07384, section 3 and Table 8. The paper's rule takes core and coda from the end.
"""
import argparse
import os
from dataclasses import replace

import torch

from data import Tokenizer
from model import (STATE_STD, TOKENIZER_FILES, Config, InputError, RecurrentLM, cli, find_checkpoint, load_config,
                   read_json, read_tensors, tensor_files)

PRESETS = {  # name: layers of the source, prelude, core, coda (the paper's Table 8, 0-based)
    "tinyllama-2-4-2": (22, "0-1", "16-19", "20-21"),
    "tinyllama-4-8-4": (22, "0-3", "10-17", "18-21"),
    "tinyllama-6-10-6": (22, "0-5", "6-15", "16-21"),
    "llama-3.2-1b-2-4-2": (16, "0-1", "10-13", "14-15"),
    "llama-3.2-1b-4-6-4": (16, "0-3", "6-11", "12-15"),
    "olmo-2-1b-4-6-4": (16, "0-3", "6-11", "12-15"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src")
    parser.add_argument("out")
    for part in ("prelude", "core", "coda"):
        parser.add_argument(f"--{part}", metavar="LAYERS", help="such as 0-3 or 0,2,5-7; '' for none")
    parser.add_argument("--preset", choices=PRESETS, help="the paper's choices of layers")
    parser.add_argument("--feed-forward", action="store_true", help="take all layers, unchanged")
    parser.add_argument("--adapter", choices=("linear", "add"), default="linear")
    parser.add_argument("--adapter-init", choices=("identity", "default"), default="identity",
                        help="identity: pass the prelude's output through, so that r = 1 equals the kept layers "
                             "run in a row; default: torch's Linear init, as the paper")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter's default init")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")
    args = parser.parse_args()
    if os.path.exists(args.out) and not args.overwrite:
        raise InputError(f"{args.out}: exists already: choose another OUT or add --overwrite")
    if os.path.exists(args.out) and not os.path.exists(os.path.join(args.out, "model.safetensors")):
        raise InputError(f"{args.out}: is not a checkpoint folder, so --overwrite leaves it: choose another OUT")
    args.src = find_checkpoint(args.src)

    raw = read_json(os.path.join(args.src, "config.json"))
    flags = [f for f in ("prelude", "core", "coda", "preset") if getattr(args, f) is not None]
    if raw.get("model_type") == "huginn_raven":
        if flags or args.feed_forward:
            raise InputError(f"--{(flags + ['feed-forward'])[0]}: {args.src} is recurrent already: drop the flag")
        model = from_raven(args.src, raw)
    else:
        native = raw.get("model_type") == "nanoloop"
        try:
            config = load_config(args.src) if native else hf_config(args.src, raw)
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
            raise InputError(f"{os.path.join(args.src, 'config.json')}: a value is of the wrong kind ({e})")
        if config.n_core:
            raise InputError(f"{args.src}: has a recurrent block already: name its feed-forward parent")
        n_layer = config.n_prelude + config.n_coda
        if args.feed_forward:
            if flags:
                raise InputError(f"--{flags[0]}: --feed-forward takes all layers: drop one of the two")
            layers = list(range(n_layer)), [], []
        else:
            layers = choose_layers(args, n_layer)
        model = (from_nanoloop if native else from_hf)(
            args.src, config, layers, args.adapter, init_adapter(config.n_embd, args.adapter_init, args.seed))
        for part, chosen in zip(("prelude", "core", "coda"), layers):
            print(f"{part:8s} layers {' '.join(map(str, chosen)) or '-'}")
        dropped = sorted(set(range(n_layer)) - set(sum(layers, [])))
        print(f"dropped  layers {' '.join(map(str, dropped)) or '-'}")

    if any(os.path.exists(os.path.join(args.src, file)) for file in TOKENIZER_FILES):
        ids = Tokenizer.load(args.src).vocab_size
        if ids > model.config.vocab_size:
            raise InputError(f"{args.src}: the tokenizer has ids up to {ids - 1}, the vocabulary of config.json ends at "
                             f"{model.config.vocab_size - 1}: the tokenizer is of another model")
    else:
        print(f"note: {args.src} has no {' or '.join(TOKENIZER_FILES)}: OUT will have no tokenizer")
    for name, count in model.num_params().items():
        print(f"{name:10s} {count:15,d}")
    model.save(args.out, tokenizer=args.src)
    print(f"wrote {args.out}")


def parse_layers(flag, text):
    """'0-3,7' -> [0, 1, 2, 3, 7]; '' -> []"""
    layers = []
    for piece in filter(None, text.split(",")):
        first, dash, last = piece.partition("-")
        try:
            some = range(int(first), int(last if dash else first) + 1)
            layers += some if some else [int("none")]
        except ValueError:
            raise InputError(f"--{flag} {text}: write layers as 0-3 or 0,2,5-7")
    return layers


def choose_layers(args, n_layer):
    """The three lists of layers, from --preset or the three flags; InputError if they cannot be."""
    texts = args.prelude, args.core, args.coda
    if args.preset:
        if any(text is not None for text in texts):
            raise InputError("--preset: names all layers itself: drop --prelude, --core and --coda")
        expected, *texts = PRESETS[args.preset]
        if expected != n_layer:
            raise InputError(f"--preset {args.preset}: is for models of {expected} layers, {args.src} has {n_layer}")
    elif None in texts:
        raise InputError(f"--{('prelude', 'core', 'coda')[texts.index(None)]}: is missing: give all three, or --preset, "
                         "or --feed-forward")
    layers = [parse_layers(flag, text) for flag, text in zip(("prelude", "core", "coda"), texts)]
    seen = {}
    for flag, chosen in zip(("prelude", "core", "coda"), layers):
        for i in chosen:
            if not 0 <= i < n_layer:
                raise InputError(f"--{flag}: layer {i} does not exist: {args.src} has layers 0-{n_layer - 1}")
            if i in seen:
                raise InputError(f"--{flag}: layer {i} is taken by --{seen[i]} already")
            seen[i] = flag
    if not layers[1]:
        raise InputError("--core: needs at least one layer (--feed-forward makes a model without recurrent block)")
    return layers


def init_adapter(C, kind, seed=0):
    """(C, 2C) float32 on [state, prelude output]. identity: [0 | I]; default: as nn.Linear's own."""
    if kind == "identity":
        return torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1)
    bound = (2 * C) ** -0.5
    return torch.empty(C, 2 * C).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- Hugging Face layout

def first_id(value):
    """A token id of config.json: an integer, a list of them, or null."""
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def need(folder, raw, *keys):
    """The first of `keys` that config.json has."""
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    raise InputError(f"{os.path.join(folder, 'config.json')}: lacks {keys[0]}")


def hf_config(folder, raw):
    """
    Config of the whole source as a feed-forward model, from config.json as transformers 4 or 5
    writes it. InputError for an architecture that this model class is not.
    """
    path = os.path.join(folder, "config.json")
    kind = raw.get("model_type")
    if kind not in ("llama", "olmo2"):
        raise InputError(f"{path}: model_type {kind!r} is not supported: only llama, olmo2 and huginn_raven are")
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key, wanted) != wanted:
            raise InputError(f"{path}: {key}={raw[key]!r} is not supported, only {wanted!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    n_head = need(folder, raw, "num_attention_heads")
    return Config(
        vocab_size=need(folder, raw, "vocab_size"), n_embd=need(folder, raw, "hidden_size"), n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head, n_ffn=need(folder, raw, "intermediate_size"),
        n_prelude=need(folder, raw, "num_hidden_layers"), n_core=0, n_coda=0, head_dim=raw.get("head_dim") or 0,
        norm="post" if kind == "olmo2" else "pre", norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=None if plain else {k: v for k, v in rope.items() if k != "rope_theta"},
        context=need(folder, raw, "max_position_embeddings"), tie_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=first_id(raw.get("bos_token_id")), eos_token_id=first_id(raw.get("eos_token_id")))


def from_hf(folder, config, layers, adapter, adapter_weight=None):
    """
    A RecurrentLM of the given layers (three lists of numbers in the source), all else from the
    source; feed-forward where the core is empty. A tied head becomes a copy in a recurrent model.
    adapter: "linear", with adapter_weight (C, 2C), or "add".
    """
    c, tied = retrofit_config(config, layers, adapter), config.tie_embeddings
    norms = ("input_layernorm", "post_attention_layernorm") if c.norm == "pre" else \
        ("post_attention_layernorm", "post_feedforward_layernorm")
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    parts = {  # ours: the source's tensors that are stacked into it, and their shapes
        "norm_1": {norms[0]: (c.n_embd,)}, "norm_2": {norms[1]: (c.n_embd,)},
        "attn.qkv": {f"self_attn.{x}_proj": (n, c.n_embd) for x, n in (("q", q), ("k", kv), ("v", kv))},
        "attn.proj": {"self_attn.o_proj": (c.n_embd, q)},
        "mlp.fc": {f"mlp.{x}_proj": (c.n_ffn, c.n_embd) for x in ("gate", "up")},
        "mlp.proj": {"mlp.down_proj": (c.n_embd, c.n_ffn)}}
    if c.norm == "post":
        parts |= {f"attn.{x}_norm": {f"self_attn.{x}_norm": (n,)} for x, n in (("q", q), ("k", kv))}
    table = (c.vocab_size, c.n_embd)
    plan = {"embed": {"model.embed_tokens.weight": table}, "norm_f": {"model.norm.weight": (c.n_embd,)},
            "head": {"model.embed_tokens.weight" if tied else "lm_head.weight": table}}
    for part, chosen in zip(("prelude", "core", "coda"), layers):
        for i, layer in enumerate(chosen):
            for ours, theirs in parts.items():
                plan[f"{part}.{i}.{ours}"] = {f"model.layers.{layer}.{k}.weight": v for k, v in theirs.items()}
    read = read_tensors(folder, {k: shape for theirs in plan.values() for k, shape in theirs.items()})
    state = {f"{ours}.weight": torch.cat([read[k] for k in theirs]) if len(theirs) > 1 else read[next(iter(theirs))]
             for ours, theirs in plan.items()}
    return assemble(c, state, tied, adapter_weight)


def retrofit_config(config, layers, adapter):
    """The source's Config with the new numbers of layers; a recurrent model has untied embeddings."""
    sizes = dict(zip(("n_prelude", "n_core", "n_coda"), map(len, layers)))
    return replace(config, **sizes, adapter=adapter, tie_embeddings=config.tie_embeddings and not sizes["n_core"])


def assemble(config, state, tied, adapter_weight):
    """A RecurrentLM of the tensors in `state`, whose source was tied or not, and the adapter's weight."""
    model = RecurrentLM.empty(config)
    if tied:
        state["head.weight"] = state["embed.weight"].clone()
    if config.n_core and config.adapter == "linear":
        state["adapter.weight"] = adapter_weight.type_as(state["embed.weight"])
    model.fill(state)
    return model


def from_nanoloop(folder, config, layers, adapter, adapter_weight=None):
    """As from_hf(), from a feed-forward checkpoint of our own."""
    shapes = RecurrentLM.empty(config).state_shapes()
    blocks = [f"prelude.{i}." for i in range(config.n_prelude)] + [f"coda.{i}." for i in range(config.n_coda)]
    source = {name: name for name in ("embed.weight", "norm_f.weight", "head.weight") if name in shapes}
    for part, chosen in zip(("prelude", "core", "coda"), layers):
        for i, layer in enumerate(chosen):
            source |= {f"{part}.{i}.{name.removeprefix(blocks[layer])}": name
                       for name in shapes if name.startswith(blocks[layer])}
    read = read_tensors(folder, {name: shapes[name] for name in source.values()})
    state = {ours: read[name] for ours, name in source.items()}
    return assemble(retrofit_config(config, layers, adapter), state, config.tie_embeddings, adapter_weight)


# ---------------------------------------------------------------- the released models' layout

def from_raven(folder, raw):
    """A RecurrentLM from a released Recurrent-* folder (model_type huginn_raven); REFERENCE: its modelling code."""
    rename = {"embed": "transformer.wte", "norm_f": "transformer.ln_f", "head": "lm_head", "adapter": "transformer.adapter",
              "core": "transformer.core_block", "prelude": "transformer.prelude", "coda": "transformer.coda"}
    names = tensor_files(folder)
    if any(name.endswith("qk_bias") for name in names):
        raise InputError(f"{folder}: Huginn's own block style is not supported, only the retrofitted Recurrent-* models")
    init = raw.get("init_values", {})
    c = Config(
        vocab_size=need(folder, raw, "vocab_size", "padded_vocab_size"), n_embd=need(folder, raw, "n_embd"),
        n_head=need(folder, raw, "n_heads"), n_kv_head=need(folder, raw, "num_key_value_heads", "n_heads"),
        n_ffn=need(folder, raw, "intermediate_size"), n_prelude=need(folder, raw, "n_layers_in_prelude"),
        n_core=need(folder, raw, "n_layers_in_recurrent_block"), n_coda=need(folder, raw, "n_layers_in_coda"),
        head_dim=raw.get("head_dim") or 0, norm="post" if any(".q_norm." in name for name in names) else "pre",
        norm_eps=need(folder, raw, "norm_eps"), rope_theta=float(raw.get("rope_theta") or 10000.0),  # never rope_base
        rope_scaling=raw.get("rope_scaling"), context=raw.get("max_position_embeddings") or need(folder, raw, "block_size"),
        tie_embeddings=bool(raw.get("tie_embeddings", raw.get("tie_word_embeddings", False))),
        adapter="linear" if "transformer.adapter.weight" in names else "add",
        state_std=init.get("std", STATE_STD), embed_scale=init.get("embed_scale", 1.0),
        mean_recurrence=raw.get("mean_recurrence", 32), backprop_depth=raw.get("mean_backprop_depth", 8),
        bos_token_id=first_id(raw.get("bos_token_id")), eos_token_id=first_id(raw.get("eos_token_id")))
    model = RecurrentLM.empty(c)
    theirs = {}
    for name in model.state_shapes():
        first, _, rest = name.partition(".")
        theirs[name] = f"{rename[first]}.{rest}".replace("attn.qkv", "attn.Wqkv")
    read = read_tensors(folder, {theirs[name]: shape for name, shape in model.state_shapes().items()})
    ignored = sorted(names.keys() - theirs.values())
    if ignored:
        print(f"note: ignored {len(ignored)} tensors that the model does not use: {' '.join(ignored[:4])}")
    model.fill({name: read[k] for name, k in theirs.items()})
    return model


if __name__ == "__main__":
    cli(main)
