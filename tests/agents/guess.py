"""A text environment whose prompt is what it shows, and which a few bytes of a random policy now and then solve."""


class Guess:
    max_turns, task_types, task_type = 3, ("guess",), 0

    def reset(self, task):
        self.wanted, self.turn, self.goal = task % 7, 0, f"guess {task}"
        return f"I think of one of seven numbers, and this is task {task}.", ["a guess"]

    def step(self, action):
        self.turn += 1
        guess = sum(action.encode()) % 7
        won = guess == self.wanted
        text = "Right." if won else f"It is not {guess}. That was guess {self.turn}."
        done = won or self.turn == self.max_turns
        return text, ["a guess"], float(won) - 0.25 * guess, done, {"won": won, "admissible": guess != 5}
