"""Trainers of other packages, one line each. A module imports its trainer's package, which has to be there.

An optimizer that a program makes itself needs none of them: ``collage_fx.install(optimizer)``.
"""
