"""The sizes of a Qwen2.5, Qwen3 or Llama and of the adapters beside its weights."""

from __future__ import annotations

import dataclasses

from hgpo_jax.config.choices import LINEARS


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the `targets` of every block compute x W + (alpha / rank) x A B, A [in, rank], B [rank, out]."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = LINEARS

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha}: must be positive")
        unknown = [name for name in self.targets if name not in LINEARS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)}: expected some of {', '.join(LINEARS)}, each at most once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


NUMBERS = [
    *(
        (name, int, "a positive whole number")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    ),
    *((name, int | float, "a positive number") for name in ("rope_theta", "rms_norm_eps", "initializer_range")),
]


MODEL_TYPES = ("qwen2", "qwen3", "llama")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary embeddings for longer contexts, `rope_type: llama3` (Llama 3, arXiv 2407.21783, as transformers has it).

    Wave lengths beyond original_max_position_embeddings / low_freq_factor become `factor` times longer, those below
    original_max_position_embeddings / high_freq_factor stay, and between them frequencies are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
                raise ValueError(f"{name}={value!r:.50}: must be a positive number")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor}: must be greater than low_freq_factor={self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Qwen2.5, Qwen3 or Llama, named as in its Hugging Face config.json.

    model_type: `qwen2` (also Qwen2.5), `qwen3` or `llama` (also SmolLM2). head_dim: hidden_size // num_attention_heads if None.
    rope_scaling: that of Llama 3. lora: adapters beside the weights, see `lora.py`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    model_type: str = "qwen2"
    head_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    lora: LoraConfig | None = None

    @property
    def head_size(self) -> int:
        """`head_dim`, which is set once the config is made."""
        assert self.head_dim is not None
        return self.head_dim

    def __post_init__(self):
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"model_type={self.model_type!r}: must be one of {', '.join(MODEL_TYPES)}")
        for name, kind, meaning in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 2**63:
                raise ValueError(f"{name}={value!r:.50}: must be {meaning}")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads or self.hidden_size // self.num_attention_heads % 2:
                raise ValueError(
                    f"hidden_size={self.hidden_size}: must be an even multiple of "
                    f"num_attention_heads={self.num_attention_heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim!r:.50}: must be a positive even number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: must divide num_attention_heads={self.num_attention_heads}"
            )
