"""Tools beside collage_fx: they import its public names and doors, and nothing in it needs them to train.

``audit`` judges optimizers, ``checkup`` checkpoints, ``doctor`` this machine. ``gpu_code`` compiles for a GPU
that is not there, ``plan`` sums up a job's memory, ``pages`` draws reports.
Programs call them by names of ``collage_fx``, which imports them at the first use.
"""
