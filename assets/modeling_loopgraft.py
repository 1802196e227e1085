"""
A depth-recurrent Llama or OLMo-2 for transformers 5 (and 4.57), exported by loopgraft.
    e   = prelude(embed(ids))             a few ordinary layers, once
    s   = core(adapter([s, e]))           num_steps times, from noise, with the same weights
    out = head(norm(coda(s)))             a few ordinary layers, once

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), num_steps=16)

from_pretrained(FOLDER, mean_recurrence=16) sets the default of num_steps. Tensors and config keys
have the names of the released Recurrent-* models (2511.07384). The residual stream stays float32.
vLLM runs it by its Transformers backend, which reads and rewrites some of this source: README.md.
"""
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

NEEDS_COLUMNS = "cache_position" in inspect.signature(create_causal_mask).parameters  # before 5.6


class LoopgraftConfig(PretrainedConfig):
    """config.json; below is what it may lack."""
    model_type = "huginn_raven"
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_heads",
                     "tie_word_embeddings": "tie_embeddings"}
    base_model_tp_plan = {"*.attn.proj": "rowwise", "*.mlp.fc": "colwise_gather_output",
                          "*.mlp.proj": "rowwise_split_input"}  # vLLM finds Wqkv by itself
    has_no_defaults_at_init = True    # sizes are config.json's
    norm: str = "pre"                 # pre: Llama; post: OLMo-2, with norms on q and k
    head_norm: bool = False           # Qwen3: a norm on each head of q and of k
    qkv_bias: bool = False            # Qwen2: biases on q, k and v
    rope_scaling: dict | None = None  # the "llama3" scaling
    tie_embeddings: bool = False
    noise_seed: int = 0               # of the initial state
    bos_token_id = eos_token_id = pad_token_id = None

    def slots(self, r):
        """How many slots a cache has: one for each layer of each recurrence."""
        return (self.n_layers_in_prelude + r * self.n_layers_in_recurrent_block
                + self.n_layers_in_coda)

    @property
    def num_hidden_layers(self):  # where transformers looks for the number of slots
        return self.slots(self.mean_recurrence)

    @num_hidden_layers.setter
    def num_hidden_layers(self, value):
        pass  # it follows from mean_recurrence, whatever config.json says

    def to_dict(self):
        return super().to_dict() | {"num_hidden_layers": self.num_hidden_layers}


class RMSNorm(nn.RMSNorm):
    """Normalise in float32, cast to the weights' dtype, then scale: the order that Llama has."""

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


def normal(seed, row, position, C):
    """Normal numbers (..., C), cut at 3 std, a function of (seed, row, position, channel) alone."""
    key = mix(mix(mix(seed) + row) + position)
    bits = mix(key[..., None] + torch.arange(C, device=key.device))
    edge = math.erf(3 / math.sqrt(2))  # within 3 std
    uniform = ((bits >> 8) - 2**23).float() * (edge / 2**23)  # 24 bits, exact in float32
    return uniform.erfinv_().mul_(math.sqrt(2))


def rope_table(config, position_ids):
    """cos and sin, each (B, T, head_dim) float32, of positions (B, T)."""
    pairs = torch.arange(0, config.head_dim, 2, device=position_ids.device)
    f = 1.0 / config.rope_theta ** (pairs.float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling:  # Llama-3.1 stretches long wavelengths, with a smooth band between long and short
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * f / (2 * torch.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        f = f * (smooth + (1 - smooth) / scaling["factor"])
    angle = position_ids[..., None].float() * torch.cat((f, f))
    return angle.cos(), angle.sin()


class Slot(nn.Module):
    """Attention without weights. vLLM reads this source, and wants one for each slot of a cache."""

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
        elif config.norm == "post":  # OLMo-2 normalises all heads together, before the split
            self.q_norm = RMSNorm(self.q, config.norm_eps)
            self.k_norm = RMSNorm(self.kv, config.norm_eps)

    def forward(self, x, rope, mask, past_key_values, number, slot, columns, **rest):
        # The sizes stand here one by one for vLLM, which replaces them by those of a worker.
        q, k, v = self.Wqkv(x).split((self.q, self.kv, self.kv), dim=-1)
        if self.config.norm == "post":
            if q.shape[-1] < self.q:
                raise ValueError("tensor parallel: OLMo-2 normalises heads of all workers together")
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        if self.config.head_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, *(t.type_as(q) for t in rope))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, number, columns)
        if slot is None:  # one object serves all slots
            slot = self
            slot.layer_idx = number  # a paged cache looks for it here
        y = Slot.forward(slot, q, k, v, mask, **rest)
        return self.proj(y.reshape(*x.shape[:-1], -1))  # vLLM's lacks the batch


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
    base_model_prefix, _input_embed_layer = "transformer", "wte"
    supports_gradient_checkpointing = _supports_attention_backend = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _no_split_modules, _skip_keys_device_placement = ["Block"], ["past_key_values"]


class LoopgraftModel(LoopgraftBase):
    """All but the head."""

    def __init__(self, config):
        super().__init__(config)
        if config.norm not in ("pre", "post") or config.qk_bias:
            raise ValueError("only Llama, Qwen and OLMo-2 blocks: load Huginn with its own code")
        C, P, R = config.n_embd, config.n_layers_in_prelude, config.n_layers_in_recurrent_block
        self.wte = nn.Embedding(config.vocab_size, C)
        self.prelude = nn.ModuleList(Block(config) for _ in range(P))
        self.core_block = nn.ModuleList(Block(config) for _ in range(R))
        self.coda = nn.ModuleList(Block(config) for _ in range(config.n_layers_in_coda))
        self.ln_f = RMSNorm(C, config.norm_eps)
        if config.injection_type not in ("linear", "add"):
            raise ValueError(f"injection_type {config.injection_type!r} is not known")
        if config.injection_type == "linear":  # else they are added
            self.adapter = nn.Linear(2 * C, C, bias=False)
        slots = config.num_hidden_layers if config._attn_implementation == "vllm" else 0
        self.slots = nn.ModuleList(Slot(config, number) for number in range(slots))
        self.post_init()

    def draw_state(self, e, position_ids):
        """s_0 (B, T, C): a function of the seed and the position. Training draws it anew."""
        position_ids = position_ids.long().expand(len(e), -1)  # mix() overflows 32 bits
        seed, row = self.config.noise_seed, torch.zeros_like(position_ids)
        if self.training:
            seed = torch.randint(2**31, ()).item()
            row = row + torch.arange(len(e), device=e.device)[:, None]
        return self.config.init_values["std"] * normal(seed, row, position_ids, e.shape[-1])

    def split_steps(self, num_steps):
        """num_steps as forward() takes it -> (n, k)."""
        steps = self.config.mean_recurrence if num_steps is None else num_steps
        if torch.is_tensor(steps):
            steps = steps.squeeze().tolist()
        if isinstance(steps, int):
            k = min(steps, self.config.mean_backprop_depth)
            steps = steps - k, k
        if min(steps) < 0:
            raise ValueError(f"{num_steps=}: a number of recurrences is 0 or more")
        return steps

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=False, num_steps=None, initial_state=None,
                output_hidden_states=None, **rest):
        """The head's input (B, T, C). See LoopgraftForCausalLM."""
        c = self.config
        n, k = self.split_steps(num_steps)
        if output_hidden_states is None:
            output_hidden_states = c.output_hidden_states
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        x = x.float() * c.init_values["embed_scale"]
        T, seen = x.shape[1], 0
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None:
            seen = past_key_values.get_seq_length()
            if len(past_key_values) not in (0, c.slots(n + k)):
                raise ValueError(f"num_steps={n + k}: the cache was made for another r")
        columns = torch.arange(T, device=x.device) + seen
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -T:]
        elif position_ids is None:
            position_ids = columns[None]
        more = {"cache_position": columns} if NEEDS_COLUMNS else {}
        mask = create_causal_mask(c, x, attention_mask, past_key_values=past_key_values,
                                  position_ids=position_ids, **more)
        columns = {"cache_position": columns}  # which a static cache of 4.57 needs
        shared = {"mask": mask, "past_key_values": past_key_values, "columns": columns,
                  "rope": rope_table(c, position_ids)}
        P, R = len(self.prelude), len(self.core_block)

        def run(blocks, first, x):
            for number, block in enumerate(blocks, first):
                slot = self.slots[number] if self.slots else None
                x = block(x, number=number, slot=slot, **shared, **rest)
            return x

        e = run(self.prelude, 0, x)
        s = self.draw_state(e, position_ids) if initial_state is None else initial_state
        states = [s] if output_hidden_states else None
        for i in range(n + k):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= n):
                s = s.to(e.device)  # a device_map may have put the core's last layer elsewhere
                if c.injection_type == "linear":
                    x = torch.cat((s, e), dim=-1).to(self.ln_f.weight.dtype)
                    x = self.adapter(x).float()
                else:
                    x = s + e
                s = run(self.core_block, P + i * R, x)
            if output_hidden_states:
                states.append(s)
        x = self.ln_f(run(self.coda, P + (n + k) * R, s))
        return BaseModelOutputWithPast(x, past_key_values, states and tuple(states))


class LoopgraftForCausalLM(LoopgraftBase, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.transformer = LoopgraftModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args, num_steps=None, **kwargs):
        """All caches are made for r = num_steps. An assistant keeps its config.mean_recurrence."""
        c, before = self.config, self.config.mean_recurrence
        c.mean_recurrence = sum(self.transformer.split_steps(num_steps))
        try:
            return super().generate(*args, **kwargs)
        finally:
            c.mean_recurrence = before

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, labels=None, use_cache=False, logits_to_keep=0, num_steps=None,
                initial_state=None, output_hidden_states=None, **rest):
        """
        As LlamaForCausalLM; the logits (B, T, V) are float32. num_steps: r, of which the last
        config.mean_backprop_depth recurrences carry gradient, or (n, k), n recurrences without and
        k with; an int, a tuple or a tensor. A cache belongs to one r. initial_state: s_0 (B, T, C),
        by default draw_state()'s. hidden_states: s_0 and each recurrence's state, r + 1 of them.
        """
        out = self.transformer(input_ids, attention_mask, position_ids, past_key_values,
                               inputs_embeds, use_cache, num_steps, initial_state,
                               output_hidden_states, **rest)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept]).float()  # 0 keeps all
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **rest)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)
