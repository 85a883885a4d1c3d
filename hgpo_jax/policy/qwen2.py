"""Qwen2.5 and Qwen3 (dense) in Flax NNX: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied or untied head.

They differ in attention: Qwen2.5 adds biases to queries, keys and values, Qwen3 normalizes each head's query and key.

Sequences are right-padded, so that causal masking alone is enough: a query at slot t sees slots 0..t, and what a padded
slot computes is never looked at. Where a sequence holds several rows of text (`packing.py`), it sees its row's slots up to t.
Three faces, one set of weights:

* `hidden(tokens, slots, first)`: training. The last block computes its queries and feed-forward only at `slots`, the positions
  whose logits the caller wants; for short responses to long prompts that saves nearly the whole block.
* `prefill(tokens, last, cache_length)` and `decode(token, position, cache, blocks)`: sampling, one key-value buffer per layer.

Shape suffixes: B rows, S slots, R wanted slots, D width, N query heads, K key-value heads, H head width.
Source: technical reports of Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388); the weights' names and conventions
follow transformers' Qwen2 and Qwen3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from hgpo_jax.mesh import constrain, free_axes, layout
from hgpo_jax.policy.attention import attend, attend_all, attend_kept

# What of a block is kept for the backward pass, by the name of the choice; the rest is computed again.
REMAT = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a block


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the `targets` of every block compute x W + (alpha / rank) x A B, A [in, rank], B [rank, out]."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = LINEARS

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha}: must be positive")
        unknown = [name for name in self.targets if name not in LINEARS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)}: expected some of {', '.join(LINEARS)}, each at most once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


NUMBERS = [
    *((name, int, "a positive whole number") for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings",
    )),
    *((name, int | float, "a positive number") for name in ("rope_theta", "rms_norm_eps", "initializer_range")),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Qwen2.5 or Qwen3, named as in its Hugging Face config.json.

    model_type: `qwen2` (Qwen2.5 too) or `qwen3`. head_dim: hidden_size // num_attention_heads if None. lora: adapters beside
    the weights, see `lora.py`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    model_type: str = "qwen2"
    head_dim: int | None = None
    lora: LoraConfig | None = None

    def __post_init__(self):
        if self.model_type not in ("qwen2", "qwen3"):
            raise ValueError(f"model_type={self.model_type!r}: must be qwen2 or qwen3")
        for name, kind, meaning in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 2**63:
                raise ValueError(f"{name}={value!r:.50}: must be {meaning}")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads or self.hidden_size // self.num_attention_heads % 2:
                raise ValueError(
                    f"hidden_size={self.hidden_size}: must be an even multiple of "
                    f"num_attention_heads={self.num_attention_heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim!r:.50}: must be a positive even number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: must divide num_attention_heads={self.num_attention_heads}"
            )


def rotary(positions, c: ModelConfig):
    """Cosines and sines, f32[B, S, 1, H / 2] each, that turn heads at positions i32[B, S] (Su et al., arXiv 2104.09864)."""
    half = c.head_dim // 2
    frequency = c.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    # Made once: the compiler would make them again for every element of every layer's queries and keys.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x, turn):
    """Rotary embedding of x [B, S, heads, H] by the `rotary` of its positions, whose B may be 1; convention of halves."""
    (cos, sin), half = turn, x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def look_up(table, tokens):
    """Rows of a table [V, D] that is split over the vocabulary, i32[B, S] -> [B, S, D].

    Every device looks all tokens up in its own part, and the parts are added: the table stays where it is. Left to the
    compiler, a table may be gathered, and one that two mesh axes split inside a shard_map over a third aborts it.
    """
    axes = free_axes("vocab")
    if not axes:
        return jnp.take(table, tokens, axis=0)

    def part(rows, tokens):
        at = tokens - jax.lax.axis_index(axes) * rows.shape[0]
        mine = (at >= 0) & (at < rows.shape[0])
        found = jnp.take(rows, jnp.where(mine, at, 0), axis=0)
        return jax.lax.psum(jnp.where(mine[..., None], found, 0), axes)

    specs = {"in_specs": (PartitionSpec(axes), PartitionSpec()), "out_specs": PartitionSpec()}
    return jax.shard_map(part, **specs, axis_names=set(axes), check_vma=False)(table, tokens)


# Of keys [B, K, H, C] and values [B, K, C, H] that are kept: heads first, as the products of decoding read them; otherwise
# each token copies them.
CACHE_AXES = ("batch", "kv_heads", None, None)


def put(cache, new, position):
    """A cache (keys [B, K, H, C], values [B, K, C, H]) with new ones (each [B, K, H]) at slot i32[B].

    Every device writes its own part. Left to the compiler, writing to an array whose rows and heads are split inside a
    shard_map over a third axis aborts it.
    """

    def part(cache, new, position):
        rows = jnp.arange(len(position))
        return cache[0].at[rows, :, :, position].set(new[0]), cache[1].at[rows, :, position].set(new[1])

    manual = {*free_axes("batch"), *free_axes("kv_heads")}
    if not manual:
        return part(cache, new, position)
    where = tuple(layout(CACHE_AXES, a.shape) for a in cache)
    its = tuple(layout(CACHE_AXES[:3], a.shape) for a in new), layout(CACHE_AXES[:1], position.shape)
    specs = {"in_specs": (where, *its), "out_specs": where}
    return jax.shard_map(part, **specs, axis_names=manual, check_vma=False)(cache, new, position)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size, eps):
        self.weight, self.eps = nnx.Param(jnp.ones(size)), eps

    def __call__(self, x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...]).astype(x.dtype)


def product_turned(x, w):
    """x [..., I] with W [O, I] -> [..., O]. Not as x W.T, for which XLA's CPU compiler writes a turned W first."""
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_vjp
def product(x, w):
    """x [..., I] W [I, O] -> [..., O]."""
    return x @ w


def _product_forward(x, w):
    return x @ w, (x, w)


def _product_backward(kept, g):
    """The usual gradients. jax would form W's as (g^T x)^T, for which XLA's CPU compiler computes g again, turned."""
    x, w = kept
    every = tuple(range(x.ndim - 1))
    return product_turned(g, w), jax.lax.dot_general(x, g, ((every, every), ((), ())))


product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Linear):
    """x W + bias, plus the adapter if the config names this layer (Hu et al., arXiv 2106.09685)."""

    def __init__(self, c: ModelConfig, name: str, inputs: int, outputs: int, rngs, bias=False):
        init = nnx.initializers.normal(c.initializer_range)
        super().__init__(inputs, outputs, use_bias=bias, kernel_init=init, rngs=rngs)
        self.lora = c.lora if c.lora and name in c.lora.targets else None
        if self.lora:
            self.lora_a = nnx.Param(jnp.zeros((inputs, self.lora.rank)))
            self.lora_b = nnx.Param(jnp.zeros((self.lora.rank, outputs)))
        self.turned = False

    def turn(self):
        """Keeps W as [out, in] from now on: on CPUs products of few rows read it a quarter faster so."""
        self.kernel, self.turned = nnx.Param(self.kernel[...].T), True

    def __call__(self, x):
        y = (product_turned if self.turned else product)(x, self.kernel[...])
        if self.bias is not None:
            y += self.bias[...]
        if self.lora:
            a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
            y += self.lora.scale * ((x @ a) @ b)
        return y


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, rngs):
        self.c, bias = c, c.model_type == "qwen2"
        self.q_proj = Linear(c, "q_proj", c.hidden_size, c.num_attention_heads * c.head_dim, rngs, bias)
        self.k_proj = Linear(c, "k_proj", c.hidden_size, c.num_key_value_heads * c.head_dim, rngs, bias)
        self.v_proj = Linear(c, "v_proj", c.hidden_size, c.num_key_value_heads * c.head_dim, rngs, bias)
        self.o_proj = Linear(c, "o_proj", c.num_attention_heads * c.head_dim, c.hidden_size, rngs)
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.c.head_dim)

    def keys_values(self, x, turn):
        k = self._heads(self.k_proj(x))
        k = self.k_norm(k) if self.c.model_type == "qwen3" else k
        k, v = rotate(k, turn), self._heads(self.v_proj(x))
        return tuple(constrain(a, "batch", None, "kv_heads", None) for a in (k, v))

    def queries(self, x, turn):
        q = self._heads(self.q_proj(x))
        q = self.q_norm(q) if self.c.model_type == "qwen3" else q
        return constrain(rotate(q, turn), "batch", None, "heads", None)


class MLP(nnx.Module):
    def __init__(self, c: ModelConfig, rngs):
        self.gate_proj = Linear(c, "gate_proj", c.hidden_size, c.intermediate_size, rngs)
        self.up_proj = Linear(c, "up_proj", c.hidden_size, c.intermediate_size, rngs)
        self.down_proj = Linear(c, "down_proj", c.intermediate_size, c.hidden_size, rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One transformer layer. `wanted` (i32[B, R]) restricts the output, not the attention, to some slots."""

    def __init__(self, c: ModelConfig, rngs):
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, rngs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c, rngs)

    def __call__(self, x, turn, cache=None, position=None, wanted=None, first=None):
        """x [B, S, D] at the positions that `turn` is the `rotary` of -> (y [B, S or R, D], (k, v)).

        `first` i32[B, S] is the slot where the text begins that each slot belongs to, 0 if None.

        With a cache (k [B, K, H, C], v [B, K, C, H]) x is one token a row, whose keys and values are written into it at slot
        `position` i32[B] first, and it is returned instead of (k, v) [B, S, K, H].
        """
        y = self.input_layernorm(x)
        kv = self.self_attn.keys_values(y, turn)
        if wanted is not None:
            at = lambda a: jnp.take_along_axis(a, jnp.expand_dims(wanted, range(2, a.ndim)), axis=1)  # noqa: E731
            x, y, turn, first = jax.tree.map(at, (x, y, turn, first))
        # Decoding reads all weights for a few tokens: the tokens' hidden dimension is split like the weights', whose parts
        # then stay where they are. Elsewhere the weights of one layer at a time come to the split rows.
        rows, hidden = ("batch", None) if cache is None else (None, "embed")
        q = self.self_attn.queries(y, turn)
        if cache is not None:
            kv = put(cache, tuple(a[:, 0] for a in kv), position)
            y = attend_kept(q[:, 0], *kv, position)[:, None]
        else:
            y = attend_all(q, *kv, first) if wanted is None else attend(q, *kv, wanted, first)
        y = constrain(y.reshape(*y.shape[:2], -1), rows, None, "heads")
        x = constrain(x + self.self_attn.o_proj(y), rows, None, hidden)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, rows, None, hidden), kv


class Qwen2(nnx.Module):
    """The language model. `layers` holds all blocks but the last, stacked for `lax.scan`; `last` is the last one."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.c = c
        self.embed_tokens = nnx.Embed(
            c.vocab_size, c.hidden_size, embedding_init=nnx.initializers.normal(c.initializer_range), rngs=rngs
        )
        stacked = c.num_hidden_layers - 1
        make = nnx.split_rngs(splits=stacked)(nnx.vmap(lambda rngs: Block(c, rngs), in_axes=0, out_axes=0))
        self.layers = make(rngs) if stacked else None
        self.last = Block(c, rngs)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c, "lm_head", c.hidden_size, c.vocab_size, rngs)

    def _embed(self, tokens):
        """Rows of the embedding, i32[B, S] -> [B, S, D]."""
        return constrain(look_up(self.embed_tokens.embedding[...], tokens), "batch", None, None)

    def logits(self, hidden):
        """hidden [..., D] -> logits f32[..., V], split over the vocabulary alone, as the weights are."""
        hidden = constrain(hidden, *(None,) * hidden.ndim)
        x = self.embed_tokens.attend(hidden) if self.lm_head is None else self.lm_head(hidden)
        return constrain(x.astype(jnp.float32), *(None,) * (x.ndim - 1), "vocab")

    def _stack(self, x, turn, first=None, remat="none", keep=False):
        """All blocks but the last; with `keep`, also their keys and values stacked [L-1, B, S, K, H]."""
        if self.layers is None:
            return x, None
        graphdef, weights = nnx.split(self.layers)

        def body(x, layer):
            y, kv = nnx.merge(graphdef, layer)(x, turn, first=first)
            return y, kv if keep else None

        body = body if remat == "none" else jax.checkpoint(body, policy=REMAT[remat])
        return jax.lax.scan(body, x, weights)

    def hidden(self, tokens, slots, first=None, remat="none"):
        """Final hidden states at some slots.

        Args:
          tokens: i32[B, S], right-padded.
          slots: i32[B, R], the slots to compute; slot t predicts token t + 1.
          first: i32[B, S], the slot where the text of each slot begins, where a sequence holds several; 0 if None.
          remat: what of each block the backward pass computes again instead of keeping it: "none"; "dots", all but the products
            with weights; "full".

        Returns: [B, R, D], to be passed to `logits`.
        """
        turn = rotary(jnp.arange(tokens.shape[1])[None] - (0 if first is None else first), self.c)
        x, _ = self._stack(self._embed(tokens), turn, first, remat)
        x, _ = self.last(x, turn, wanted=slots, first=first)
        return self.norm(x)

    def prefill(self, tokens, last, cache_length):
        """Reads prompts and fills the cache.

        Args:
          tokens: i32[B, S], right-padded prompts.
          last: i32[B], the last slot of each prompt.
          cache_length: slots of the cache, S plus what will be decoded.

        Returns: (hidden [B, D] at `last`, cache: one (k [B, K, H, cache_length], v [B, K, cache_length, H]) per layer).
        """
        turn = rotary(jnp.arange(tokens.shape[1])[None], self.c)
        x, stacked = self._stack(self._embed(tokens), turn, keep=True)
        x, kv = self.last(x, turn, wanted=last[:, None])
        per_layer = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(self.c.num_hidden_layers - 1)]
        room = [(0, 0), (0, cache_length - tokens.shape[1]), (0, 0), (0, 0)]
        padded = jax.tree.map(lambda a: jnp.pad(a, room), [*per_layer, kv])
        return self.norm(x)[:, 0], [(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)) for k, v in padded]

    def unstacked(self):
        """All blocks, turned, each with its own weights. A loop that slices them from the stack copies them in every round."""
        stack, stacked = (None, None) if self.layers is None else nnx.split(self.layers)
        each = [(stack, jax.tree.map(lambda a, i=i: a[i], stacked)) for i in range(self.c.num_hidden_layers - 1)]
        blocks = [nnx.merge(*parts) for parts in (*each, nnx.split(self.last))]
        for block in blocks:
            for _, module in nnx.iter_modules(block):
                if isinstance(module, Linear):
                    module.turn()
        return blocks

    def decode(self, token, position, cache, blocks):
        """One token i32[B] at slot i32[B] for each row, by the blocks `unstacked()`: (hidden [B, D], cache)."""
        x, turn = constrain(self._embed(token[:, None]), None, None, "embed"), rotary(position[:, None], self.c)
        new_cache = []
        for block, kv in zip(blocks, cache, strict=True):
            x, kv = block(x, turn, cache=kv, position=position)
            new_cache.append(kv)
        return self.norm(x)[:, 0], new_cache
