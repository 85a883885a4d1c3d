"""The memory of a run on each device, by arithmetic: parameters, gradients, optimizer, reference policy, cache, activations.

The sizes follow from `policy.shardings` and from the arrays that `learner.make_update` and the samplers (`sampling.generate`,
`sampling/continuous_batching.py`) hold. Tests compare the sums with XLA's own analysis of the compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hgpo_jax.config import Config
from hgpo_jax.config.policies import config_of, roles_by_policy
from hgpo_jax.envs.protocol import Pictured
from hgpo_jax.learner.logprobs import MAX_LOGITS
from hgpo_jax.learner.methods import method_named
from hgpo_jax.learner.packing import conversation_shape, sequence_shape
from hgpo_jax.policy import LoraConfig, ModelConfig, huggingface_folder, shapes, shardings
from hgpo_jax.policy.attention import MAX_SCORES, query_block_size
from hgpo_jax.policy.presets import preset
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import embedding_rows, vocabulary_size
from hgpo_jax.rollout.backend import backend, converses, role_names
from hgpo_jax.rollout.compiled_prompts import prompt_length
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer
from hgpo_jax.rollout.environments import environment, max_turns
from hgpo_jax.sampling.constraint import words_of
from hgpo_jax.setup.sight import shown, small_model, tower_is_frozen
from hgpo_jax.utils.container import memory_limit
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.progress import say

MiB, GiB = 2**20, 2**30
# Memory of one device in bytes: of TPUs by data sheets, of GPUs as their drivers report it, which is less than the name says.
CHIPS = {
    "a100-40g": int(39.4 * GiB),
    "a100-80g": int(79.2 * GiB),
    "b200-180g": int(178.3 * GiB),
    "h100-80g": int(79.1 * GiB),
    "h200-141g": int(139.7 * GiB),
    "l40s-48g": int(44.4 * GiB),
    "tpu-v4": 32 * GiB,
    "tpu-v5e": 16 * GiB,
    "tpu-v5p": 95 * GiB,
    "tpu-v6e": 32 * GiB,
}
PARAM_BYTES = 4  # of a trained element
STATE = ("parameters", "optimizer", "critic", "weights that sample")  # what a checkpoint holds
GOING_ON = "caches of unfinished answers"
USABLE = 0.92  # the rest is for the runtime, collectives and fragmentation
MEMORY_SHARES = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}  # what jax reserves of a GPU; two names for one


@dataclasses.dataclass(frozen=True)
class Workload:
    """The shapes of one iteration.

    model: the policy's sizes. prompt, response: P and R, slots. steps: decisions that an iteration records. decode_batch:
    prompts that one index of the `data` axis decodes at a time. picture: height and width of what each prompt shows, in pixels;
    None: nothing. rereads: whether prompts are read with the part of an answer that earlier weights have sampled.
    """

    model: ModelConfig
    prompt: int
    response: int
    steps: int
    decode_batch: int
    picture: tuple[int, int] | None = None
    rereads: bool = False

    @property
    def read(self) -> int:
        """Slots that a sampler reads at once."""
        return self.prompt + self.response * self.rereads


def bytes_by_phase(config: Config, mesh, workload: Workload) -> dict[str, dict[str, int]]:
    """Returns the bytes on each device: {"always": {...}, "loading": ..., "sampling": ..., "update": ...}, each by purpose.

    `always` lives through the whole iteration; the others come one after the other, but for `rollout.overlap`. `loading` is
    what adapters need before the first iteration and after the last; where all weights are trained the update needs more.
    """
    sizes = _Sizes.of(config, mesh, workload.model)
    always = {"parameters": sizes.trained * PARAM_BYTES}
    update: dict[str, int] = {}
    (update if config.learner.offload else always).update(_learning_state(config, sizes))
    if config.rollout.overlap:
        always["weights that sample"] = sizes.trained * sizes.compute_bytes
    loading: dict[str, int] = {}
    if config.lora.rank:  # the adapters are bound to it while sampling, too
        always["reference policy"] = sizes.policy * sizes.compute_bytes
        # The adapters of a warm start are merged beside the weights, those of a run in the place of one copy for each policy.
        loading["weights in float32"] = sizes.policy * PARAM_BYTES * (2 if config.warm_start == "cloning" else 1)
    sets = words_of(workload.model.vocab_size) if config.rollout.constrain == "admissible" else 0
    always["episodes"] = workload.steps * (workload.prompt + (2 + sets) * workload.response + 8) * 4
    if workload.picture:
        always["episodes"] += workload.steps * 3 * math.prod(workload.picture)
    if config.rollout.overlap:
        always["episodes"] *= 2  # those that are learned from, and the next ones
    sampling = _sampling(sizes, workload, lockstep=backend(config) == "compiled")
    sampling |= _store(config, sizes, workload, mesh.size)
    update |= _update(config, sizes, workload)
    if config.rollout.overlap:
        update["rollout beside it"] = sum(sampling.values())
    if not config.rollout.reread and config.evaluation.every:  # a validation has caches of its own beside them
        always[GOING_ON] = sampling["key-value cache"]
    elif not config.rollout.reread and not config.rollout.overlap:
        update[GOING_ON] = sampling["key-value cache"]
    return {"always": always, "loading": loading, "sampling": sampling, "update": update}


def bytes_of_run(config: Config, mesh) -> dict[str, dict[str, int]]:
    """Like `bytes_by_phase`, but for all policies of a run: any of them may sample, and one learns at a time.

    Raises ValueError as in `workload_of`.
    """
    parts, begun = [], set()
    for name, policy_config in configs_by_policy(config).items():
        try:
            part = bytes_by_phase(policy_config, mesh, workload_of(policy_config, mesh))
        except ValueError as error:
            if policy_config.policy == config.policy:
                raise
            raise ValueError(f"roles.{name}.policy={policy_config.policy.source}: {error}") from None
        if policy_config.lora.rank and config.warm_start != "cloning":  # adapters share one copy
            part["always"]["reference policy"] *= policy_config.policy.source not in begun
            begun.add(policy_config.policy.source)
        parts.append(part)
    resident = {"optimizer", "critic", "reference policy", "rollout beside it", GOING_ON}
    together = lambda phase, name: max if name == "episodes" or (phase == "update" and name not in resident) else sum  # noqa: E731
    return {
        phase: {
            name: together(phase, name)([part[phase].get(name, 0) for part in parts])
            for name in dict.fromkeys(name for part in parts for name in part[phase])
        }
        for phase in parts[0]
    }


def bytes_apart(config: Config, mesh, rollout_mesh) -> tuple[dict, dict]:
    """Like `bytes_of_run`, but of devices that only learn and of those of `rollout.mesh`, which only sample."""
    alone = config.model_copy(update={"rollout": config.rollout.model_copy(update={"overlap": 0})})
    learning, sampling = bytes_of_run(alone, mesh), bytes_of_run(alone, rollout_mesh)
    learning["always"]["episodes"] *= 2  # those that are learned from, and the next ones
    for phase in ("always", "update"):  # where they are counted if the same devices sample
        learning[phase].pop(GOING_ON, None)
    size, always = jnp.dtype(config.policy.compute_dtype).itemsize, sampling["always"]
    kept = {"weights that sample": always["parameters"] // PARAM_BYTES * size, "episodes": always["episodes"]}
    if GOING_ON in always:
        kept[GOING_ON] = always[GOING_ON]
    if config.evaluation.every:
        kept["weights that are validated"] = kept["weights that sample"]
    if config.lora.rank or any(role.lora_rank for role in config.roles.values()):
        kept["reference policy"] = always["reference policy"]
    return learning | {"sampling": {}}, {"always": kept, "sampling": sampling["sampling"] | {"compute copy": 0}, "update": {}}


def of_playing(phases: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Returns what a job needs that only plays: an evaluation, of weights without adapters."""
    kept = ("parameters", "episodes")
    return {
        "always": {name: size for name, size in phases["always"].items() if name in kept},
        "sampling": phases["sampling"],
    }


def add_checkpoint(phases: dict[str, dict[str, int]]) -> None:
    """Adds the state that is being written as a checkpoint, for devices that are processors.

    The writer reads the devices' own memory there, so an update that begins meanwhile cannot reuse it for the new state.
    """
    phases["update"]["checkpoint being written"] = of_state(phases)


def of_state(phases: dict[str, dict[str, int]]) -> int:
    """Returns the bytes of what a checkpoint holds; of one device's plan, that of a whole checkpoint."""
    return sum(part.get(name, 0) for part in phases.values() for name in STATE)


def configs_by_policy(config: Config) -> dict[str, Config]:
    """Returns the configuration of each policy by its name (`config/policies.py`)."""
    roles = role_names(config) if config.roles else ()  # the environment is made to learn them
    return {name: config_of(config, name) for name in roles_by_policy(config, roles)}


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Quantities on one device that several parts of the sum need."""

    fsdp: int
    tensor: int
    policy: int  # elements of the policy's weights
    trained: int  # trained elements: the same, or the adapters
    moments: int  # those that the optimizer has moments of: a frozen vision tower has none
    compute_bytes: int  # bytes of an element of the copy used for computation
    compute_copy: int  # bytes of that copy, 0 if the parameters themselves are used
    heads: float  # query heads
    kv_heads: float
    feed_forward: float
    vocabulary: float
    token_kv: float  # bytes of a token's keys and values in one layer
    on_tpu: bool  # false, too, if the devices are not known
    gathered_layer: float  # bytes of a layer's weights, gathered over fsdp for computation; decoding gathers nothing

    @classmethod
    def of(cls, config: Config, mesh, model: ModelConfig) -> _Sizes:
        compute_bytes = jnp.dtype(config.policy.compute_dtype).itemsize
        fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
        arrays, shards = shapes(model), shardings(model, mesh)
        whole, count = jax.tree.leaves(arrays), lambda shard, a: math.prod(shard.shard_shape(a.shape))
        policy = sum(jax.tree.leaves(jax.tree.map(count, shards, arrays)))
        trained, compute_copy = policy, 0 if compute_bytes == PARAM_BYTES else policy * compute_bytes
        if config.lora.rank:
            adapted = dataclasses.replace(model, lora=LoraConfig(**config.lora.model_dump()))
            trained = sum(a.size for a in jax.tree.leaves(shapes(adapted))) - sum(a.size for a in whole)
            compute_copy = 0
        frozen = 0
        if tower_is_frozen(config, model) and not config.lora.rank:
            frozen = sum(jax.tree.leaves(jax.tree.map(count, shards["visual"], arrays["visual"])))
        D, F, E = model.hidden_size, model.intermediate_size, model.head_size
        H, G = model.num_attention_heads, model.num_key_value_heads
        kv_heads = G / (tensor if G % tensor == 0 else 1)
        return cls(
            fsdp=fsdp,
            tensor=tensor,
            policy=policy,
            trained=trained,
            moments=trained - frozen,
            compute_bytes=compute_bytes,
            compute_copy=compute_copy,
            heads=H / tensor,
            kv_heads=kv_heads,
            token_kv=2 * kv_heads * E * compute_bytes,
            feed_forward=F / tensor,
            vocabulary=model.vocab_size / tensor,
            on_tpu=isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu",
            gathered_layer=(2 * D * (H + G) * E + 3 * D * F) / tensor * compute_bytes * (fsdp > 1),
        )


def _critic(config: Config, sizes: _Sizes) -> int:
    """Counts the critic's elements on one device: about a policy's, in float32 and without adapters."""
    return sizes.policy if method_named(config.method).critic else 0


def _learning_state(config: Config, sizes: _Sizes) -> dict[str, int]:
    """Counts the bytes that only the update reads, so that `learner.offload` can move them away."""
    critic = _critic(config, sizes)
    state = {"optimizer": 2 * (sizes.moments * PARAM_BYTES + 4 * critic)}
    if critic:
        state["critic"] = 4 * critic
    if not config.lora.rank:
        state["reference policy"] = sizes.policy * sizes.compute_bytes if config.learner.kl_weight else 0
    return state


def _sampling(sizes: _Sizes, workload: Workload, lockstep: bool) -> dict[str, int]:
    """Counts the bytes that a sampler holds for the rows of one decode batch.

    lockstep: it samples one batch after another; otherwise it keeps slots, which new prompts fill.
    """
    model, compute, read = workload.model, sizes.compute_bytes, workload.read
    D, H, layers = model.hidden_size, model.num_attention_heads, model.num_hidden_layers
    rows = -(-workload.decode_batch // sizes.fsdp)
    tokens = rows * read
    cache = rows * (workload.prompt + workload.response) * layers * sizes.token_kv
    scores = min(tokens * H * query_block_size(read) * sizes.fsdp, max(MAX_SCORES, H * tokens * sizes.fsdp))
    feed_forward = 3 * tokens * sizes.feed_forward * compute  # the gate, the values and their product
    prefill = tokens * 2 * D * compute + max(2 * 4 * scores / sizes.fsdp / sizes.tensor, feed_forward)
    tables = model.vocab_size * D * (1 if model.tie_word_embeddings else 2)
    blocks = 1 - tables / sum(a.size for a in jax.tree.leaves(shapes(model)))
    return _pictures(workload, sizes, rows) | {
        "compute copy": sizes.compute_copy,
        "weights by layer": int(sizes.policy * compute * blocks),
        "key-value cache": int(cache),
        "prompts' keys and values": int(tokens * (layers - 1) * sizes.token_kv),
        # The cache of a batch is made when the activations of its prompts are gone.
        "activations": int(max(prefill - cache, 0) if lockstep else prefill),
        "logits": int(3 * 4 * rows * sizes.vocabulary),
        "gathered weights": int(sizes.gathered_layer),
    }


def _store(config: Config, sizes: _Sizes, workload: Workload, devices: int) -> dict[str, int]:
    """Counts the bytes of what conversations keep without a slot. Raises ValueError where not one of them finds room."""
    store = config.rollout.store * MiB
    row = (workload.prompt + workload.response) * workload.model.num_hidden_layers * sizes.token_kv * devices
    if 0 < store < row:
        smallest = math.ceil(row / MiB)
        raise ValueError(
            f"rollout.store={config.rollout.store}: the smallest that holds a prompt and its response is {smallest}"
        )
    return {"conversations without a slot": store // devices} if store else {}


def _update(config: Config, sizes: _Sizes, workload: Workload) -> dict[str, int]:
    """Counts the bytes that `learner.make_update` holds for one micro-batch, and those of its gradients."""
    rows, model, critic = -(-config.learner.microbatch_size // sizes.fsdp), workload.model, _critic(config, sizes)
    # The vocabulary is not gathered: every device looks up the whole group's tokens in its part.
    looked_up = model.hidden_size * sizes.compute_bytes * (sizes.fsdp * sizes.tensor > 1)
    tokens = rows * sizes.fsdp * (workload.prompt + workload.response)
    # Float32 logits, with their exponentials and gradient; where a whole conversation is predicted at once, also the entropy's
    # two arrays, which otherwise find room beside the blocks' activations.
    shape, copies = (conversation_shape, 5) if converses(config) else (sequence_shape, 3)
    predictions = rows * sizes.fsdp * shape(workload.prompt, workload.response).predictions
    logits = copies * 4 * min(predictions * model.vocab_size, max(MAX_LOGITS, rows * sizes.fsdp * model.vocab_size))
    return _pictures(workload, sizes, rows, config.learner.remat) | {
        # Policy and critic learn one after the other.
        "compute copy": max(sizes.compute_copy, critic * sizes.compute_bytes * (sizes.compute_bytes != 4)),
        # The gradients of a micro-batch, their sum, and the optimizer's updates.
        "gradients": max(sizes.trained * (2 * PARAM_BYTES + sizes.compute_bytes), critic * (2 * 4 + sizes.compute_bytes)),
        "activations": int(_training_activations(config.learner.remat, sizes, workload, rows) + tokens * looked_up),
        "logits": int(logits / sizes.fsdp / sizes.tensor),
        "gathered weights": int(2 * sizes.gathered_layer),
    }


def _pictures(workload: Workload, sizes: _Sizes, rows: int, remat: str | None = None) -> dict[str, int]:
    """Counts the bytes of the vision tower for the pictures of a batch of rows.

    remat: what the forward pass saves for the backward pass; None: there is none.
    """
    v, compute = workload.model.vision, sizes.compute_bytes
    if workload.picture is None or v is None:
        return {}
    patches, D, F = math.prod(workload.picture) // v.patch_size**2, v.hidden_size, v.intermediate_size
    seen = patches if v.fullatt_block_indexes else min(patches, (v.window * v.spatial_merge_size) ** 2)
    scores = min(rows * v.num_heads * patches * seen, MAX_SCORES) // sizes.tensor
    block = 3 * 4 * scores + rows * patches * (8 * D + 3 * F) * compute
    inputs = 2 * 4 * rows * patches * v.patch_length
    if remat is None:
        return {"pictures": inputs + block}
    products = rows * patches * (7 * D + 2 * F) * compute  # saved per block by "dots"
    saved = {"none": block, "dots": products, "full": rows * patches * D * compute}[remat]
    return {"pictures": inputs + (v.depth - 1) * saved + block}


def _training_activations(remat: str, sizes: _Sizes, workload: Workload, rows: int) -> float:
    """Counts the bytes that the forward pass saves for the backward pass, for rows of S slots."""
    model, compute, S = workload.model, sizes.compute_bytes, workload.prompt + workload.response
    D, E, H = model.hidden_size, model.head_size, model.num_attention_heads
    # The arrays of one block: attention scores in float32, projections, the feed-forward.
    scores = min(H * S * S * rows * sizes.fsdp, max(MAX_SCORES, H * S * rows * sizes.fsdp)) / sizes.fsdp / sizes.tensor
    projections = 2 * sizes.heads * E + 2 * sizes.kv_heads * E
    # That cuDNN is given instead of scores: of segments, as bool and bfloat16.
    mask = 3 * rows * S * S if compute == 2 and not sizes.on_tpu else 0
    block = max(3 * scores * 4, mask) + rows * S * (projections + 3 * sizes.feed_forward + 4 * D) * compute
    products = rows * S * (projections + 2 * sizes.feed_forward + 3 * D) * compute  # saved per block by "dots"
    saved = {"none": block, "dots": products, "full": rows * S * D * compute}[remat]
    return (model.num_hidden_layers - 1) * saved + block


def workload_of(config: Config, mesh) -> Workload:
    """Returns the shapes of a configuration's iteration, without weights. Raises ValueError for invalid sizes."""
    settings, policy = config.rollout, config.policy
    batch = settings.prompt_groups * settings.group_size
    prompt, response, vocabulary = settings.prompt_limit, settings.response_limit, None
    published = preset(policy.source)
    entry, env = environment(config.env), shown(config)
    if entry.compiled and backend(config) == "compiled":
        env = entry.compiled(config)
        prompt, response = prompt_length(env, settings.history_length), env.action_length + 1
        vocabulary = vocabulary_size(env.words)
    if policy.source:
        model = published or huggingface_folder.read_config(find(policy.source, config.cache_dir, weights=False))
    else:
        if vocabulary is None:
            vocabulary = embedding_rows(len(fresh_tokenizer(config)))
        try:
            model = small_model(policy, vocabulary, env)
        except ValueError as error:
            raise ValueError(f"policy.{error}") from None
    return Workload(
        model=model,
        prompt=prompt,
        response=response,
        steps=batch * max_turns(config.env),
        decode_batch=min(settings.decode_batch_size, -(-batch * settings.keep // mesh.shape["data"])),
        picture=env.picture_size if isinstance(env, Pictured) else entry.picture_size,
        rereads=settings.keep > 1,
    )


def device_limit(devices: Sequence) -> int | None:
    """Returns the bytes that each device of a process can hold, or None if unknown; the cores of a CPU share the memory."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        # Of a GPU, what jax has reserved: all that is used.
        return round(stats["bytes_limit"] / (USABLE if devices[0].platform == "gpu" else 1))
    if devices[0].platform == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(machine, memory_limit() or machine) // len(devices)
    return None


def peak(bytes_by_phase: dict[str, dict[str, int]]) -> int:
    """Returns the peak memory of a device in bytes."""
    total = {phase: sum(parts.values()) for phase, parts in bytes_by_phase.items()}
    return total.pop("always") + max(total.values())


def table(bytes_by_phase: dict[str, dict[str, int]]) -> str:
    """Formats the bytes as lines of text."""
    lines = []
    for phase, parts in bytes_by_phase.items():
        lines += [f"  {phase:9s} {name:24s} {size / GiB:9.3f} GiB" for name, size in parts.items() if size]
    return "\n".join([*lines, f"  peak on each device                {peak(bytes_by_phase) / GiB:9.3f} GiB"])


def refuse_too_large(mesh: str, phases: dict[str, dict[str, int]], needed: int, limit: int) -> None:
    """Raises ConfigError, after printing the table, if a device with `limit` bytes has less than the needed memory.

    mesh: as it was given, field=value.
    """
    if needed > USABLE * limit:
        say(table(phases))
        learns = "learner.microbatch_size or rollout.decode_batch_size, or learner.remat=full"
        raise ConfigError(
            f"{mesh}: needs {needed / GiB:.1f} GiB on each device, which has {limit / GiB:.1f}; take more devices for fsdp or "
            f"tensor, or a smaller {learns if phases.get('update') else 'rollout.decode_batch_size'}"
        )
