"""Graph passes, one per file, imported as ``collage_fx.passes``; ``pipeline.py`` lists them in order."""

if __name__ != "collage_fx.passes":
    raise ImportError(f"import this package as collage_fx.passes, not as {__name__}")
