"""The commands of `pmlf`, a dataclass each: its fields are the options, its docstrings the help."""
