"""Integrations with trainers of other packages, one line each; each needs its trainer's package.

An optimizer that your program creates needs no integration: ``collage_fx.install(optimizer)``.
"""
