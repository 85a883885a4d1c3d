"""A tiny Qwen2.5-VL with random weights, the byte tokenizer and a chat template that shows pictures."""

import jax
from tokenizers import AddedToken

from hgpo_jax.policy import ModelConfig, Policy, initialize
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import VISION_TOKENS
from hgpo_jax.policy.tokenizer import embedding_rows
from tests.helpers.chat_tokenizers import byte_tokenizer

# Of the form of Qwen2.5-VL's: the parts of a message one after the other, and a picture as three tokens.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vision_policy(template=TEMPLATE) -> Policy:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in VISION_TOKENS]})
    tokenizer.chat_template = template
    start, image, end = tokenizer.convert_tokens_to_ids([*VISION_TOKENS])
    vision = VisionConfig(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, fullatt_block_indexes=(1,),
        mrope_section=(1, 1, 2), window_size=16, patch_size=4, image_token_id=image, vision_start_token_id=start,
        vision_end_token_id=end, min_pixels=64, max_pixels=64 * 64,
    )  # fmt: skip
    config = ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=512,
        model_type="qwen2_5_vl", vision=vision,
    )  # fmt: skip
    return Policy(config, initialize(config, 3, make_mesh("data=1", jax.devices()[:1])), tokenizer)
