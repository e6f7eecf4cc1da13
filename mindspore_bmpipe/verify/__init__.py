"""Plans checked by MindSpore's own Ascend compiler, on any machine."""
