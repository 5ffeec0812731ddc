"""Tools for users: audit, explain, doctor, and the code for a GPU."""

from collage_fx.tools.doctor import examine, patches
