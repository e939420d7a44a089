"""Lists of words as one text, which is easier to read than a list of quoted ones. Pure."""


def words(*lines: str) -> list[str]:
    """The words of all lines."""
    return [word for line in lines for word in line.split()]
