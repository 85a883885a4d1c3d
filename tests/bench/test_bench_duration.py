"""Hours before renting: the counts against others of the same, and against runs that were measured."""

import re

import pytest

from hgpo_jax import config as configuration
from hgpo_jax.bench import __main__ as bench
from hgpo_jax.bench.duration import RATES, REACHED, rates_of, seconds_at_limits
from hgpo_jax.bench.limits import Rates
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.setup import memory
from hgpo_jax.tables import plan as planning
from hgpo_jax.utils.errors import ConfigError

PAPER = "alfworld_qwen2.5_1.5b"


def count(name: str, *overrides: str, mesh: str = "data=1", rates=(1e15, 1e12), turns=20.0, prompt=1000.0, response=200.0):
    config = configuration.load(name, ["data=x", *overrides] if name == PAPER else list(overrides))
    mesh = abstract_mesh(mesh)
    return seconds_at_limits(config, mesh, memory.workload_of(config, mesh), Rates(*rates), turns, prompt, response)


def test_every_chip_with_a_memory_has_rates():
    assert set(RATES) == set(memory.CHIPS)
    for chip, (operations, reading) in RATES.items():
        assert rates_of(chip, "bfloat16") == (operations, reading)
        assert rates_of(chip, "float32") == (operations if chip.startswith("tpu") else operations / 2, reading)


def test_the_usual_count_of_operations():
    """2 operations per weight and token forwards, 4 backwards, and weights read once per step of decoding."""
    found = count(PAPER, "learner.remat=none")
    steps, weights = 16 * 8 * 20, 1.31e9  # without the embedding
    assert found["prompts"] == pytest.approx(2 * weights * steps * 1000 / 1e15, rel=0.1)
    forward = 2 * steps * (1200 * weights + 200 * 151936 * 1536) / 1e15
    assert found["reference policy"] == pytest.approx(forward, rel=0.1)
    assert found["update"] == pytest.approx(3 * forward, rel=0.1)
    # 64 slots for 128 episodes would do with 8,000 tokens, but one of 50 turns takes 10,000; so 51 slots are busy in the mean.
    # Keys and values of 28 layers, 2 heads of 128.
    read = 2 * (weights + 151936 * 1536) + 52 * (1000 + 100) * 28 * 2 * 2 * 128 * 2
    assert found["decoding"] == pytest.approx(50 * 200 * read / 1e12, rel=0.05)
    # Twenty slots need 25,600 tokens and are always busy.
    read = 2 * (weights + 151936 * 1536) + 20 * (1000 + 100) * 28 * 2 * 2 * 128 * 2
    few = count(PAPER, "rollout.decode_batch_size=20")["decoding"]
    assert few == pytest.approx(steps * 200 / 20 * read / 1e12, rel=0.05)


def test_a_compiled_environment_decodes_in_lockstep():
    """Every turn lasts as long as its longest answer, of which there are as many as turns and batches."""
    base = count("household")["decoding"]
    assert count("household", turns=10.0)["decoding"] < base
    assert count("household", response=1.0)["decoding"] == base
    assert count("household", "rollout.decode_batch_size=4")["decoding"] > 1.1 * base


def test_what_changes_it():
    base = count(PAPER)
    assert count(PAPER, "learner.remat=none")["update"] == pytest.approx(base["update"] * 3 / 4)
    assert count(PAPER, "lora.rank=8")["update"] == pytest.approx(base["update"] * 3 / 4)
    assert "reference policy" not in count(PAPER, "learner.kl_weight=0")
    assert "rollout correction" not in base
    assert count(PAPER, "learner.rollout_correction=token") == base | {"rollout correction": base["reference policy"]}
    assert count(PAPER, "method=ppo")["critic"] == pytest.approx(base["update"] * 5 / 4)
    split = count(PAPER, mesh="fsdp=4")
    assert all(split[name] == pytest.approx(base[name] / 4) for name in base)
    # More batches of fewer rows read the weights more often.
    assert count(PAPER, "rollout.decode_batch_size=8")["decoding"] > 2 * base["decoding"]
    assert count(PAPER, rates=(1e15, 2e12))["decoding"] == pytest.approx(base["decoding"] / 2)


@pytest.mark.parametrize(("name", "rates", "expected", "measured"), [
    ("household", (181e9, 20e9), (20, 27, 3), 0.208 + 0.714),  # `bench train`
    pytest.param(  # means of 24 iterations
        "household_smollm2", (206e9, 34e9), (10.3, 174, 6.8), 72.7 + 192.1, marks=pytest.mark.needs("smollm2")
    ),
])  # fmt: skip
def test_measured_iterations_on_a_cpu(name, rates, expected, measured):
    """Those in hgpo_jax/bench/README.md, with the rates of the cores that they ran on."""
    config = configuration.load(name, ["policy.compute_dtype=float32"])
    mesh = abstract_mesh("data=1")
    limits = seconds_at_limits(config, mesh, memory.workload_of(config, mesh), Rates(*rates), *expected)
    assert sum(limits.values()) / REACHED == pytest.approx(measured, rel=0.3)


@pytest.fixture
def planned(monkeypatch, capsys):
    """What `bench plan` prints."""

    def shown(*arguments):
        monkeypatch.setattr("sys.argv", ["bench", "plan", *arguments])
        bench.main()
        return capsys.readouterr().out

    return shown


def test_the_plan_counts_the_weights_of_every_role(planned):
    team, apart = ("--mesh", "data=1", "env.name=household_team"), "roles.searcher.policy=own"
    one, two = (float(re.search(r"parameters \| ([\d.e-]+)", planned(*team, *more))[1]) for more in ((), (apart,)))
    assert two == pytest.approx(2 * one, rel=0.01)
    with pytest.raises(ConfigError, match=r"^--compile v5e:2x4: compiles for one policy"):
        planned(*team, apart, "--compile", "v5e:2x4")


def test_the_plan_says_how_long(planned, capsys):
    paper = "--config", PAPER, "data=x", "--mesh", "fsdp=2"
    shown = planned(*paper, "--chip", "h100-80g", "--turns", "20", "--prompt", "1000", "--response", "200")
    assert "| an iteration at the limits of h100-80g: decoding | 7.06 | s |" in shown
    assert "| 160 iterations at 50% of these limits | 2.81 | h |" in shown
    most = planned(*paper, "--chip", "h100-80g")
    assert float(most.split("50% of these limits | ")[1].split()[0]) > 9
    assert "iterations at" not in planned(*paper)
    with pytest.raises(SystemExit) as ended:
        planned(*paper, "--chip", "h100-80g", "--turns", "0")
    assert ended.value.code == 2 and "--turns: 0: must be above 0" in capsys.readouterr().err


def test_a_plan_of_runs_says_it_for_the_slices_of_its_settings():
    plan = planning.read(planning.find("paper"))
    one = {"settings": ["alfworld_1.5b"], "methods": ["hgpo-k2"], "baseline": None}
    plan = plan.model_copy(update={"tables": [plan.tables[0].model_copy(update=one)]})
    listing = planning.listing(plan, "runs")
    assert "alfworld_1.5b/hgpo-k2/s0: 2 devices" in listing
    assert "about 3.4 h on v5litepod-8 (mesh=fsdp=8) without environments" in listing
    cell = planning.Cell("alfworld_1.5b", "hgpo-k2", 0)
    expected = sum(count(PAPER, mesh="fsdp=8", rates=RATES["tpu-v5e"]).values()) * 160 / REACHED / 3600
    assert planning.cost(plan, cell).hours == pytest.approx(expected)
