"""``./dev peers``: test suites of other packages, with each of their optimizers installed.

Files:
- ``suites``: the suites, and where they come from;
- ``listed``: tests that may fail with ``install``, with the reasons;
- ``sources``: download and unpack;
- ``worker``: the process that runs a suite by pytest, or a script; ``making``, ``plugin`` and ``recording``
  are its parts;
- ``runs``: workers with a time limit for each test, whose results stay on disk;
- ``verdicts``: comparison of plain and installed results;
- ``programs``: programs of packages without such a suite, against float64.
"""
