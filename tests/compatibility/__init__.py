"""The compatibility measurements, ``./dev compat``: which optimizers work.

``catalog.py`` says what a row is, ``torch_optim.py`` and ``third_party.py`` list the rows, ``measure.py``
measures one, ``worker.py`` does that in a process of its own, ``table.py`` makes lines of measurements for
``measured.json``, ``pages.py`` writes the pages, ``__main__.py`` is the command.
"""
