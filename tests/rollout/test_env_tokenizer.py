"""The vocabulary of a small policy for a text environment."""

import pytest

from hgpo_jax.config import load
from hgpo_jax.envs.webshop.synthetic import write_catalogue
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer, template_of
from hgpo_jax.rollout.environments import environment, webshop_files
from hgpo_jax.rollout.runners import TextRunner
from hgpo_jax.setup.memory import configs_by_policy, workload_of
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

ENV = '''
class Colours:
    """The agent names the colour that it is told; the words differ by task."""

    max_turns, task_types, task_type, goal = 2, ("name",), 0, "Name the colour."

    def __len__(self):
        return 3

    def reset(self, task):
        self.colour = ("crimson", "azure", "ochre")[task]
        return f"It is {self.colour}.", [f"say {self.colour}", "wait a little"]

    def step(self, action):
        won = action == f"say {self.colour}"
        return "Well.", ["wait a little"], 10.0 * won, won, {"won": won, "admissible": True}
'''


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "colours.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: load("text_small", ["env.name=./colours.py:Colours", f"cache_dir={tmp_path}", *overrides])


def test_words_of_every_task_are_tokens_and_the_seed_changes_nothing(config):
    tokenizer = fresh_tokenizer(config())
    for word in ("crimson", "azure", "ochre", "wait", "little", "Well"):
        assert len(tokenizer(f" {word}").input_ids) <= 2, word  # a capital stands apart from the blank before it
    assert fresh_tokenizer(config("seed=7", "method=gigpo")) is tokenizer


def test_the_prompt_is_the_bare_facts_and_the_response_the_command(config):
    tokenizer = fresh_tokenizer(config())
    form = ChatFormat(ChatFrame(tokenizer), template_of(config(), tokenizer))
    (prompt,) = form.build([PromptInput("Name it.", [("It is azure.", "wait")], 1, "Well.", ["say azure", "wait"])])
    assert tokenizer.decode(prompt.ids) == "Name it.\nIt is azure. > wait\nWell.\n['say azure',\n'wait']\n>"
    parsed = form.parse(form.frame.text.encode([" say azure"])[0] + [tokenizer.eos_token_id])
    assert parsed == (" say azure", "say azure", True)


@pytest.mark.parametrize(("name", "action"), [("./colours.py:Colours", "Answer[Paris]"), ("webshop", "answer[paris]")])
def test_answers_keep_their_capitals_where_the_original_does_not_take_them(name, action, config, tmp_path):
    items, attributes = write_catalogue(tmp_path, 200, vocabulary=500)
    items.rename(tmp_path / "items_shuffle.json")
    attributes.rename(tmp_path / "items_ins.json")
    of_webshop = [f"data={tmp_path}"] if name == "webshop" else []
    given = config(f"env.name={name}", "env.template=text", "rollout.response_limit=64", *of_webshop)
    tokenizer, found, mesh = fresh_tokenizer(given), environment(given.env), mesh_of("data=1")
    model = workload_of(configs_by_policy(given)[""], mesh).model
    form = TextRunner(given, found, *found.text(given), {"": model}, {"": tokenizer}, mesh).formats[0]
    ids = form.frame.text.encode(["<think></think><action>Answer[Paris]</action>"])[0]
    assert form.parse(ids)[1:] == (action, True)


def test_a_shops_catalogue_has_its_own_attributes(tmp_path):
    def put(*names):
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        for name in names:
            (folder / name).touch()
        return str(folder)

    found = lambda *names: [file.name for file in webshop_files(put(*names))]  # noqa: E731
    pair = ["items_shuffle_1000.json.gz", "items_ins_v2_1000.json"]
    assert found(*pair, "items_human_ins.json", "items_shuffle_1000.json.gz.part") == pair
    assert found(*pair, "items_ins_v2.json") == found(*pair, "items_shuffle.json") == pair
    assert found("items_shuffle.json", "items_ins_1.json") == ["items_shuffle.json", "items_ins_1.json"]  # the only ones
    with refused("holds the catalogues items_shuffle.json and items_shuffle_1000.json.gz; give a folder with one of them"):
        found(*pair, "items_shuffle.json", "items_ins_v2.json")
    with refused("expected WebShop's items_shuffle"):
        found("items_shuffle.json", "items_shuffle_1000.json", "items_ins_v2_50.json")


def test_a_template_of_the_users_wins(config, tmp_path):
    (tmp_path / "mine.txt").write_text("== first ==\nLook: $observation\n== later ==\n$history\n== entry ==\n$action\n")
    mine = config(f"env.template={tmp_path / 'mine.txt'}")
    tokenizer = fresh_tokenizer(mine)
    assert template_of(mine, tokenizer).endswith("mine.txt")
    assert len(tokenizer("Look:").input_ids) == 2


def test_commands_that_no_response_can_hold_are_refused(config):
    with pytest.raises(ConfigError, match=r"^rollout.response_limit=3: the commands take up to 4 tokens; give as many"):
        fresh_tokenizer(config("rollout.response_limit=3"))
    fresh_tokenizer(config("rollout.response_limit=4"))


def test_an_environment_that_cannot_be_played_is_refused(config, tmp_path):
    (tmp_path / "colours.py").write_text(ENV.replace('("crimson"', '1 / 0 or ("crimson"').replace("Colours:", "Broken:"))
    with pytest.raises(ConfigError, match=r"^env.name=./colours.py:Broken: task \d cannot be played: ZeroDivisionError"):
        fresh_tokenizer(config("env.name=./colours.py:Broken"))


def test_play_keeps_to_the_time_limit_of_the_run(config, tmp_path):
    slow = ENV.replace("        self.colour =", "        task and __import__('time').sleep(60)\n        self.colour =")
    (tmp_path / "colours.py").write_text(slow)
    with pytest.raises(ConfigError, match=r"reset\(\d\) gives no answer in 0.2 s \(env.time_limit\)"):
        fresh_tokenizer(config("env.time_limit=0.2"))


def test_a_tokenizer_that_was_written_anew_is_read_anew(tmp_path):
    """As that of a run that was begun again in the same folder, in one notebook."""
    for words in (["a", "b"], ["c", "d", "e"]):
        word_tokenizer(["", *words]).save_pretrained(tmp_path)
        assert load_tokenizer(str(tmp_path), "cache").convert_ids_to_tokens(1) == words[0]
        assert load_tokenizer(str(tmp_path), "cache") is load_tokenizer(str(tmp_path), "cache")
