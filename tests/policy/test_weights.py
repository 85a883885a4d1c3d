"""Hugging Face folders in and out: bit-exact, on every mesh, in little memory, and every damage named in one line."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hgpo_jax import export
from hgpo_jax.policy import (
    ModelConfig,
    Policy,
    RopeScaling,
    huggingface_folder,
    load_policy,
    safetensors_files,
    shapes,
    shardings,
    weight_names,
)
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import word_tokenizer
from tests.helpers.refusals import refused
from tests.helpers.xla import xla_flags

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def policy(dtype="float32", **fields):
    config, rng = ModelConfig(**SIZES | fields), np.random.default_rng(5)
    params = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), dtype), shapes(config))
    # transformers imports torch, where it is installed, for a llama's tokenizer (test_gguf.py).
    return Policy(config, params, None if config.model_type == "llama" else word_tokenizer(("", "go_to", "fridge_1")))


def tensors(folder):
    """All tensors of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_bytes_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize(("dtype", "fields"), [
    ("float32", {"tie_word_embeddings": False}),
    ("bfloat16", {"model_type": "qwen3", "head_dim": 6, "rope_theta": 1e4, "max_position_embeddings": 77}),
    ("bfloat16", {
        "model_type": "llama", "rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192), "rope_theta": 5e5, "num_hidden_layers": 1,
    }),
])  # fmt: skip
def test_round_trip_is_bit_exact(dtype, fields, tmp_path):
    first = policy(dtype, **fields)
    first.save(tmp_path / "a")
    back = load_policy(tmp_path / "a", dtype=dtype)
    assert back.config == first.config
    jax.tree.map(np.testing.assert_array_equal, first.params, back.params)
    if first.tokenizer:
        assert back.tokenizer("go_to fridge_1 _ <|im_end|>")["input_ids"] == [1, 2, 0, 4]
        assert (back.tokenizer.eos_token_id, back.tokenizer.pad_token_id) == (4, 3)
    header = (tmp_path / "a" / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0  # the data are aligned
    back.save(tmp_path / "b", size=10_000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert_bytes_equal(tensors(tmp_path / "a"), tensors(tmp_path / "b"))
    assert_bytes_equal(tensors(tmp_path / "a"), tensors_of(first))


def tensors_of(p):
    """Transformers' tensors by plain indexing of the parameters."""
    layers, out = p.config.num_hidden_layers, {}
    for path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(p.params)):
        top, *rest = [part.key for part in path]
        turn = np.transpose if rest[-1:] == ["kernel"] else np.asarray
        end = ".".join(rest).replace("kernel", "weight").replace("embedding", "weight")
        if top == "layers":
            out |= {f"model.layers.{i}.{end}": turn(np.asarray(value[i])) for i in range(layers - 1)}
        elif top == "lm_head":
            out["lm_head.weight"] = np.asarray(value).T
        else:
            out[f"model.layers.{layers - 1}.{end}" if top == "last" else f"model.{top}.{end}"] = turn(np.asarray(value))
    return out


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen2", "float32"), ("qwen3", "bfloat16"), ("llama", "bfloat16"), ("mistral", "float32")]
)
def test_transformers_writes_we_read_and_write_transformers_reads(model_type, dtype, tmp_path):
    import torch
    from make_reference import random_model
    from transformers import AutoModelForCausalLM

    model = random_model(model_type, llama3=model_type == "llama", **SIZES, head_dim=6).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    load_policy(tmp_path / "theirs", dtype=dtype).save(tmp_path / "ours", size=30_000)
    assert_bytes_equal(tensors(tmp_path / "theirs"), tensors(tmp_path / "ours"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(model)
    theirs, ours = model.state_dict(), back.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype for name in theirs)
    same = (
        "head_dim",
        "rope_parameters",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "layer_types",
        "sliding_window",
    )
    fields = lambda config: {name: getattr(config, name, None) for name in same}  # noqa: E731  a llama has no layer_types
    assert fields(back.config) == fields(model.config)


def test_a_mesh_gets_the_same_parameters_and_only_the_bytes_of_a_shard_are_read(tmp_path, monkeypatch):
    first, mesh = policy(tie_word_embeddings=False), make_mesh("fsdp=4,tensor=2")
    first.save(tmp_path, size=20_000)
    asked, read = {}, safetensors_files.Weights.read

    def counted(self, name, index=None):
        value = read(self, name, index)
        asked[name] = [*asked.get(name, []), value.shape]
        return value

    monkeypatch.setattr(safetensors_files.Weights, "read", counted)
    spread = load_policy(tmp_path, mesh).params
    jax.tree.map(np.testing.assert_array_equal, first.params, jax.device_get(spread))
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), spread, shardings(first.config, mesh))
    assert all(jax.tree.leaves(placed))
    # [out, in] = [48, 32] over tensor=2 and fsdp=4: eight different parts; a norm is whole everywhere and read once.
    assert asked["model.layers.0.mlp.gate_proj.weight"] == [(24, 8)] * 8
    assert asked["model.norm.weight"] == [(32,)]


def test_other_types_are_read_and_rounded_once(tmp_path):
    first = policy()
    first.save(tmp_path)
    expected = jax.tree.map(lambda a: a.astype(jnp.bfloat16), first.params)
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path, dtype="bfloat16").params, expected)
    retensor(tmp_path, lambda t: t.update({name: value.astype(np.float16) for name, value in t.items()}))
    expected = jax.tree.map(lambda a: a.astype(jnp.float16).astype(jnp.float32), first.params)
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path).params, expected)


def test_an_older_policy_is_replaced_and_nothing_else(tmp_path, monkeypatch):
    old, new = policy(), policy(num_hidden_layers=2)
    old.save(tmp_path / "p", size=20_000)
    new.save(tmp_path / "p")
    assert huggingface_folder.read_config(tmp_path / "p") == new.config
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert not list((tmp_path / "p").glob("model-*"))
    before = (tmp_path / "p" / "model.safetensors").read_bytes()

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "_write_file", full)
        for name in ("p", "q"):
            with pytest.raises(OSError, match="no space"):
                old.save(tmp_path / name)
    (tmp_path / "p" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        old.save(tmp_path / "p")
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p" / "model.safetensors").read_bytes() == before


# ---- damage -------------------------------------------------------------------------------------------------------------


def edit(**fields):
    """Changes config.json; a field of None is left out."""

    def change(folder):
        raw = json.loads((folder / "config.json").read_text()) | fields
        raw = {name: value for name, value in raw.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def scale(**fields):
    """Asks for Llama 3's rope scaling, with these of its fields changed."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return edit(rope_parameters={"rope_type": "llama3", **rope, **fields})


def retensor(folder, change):
    """Rewrites the one file's tensors."""
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


SINGLE = [
    (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "holds adapters of another policy; merge them first"),
    (lambda f: (f / "model.safetensors").rename(f / "adapter_config.json").write_text("{}"), "holds adapters of another"),
    (lambda f: (f / "model.safetensors").rename(f / "training_args.bin"), "neither model.safetensors nor model.safetensors.in"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor model.safetensors.index.json"),
    (lambda f: cut(f / "model.safetensors"), "model.safetensors is damaged"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    (edit(num_hidden_layers=2), "model.layers.2.input_layernorm.weight is unexpected (12 in all)"),
    (edit(hidden_size=40, layer_types=None), "model.embed_tokens.weight has shape [67, 32], the config asks for [67, 40]"),
    (edit(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
    (lambda f: retensor(f, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    (lambda f: retensor(f, lambda t: t.update({"model.norm.weight": np.ones(32, "i4")})), "model.norm.weight has dtype I32"),
    (edit(model_type="gemma"), "model_type is 'gemma'"), (edit(model_type="mistral"), "sliding_window=4096 in config.json is"),
    (edit(model_type="mistral", sliding_window=32), "sliding_window=32 in config.json is not supported"),
    (edit(model_type="llama", attention_bias=True), "attention_bias=true"),
    (edit(model_type="llama", mlp_bias=True), "mlp_bias=true"),
    (edit(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "rope_scaling in config.json lacks low_freq_factor"),
    (scale(factor="x"), "factor='x': must be a positive number"),
    (scale(high_freq_factor=1.0), "high_freq_factor=1.0: must be greater than low_freq_factor=1.0"),
    (edit(vocab_size=None), "lacks vocab_size"),
    (edit(num_attention_heads=5), "num_attention_heads=5"),
    (edit(use_sliding_window=True), "use_sliding_window=true"),
    (edit(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types="),
    (edit(rope_scaling={"type": "yarn", "factor": 4.0}, rope_parameters=None), "yarn"),
    (edit(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),  # it is read before rope_parameters
    (edit(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "linear"),
    (edit(hidden_act="gelu"), "hidden_act"), (edit(quantization_config={"quant_method": "awq"}), "quantization_config"),
    (edit(quantization_config={"quant_method": "compressed-tensors", "ignore": ["lm_head"] * 300}),
     'quantization_config="compressed-tensors" in config.json is not supported; give the weights as they were before'),
    (lambda f: retensor(f, lambda t: t.update({"model.norm.scales": t.pop("model.norm.weight")})), "(1 in all); give"),
    (lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}'), "holds no vocabulary"),
    (edit(model_type="qwen3", attention_bias=True), "attention_bias=true"),
    (edit(num_attention_heads=0), "num_attention_heads=0: must be a positive whole number"),
    (edit(num_hidden_layers=1.5), "num_hidden_layers=1.5"), (edit(num_hidden_layers=True), "num_hidden_layers=True: must be"),
    (edit(vocab_size=10**30), "vocab_size=1000000000"), (edit(head_dim=[8]), "head_dim=[8]"),
    (edit(tie_word_embeddings="no"), "tie_word_embeddings='no'"), (edit(model_type=[]), "model_type is []"),
    (edit(layer_types=5), "layer_types in config.json is not a list"),
    (edit(rope_parameters=["x"]), "rope_scaling in config.json is not an object"),
    (edit(rope_parameters={"rope_theta": "x"}), "rope_theta='x'"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "config.json: Is a directory"),
    (lambda f: ((f / "tokenizer_config.json").write_text("{}"), (f / "tokenizer.json").write_text("[")), "cannot be read"),
]  # fmt: skip


def reindex(change):
    def apply(folder):
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        change(index)
        file.write_text(json.dumps(index))

    return apply


def point(file):
    return reindex(lambda index: index["weight_map"].update({"model.norm.weight": file}))


FIRST = "model-00001-of-00003.safetensors"
SHARDED = [
    (lambda f: (f / FIRST).unlink(), f"file {FIRST} is missing"),
    (lambda f: cut(f / FIRST), f"{FIRST} is damaged"),
    (point("../other.safetensors"), "'../other.safetensors'"),
    (point("pytorch_model.bin"), "'pytorch_model.bin'"),
    (point("model-00002-of-00003.safetensors"), "model.norm.weight is not in model-00002-of-00003.safetensors"),
    (reindex(lambda index: index.pop("weight_map")), "holds no weight_map"),
    (reindex(lambda index: index.update(weight_map=[1])), "holds no weight_map"),
    (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "holds no weight_map"),
    (point("a\nb.safetensors"), "file a b.safetensors is missing"),
    (point("a\0b.safetensors"), "is missing"),
    (reindex(lambda index: index["weight_map"].update({"odd\nname\x1b[2J": FIRST})), "tensor odd name?[2J is not in"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same policy in one file and in three."""
    sharded = tmp_path_factory.mktemp("sharded") / "p"
    export.export(DATA / "qwen2_tiny", sharded, shard_size=45_000)
    assert len(list(sharded.glob("model-*-of-00003.safetensors"))) == 3
    return {"one": DATA / "qwen2_tiny", "three": sharded}


@pytest.mark.parametrize(("files", "change", "fragment"), [
    *(("one", *case) for case in SINGLE), *(("three", *case) for case in SHARDED)
], ids=[fragment for _, fragment in SINGLE + SHARDED])  # fmt: skip
def test_damaged_folders_are_named_in_one_line(files, change, fragment, folders, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(folders[files], folder)
    change(folder)
    with refused(fragment) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)


def test_a_head_stored_beside_the_embedding_that_it_equals_is_read_and_not_written(tmp_path):
    first = policy()
    first.save(tmp_path)
    retensor(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    back = load_policy(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, first.params, back.params)
    back.save(tmp_path)
    assert "lm_head.weight" not in tensors(tmp_path)


def test_a_sliding_window_that_is_not_used_is_ignored(tmp_path):
    shutil.copytree(DATA / "qwen2_tiny", tmp_path / "p")
    edit(use_sliding_window=False, sliding_window=16, max_window_layers=1, layer_types=None)(tmp_path / "p")
    assert huggingface_folder.read_config(tmp_path / "p") == huggingface_folder.read_config(DATA / "qwen2_tiny")


@pytest.mark.parametrize("fields", [{"sliding_window": None}, {"sliding_window": 96, "max_position_embeddings": 96}])
def test_a_mistral_without_a_window_is_read(fields, tmp_path):
    shutil.copytree(DATA / "llama_tiny", tmp_path / "p")
    file = tmp_path / "p" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mistral"} | fields))
    load_policy(tmp_path / "p").save(tmp_path / "again")
    assert load_policy(tmp_path / "again").config.model_type == "mistral"


def test_angles_in_a_file_are_ignored(tmp_path):
    """Files of Llama-2 hold what rope_theta gives."""
    shutil.copytree(DATA / "llama_tiny", tmp_path / "p")
    file = tmp_path / "p" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}, file)
    assert load_policy(tmp_path / "p").config.model_type == "llama"


# ---- the hub ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp16"])
def test_other_dtypes_are_refused(dtype):
    with refused(f"dtype={dtype}: must be float32 or bfloat16"):
        load_policy(DATA / "qwen2_tiny", dtype=dtype)


def test_a_policy_may_lie_below_the_users_own_folder(monkeypatch):
    monkeypatch.setenv("HOME", str(DATA))
    assert find("~/qwen2_tiny") == DATA / "qwen2_tiny"


@pytest.mark.parametrize("weights", [True, False])
def test_a_name_is_fetched_from_the_hub_when_no_such_folder_exists(monkeypatch, weights):
    asked = []

    def download(name, *, allow_patterns):
        asked.append(name)
        assert not any("bin" in pattern for pattern in allow_patterns)
        assert ("model*.safetensors" in allow_patterns) == weights
        assert {"tokenizer.model", "vocab.txt"} <= {*allow_patterns}
        return str(DATA / "qwen2_tiny")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert huggingface_folder.read_config(find("Qwen/Qwen2.5-0.5B", weights=weights)).vocab_size == 67
    assert asked == ["Qwen/Qwen2.5-0.5B"]


@pytest.mark.parametrize(("name", "fragment"), [
    ("nobody/no-such-model", "cannot be fetched from"), ("no-such-folder", "no such folder"), ("a/b/c", "no such folder"),
])  # fmt: skip
def test_what_is_neither_folder_nor_on_the_hub_is_one_line(name, fragment):
    with refused(fragment):
        load_policy(name)


# ---- meshes that do not fit ---------------------------------------------------------------------------------------------


def test_what_a_mesh_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"o_proj\.kernel.*heads dimension of 4.*tensor = 8") as caught:
        shardings(ModelConfig(**SIZES), make_mesh("tensor=8"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"down_proj\.kernel.*embed dimension of 36.*fsdp = 8"):
        shardings(ModelConfig(**SIZES | {"hidden_size": 36, "head_dim": 8}), make_mesh("fsdp=8"))
    with pytest.raises(ValueError, match=r"embed_tokens\.embedding.*vocab dimension of 36.*fsdp = 8"):
        shardings(ModelConfig(**SIZES | {"vocab_size": 36}), make_mesh("fsdp=8"))


def test_replicated_heads_are_said_once(caplog):
    config = ModelConfig(**SIZES | {"num_key_value_heads": 1})
    for _ in range(2):
        shardings(config, make_mesh("data=2,tensor=4"))
    assert [r.message for r in caplog.records if "key-value heads" in r.message] == [
        "mesh axis tensor=4 does not divide the 1 key-value heads: every device holds all of them"
    ]


# ---- size ---------------------------------------------------------------------------------------------------------------

BIG = ModelConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
MEASURE = """
    import sys, jax, numpy
    from transformers import AutoTokenizer
    from hgpo_jax.policy.mesh import make_mesh
    from hgpo_jax.policy import load_policy

    def megabytes(field):
        return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) / 1024

    mesh = make_mesh(sys.argv[2])
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    before = megabytes("VmRSS")
    params = jax.block_until_ready(load_policy(sys.argv[1], mesh).params)
    shards = sum(s.data.nbytes for a in jax.tree.leaves(params) for s in a.addressable_shards) / 2**20
    print(megabytes("VmHWM") - before, shards, float(params["layers"]["mlp"]["up_proj"]["kernel"][7, 5, 9]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_takes_the_shards_and_one_tensor(tmp_path):
    listed = weight_names.layout(shapes(BIG), BIG.num_hidden_layers)
    rng = np.random.default_rng(0)
    kept = {}

    def value(tensor):
        drawn = rng.random(tensor.shape, np.float32)
        if tensor.name == "model.layers.7.mlp.up_proj.weight":
            kept["one"] = float(drawn[9, 5])
        return drawn

    safetensors_files.write(tmp_path, listed, value, size=300_000_000)
    (tmp_path / "config.json").write_text(json.dumps(huggingface_folder.config_json(BIG, "float32")))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0.95e9 < size < 1.05e9
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), "fsdp=4,tensor=2"],
        env=os.environ | {"XLA_FLAGS": xla_flags(8, optimized=False), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    grown, shards, one = map(float, run.stdout.split())
    largest = max(4 * np.prod(t.shape) for t in listed) / 2**20
    assert one == kept["one"]
    assert shards >= size / 2**20 - 1
    assert grown <= shards + largest, f"{grown:.0f} MB for {shards:.0f} MB of shards and a tensor of {largest:.0f} MB"
