"""An agent that plays Guess over HTTP alone, and others that do not do what they should.

python player.py 3=crashes    in task 3; well in the others
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from guess import Guess

URL, KEY, NAME = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "HGPO_SESSION"))
TASK, SPLIT = int(os.environ["HGPO_TASK"]), os.environ["HGPO_SPLIT"]


def post(path, headers=(), **body):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=120))


def ask(text, **headers):
    messages = [{"role": "user", "content": text}]
    answer = post("/chat/completions", headers, model="whatever", messages=messages, temperature=0, seed=1)
    return answer["choices"][0]["message"]["content"]


def chat():
    """Asks again and again, each time with all that was said."""
    messages = []
    for _ in range(3):
        messages.append({"role": "user", "content": f"{NAME}, that is my name, and what is yours?"})
        answer = post("/chat/completions", model="whatever", messages=messages)
        messages.append(answer["choices"][0]["message"])
    reward(1)


def reward(reward, **body):
    return post(f"/sessions/{NAME}/reward", reward=reward, **body)


def play():
    env = Guess()
    seen, _ = env.reset(TASK)
    done = False
    while not done:
        seen, _, points, done, info = env.step(ask(seen).strip())
        reward(points, turn=-1, admissible=info["admissible"])
    reward(0, success=info["won"], state=seen)


if __name__ == "__main__":
    given = sys.argv[1:]
    match next((how.rpartition("=")[2] for how in given if how.partition("=")[0] == str(TASK)), "well"):
        case "crashes":
            ask("hello")
            sys.exit("it is broken\n")
        case "hangs":
            ask("hello")
            Path(NAME).touch()
            time.sleep(600)
        case "chats":
            chat()
        case "leaves":
            ask("hello")
        case "pays":  # and crashes
            ask("hello")
            reward(0.5, turn=0)
            os.abort()
        case "delegates":  # to two others, at the same time
            ask("hello")
            with ThreadPoolExecutor() as others:
                list(others.map(lambda name: ask("hello", **{"X-Branch-Id": name}), "bc"))
            reward(1, branch="c")
            reward(0, success=True)
        case "overflows":
            ask("hello")
            ask("hello" * 99)
        case "exceeds":
            ask("hello" * 99)
        case "talks":
            try:
                for number in range(99):
                    ask(f"hello {number}")
            except urllib.error.HTTPError as error:
                assert error.code == 400, error
                sys.exit(json.load(error)["error"]["message"])
        case "well":
            play()
