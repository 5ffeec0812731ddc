"""The graph passes, one a file, imported as ``collage_fx.passes``; the pipeline has their order."""

if __name__ != "collage_fx.passes":
    raise ImportError(f"import this package as collage_fx.passes, not as {__name__}")
