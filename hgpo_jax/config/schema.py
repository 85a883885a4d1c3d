"""The fields of a run's configuration, by section."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pydantic

from hgpo_jax.config.choices import ENVIRONMENTS, LINEARS, ROLES, HeldOut
from hgpo_jax.config.learning import AdvantageConfig, CriticConfig, LearnerConfig
from hgpo_jax.config.open_fields import are_options, is_choice
from hgpo_jax.config.roles import RoleConfig, unknown_role
from hgpo_jax.config.section import Positive, Section, Share, field
from hgpo_jax.config.workers import workers_of
from hgpo_jax.utils.files import CACHE_DIR, check_scheme, is_remote


class EnvConfig(Section):
    """The environment: compiled with the policy (household, sokoban, alfworld if possible), or text on the host (the others).

    The class of your own environment decides which kind it is (`envs/protocol.py`)."""

    name: str = field(
        "household",
        "which environment; your own by the place of its class, Gymnasium's as gymnasium:ID or, where your own "
        "code registers it, gymnasium:FILE.py:ID",
    )
    options: dict[str, Any] = field({}, "your own: keyword arguments of its class, each written as env.options.NAME=VALUE")
    template: str = field(
        "",
        "text: file with the prompts, or conversation, which shows the whole chat so far; default: the environment's own, "
        "text.txt for yours, plain.txt for a small policy",
    )
    tasks: tuple[Literal["place", "two", "look", "clean", "heat", "cool"], ...] = field(
        ("place",), "household: task types to draw from"
    )
    rooms: tuple[Literal["kitchen", "bathroom", "bedroom", "livingroom"], ...] = field(
        ("kitchen",), "household: rooms to draw from"
    )
    places: int = field(6, "household: receptacles per room", ge=6, le=12)
    milestones: bool = field(
        False, "household: give the signal milestones, the number of the goal's predicates that hold after a turn, for beacon"
    )
    size: int = field(6, "sokoban: cells along a room's side, outer walls included", ge=6, le=10)
    tile: int = field(4, "sokoban_pixels: pixels along the side of a cell; the policy sees one feature a cell", ge=1, le=64)
    problems: tuple[Literal["arithmetic", "equation", "story"], ...] = field(
        ("arithmetic", "equation", "story"), "math: kinds of generated problems to draw from"
    )
    operations: int = field(2, "math: operations in a generated problem", ge=1, le=8)
    digits: int = field(2, "math: digits of a generated problem's numbers", ge=1, le=6)
    compiled: bool | None = field(
        None,
        "alfworld: play the games inside the compiled rollout; default: with a small policy, and with pretrained weights "
        "(policy=) unless env.workers is set",
    )
    max_turns: int = field(20, "actions after which an episode ends", ge=1, le=1000)
    data: str = field(
        "",
        "folder of ALFWorld's (default: ALFWORLD_DATA) or WebShop's files, of math's train.jsonl and test.jsonl (default: "
        "generated problems), of search's questions and passages (default: a generated world); data=FOLDER is short for it",
    )
    passages: int = field(3000, "search: passages of the generated world", ge=24, le=900_000)
    top_k: int = field(3, "search: passages that answer a query", ge=1, le=100)
    retriever: str = field(
        "", "search: URL of a server that finds passages, Search-R1's or python -m hgpo_jax.envs.search_server"
    )
    split: Literal["train", "valid_train", "generated"] = field(
        "train", "alfworld: games to train on; generated: the training games there are, and more made of them (compiled only)"
    )
    generated: int = field(4000, "alfworld: games made for env.split=generated", ge=1)
    held_out: HeldOut = field("valid_seen", "alfworld: games to evaluate on")
    goal_order: Literal["original", "verl-agent"] = field(
        "original",
        "webshop: one shuffle of the goals for all, the first 500 held out; or as verl-agent a shuffle for each "
        "prompt group and each evaluation episode, so that held-out goals are also trained on",
    )
    command: str = field("", "agent: what plays an episode, started anew for each one (hgpo_jax/serving/agent_rollout.py)")
    preload: tuple[str, ...] = field(
        (),
        "agent: modules, as in [openai], that one process imports, which then forks every episode's, for a command "
        "`python FILE` or `python -m MODULE`; (): each is started anew and imports them itself",
    )
    failed: Literal["zero", "exclude"] = field(
        "zero",
        "agent: an episode whose command fails after an answer, or posts no reward, is lost and keeps the rewards it "
        "posted by then (zero), or is left out, so that nothing is learned from it; one that never asked is always left out",
    )
    num_held_out_tasks: int = field(0, "agent: tasks to evaluate on, numbered from 0; 0: any number, of 64 bits", ge=0)
    state_key: str = field(
        "",
        "text: function of an observation (FILE.py:NAME); states are equal where its values are, for instance the text "
        "without a step counter or a clock; default: equal texts",
    )
    budgets: tuple[Positive, ...] = field(
        (),
        "text: turns that an episode should take at most, as its prompts say; the members of a prompt group have them in turn; "
        "the first signal, budget, for hbpo",
    )
    strict: bool = field(False, "text: an inadmissible action is invalid, as a malformed response always is")
    workers: int | str = field(
        0,
        "text: processes that play the environments; 0 plays them in this one. agent: commands at a time; 0: one a slot. "
        "ray:N: on a Ray cluster, that of RAY_ADDRESS or one that starts here",
    )
    time_limit: float = field(
        60.0,
        "seconds after which an environment in a worker counts as hung, an agent that asks for nothing, and a retrieval "
        "server that has gone",
        gt=0,
    )

    @pydantic.field_validator("name")
    @classmethod
    def _is_known(cls, value):
        return is_choice("env.name", value)

    @pydantic.field_validator("workers", mode="before")
    @classmethod
    def _are_workers(cls, value):
        return value if workers_of(value).ray else int(value)

    _are_options = pydantic.field_validator("options")(are_options)


class PolicyConfig(Section):
    """The policy: pretrained weights (`policy=...` is short for `policy.source=...`), or a random Qwen2.5 of these sizes."""

    source: str = field(
        "",
        "Hugging Face folder, FILE.gguf, smollm2 (a package's), or hub id such as Qwen/Qwen2.5-1.5B-Instruct; empty: "
        "random weights of the sizes below",
    )
    tokenizer: str = field(
        "",
        "text: the tokenizer for random weights, where source would look for it; default: the source's own, for random "
        "weights one of the words that the environment's texts have",
    )
    compute_dtype: Literal["float32", "bfloat16"] = field(
        "float32",
        "dtype of the copy of the weights in rollouts and in the loss; the trained weights are float32. Accelerators multiply "
        "float32 in TF32 or bfloat16, unless JAX_DEFAULT_MATMUL_PRECISION=highest",
    )
    hidden_size: Positive = field(64, "width")
    intermediate_size: Positive = field(176, "width of the feed-forward layer")
    num_hidden_layers: Positive = field(2, "layers")
    num_attention_heads: Positive = field(2, "query heads")
    num_key_value_heads: Positive = field(1, "key-value heads")
    rope_theta: float = field(1_000.0, "RoPE base (theta)", gt=1)
    vision_depth: Positive = field(2, "where pictures are seen: blocks of the vision tower")
    vision_hidden_size: Positive = field(32, "the same: its width")
    vision_intermediate_size: Positive = field(64, "the same: width of its feed-forward layers")
    vision_heads: Positive = field(2, "the same: its attention heads")
    vision_frozen: bool = field(
        False, "leave the vision tower as it is, without gradient and weight decay; one that sees no pictures always stays"
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _short(cls, value):
        return {"source": value} if isinstance(value, str) else value

    @property
    def sizes(self) -> dict:
        """The fields of a random policy's ModelConfig but for its vision; its embeddings are tied."""
        sizes = self.model_dump(exclude={"source", "tokenizer", "compute_dtype"}) | {"initializer_range": 0.1}
        return {name: value for name, value in sizes.items() if not name.startswith("vision_")}


class LoraFields(Section):
    """Low-rank adapters beside pretrained weights, which stay frozen and serve as the reference policy."""

    rank: int = field(0, "rank of the adapters; 0: train the weights themselves", ge=0)
    alpha: float = field(32.0, "the adapters' product is scaled by alpha / rank", gt=0)
    targets: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = field(
        LINEARS, "which matrices of every block get an adapter", min_length=1
    )


class RolloutConfig(Section):
    """How episodes are sampled."""

    prompt_groups: Positive = field(32, "tasks per iteration; the episodes of one task form a prompt group")
    group_size: Positive = field(8, "episodes per task, all from the same initial state")
    history_length: int = field(2, "K: past observations and actions in the prompt, and the deepest HGPO level", ge=0, le=64)
    temperature: float = field(1.0, "sampling temperature in training", gt=0, le=10)
    prompt_limit: int = field(4096, "tokens of the longest prompt of a text environment", ge=16)
    response_limit: Positive = field(512, "tokens of the longest response in a text environment")
    stop: tuple[str, ...] = field(
        (),
        "tokens that end a response in a text environment besides those of the chat template, the tokenizer and "
        "generation_config.json, as in [<|endoftext|>]",
    )
    thinking: bool | None = field(
        None,
        "text: whether responses begin with a thought, where the chat template has a switch for it; default: as "
        "policy.source was trained, or else the template's own",
    )
    decode_batch_size: Positive = field(
        64, "episodes that each index of the data axis decodes at a time; in a text environment the others wait for a free slot"
    )
    prompt_widths: Positive = field(
        13,
        "text on the device: widths that prompts are padded to, at most; all layers are compiled for each, so fewer compile "
        "sooner, and pad more",
    )
    constrain: Literal["none", "admissible"] = field(
        "none",
        "admissible: sample only what can still become an admissible action, and learn with these probabilities; for a "
        "compiled environment played in its own words, which lists its actions, and for text with env.template=plain",
    )
    store: int = field(
        0,
        "agents and env.template=conversation: MiB, over all devices and for each policy, that keep the keys and values of "
        "conversations while others use their slots",
        ge=0,
    )
    ready_fraction: float = field(
        1.0,
        "text: go on decoding as soon as this fraction of the unfinished episodes can take part, while the environments "
        "of the others step in env.workers; 1: wait for all, which makes a run the same to the bit; give less where "
        "environments are slow",
        gt=0,
        le=1,
    )
    overlap: int = field(
        0,
        "1: sample the next iteration's episodes while this one's update runs, with the weights from before it (see "
        "hgpo_jax/rollout/README.md); 0: one after the other",
        ge=0,
        le=1,
    )
    keep: int = field(
        1,
        "text on the host: prompt groups that are played at a time, over those of an iteration; with 2 it learns from those "
        "that are complete first, and the others go on in the next one (see hgpo_jax/rollout/README.md)",
        ge=1,
        le=8,
    )
    reread: bool = field(
        True,
        "with keep: the new weights read an unfinished answer again, with its prompt; false: it goes on from what earlier "
        "weights computed, which saves this but keeps the caches beside the update, and a resumed run is not the same to "
        "the bit",
    )
    mesh: str = field(
        "",
        "with overlap: the mesh of the rollouts, as in data=1, on the last devices, so that rollout and update run side by "
        "side; empty: `mesh`, where they take turns",
    )


class RewardConfig(Section):
    """Additions to the environment's rewards: from a function of your own (`reward=...` is short for `reward.source=...`;
    hgpo_jax/rollout/rewards.py), and for answers near the limit."""

    source: str = field("", "function that scores an episode by its texts, for a compiled environment in pure JAX; empty: none")
    overlong_cache: int = field(
        0,
        "text: last tokens before an answer's limit, in which its reward falls as in DAPO, by up to 1; 0: none",
        ge=0,
    )
    workers: Positive = field(1, "text: processes that call the function, each with one episode at a time")
    time_limit: float = field(60.0, "text: seconds for a call, after which its episode is left out", gt=0)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _short(cls, value):
        return {"source": value} if isinstance(value, str) else value

    @pydantic.field_validator("source")
    @classmethod
    def _is_known(cls, value):
        return value and is_choice("reward.source", value)


class CloningConfig(Section):
    """The warm start: behaviour cloning on generated play (see README for what it does and what success it gives)."""

    stop_at: Share = field(0.4, "sampled success on practice tasks at which cloning ends, so that every run starts alike")
    max_steps: Positive = field(1000, "optimizer steps at most")
    check_every: Positive = field(50, "optimizer steps between evaluations of the practice success")
    batch_size: Positive = field(64, "environment steps per optimizer step")
    episodes: Positive = field(4096, "generated episodes to learn from")
    lr: float = field(2e-3, "peak learning rate; rises over 100 steps, then falls to a tenth along a cosine", gt=0)
    optimizer: Literal["adamw", "muon"] = field("adamw", "muon: Muon for the layers' matrices, with the RMS of Adam's updates")
    seed: int | None = field(
        None,
        "seed of the first weights and of cloning; default: seed; runs that share it start from the same policy",
        ge=0,
        lt=2**31,
    )


class LogConfig(Section):
    """Files that a run writes, and their intervals."""

    checkpoint_every: Positive = field(25, "iterations between checkpoints; the last iteration always has one")
    keep_checkpoints: Positive = field(2, "last checkpoints kept")
    keep_best: int = field(0, "also keep this many checkpoints, the best by validation success (evaluation.every)", ge=0)
    dump_every: Positive = field(25, "iterations between dumps of the sampled episodes")
    tensorboard: bool = field(True, "write TensorBoard events")
    wandb: bool = field(
        False, "send metrics to Weights & Biases (extra wandb, whose variables are WANDB_PROJECT, WANDB_MODE, ...)"
    )


class EvaluationConfig(Section):
    """The evaluation on held-out tasks at the end of a run, and validations while it trains: with other samples, and on other
    held-out tasks where there are twice as many as evaluation.episodes."""

    episodes: Positive = field(512, "held-out tasks", le=1_000_000)
    every: int = field(0, "iterations between validations (sampled) of the policy that an iteration begins with; 0: none", ge=0)
    temperature: float = field(1.0, "temperature of the sampled evaluation; a greedy one is always made too", gt=0, le=10)


class Config(Section):
    """One run."""

    name: str = field("household", "name of the run, used for its folder", pattern=r"^[A-Za-z0-9][\w.-]*$")
    run_dir: str = field("", "the run's folder, or a bucket's as in gs://bucket/run; default runs/NAME-METHOD-sSEED-TIME")
    seed: int = field(0, "seed of everything random", ge=0, lt=2**31)
    iterations: int = field(80, "iterations of rollout and update", ge=0)
    method: str = field("hgpo", "how advantages and loss are made; your own by its estimator's place")
    warm_start: Literal["cloning", "none"] = field(
        "cloning", "cloning: behaviour cloning (SFT) of the environment's expert first; none: from policy= as it is"
    )
    mesh: str = field(
        "auto", "device mesh: auto, or sizes as in data=2,fsdp=4,tensor=1 with at most one -1; fewer than all devices will do"
    )
    cache_dir: str = field(
        CACHE_DIR,
        "folder of warm starts, unpacked GGUF files and, unless JAX_COMPILATION_CACHE_DIR is set, compiled "
        "programs; shared by runs",
    )
    env: EnvConfig = EnvConfig()
    policy: PolicyConfig = PolicyConfig()
    lora: LoraFields = LoraFields()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    cloning: CloningConfig = CloningConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    roles: dict[str, RoleConfig] = field(
        {}, "teams: what is different for a role of the environment, each field written as roles.NAME.FIELD=VALUE"
    )
    log: LogConfig = LogConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def start_seed(self) -> int:
        """The seed of everything random before the first iteration."""
        return self.seed if self.cloning.seed is None else self.cloning.seed

    @pydantic.field_validator("method")
    @classmethod
    def _is_known(cls, value):
        return is_choice("method", value)

    @pydantic.field_validator("run_dir")
    @classmethod
    def _is_reached(cls, value):
        if is_remote(value):
            check_scheme(value)
        return value

    @pydantic.model_validator(mode="after")
    def _has_these_roles(self):
        """Checks the roles of built-in environments; others are checked after they are made (`setup/validate.py`)."""
        for role in self.roles if self.env.name in ENVIRONMENTS else ():
            if role not in (roles := ROLES.get(self.env.name, ())):
                raise ValueError(unknown_role(self.env.name, role, self.roles[role], roles))
        return self

    @pydantic.field_validator("cache_dir")
    @classmethod
    def _is_local(cls, value):
        if is_remote(value):  # else it would be a folder of this name
            raise ValueError("must be a folder of this machine")
        return value


def role_fields(role: str) -> dict[str, Any]:
    """Returns the `fields` of one role."""
    return fields(RoleConfig, f"roles.{role}.")


def fields(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Returns dotted name -> pydantic field for every leaf of the tree."""
    leaves: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            leaves |= fields(info.annotation, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = info
    return leaves


def literals(annotation) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for inner in get_args(annotation) for value in literals(inner))
