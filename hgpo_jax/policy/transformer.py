"""Qwen2.5, Qwen3 (dense), Llama and Mistral in Flax NNX: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, a tied
or untied head.

They differ in attention: Qwen2.5 adds biases to queries, keys and values, Qwen3 normalizes each head's query and key, and
Llama 3 scales rotary frequencies. A Mistral without a sliding window is a Llama. Qwen2.5-VL is a Qwen2.5 with a vision tower
(`vision.py`), whose prompts may hold pictures (`pictures.py`).

Sequences are right-padded, so causal masking alone is enough: a query at slot t sees slots 0..t, and the output of a padded
slot is never used. If a sequence holds several segments (`learner/packing.py`), a query sees its segment's slots up to t.
There are three entry points with one set of weights:

* `hidden(tokens, predict_slots, segment_start)`: training. The last block computes its queries and feed-forward only at
  `predict_slots`, where the logits are needed; for short responses to long prompts that saves nearly the whole block.
* `prefill(tokens, last, cache_length)`, `extend(tokens, begin, lengths, cache, rows, blocks)` and `decode(token, position,
  cache, blocks)`: sampling, one KVCache per layer.

Shapes are written in the dimension letters of `hgpo_jax`.
Source: technical reports of Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388) and Llama 3 (arXiv 2407.21783); the weights'
names and conventions follow transformers' Qwen2, Qwen3, Llama and Mistral.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hgpo_jax.policy.attention import attend, attend_all, decode_attention, extend_attention
from hgpo_jax.policy.kv_cache import KVCache, on_each_device
from hgpo_jax.policy.layers import MLP, REMAT, Linear, RMSNorm, product
from hgpo_jax.policy.mesh import constrain, max_across_devices
from hgpo_jax.policy.model_config import ModelConfig
from hgpo_jax.policy.pictures import Pictures
from hgpo_jax.policy.rope import apply_rope, rope_tables
from hgpo_jax.policy.vision import VisionTower
from hgpo_jax.policy.vocabulary import embedding_lookup


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, rngs):
        self.c, bias = c, c.model_type in ("qwen2", "qwen2_5_vl")
        self.q_proj = Linear(c, "q_proj", c.hidden_size, c.num_attention_heads * c.head_size, rngs, bias)
        self.k_proj = Linear(c, "k_proj", c.hidden_size, c.num_key_value_heads * c.head_size, rngs, bias)
        self.v_proj = Linear(c, "v_proj", c.hidden_size, c.num_key_value_heads * c.head_size, rngs, bias)
        self.o_proj = Linear(c, "o_proj", c.num_attention_heads * c.head_size, c.hidden_size, rngs)
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(c.head_size, c.rms_norm_eps), RMSNorm(c.head_size, c.rms_norm_eps)

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.c.head_size)

    def keys_values(self, x, rope):
        """Projects x [B, S, D] to keys and values, [B, S, G, E] each."""
        k = self._heads(self.k_proj(x))
        k = self.k_norm(k) if self.c.model_type == "qwen3" else k
        k, v = apply_rope(k, rope), self._heads(self.v_proj(x))
        return tuple(constrain(a, "batch", None, "kv_heads", None) for a in (k, v))

    def queries(self, x, rope):
        """Projects x [B, S, D] to queries [B, S, H, E]."""
        q = self._heads(self.q_proj(x))
        q = self.q_norm(q) if self.c.model_type == "qwen3" else q
        return constrain(apply_rope(q, rope), "batch", None, "heads", None)


class Block(nnx.Module):
    """One transformer layer."""

    def __init__(self, c: ModelConfig, rngs):
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, rngs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c, c.hidden_size, c.intermediate_size, rngs)

    def __call__(
        self,
        x,
        rope,
        cache: KVCache | None = None,
        position=None,
        needed=None,
        lengths=None,
        rows=None,
        predict_slots=None,
        segment_start=None,
    ):
        """Maps x [B, S, D] with the `rope_tables` of its positions to (y [B, S, D], (keys, values) [B, S, G, E] each).

        predict_slots: i32[B, Q]; computes y only there, [B, Q, D].
        segment_start: i32[B, S], the slot where each slot's segment begins, 0 if None.
        cache: x is then one token per row, whose key and value are first written into it at slot `position` i32[B]; the cache
          is returned in place of keys and values.
        needed: i32[], the slots of the cache to read at least.
        lengths: i32[B]; x is then that many tokens per row, which go into the cache's `rows` i32[B] from `position` on.
        """
        y = self.input_layernorm(x)
        kv = keys, values = self.self_attn.keys_values(y, rope)
        if predict_slots is not None:
            at = lambda a: jnp.take_along_axis(a, jnp.expand_dims(predict_slots, range(2, a.ndim)), axis=1)  # noqa: E731
            x, y, rope, segment_start = jax.tree.map(at, (x, y, rope, segment_start))
        # Decoding reads all weights for a few tokens: the tokens' hidden dimension is split like the weights', which then stay
        # in place. Elsewhere the weights of one layer at a time are gathered for the split rows.
        batch, hidden = (None, "embed") if cache is not None and lengths is None else ("batch", None)
        q = self.self_attn.queries(y, rope)
        if cache is not None and lengths is None:
            kv = cache.write(keys[:, 0], values[:, 0], position)
            y = decode_attention(q[:, 0], kv, position, needed)[:, None]
        elif cache is not None:
            kv = on_each_device(KVCache.insert_at, cache, KVCache.of(keys, values), rows, position, lengths)
            slots = jnp.arange(keys.shape[1])[None] if predict_slots is None else predict_slots
            y = extend_attention(q, kv, rows, position[:, None] + slots, needed)
        elif predict_slots is None:
            y = attend_all(q, keys, values, segment_start)
        else:
            y = attend(q, keys, values, predict_slots, segment_start)
        y = constrain(y.reshape(*y.shape[:2], -1), batch, None, "heads")
        x = constrain(x + self.self_attn.o_proj(y), batch, None, hidden)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, batch, None, hidden), kv


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
        self.visual = VisionTower(c, c.vision, rngs) if c.vision else None

    def _embed(self, tokens):
        """Looks up rows of the embedding, i32[B, S] -> [B, S, D]."""
        return constrain(embedding_lookup(self.embed_tokens.embedding[...], tokens), "batch", None, None)

    def logits(self, hidden):
        """Maps hidden [..., D] to logits f32[..., V], split over the vocabulary alone, as the weights are."""
        hidden = constrain(hidden, *(None,) * hidden.ndim)
        if self.lm_head is None:
            # Flax's `attend` would first widen the whole table to the type that it was made with.
            x = jnp.dot(hidden, self.embed_tokens.embedding[...].T, preferred_element_type=jnp.float32)
        else:
            x = product(hidden, self.lm_head.kernel[...], jnp.float32)
        return constrain(x, *(None,) * (x.ndim - 1), "vocab")

    def _read(self, tokens, segment_start=None, pictures: Pictures | None = None):
        """Embeds sequences from their first slot on: (x [B, S, D], the `rope_tables` of their positions)."""
        x, slots = self._embed(tokens), jnp.arange(tokens.shape[1])[None]
        if pictures is None:
            return x, rope_tables(slots - (0 if segment_start is None else segment_start), self.c)
        assert self.c.vision is not None  # or there would be no features
        x, positions = pictures.read(tokens, x, self.c.vision.image_token_id)
        if segment_start is not None:
            positions -= jnp.take_along_axis(positions, segment_start[..., None], axis=1)
        return constrain(x, "batch", None, None), rope_tables(positions, self.c)

    def _stack(self, x, rope, segment_start=None, remat="none", return_kv=False):
        """Runs all blocks but the last; with `return_kv`, also returns their keys and values, [layers - 1, B, S, G, E]."""
        if self.layers is None:
            return x, None
        graphdef, weights = nnx.split(self.layers)

        def body(x, layer):
            y, kv = nnx.merge(graphdef, layer)(x, rope, segment_start=segment_start)
            return y, kv if return_kv else None

        body = body if remat == "none" else jax.checkpoint(body, policy=REMAT[remat])
        return jax.lax.scan(body, x, weights)

    def hidden(self, tokens, predict_slots, segment_start=None, remat="none", pictures: Pictures | None = None):
        """Computes final hidden states at some slots.

        Args:
          tokens: i32[B, S], right-padded.
          predict_slots: i32[B, Q], the slots to compute; slot t predicts token t + 1.
          segment_start: i32[B, S], the slot where each slot's segment begins, if a sequence holds several; 0 if None.
          remat: the parts of each block that the backward pass recomputes instead of saving them: "none"; "dots", all but the
            products with weights; "full".
          pictures: the pictures of the rows, whose features take the place of image tokens.

        Returns: [B, Q, D], to be passed to `logits`.
        """
        x, rope = self._read(tokens, segment_start, pictures)
        x, _ = self._stack(x, rope, segment_start, remat)
        x, _ = self.last(x, rope, predict_slots=predict_slots, segment_start=segment_start)
        return self.norm(x)

    def prefill(self, tokens, last, cache_length, pictures: Pictures | None = None):
        """Processes prompts and fills the cache.

        Args:
          tokens: i32[B, S], right-padded prompts.
          last: i32[B], the last slot of each prompt.
          cache_length: C, slots of the cache: S plus the tokens to decode.
          pictures: those of the prompts. Their `offset()` then goes to `decode`.

        Returns: (hidden [B, D] at `last`, cache: a KVCache per layer).
        """
        x, rope = self._read(tokens, pictures=pictures)
        x, stacked = self._stack(x, rope, return_kv=True)
        x, kv = self.last(x, rope, predict_slots=last[:, None])
        per_layer = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(self.c.num_hidden_layers - 1)]
        more = cache_length - tokens.shape[1]
        return self.norm(x)[:, 0], [KVCache.of(*kv).lengthen(more) for kv in (*per_layer, kv)]

    def extend(self, tokens, begin, lengths, cache, rows, blocks, offset=0):
        """Processes prompts of which a cache holds the beginning, with the `decode_blocks()`.

        Args:
          tokens: i32[B, W], the rest of each prompt, right-padded.
          begin: i32[B], the tokens that the cache holds.
          lengths: i32[B], tokens of the rest, at least one.
          cache: a KVCache per layer with room for the rest. It is read only as far as the longest prompt needs.
          rows: i32[B], the row of each prompt among those that a device has; one outside belongs to padding.
          offset: as in `decode`; no picture stands in the rest.

        Returns: (hidden [B, D] at the last token, the cache with the rest).
        """
        rope = rope_tables((begin + offset)[:, None] + jnp.arange(tokens.shape[1]), self.c)
        needed = max_across_devices((begin + lengths).max())
        x, new_cache = self._embed(tokens), []
        for block, layer in zip(blocks, cache, strict=True):
            predict_slots = lengths[:, None] - 1 if block is blocks[-1] else None
            x, layer = block(x, rope, layer, begin, needed, lengths, rows, predict_slots)
            new_cache.append(layer)
        return self.norm(x)[:, 0], new_cache

    def decode_blocks(self):
        """Returns all blocks for `decode`, each with its own transposed weights.

        A loop that slices them from the stack would copy them in every iteration.
        """
        blocks = []
        if self.layers is not None:
            stack, stacked = nnx.split(self.layers)
            each = (jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(self.c.num_hidden_layers - 1))
            blocks = [nnx.merge(stack, weights) for weights in each]
        blocks.append(nnx.merge(*nnx.split(self.last)))
        for block in blocks:
            for _, module in nnx.iter_modules(block):
                if isinstance(module, Linear):
                    module.transpose()
        return blocks

    def decode(self, token, position, cache, blocks, live=None, offset=0):
        """Decodes one token i32[B] at slot `position` i32[B] of each row with the `decode_blocks()`: (hidden [B, D], cache).

        live: bool[B], the rows whose result counts; None: all. The cache is read only as far as they need.
        offset: i32[B], from the slots to the rotary positions of tokens after pictures.
        """
        needed = max_across_devices((position + 1 if live is None else jnp.where(live, position + 1, 0)).max())
        x, rope = constrain(self._embed(token[:, None]), None, None, "embed"), rope_tables((position + offset)[:, None], self.c)
        new_cache = []
        for block, layer in zip(blocks, cache, strict=True):
            x, layer = block(x, rope, cache=layer, position=position, needed=needed)
            new_cache.append(layer)
        return self.norm(x)[:, 0], new_cache
