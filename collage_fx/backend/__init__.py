"""The ``torch.compile`` backend, and the course of one compilation."""

from collage_fx.backend.backend import CollageBackend, backend_for, collage, collage_backend

__all__ = ["CollageBackend", "backend_for", "collage", "collage_backend"]
