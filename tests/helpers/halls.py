"""A text environment that costs nothing: halls in a row, of which one is to be reached."""


class Halls:
    task_types, task_type = ("walk",), 0

    def __init__(self, max_turns: int = 6):
        self.max_turns = max_turns

    def reset(self, task):
        self.at, self.end, self.turn = 0, 1 + task % 3, 0
        self.goal = f"walk to hall {self.end}."
        return self._seen()

    def step(self, action):
        ways = {"go on": 1, "go back": -1, "look": 0}
        self.turn += 1
        self.at = max(0, self.at + ways.get(action, 0))
        won = self.at == self.end
        info = {"won": won, "admissible": action in ways}
        return *self._seen(), 10.0 * won, won or self.turn == self.max_turns, info

    def _seen(self):
        return f"You are in hall {self.at}.", ["go on", "go back", "look"]
