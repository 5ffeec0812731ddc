"""A captured step as data, and the hands that edit it: what the author of a pass may import."""
