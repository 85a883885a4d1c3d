"""`python -m hgpo_jax.export`: writes a run's policy, or any Hugging Face folder, as a Hugging Face folder.

    python -m hgpo_jax.export runs/household-hgpo-s0 --to household-policy
    python -m hgpo_jax.export Qwen/Qwen2.5-1.5B-Instruct --to qwen --dtype bfloat16 --shard-size 2GB
    python -m hgpo_jax.export FILE.gguf --to folder
    python -m hgpo_jax.export runs/household-hgpo-s0 --iteration best --to best-by-validation

Weights pass through memory one tensor at a time; config.json (except for its dtype), tokenizer, chat template and model card
stay unchanged. The folder appears only when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from pathlib import Path

from hgpo_jax.config import cli
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.policy import huggingface_folder, safetensors_files, shapes, weight_names
from hgpo_jax.policy.source import find
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import Heartbeat
from hgpo_jax.utils.progress import say

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def export(
    source: str | Path, target: str | Path, dtype: str | None = None, shard_size: int = safetensors_files.SHARD_SIZE
) -> None:
    """Copies the policy in a run's folder or a Hugging Face folder.

    Args:
      source: a folder, a GGUF file or package, or a name on the hub.
      target: a folder that does not exist, or is empty.
      dtype: `float32` or `bfloat16`; the stored dtype if None.
      shard_size: maximum bytes of a safetensors file; a larger tensor gets a separate file.

    Raises:
      ValueError: one line that names the folder, file or tensor at fault.
    """
    target = Path(target)
    refuse_occupied(target)
    folder = policy_folder(source)
    config = huggingface_folder.read_config(folder)
    source_weights = safetensors_files.Weights(folder)
    nested = weight_names.is_nested(source_weights.shapes)
    tensors = weight_names.layout(shapes(config), config.num_hidden_layers, nested=nested)
    source_weights.check(tensors, tied=config.tie_word_embeddings)
    tensors = [dataclasses.replace(t, dtype=dtype or safetensors_files.DTYPES[source_weights.dtypes[t.name]]) for t in tensors]
    raw = huggingface_folder.read_json(folder, "config.json")
    raw |= {name: tensors[0].dtype for name in ("dtype", "torch_dtype") if name in raw or name == "torch_dtype"}
    with huggingface_folder.atomic_folder(target) as partial:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        for name in huggingface_folder.beside_weights(folder):
            if name != "config.json":
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / name, partial / name)
        huggingface_folder.open_to_transformers_4(partial)
        safetensors_files.write(partial, tensors, lambda t: source_weights.read(t.name), size=shard_size)


def export_checkpoint(
    run: str | Path,
    iteration: int | None,
    target: str | Path,
    dtype: str | None = None,
    shard_size: int = safetensors_files.SHARD_SIZE,
    mesh: str | None = None,
) -> None:
    """Writes a run's policy after this many iterations, of a checkpoint that is kept; of several policies each in a folder.

    iteration: None for the one with the highest validation success. mesh: of the devices that read it; by default the run's.
    Others as in `export`. Raises ConfigError or RunError.
    """
    from hgpo_jax.analysis import earlier_policies  # takes seconds to import, and other exports do not need it

    folder, target = Path(remote.local(str(run), checkpoints=True)), Path(target)
    refuse_occupied(target)
    iteration = earlier_policies.best(folder) if iteration is None else iteration
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as place:
        for name, saved in earlier_policies.save(folder, iteration, Path(place), mesh).items():
            export(saved, target / name, dtype, shard_size)


def refuse_occupied(target: Path) -> None:
    """Raises ValueError unless this folder is empty or not there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--to {target}: already exists and is not empty; choose another folder")


def policy_folder(source: str | Path) -> Path:
    """Returns the Hugging Face folder of a run's policy, or the one that `find` finds. Raises ValueError if there is none."""
    folder = find(remote.local(str(source)))
    if (folder / "config.json").is_file() or not (folder / "config.yaml").is_file():
        return folder
    if sets := cli.policies_of(folder):
        raise ValueError(f"run {folder}: its roles have policies of their own; give one of {', '.join(map(str, sets))}")
    if not (folder / "policy" / "config.json").is_file():
        raise ValueError(
            f"run {folder}: has no policy/ yet, it is written at the end; "
            f"finish it with python -m hgpo_jax.train --resume {folder}"
        )
    return folder / "policy"


def _iteration(text: str) -> int | str:
    return text if text == "best" else whole_number(text, low=0)


def shard_size(text: str) -> int:
    """Parses bytes such as 5GB, 500MB or 64KB. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})(KB|MB|GB)", text)
    if not match or not int(match[1]):
        raise ValueError(f"--shard-size {text:.50}: expected a size such as 5GB, 500MB or 64KB")
    return int(match[1]) * UNITS[match[2]]


@Heartbeat("export")
def main() -> None:
    p = cli.parser("export", __doc__)
    p.add_argument("source", metavar="RUN_OR_FOLDER", help="a run's folder, or what policy= takes")
    p.add_argument("--to", metavar="DIR", type=cli.local_path, required=True, help="the folder to write; new or empty")
    p.add_argument(
        "--iteration", metavar="N", type=_iteration, help="of a run, the policy of a kept checkpoint; best: by validation"
    )
    p.add_argument("--mesh", metavar="SPEC", help="with --iteration, of the devices that read it; default: the run's; or auto")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights; default: as they are stored")
    p.add_argument("--shard-size", metavar="SIZE", default="5GB", help="of a file at most, as in 500MB; default: 5GB")
    args = p.parse_args()
    if args.mesh is not None and args.iteration is None:
        raise ConfigError(f"--mesh {args.mesh}: goes with --iteration; other weights are copied without any devices")
    try:
        if args.iteration is None:
            export(args.source, args.to, args.dtype, shard_size(args.shard_size))
        else:
            number = None if args.iteration == "best" else args.iteration
            export_checkpoint(args.source, number, args.to, args.dtype, shard_size(args.shard_size), args.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    size = sum(file.stat().st_size for file in Path(args.to).rglob("*.safetensors"))
    say(f"{args.to}: {size / 1e6:,.1f} MB of weights")


if __name__ == "__main__":
    cli.run(main)
