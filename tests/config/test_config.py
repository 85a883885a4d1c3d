"""The configuration: what it accepts, and that every refusal names field, value and fix in one line."""

import re

import pytest
import yaml

from hgpo_jax import config as configuration
from hgpo_jax.advantages import parameters
from hgpo_jax.advantages.checks import check_option
from hgpo_jax.config import CONFIGS, choices, load
from hgpo_jax.config.schema import AdvantageConfig
from hgpo_jax.config.workers import at_most, workers_of
from hgpo_jax.learner.methods import METHODS, estimator_options
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.environments import ENVIRONMENTS
from hgpo_jax.setup.validate import check_overrides, check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused


def test_no_option_of_an_estimator_is_refused_only_after_the_warm_start():
    """What the configuration takes, the estimators take."""
    numbers = (-1, 0, 0.5, 1, 2, 10, 10.5, 64, 65, 1000, 1001, 1e6, 1e7)
    for name in AdvantageConfig.model_fields:
        taken = []
        for number in numbers:
            try:
                taken.append(getattr(load(None, [f"advantage.{name}={number:g}"]).advantage, name))
            except ConfigError:
                continue
            check_option(name, taken[-1])
        assert len(taken) < len(numbers)


def test_overrides_win_over_the_file_and_take_yaml_values(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 3\nlearner:\n  lr: 0.1\n  kl_weight: 0.5\n")
    config = load(str(file), ["learner.lr=3e-4", "env.tasks=place,heat", "log.tensorboard=false", "mesh=data=2,fsdp=4"])
    assert (config.seed, config.learner.lr, config.learner.kl_weight) == (3, 3e-4, 0.5)
    assert config.env.tasks == ("place", "heat")
    assert config.log.tensorboard is False
    assert config.mesh == "data=2,fsdp=4"
    file.write_text("env: # all of it is commented out\nroles:\nadvantage: {normalize: mean, lam: 0.9}\n")
    config = load(str(file), ["env.places=8", "advantage.normalize=null", "advantage.lam=~", "seed=010", "iterations=1e2"])
    assert (config.env.places, config.advantage.normalize, config.advantage.lam) == (8, None, None)
    assert (config.seed, config.iterations) == (10, 100)  # YAML 1.1 has 8 and a text


@pytest.mark.parametrize(
    ("value", "workers", "least"),
    [("0", (0, False), 0), ("256", (256, False), 2), ("ray:1", (1, True), "ray:1"), ("ray:1024", (1024, True), "ray:2")],
)
def test_workers_are_here_or_on_a_cluster(value, workers, least):
    config = load(None, [f"env.workers={value}"])
    assert workers_of(config.env.workers) == workers and at_most(config.env.workers, 2) == least
    assert load(None, [f"env.workers={config.env.workers}"]) == config


@pytest.mark.parametrize(
    "value", ["-1", "257", "2.5", "ray:0", "ray:-1", "ray:1025", "ray:", "ray", "ray:two", "rya:2", "ray: 2", "''", "[2]"]
)
def test_workers_that_make_no_sense_are_refused(value):
    with pytest.raises(ConfigError, match=r"^env\.workers=.*: must be 0 to 256, or ray:N with N from 1 to 1024$"):
        load(None, [f"env.workers={value}"])


def test_who_needs_no_cluster_needs_no_ray(monkeypatch):
    config = load(None, ["env.name=household_text", "env.workers=ray:2"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^env\.workers=ray:2: ray is not installed; pip install 'hgpo_jax\[ray\]'$"):
        check_together(config)
    check_together(load(None, ["env.name=household_text", "env.workers=2"]))


def test_every_config_of_the_project_loads_by_name():
    for path in CONFIGS.glob("*.yaml"):
        assert load(path.stem) == load(str(path))
    with pytest.raises(ConfigError, match="did you mean household_six"):
        load("household_sx")
    with pytest.raises(ConfigError, match=r"no such file; there are alfworld_agent, .*webshop_tiny$"):
        load("nope")


def test_help_names_every_field_with_default_and_meaning():
    def squeezed(text):
        return " ".join(text.split())

    every, short = configuration.describe(), configuration.describe(configuration.COMMON)
    for name, info in configuration.fields().items():
        assert f"\n  {name}=" in every
        assert info.description
        assert squeezed(info.description) in squeezed(every)
        assert (f"\n  {name}=" in f"\n{short}") == (name in configuration.COMMON)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", r"learner\.lrr=1: no such field; did you mean learner\.lr\?"),
        ("lr=1", r"lr=1: .*learner\.lr"),
        ("rollout.chunk=64", r"rollout\.chunk=64: is now called rollout\.decode_batch_size"),
        ("learner.lr=-1", r"learner\.lr=-1: must be greater than 0"),
        ("learner.lr=fast", r"learner\.lr='fast': must be a valid number"),
        ("learner.lr=nan", r"learner\.lr=.*finite"),
        ("learner.lr=.inf", r"learner\.lr=.*finite"),
        ("method=hpgo", r"method='hpgo': .*did you mean pgpo or hgpo or hbpo\?"),
        ("env.tasks=plase", r"env\.tasks='plase': .*did you mean place\?"),
        ("iterations=1:30", r"iterations='1:30': must be a valid integer"),
        ("lora.targets=[]", r"lora\.targets=\[\]: "),
        ("iterations=1.5", r"iterations=1\.5: must be a valid integer"),
        ("seed=-1", r"seed=-1: must be greater than or equal to 0"),
        ("name=../x", r"name='\.\./x': "),
        ("learner=3", r"learner=3"),
        ("just_a_word", r"'just_a_word': an override is written field=value"),
        ("roles.searcher.policy=", r"roles\.searcher\.policy='': must be shared, own, or"),
    ],
)
def test_refusals(override, message):
    with pytest.raises(ConfigError, match=f"^{message}[^\n]*$"):
        load(None, [*(["env.name=household_team"] if override.startswith("roles.") else []), override])


@pytest.mark.parametrize("name", configuration.REMOVED)
def test_a_removed_field_is_refused_with_what_holds_now(name):
    assert name not in configuration.fields() | configuration.role_fields("NAME")
    field = name.replace("NAME", "searcher")
    with pytest.raises(ConfigError, match=rf"^{re.escape(field)}=1: is [^\n]{{4,70}}$"):
        load(None, ["env.name=household_team", f"{field}=1"])


def test_mistakes_in_a_file(tmp_path):
    """Files that are no YAML are in test_refusals_commands.py."""
    for content, message in (
        ("learnr:\n  lr: 1\n", "learnr: no such field"),
        ("learner:\n  lrr: 1\n", r"learner\.lrr=1: no such field; did you mean learner\.lr\?"),
        ("learner.lr: 0.5\n", r"learner\.lr=0\.5: in a file, write learner: {lr: 0\.5}$"),
        ("learner.lrr: 0.5\n", r"learner\.lrr=0\.5: no such field; did you mean learner\.lr\?"),
        ("rollout: {chunk: 64}\n", r"rollout\.chunk=64: is now called rollout\.decode_batch_size$"),
        ("learner: {beta1: 0.9}\n", r"learner\.beta1=0\.9: is fixed at 0\.9$"),
        ("roles: {1: {lr: 1}}\n", "roles: 1 is no name; names are text$"),
        ("learner: {loss_options: {1: 2}}\n", r"learner\.loss_options: 1 is no name; names are text$"),
        ("roles: {searcher: {template: text}}\n", r"roles\.searcher\.template='text': is env\.template for every role$"),
    ):  # fmt: skip
        (tmp_path / "run.yaml").write_text(content)
        with pytest.raises(ConfigError, match=f"^{message}") as caught:
            load(str(tmp_path / "run.yaml"))
        assert "\n" not in str(caught.value)


def test_a_file_is_read_as_the_command_line_is(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 010\nenv: {name: here.py:Env, options: {a: 010, b: 1:30, c: [1:30.5, 0x10]}}\n")
    given = ["seed=010", "env.name=here.py:Env", *(f"env.options.{a}" for a in ("a=010", "b=1:30", "c=[1:30.5, 0x10]"))]
    assert load(str(tmp_path / "run.yaml")) == load(None, given)
    assert load(None, given).env.options == {"a": "010", "b": "1:30", "c": ["1:30.5", 16]} and load(None, given).seed == 10
    (tmp_path / "run.yaml").write_text("iterations: 1:30\n")
    with pytest.raises(ConfigError, match=r"^iterations='1:30': must be a valid integer"):
        load(str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nlearner: {lr: 1}\nseed: 2\n", "seed: stands in line 1 and again in line 3; leave one of them out"),
        ("env:\n  size: 6\n  'size': 7\n", "size: stands in line 2 and again in line 3"),
        ("a: &a {x: 1}\nb: &b {x: 2}\nc: {<<: *a, <<: *b, x: 3}\n", None),
        ("a: {x: 1}\nb: {x: 1}\n", None),
    ],
)
def test_a_name_that_a_section_holds_twice(text, said):
    if said is None:
        assert configuration.read_yaml(text) == yaml.safe_load(text)
        return
    with refused(said, yaml.YAMLError):
        configuration.read_yaml(text)


def test_every_yaml_file_of_the_project_reads_as_yaml_does():
    for path in (CONFIGS.parents[1] / "configs").rglob("*.yaml"):
        assert configuration.read_yaml(path.read_text()) == yaml.safe_load(path.read_text())


def test_empty_sections_of_sections(tmp_path):
    (tmp_path / "run.yaml").write_text("env:\n  name: here.py:Env\n  options:\nlearner:\n  loss_options:\nroles:\n  carrier:\n")
    assert load(str(tmp_path / "run.yaml"), ["env.options.a=1"]).env.options == {"a": 1}
    config = load(str(tmp_path / "run.yaml"))
    assert (config.env.options, config.learner.loss_options, config.roles) == ({}, {}, {})
    (tmp_path / "run.yaml").write_text("env:\n  options: 3\n")
    with pytest.raises(ConfigError, match=r"^env\.options=3: is a section; its fields are written env\.options\.field=value$"):
        load(str(tmp_path / "run.yaml"), ["env.options.a=1"])


MUON = ["policy=somewhere", "cloning.optimizer=muon"]
WHOLE_RESPONSES = ("gagpo", "gspo")
COMPARE_EPISODES = (
    "adora", "g2rpo", "gbpo", "hapo", "hbpo", "grpo", "dapo", "gspo", "kpo", "rloo", "dr_mas", "reinforce_pp_baseline",
)  # fmt: skip
# Fields that do not go together, what is said of them, and fields like these that do.
TOGETHER = [
    *((["learner.rollout_correction=token", f"method={name}"], f"method={name} weighs whole", [])
      for name in WHOLE_RESPONSES),
    (["learner.rollout_correction=mask", "method=gspo"], "method=gspo weighs whole", []),
    (["lora.rank=2", *MUON], "cloning.optimizer=muon: needs full-rank weights; with lora.rank=2 give adamw",
     [MUON, [*MUON, "lora.rank=2", "warm_start=none"]]),
    *((["rollout.group_size=1", f"method={name}"], f"method={name} compares a task's episodes", [])
      for name in COMPARE_EPISODES),
    (["advantage.keep=valid", "method=ppo"], "the critic of method=ppo learns from all", [["advantage.keep=valid"]]),
    *((["advantage.keep=" + keep, "rollout.group_size=1", f"method={name}"], "with rollout.group_size=1 it drops every", [])
      for keep in ("informative", "valid") for name in ("hgpo", "reinforce_pp", "beacon")),
    (["advantage.keep=informative", "method=dapo"], "method=dapo keeps no other", [["advantage.keep=valid", "method=dapo"]]),
    (["advantage.by_role=true"], "env.name=household has one role",
     [["advantage.by_role=true", "env.name=household_team", f"method={name}"] for name in ("hgpo", "kpo")]),
    *((["advantage.by_role=true", "env.name=household_team", f"method={name}"], f"method={name} compares no turns", [])
      for name in ("dr_mas", "ppo")),
    (["advantage.statistics=per_trajectory"], "method=hgpo compares no whole episodes",
     [["advantage.statistics=per_trajectory", f"method={name}"] for name in ("grpo", "dapo", "rloo")]),
    *(([f"env.template={file}", f"env.name={name}"], said, []) for name in ("math", "household_text") for file, said in (
        ("nope", "no such file; give one, or alfworld, "), (__file__, "needs the sections == first ="))),
    (["method=hiper"], "which env.name=household does not have", [["method=hiper", "env.name=household_subgoals"]]),
    (["method=hiper", "env.name=household_text"], "which env.name=household_text does not have",
     [["rollout.group_size=1", f"method={name}"] for name in ("hgpo", "gigpo", "ppo", "reinforce_pp")]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said", "fine"), TOGETHER)
def test_fields_that_do_not_go_together(fields, said, fine):
    with refused(said, ConfigError) as caught:
        check_together(load(None, fields))
    assert str(caught.value).startswith(tuple(fields))
    for others in fine:
        check_together(load(None, others))


UNREAD = [
    (["learner.mask_token=0.3"], ["learner.rollout_correction=mask"], "nothing is masked; give learner.rollout_correction="),
    (["critic.lr=1e-2"], ["method=ppo"], "method=hgpo has no critic"),
    (["lora.alpha=8"], ["lora.rank=2"], "there are no adapters; give lora.rank, too"),
    (["lora.targets=q_proj", "lora.rank=0"], ["roles.carrier.lora_rank=2", "env.name=household_team"], "there are no adapters"),
    (["policy.vision_depth=3"], ["env.name=sokoban_pixels"], "env.name=household shows no pictures; leave it out"),
    (["env.compiled=false"], ["env.name=alfworld"], "env.name=household has no such choice"),
    (["rollout.response_limit=64"], ["env.name=household_text"], "env.name=household, compiled, is not told as text"),
    (["rollout.ready_fraction=0.5"], ["env.name=household_text", "env.workers=2"], "env.name=household, compiled, steps all"),
    (["env.generated=9", "env.name=alfworld"], ["env.split=generated"], "is read with env.split=generated alone"),
    (["env.passages=99", "env.name=search", "env.data=x"], ["env.data="], "is the size of the generated world"),
    (["advantage.lam=0.9"], ["method=ppo"], "method=hgpo does not read it"),
    (["advantage.normalize=mean", "method=rloo"], ["method=dapo"], "method=rloo does not read it"),
    (["advantage.signal_weights=1"], ["method=gdpo"], "method=hgpo does not read it"),
    (["policy.hidden_size=64", "env.name=household_text", "policy=x"], ["policy="], "policy.source has sizes of its own"),
    (["reward.workers=2"], ["reward.source=./x.py:f"], "there is no reward function; give reward.source, too"),
    (["rollout.prompt_widths=2"], ["env.name=alfworld", "policy=Qwen2.5-0.5B"], "env.name=household is not played as text"),
    (["rollout.stop=x"], ["env.name=alfworld", "policy=Qwen2.5-0.5B"], "env.name=household, compiled, is not told as text"),
]


@pytest.mark.parametrize(("unread", "reader", "why"), UNREAD)
def test_what_nothing_reads_is_refused_on_the_command_line(unread, reader, why):
    with pytest.raises(ConfigError, match=f"^{unread[0]}: {why}"):
        check_overrides(load(None, unread), unread)
    check_overrides(load(None, [*unread, *reader]), [*unread, *reader])
    check_overrides(load(None, unread), [])  # as a file has it
    check_overrides(load(None, ["env.name=./no.py:Mine"]), [])  # which is not made before devices are open


def test_a_path_may_begin_with_the_users_own_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(None, ["run_dir=~/runs/x", "policy=~/qwen", "env.name=household_text"])
    assert (config.run_dir, config.policy.source) == ("/home/me/runs/x", "/home/me/qwen")


def test_names_are_those_of_the_tables():
    assert tuple(ENVIRONMENTS) == choices.ENVIRONMENTS
    assert tuple(METHODS) == choices.METHODS


@pytest.mark.parametrize(
    ("given", "on_device"),
    [
        (["policy=Qwen2.5-0.5B"], True),
        (["policy=Qwen2.5-0.5B", "env.workers=2"], False),  # they are the host's
        (["policy=Qwen2.5-0.5B", "env.compiled=false"], False),
        (["policy.tokenizer=some/folder"], False),  # what random weights say cannot be reproduced
        (["policy.tokenizer=some/folder", "env.compiled=true"], True),
        ([], False),  # in the games' own words
    ],
)
def test_given_weights_play_alfworld_on_the_device(given, on_device):
    assert (backend(load(None, ["env.name=alfworld", *given])) == "compiled_text") == on_device


def test_a_methods_normalization_is_its_papers_unless_it_is_given():
    options = {}
    for name, method in METHODS.items():
        if "normalize" in parameters(method.estimator)[1]:
            options[name] = estimator_options(load(None, [f"method={name}"]), method.estimator)["normalize"]
            given = load(None, [f"method={name}", "advantage.normalize=mean"])
            assert estimator_options(given, method.estimator)["normalize"] == "mean"
    assert {name for name, value in options.items() if value == "mean_std"} == {
        "adora", "crbc", "dr_mas", "ecpo", "g2po", "gagpo", "graphgpo", "milegpo", "pgpo",
    }  # fmt: skip
    assert {options[name] for name in ("hgpo", "gigpo", "grpo", "dapo", "gspo", "himac", "kpo")} == {"mean"}
