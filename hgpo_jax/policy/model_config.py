"""The sizes of a Qwen2.5, Qwen3, Llama or Qwen2.5-VL, and of the adapters beside its weights."""

from __future__ import annotations

import dataclasses

from hgpo_jax.config.choices import LINEARS

TOWER_LINEARS = ("visual.qkv", "visual.proj", "visual.gate_proj", "visual.up_proj", "visual.down_proj")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the `targets` of every block compute x W + (alpha / rank) x A B, A [in, rank], B [rank, out].

    targets: some of LINEARS and, for the blocks of a vision tower, of TOWER_LINEARS.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LINEARS

    def __post_init__(self):
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank!r:.50}: must be a whole number of at least 1")
        if type(self.alpha) not in (int, float) or not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha}: must be positive")
        unknown = [name for name in self.targets if name not in (*LINEARS, *TOWER_LINEARS)]
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


TEXT_TYPES = ("qwen2", "qwen3", "llama")
MODEL_TYPES = (*TEXT_TYPES, "mistral", "qwen2_5_vl")  # a GGUF file says llama of a Mistral, which has the same layers


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
class VisionConfig:
    """What a Qwen2.5-VL adds to a language model, named as in its Hugging Face config.json and preprocessor_config.json.

    Blocks outside fullatt_block_indexes attend within windows of window_size pixels a side. Features of spatial_merge_size ^ 2
    patches become one of out_hidden_size, the width of the language model. mrope_section: of the rotary frequencies, how many
    turn with a token's time, row and column. min_pixels, max_pixels: areas to which pictures are resized. video_token_id and
    tokens_per_second are only kept for the file.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    fullatt_block_indexes: tuple[int, ...]
    mrope_section: tuple[int, ...]
    window_size: int = 112
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    tokens_per_second: int = 4
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @property
    def patch_length(self) -> int:
        """Numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window(self) -> int:
        """Merged patches along the side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name.endswith("token_id"):
                whole, meaning = [value], "a whole number from 0 on"
                low = 0
            else:
                lists = name in ("fullatt_block_indexes", "mrope_section")
                whole, low = (list(value), int(name == "mrope_section")) if lists else ([value], 1)
                meaning = "a list of whole numbers" if lists else "a positive whole number"
            if any(isinstance(n, bool) or not isinstance(n, int) or not low <= n < 2**63 for n in whole):
                raise ValueError(f"{name}={value!r:.50}: must be {meaning}")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 4:
            raise ValueError(f"hidden_size={self.hidden_size}: must be num_heads={self.num_heads} times a multiple of 4")
        if self.window < 1:
            raise ValueError(f"window_size={self.window_size}: must be at least spatial_merge_size times patch_size")
        if self.in_channels != 3:
            raise ValueError(f"in_channels={self.in_channels}: must be 3")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels}: must not exceed max_pixels={self.max_pixels}")
        if any(index >= self.depth for index in self.fullatt_block_indexes):
            raise ValueError(f"fullatt_block_indexes={list(self.fullatt_block_indexes)}: must be less than depth={self.depth}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Qwen2.5, Qwen3, Llama or Qwen2.5-VL, named as in its Hugging Face config.json.

    model_type: `qwen2` (also Qwen2.5), `qwen3`, `llama` (also SmolLM2) or `qwen2_5_vl`, which alone has `vision`. head_dim:
    hidden_size // num_attention_heads if None. rope_scaling: that of Llama 3. lora: adapters beside the weights, see `lora.py`.
    vision_frozen: whether training leaves the vision tower as it is.
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
    vision: VisionConfig | None = None
    lora: LoraConfig | None = None
    vision_frozen: bool = False

    @property
    def head_size(self) -> int:
        """`head_dim`, which is set once the config is made."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def unwritten(self) -> int | None:
        """The token that no answer may hold: that of images, which stands for a feature; None without vision."""
        return self.vision.image_token_id if self.vision else None

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
        if (self.vision is not None) != (self.model_type == "qwen2_5_vl"):
            raise ValueError(f"model_type={self.model_type!r}: a qwen2_5_vl has vision, and no other model")
        if self.lora and not self.vision and (tower := [name for name in self.lora.targets if name in TOWER_LINEARS]):
            raise ValueError(f"targets={tower}: a {self.model_type} has no vision tower")
        if self.vision and self.vision.out_hidden_size != self.hidden_size:
            raise ValueError(f"out_hidden_size={self.vision.out_hidden_size}: must be hidden_size={self.hidden_size}")
        if self.vision and (len(self.vision.mrope_section) != 3 or 2 * sum(self.vision.mrope_section) != self.head_dim):
            sections = list(self.vision.mrope_section)
            raise ValueError(f"mrope_section={sections}: must be three numbers whose sum is {self.head_dim // 2}")
