"""Numbers: storage formats, compensated arithmetic, error formats, and what measures an update.

Ordinary eager functions of tensors, and facts about formats; nothing here knows of graphs, optimizers or
compilers.
"""
