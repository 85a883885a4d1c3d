"""The smallest agent: asks for one sum, with tasks that differ in their numbers.

    python -m hgpo_jax.train env.name=agent env.command="python -m hgpo_jax.envs.agents.sums" env.max_turns=1 \\
        warm_start=none policy=smollm2 lora.rank=8
"""

import os

from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
a, b = divmod(int(os.environ["HGPO_TASK"]) % 900, 30)
question = f"What is {a + 1} plus {b + 1}? Answer with the number only."
answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
right = (answer.choices[0].message.content or "").strip(" .\n") == str(a + b + 2)
client.post(f"/sessions/{os.environ['HGPO_SESSION']}/reward", body={"reward": float(right)}, cast_to=object)
