"""What the numbers mean that graphs hold as settings of the fused attention kernel."""

from __future__ import annotations

ATTENTION_LAYOUTS = ("BSH", "BNSD", "SBH", "BSND")
"""Layouts of query, key and value by their number."""
CAUSAL_MODES = frozenset({2, 3})
"""`sparse_mode` values whose mask leaves one half of the scores to compute."""
BAND_MODE = 4
"""`sparse_mode` that the compiler gives a causal mask whose queries ranks share by tokens."""
