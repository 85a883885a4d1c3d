"""Turn budgets: what prompts say, what the signal holds, whose they are, and what a run with them is refused for."""

import contextlib

import pytest
from odd_env import Counting
from test_host import MODEL
from test_partial_rollout import MEMBERS, B, host_of, inputs, params, play

from hgpo_jax.config import load
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.runners import _chat_format
from hgpo_jax.rollout.scripted_play import play as scripted
from hgpo_jax.rollout.turn_budgets import BUDGET, goal_of, with_budget
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput
from hgpo_jax.setup.build import check_signals
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import rehearsal
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.refusals import refused

BUDGETS = (3, 7)
TEXT = ["env.name=household_text", "rollout.group_size=4"]


class Costly(Counting):
    """An environment with a signal of its own."""

    signals = ("cost",)

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"signals": {"cost": 0.5}}


def test_an_output_states_the_budget_of_its_episode():
    output = EnvOutput("a room", ["go"], "find it.", 0, signals=[0.25])
    assert with_budget(output, 5, ()) is output
    assert with_budget(EnvFailure("hung"), 5, BUDGETS) == EnvFailure("hung")
    for episode, budget in ((0, 3), (1, 7), (2, 3)):
        told = with_budget(output, episode, BUDGETS)
        assert (told.goal, told.signals) == ("find it.", [float(budget), 0.25])  # what rewards are asked for does not change
        assert goal_of(told) == f"find it. Use at most {budget} turns."
    assert goal_of(output) == "find it."
    for goal, budget, said in (("3 + 4", 1, "3 + 4. Use at most 1 turn."), ("Who?", 2, "Who? Use at most 2 turns.")):
        assert goal_of(output._replace(goal=goal, budget=budget)) == said
    assert goal_of(output._replace(goal="", budget=2)) == "Use at most 2 turns."


@pytest.mark.parametrize("make_env, signals", [(Counting, ("budget",)), (Costly, ("budget", "cost"))])
def test_the_members_of_a_prompt_group_have_them_in_turn(make_env, signals):
    host = host_of(make_env, keep=1, budgets=BUDGETS)
    assert host.signals == signals
    e, report = host(params(0), *inputs(0))
    assert e.mask.sum() > B
    for episode in range(B):
        budget, played = BUDGETS[episode % MEMBERS], e.mask[episode]
        assert "turns" not in report.goals[episode]
        assert (e.signals[episode, played, 0] == budget).all() and not e.signals[episode, ~played].any()
        assert (e.signals[episode, played, 1:] == 0.5).all()


def test_the_prompts_hold_what_the_report_says():
    class Written:
        """Writes down the goals of the prompts that it passes on."""

        def __init__(self, form):
            self.form, self.goals = form, []

        def __getattr__(self, name):
            return getattr(self.form, name)

        def build(self, inputs):
            self.goals += [each.goal for each in inputs]
            return self.form.build(inputs)

    host = host_of(keep=1, budgets=BUDGETS)
    host._formats = {name: Written(form) for name, form in host._formats.items()}
    _, report = host(params(0), *inputs(0))
    (form,) = host._formats.values()
    wanted = {f"{goal}. Use at most {BUDGETS[n % MEMBERS]} turns.".removeprefix(". ") for n, goal in enumerate(report.goals)}
    assert set(form.goals) == wanted and len(form.goals) >= B


def test_partial_rollouts_keep_an_episodes_budget():
    results, _ = play(range(4), host_of(budgets=BUDGETS))
    for e, _ in results:
        for episode in range(B):
            assert (e.signals[episode, e.mask[episode], 0] == BUDGETS[episode % MEMBERS]).all()


def test_held_out_episodes_are_told_budgets_too():
    host = host_of(keep=1, budgets=BUDGETS).with_environment(Costly)
    assert host.signals == ("budget", "cost")


def test_a_scripted_player_reads_them():
    episodes = list(scripted(Counting, range(1, 5), noise=0.0, history_length=1, seed=0, budgets=BUDGETS))
    for number, episode in enumerate(episodes):
        assert all(turn.goal.endswith(f"at most {BUDGETS[number % 2]} turns.") for turn in episode.inputs)


@pytest.mark.parametrize(
    "fields, said",
    [
        (["env.budgets=5,10"], "env.budgets=5,10: env.name=household is not played as text on the host; give env.name=h"),
        (["env.name=alfworld", "policy=smollm2", "env.budgets=5"], "env.name=alfworld is .* give env.compiled=false"),
        ([*TEXT, "env.budgets=5,21"], "env.budgets=5,21: an episode ends after 20 turns; give no more"),
        ([*TEXT, "env.budgets=5,6,7"], "env.budgets=5,6,7: rollout.group_size=4 is no multiple of 3"),
        ([*TEXT, "env.budgets=0"], "env.budgets"),
    ],
)
def test_refusals(fields, said):
    with pytest.raises(ConfigError, match=f"^[^\n]*{said}[^\n]*$"):
        check_together(load(None, fields))


def test_a_template_that_tells_no_goal_is_refused(tmp_path):
    for text, right in (("$goal", True), ("Go on.", False)):
        (tmp_path / "t.txt").write_text(f"== first ==\n$goal $observation\n== later ==\n{text} $history\n== entry ==\n$action")
        assert load_template(str(tmp_path / "t.txt")).tells_goal == right
        config = load("text_small", [f"env.template={tmp_path}/t.txt", "env.budgets=5"])
        with contextlib.nullcontext() if right else pytest.raises(ValueError, match="in every first message"):
            _chat_format(config, environment(config.env), byte_tokenizer(), MODEL)
    assert load_template("conversation").tells_goal and load_template("webshop").tells_goal


@pytest.mark.parametrize("fields", [["env.budgets=5,5,20"], ["env.budgets=7", "env.max_turns=7"]])
def test_what_may_be_told(fields):
    check_together(load(None, ["env.name=household_text", "rollout.group_size=6", *fields]))


@pytest.mark.parametrize("method", ["gdpo", "dvao"])
def test_a_budget_is_no_reward(method):
    config = load(None, [*TEXT, f"method={method}", "env.budgets=5,10"])
    with refused(f"env.budgets=5,10: method={method} would take an episode's budget for a reward; leave one", ConfigError):
        check_signals(config, (BUDGET,), (BUDGET, "mine"))


def test_hbpo_asks_for_them():
    def check(*signals, fields=("env.budgets=5,10",)):
        check_signals(load(None, [*TEXT, "method=hbpo", *fields]), signals, signals)

    with refused("neither env.name=household_text nor a reward function has any; give env.budgets, for instance", ConfigError):
        check(fields=())
    with refused("env.budgets=5,10: env.name=household_text has a signal budget of its own; leave it out", ConfigError):
        check("budget", "budget")
    check("budget")
    with refused("env.budgets=5,20: method=hbpo gives no score for a success within all 20 turns; give smaller", ConfigError):
        check_together(load("text_small", ["method=hbpo", "env.budgets=5,20"]))


def test_a_rehearsal_has_as_many_as_its_groups():
    config = load("text_small", ["method=hbpo", "env.budgets=1,5,10,15"])
    fields = rehearsal.smaller(config, rehearsal._axes("data=1"))
    assert fields["env"]["budgets"] == [1, 2]
