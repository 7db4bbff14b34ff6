"""Names of what is timed beside our methods, as tables and results show them."""

UNPATCHED, PEER, FLOOR = "untouched", "tomesd", "floor"
COMPILED = ", compiled"  # at the end of a name


def is_reference(name: str) -> bool:
    """Tell whether a row is there to compare with: untouched, the peer, or a floor."""
    plain = name.removesuffix(COMPILED)
    return plain in (UNPATCHED, PEER) or plain.startswith(FLOOR)
