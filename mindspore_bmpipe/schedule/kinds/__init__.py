"""One file per schedule; `schedule/registry.py` lists them."""
