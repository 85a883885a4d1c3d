"""Every field of every cell of the paper's plan beside the released recipe, written down here with where it says so.

H: recipe/hgpo/run_qwen2.5_{1.5b,7b}_{alfworld,webshop}_train.sh; M: examples/{ppo,grpo,rloo,gigpo}_trainer/run_*.sh; D: the
defaults below them, verl/trainer/config/ppo_trainer.yaml; all of verl-agent as OliverLeeXZ/SERL 5a2a85b1 holds it.
"""

import functools

from hgpo_jax import advantages
from hgpo_jax import config as configuration
from hgpo_jax.learner import loss_table
from hgpo_jax.learner.methods import METHODS
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.tables import plan as planning

PLAN = planning.read(planning.find("paper"))

RELEASED = {
    "iterations": 160,  # H trainer.total_epochs, one update an epoch
    "warm_start": "none",
    "seed": 0,  # H env.seed
    "env.split": "train",
    "env.compiled": None,
    "env.strict": False,  # agent_system/environments: a response is valid by its form alone
    # Their old log-probabilities are the trainer's, and nothing weighs the sampler's in.
    "learner.mask_response": 0.1,  # not read
    "learner.mask_token": 0.5,
    "learner.rollout_correction": "none",
    "policy.compute_dtype": "bfloat16",  # D rollout.dtype, and FSDP's mixed precision
    "lora.rank": 0,  # D model.lora_rank
    "rollout.prompt_groups": 16,  # H data.train_batch_size
    "rollout.group_size": 8,  # H env.rollout.n
    "rollout.history_length": 2,  # D env.history_length, and H
    "rollout.temperature": 1.0,  # D rollout.temperature
    "rollout.prompt_limit": 4096,  # H data.max_prompt_length
    "rollout.response_limit": 512,  # H data.max_response_length
    "rollout.stop": ("<|endoftext|>",),  # vLLM ends where Qwen2.5's generation_config.json does: there, and at eos_token
    "rollout.constrain": "none",
    "rollout.overlap": 0,  # rollout and update take turns
    "rollout.keep": 1,  # every episode is played to its end
    "rollout.reread": True,  # of `keep`
    "rollout.mesh": "",
    "rollout.store": 0,
    "env.preload": (),  # not read
    "rollout.ready_fraction": 1.0,  # all environments in step
    "rollout.thinking": None,  # Qwen2.5's template has no switch
    "reward.source": "",  # the environment's alone
    "reward.workers": 1,
    "reward.time_limit": 60.0,
    "reward.overlong_cache": 0,  # D reward_model.overlong_buffer.enable: false
    "env.budgets": (),  # prompts tell none
    "env.state_key": "",
    "advantage.similarity": None,  # D algorithm.gigpo.enable_similarity: false
    "learner.unfinished": "train",  # responses that were cut are in the loss
    "advantage.gamma": 0.95,  # H algorithm.gamma
    "advantage.alpha": 1.0,  # H algorithm.hgpo.length_weight_alpha
    "advantage.history_length": None,  # that of the prompt
    "advantage.signal_weights": (),  # there are no signals
    "advantage.keep": "all",  # no filter
    "advantage.by_role": False,  # one role
    "advantage.statistics": "per_step",  # D compute_mean_std_cross_steps=True
    "advantage.lam": None,  # of estimators that read it, D algorithm.lam for ppo
    "advantage.invalid_penalty": 0.1,  # H actor.invalid_action_penalty_coef
    "learner.lr": 1e-6,  # H actor.optim.lr, for 7B on ALFWorld D
    "learner.warmup_steps": 0,  # D actor.optim.lr_warmup_steps_ratio
    "learner.final_lr": 1.0,  # D actor.optim.warmup_style: constant
    "learner.weight_decay": 0.01,  # D actor.optim.weight_decay
    "learner.grad_clip": 1.0,  # D actor.grad_clip
    "learner.loss": "",  # the method's own
    "learner.loss_options": {},
    "learner.clip_low": 0.2,  # D actor.clip_ratio_low
    "learner.clip_high": 0.2,  # D actor.clip_ratio_high
    "learner.kl_weight": 0.01,  # H actor.kl_loss_coef
    "learner.entropy_weight": 0.001,  # D actor.entropy_coeff
    "learner.aggregate": "token-mean",  # D actor.loss_agg_mode
    "critic.lr": 1e-5,  # M critic.optim.lr
    "critic.warmup_steps": 0,  # D critic.optim.lr_warmup_steps_ratio; M trainer.critic_warmup=0
    "critic.grad_clip": 1.0,  # D critic.grad_clip
    "critic.value_clip": 0.5,  # D critic.cliprange_value
    "evaluation.episodes": 512,  # recipe/hgpo/run_*_eval.sh: val_data_size * 4
    "evaluation.temperature": 0.4,  # H rollout.val_kwargs.temperature
}
ENVIRONMENTS = {
    "alfworld": {
        "env.name": "alfworld",
        "env.max_turns": 50,  # H env.max_steps
        "env.held_out": "valid_seen",
        "env.goal_order": "original",  # of webshop only
        "advantage.normalize": "mean_std",  # H algorithm.hgpo.mode, M algorithm.gigpo.mode
        "learner.minibatch_size": 256,  # H actor.ppo_mini_batch_size
    },
    "webshop": {
        "env.name": "webshop",
        "env.max_turns": 30,
        "env.held_out": "valid_seen",  # of alfworld only
        "env.goal_order": "verl-agent",
        "advantage.normalize": "mean",
        "learner.minibatch_size": 64,
    },
}
MODELS = {  # H actor_rollout_ref.model.path and trainer.n_gpus_per_node
    "1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", 2),
    "7b": ("Qwen/Qwen2.5-7B-Instruct", 4),
}
SHALLOW, DEEP = {"method": "hgpo", "rollout.history_length": 2}, {"method": "hgpo", "rollout.history_length": 4}
METHOD = {
    "ppo": {
        "method": "ppo",  # M algorithm.adv_estimator=gae
        "rollout.prompt_groups": 128,  # M data.train_batch_size
        "rollout.group_size": 1,  # D env.rollout.n
        "advantage.gamma": 1.0,  # D algorithm.gamma
        "advantage.lam": 1.0,  # D algorithm.lam
    },
    "rloo": {"method": "rloo"},
    "grpo": {"method": "grpo", "advantage.normalize": "mean_std"},  # D algorithm.norm_adv_by_std_in_grpo
    "gigpo-k2": SHALLOW | {"method": "gigpo"},
    "gigpo-k4": DEEP | {"method": "gigpo"},
    "hgpo-k2": SHALLOW,
    "hgpo-k4": DEEP,
    # The paper's ablations.
    "hgpo-k4-level0": DEEP | {"advantage.history_length": 0},
    "hgpo-k4-level1": DEEP | {"advantage.history_length": 1},
    "hgpo-k4-level2": DEEP | {"advantage.history_length": 2},
    "hgpo-k4-alpha0": DEEP | {"advantage.alpha": 0.0},
    "hgpo-k4-alpha2": DEEP | {"advantage.alpha": 2.0},
}
# Other environments' and methods' fields, places, speed, and what is written: no result depends on them here.
ELSEWHERE = (
    "name", "run_dir", "cache_dir", "mesh", "env.tasks", "env.rooms", "env.places", "env.milestones", "env.size",
    "env.tile", "env.problems", "env.operations", "env.digits",
    "env.options", "env.template", "env.data", "env.generated", "env.workers", "env.time_limit", "env.command", "env.failed",
    "env.passages", "env.top_k", "env.retriever",
    "env.num_held_out_tasks", "lora.alpha", "lora.targets", "rollout.decode_batch_size",
    "rollout.prompt_widths", "cloning.",
    "learner.microbatch_size", "learner.remat", "learner.offload", "evaluation.every", "roles", "log.",
    *(f"policy.{name}" for name in ("tokenizer", "vision_", *configuration.PolicyConfig().sizes)),
)  # fmt: skip
CELLS = planning.cells(PLAN)


def test_every_field_of_every_cell_is_the_released_one():
    assert {cell.method for cell in CELLS} == set(METHOD)
    assert {cell.setting for cell in CELLS} == {f"{environment}_{size}" for environment in ENVIRONMENTS for size in MODELS}
    for cell in CELLS:
        config, (environment, _, size) = planning.config_of(PLAN, cell), cell.setting.partition("_")
        source, devices = MODELS[size]
        assert abstract_mesh(config.mesh).size == devices
        method = METHODS[config.method]
        options = loss_table.options(config.learner, method)
        own = {"learner.clip_low": options["clip_low"], "learner.clip_high": options["clip_high"]}
        seen = {}
        for name in configuration.fields():
            if not name.startswith(ELSEWHERE):
                value = functools.reduce(getattr, name.split("."), config)
                seen[name] = own[name] if value is None and name in own else value
        wanted = RELEASED | ENVIRONMENTS[environment] | {"policy.source": source} | METHOD[cell.method]
        assert seen == wanted, cell.name


def test_a_field_that_a_method_does_not_read_may_be_the_settings():
    """The released scripts leave gamma at 1 for these, and know no mode of theirs."""
    for method, unread in (("grpo", "gamma"), ("rloo", "gamma"), ("rloo", "normalize"), ("gae", "normalize")):
        assert unread not in advantages.parameters(method)[1]


def test_cells_are_evaluated_as_released():
    for name, setting in PLAN.settings.items():
        assert setting.seeds == (123, 456, 789)  # recipe/hgpo/run_*_eval.sh: seeds
        assert setting.splits == (("valid_seen", "valid_unseen") if name.startswith("alfworld") else ("held_out",))
