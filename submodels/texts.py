"""Values in the words of an error."""

from typing import Any

LONGEST = 100  # characters


def shown(value: Any) -> str:
    """A value on one line, cut short.

    Example:
        >>> shown([[0] * 100])
        '[[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,...'
    """
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number of thousands of digits"
    except Exception:  # an object of the user's, which cannot even be shown
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def plain(message: str) -> str:
    """What Python says of a call, where it calls a wrong argument unexpected.

    Example:
        >>> plain("forward() got an unexpected keyword argument 'mask'")
        "forward() takes no argument 'mask'"
    """
    return message.replace("got an unexpected keyword argument", "takes no argument")
