"""
A depth-recurrent Llama or OLMo-2 for transformers 5 (and 4.57), exported by loopgraft.

    e   = prelude(embed(ids))             a few ordinary layers, once
    s   = core(adapter([s, e]))           num_steps times, from noise, with the same weights
    out = head(norm(coda(s)))             a few ordinary layers, once

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), num_steps=16)

from_pretrained(FOLDER, mean_recurrence=16) sets the default of num_steps. Tensors and config keys
have the names of the released Recurrent-* models (arXiv 2511.07384). The residual stream stays
float32. vLLM runs the model through its Transformers backend, which parses and rewrites some of
this source (README.md has the command).
"""
import copy
import inspect
import math

import torch
import torch.nn as nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils import can_return_tuple

# Before transformers 5.6, create_causal_mask() needs the cache positions of the new tokens. From
# 5.24 on, it and forward() take past_key_values under the name `cache`.
MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
NEEDS_COLUMNS = "cache_position" in MASK_ARGUMENTS
CACHE = "cache" if "cache" in MASK_ARGUMENTS else "past_key_values"


class LoopgraftConfig(PretrainedConfig):
    """The content of config.json. The fields below have defaults, since a file may lack them."""
    model_type = "huginn_raven"
    attribute_map = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "tie_word_embeddings": "tie_embeddings",
    }
    base_model_tp_plan = {  # for tensor parallelism in vLLM, which finds Wqkv by itself
        "*.attn.proj": "rowwise",
        "*.mlp.fc": "colwise_gather_output",
        "*.mlp.proj": "rowwise_split_input",
    }
    has_no_defaults_at_init = True    # sizes have no defaults; config.json has them
    norm: str = "pre"                 # pre: Llama; post: OLMo-2, with norms on q and k
    head_norm: bool = False           # Qwen3: a norm on each head of q and of k
    qkv_bias: bool = False            # Qwen2: biases on q, k and v
    rope_scaling: dict | None = None  # the "llama3" scaling
    tie_embeddings: bool = False
    noise_seed: int = 0               # seed of the initial state
    bos_token_id = None
    eos_token_id = None
    pad_token_id = None

    def slots(self, r):
        """
        The number of slots of a cache: one for each layer of prelude and coda, and one for each
        core layer of each recurrence.
        """
        return (self.n_layers_in_prelude + r * self.n_layers_in_recurrent_block
                + self.n_layers_in_coda)

    @property
    def num_hidden_layers(self):  # where transformers looks for the number of slots
        return self.slots(self.mean_recurrence)

    @num_hidden_layers.setter
    def num_hidden_layers(self, value):
        pass  # mean_recurrence decides, whatever config.json says

    def to_dict(self):
        return super().to_dict() | {"num_hidden_layers": self.num_hidden_layers}


# Copies of loopgraft's model.py: RMSNorm, mix() and truncated_normal(). Keep them in sync.

class RMSNorm(nn.RMSNorm):
    """Normalize in float32, cast to the weights' dtype, then scale: the order that Llama has."""

    def forward(self, x):
        x = nn.functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return x.to(self.weight.dtype) * self.weight


def mix(x):
    """A hash of 32-bit numbers (splitmix32), the same on every device."""
    x = x + 0x9E3779B9
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= 0xFFFFFFFF
    x ^= x >> 15
    x *= 0x735A2D97
    x &= 0xFFFFFFFF
    x ^= x >> 15
    return x


def truncated_normal(seed, row, position, C):
    """
    Normal numbers (..., C), truncated at 3 standard deviations. Each depends only on the seed, the
    row, the position and the channel. row and position: int64, (...).
    """
    key = mix(mix(mix(seed) + row) + position)
    bits = mix(key[..., None] + torch.arange(C, device=key.device))
    edge = math.erf(3 / math.sqrt(2))  # within 3 std
    uniform = ((bits >> 8) - 2**23).float() * (edge / 2**23)  # 24 bits, exact in float32
    return uniform.erfinv_().mul_(math.sqrt(2))


def rope_table(config, position_ids):
    """Return cos and sin, each (B, T, head_dim) float32, for positions (B, T)."""
    pairs = torch.arange(0, config.head_dim, 2, device=position_ids.device)
    f = 1.0 / config.rope_theta ** (pairs.float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling:  # Llama 3.1 stretches long wavelengths, keeps short ones, and blends in between
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * f / (2 * torch.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        f = f * (smooth + (1 - smooth) / scaling["factor"])
    angle = position_ids[..., None].float() * torch.cat((f, f))
    return angle.cos(), angle.sin()


class Slot(nn.Module):
    """
    Attention without weights, for one slot of a cache. vLLM, which reads this source, needs such an
    object for each slot.
    """

    def __init__(self, config, layer_idx=0):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_key_value_groups = config.n_heads // config.num_key_value_heads
        self.scaling = config.head_dim ** -0.5

    def forward(self, q, k, v, mask, **rest):
        kind = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get(kind, eager_attention_forward)
        return attend(self, q, k, v, mask, scaling=self.scaling, **rest)[0]


class Attention(Slot):
    def __init__(self, config):
        super().__init__(config)
        self.head_dim = config.head_dim
        self.q = config.n_heads * self.head_dim
        self.kv = config.num_key_value_heads * self.head_dim
        self.Wqkv = nn.Linear(config.n_embd, self.q + 2 * self.kv, bias=config.qkv_bias)
        self.proj = nn.Linear(self.q, config.n_embd, bias=False)
        if config.head_norm:  # Qwen3
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        elif config.norm == "post":  # OLMo-2 normalizes all heads together, before the split
            self.q_norm = RMSNorm(self.q, config.norm_eps)
            self.k_norm = RMSNorm(self.kv, config.norm_eps)

    def forward(self, x, rope, mask, past_key_values, number, slot, columns, **rest):
        # Spelled out, because vLLM replaces these three sizes with a tensor-parallel worker's.
        q, k, v = self.Wqkv(x).split((self.q, self.kv, self.kv), dim=-1)
        if self.config.norm == "post":
            if q.shape[-1] < self.q:
                raise ValueError("tensor parallelism is not supported for OLMo-2, whose norms "
                                 "cover the heads of all workers")
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        k = k.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.config.head_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        cos, sin = (t.type_as(q) for t in rope)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, number, columns)
        if slot is None:  # outside vLLM one object serves all slots
            slot = self
        y = Slot.forward(slot, q, k, v, mask, **rest)
        return self.proj(y.reshape(*x.shape[:-1], -1))  # in vLLM y has no batch dimension


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)  # gate and up
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(nn.functional.silu(gate) * up)


class Block(GradientCheckpointingLayer):
    """Llama: x + f(norm(x)). OLMo-2: x + norm(f(x)). f is attention, then the MLP."""

    def __init__(self, config):
        super().__init__()
        self.norm = config.norm
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x, **kwargs):
        if self.norm == "post":
            dtype = self.norm_1.weight.dtype
            x = x + self.norm_1(self.attn(x.to(dtype), **kwargs))
            return x + self.norm_2(self.mlp(x.to(dtype)))
        x = x + self.attn(self.norm_1(x), **kwargs)
        return x + self.mlp(self.norm_2(x))


class LoopgraftBase(PreTrainedModel):
    config_class = LoopgraftConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _input_embed_layer = "wte"
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_attention_backend = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True


class LoopgraftModel(LoopgraftBase):
    """Everything but the head."""

    def __init__(self, config):
        super().__init__(config)
        if config.norm not in ("pre", "post") or config.qk_bias:
            raise ValueError("this code has the blocks of Llama, Qwen and OLMo-2 only. Load Huginn "
                             "with its own code")

        def blocks(count):
            return nn.ModuleList(Block(config) for _ in range(count))

        C = config.n_embd
        self.wte = nn.Embedding(config.vocab_size, C)
        self.prelude = blocks(config.n_layers_in_prelude)
        self.core_block = blocks(config.n_layers_in_recurrent_block)
        self.coda = blocks(config.n_layers_in_coda)
        self.ln_f = RMSNorm(C, config.norm_eps)
        if config.injection_type == "linear":  # "add" needs no weights
            self.adapter = nn.Linear(2 * C, C, bias=False)
        slots = config.num_hidden_layers if config._attn_implementation == "vllm" else 0
        self.slots = nn.ModuleList(Slot(config, number) for number in range(slots))
        self.post_init()

    def draw_state(self, e, position_ids):
        """
        Return the initial state s_0 (B, T, C) for e (B, T, C) at position_ids (B or 1, T). It
        depends on config.noise_seed and the position only; in training it is random.
        """
        B, _, C = e.shape
        position_ids = position_ids.long().expand(B, -1)  # mix() would overflow int32
        seed = self.config.noise_seed
        row = torch.zeros_like(position_ids)
        if self.training:
            seed = torch.randint(2**31, ()).item()
            row = row + torch.arange(B, device=e.device)[:, None]
        return self.config.init_values["std"] * truncated_normal(seed, row, position_ids, C)

    def split_steps(self, num_steps):
        """Return num_steps, in any form that forward() takes, as (n, k)."""
        steps = self.config.mean_recurrence if num_steps is None else num_steps
        if isinstance(steps, int):
            k = min(steps, self.config.mean_backprop_depth)
            steps = steps - k, k
        if min(steps) < 0:
            raise ValueError(f"{num_steps=}: the number of recurrences must not be negative")
        return steps

    def attention_inputs(self, x, attention_mask, position_ids, past_key_values):
        """
        Return what attention needs besides x (B, T, C): the positions (B or 1, T), and a dict of
        arguments that are the same for every block.
        """
        T = x.shape[1]
        seen = 0
        if past_key_values is not None:
            seen = past_key_values.get_seq_length()
        columns = torch.arange(T, device=x.device) + seen
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -T:]
        elif position_ids is None:
            position_ids = columns[None]
        for_cache = {"cache_position": columns}  # a static cache of 4.57 needs it
        for_mask = {CACHE: past_key_values}
        if NEEDS_COLUMNS:
            for_mask |= for_cache
        mask = create_causal_mask(self.config, x, attention_mask, position_ids=position_ids,
                                  **for_mask)
        return position_ids, {
            "rope": rope_table(self.config, position_ids),
            "mask": mask,
            "past_key_values": past_key_values,
            "columns": for_cache,
        }

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=False, num_steps=None, initial_state=None,
                output_hidden_states=None, cache=None, **rest):
        """Return the head's input (B, T, C). For the arguments see LoopgraftForCausalLM."""
        c = self.config
        if cache is not None:
            past_key_values = cache
        n, k = self.split_steps(num_steps)
        r = n + k
        if output_hidden_states is None:
            output_hidden_states = c.output_hidden_states
        x = inputs_embeds
        if x is None:
            x = self.wte(input_ids)
        x = x.float() * c.init_values["embed_scale"]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None and len(past_key_values) not in (0, c.slots(r)):
            raise ValueError(f"num_steps={r}, but the cache was made for another r")
        position_ids, shared = self.attention_inputs(
            x, attention_mask, position_ids, past_key_values)

        def run(blocks, first, x):
            """x (B, T, C) through blocks whose slots in the cache begin at `first`."""
            for number, block in enumerate(blocks, first):
                slot = self.slots[number] if self.slots else None
                x = block(x, number=number, slot=slot, **shared, **rest)
            return x

        e = run(self.prelude, 0, x)
        s = initial_state
        if s is None:
            s = self.draw_state(e, position_ids)
        states = [s]
        first = len(self.prelude)
        for i in range(r):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= n):
                s = s.to(e.device)  # a device_map may have put the core's last layer elsewhere
                if c.injection_type == "linear":
                    x = torch.cat((s, e), dim=-1).to(self.ln_f.weight.dtype)
                    x = self.adapter(x).float()
                else:
                    x = s + e
                s = run(self.core_block, first, x)
            first += len(self.core_block)
            if output_hidden_states:
                states.append(s)
        x = self.ln_f(run(self.coda, first, s))
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
        )


class LoopgraftForCausalLM(LoopgraftBase, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.transformer = LoopgraftModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args, num_steps=None, **kwargs):
        """
        GenerationMixin.generate() at r = num_steps. transformers sizes caches by the config, so
        another r needs another config. This call's own model has it, with the same weights, because
        other threads may generate at their own r. An assistant model runs at its own
        config.mean_recurrence.
        """
        n, k = self.transformer.split_steps(num_steps)
        model = self
        if n + k != self.config.mean_recurrence:
            model = copy.copy(self)
            model.config = copy.copy(self.config)
            model.config.mean_recurrence = n + k
        return super(LoopgraftForCausalLM, model).generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"num_steps": self.config.mean_recurrence}

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, labels=None, use_cache=False, logits_to_keep=0, num_steps=None,
                initial_state=None, output_hidden_states=None, cache=None, **rest):
        """
        Like LlamaForCausalLM, with logits (B, T, V) in float32.

        num_steps: the number of recurrences r, the last config.mean_backprop_depth of which carry
        gradient; or (n, k), for n recurrences without gradient and then k with it. A cache can be
        used with one r only.
        initial_state (B, T, C): s_0; by default draw_state() draws it.
        cache: past_key_values, under the name that transformers has used since 5.24.

        The output's hidden_states are s_0 and the state after each recurrence, r + 1 in all.
        """
        if cache is None:
            cache = past_key_values
        out = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_steps=num_steps,
            initial_state=initial_state,
            output_hidden_states=output_hidden_states,
            **rest,
        )
        kept = logits_to_keep
        if isinstance(kept, int):
            kept = slice(-kept, None)  # 0 keeps all
        logits = self.lm_head(out.last_hidden_state[:, kept]).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **rest)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
        )
