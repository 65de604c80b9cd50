"""What a misspelt word was probably meant to be."""

import difflib
from collections.abc import Iterable
from pathlib import Path

LONGEST = 200  # characters of a word that may be a misspelt one


def closest(word: object, choices: Iterable[str]) -> str | None:
    """The choice that a word resembles most, or None if it resembles none.

    Example:
        >>> closest("prem", ["perm", "local"])
        'perm'
    """
    if not isinstance(word, str | Path) or len(str(word)) > LONGEST:
        return None
    return next(iter(difflib.get_close_matches(str(word), list(choices), n=1)), None)


def did_you_mean(word: object, choices: Iterable[str], otherwise: str = "") -> str:
    """A question that names the closest choice, or `otherwise` if there is none.

    Example:
        >>> did_you_mean("epoch", ["epochs", "seed"])
        "did you mean 'epochs'?"
        >>> did_you_mean("?", ["epochs", "seed"], "known are epochs, seed")
        'known are epochs, seed'
    """
    choice = closest(word, choices)
    return f"did you mean {choice!r}?" if choice else otherwise
