"""Text of others, made harmless before it is shown: a terminal obeys escape sequences, a log is read line by line."""


def printable(text: str) -> str:
    r"""One line in which everything that is no visible character stands as an escape, such as \n or \x1b.

    That covers line breaks, control characters, characters that reverse the direction of writing, and bytes that
    could not be decoded.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay apart."""
    return "\n".join(map(printable, text.split("\n")))
