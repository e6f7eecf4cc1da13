"""Names of the symbols that tracing knows by itself; other names are the user's."""

BATCH = "b"
"""Samples of one micro-batch."""
SEQUENCE = "s"
"""Tokens of one sample."""
