"""The two commands of the shop: `search[words]` and `click[label]`."""

import re

# As in the original: greedy, so a label with an opening bracket cannot be clicked, and blind to what follows the last
# closing bracket. The verb is case-sensitive, the argument is not.
_COMMAND = re.compile(r"(.+)\[(.+)\]")


def parse(command: str) -> tuple[str, str]:
    """Returns verb and lower-case argument; ("", "") for text that is not a command."""
    match = _COMMAND.match(command)
    return (match[1], match[2].lower()) if match else ("", "")


def click(label: str) -> str:
    """Returns the command that clicks `label`."""
    return f"click[{label}]"


def search(words: str) -> str:
    """Returns the command that searches `words`, brackets and line breaks replaced by spaces."""
    return f"search[{' '.join(re.sub(r'[][]', ' ', words).split())}]"
