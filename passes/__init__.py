"""The graph passes, one a file, imported as ``collage_fx.passes``. The order they run in is ``collage_fx/pipeline.py``."""

if __name__ != "collage_fx.passes":
    raise ImportError(f"import this package as collage_fx.passes, not as {__name__}")
