"""Everything about the package is in setup.cfg, but for its one file of C.

It speaks no Python (`rayxfer.copying` calls it through ctypes), so it needs a compiler and no headers, and
one build is good for every Python. Without a compiler everything works, with slower copies.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rayxfer._copies",
            ["rayxfer/copies.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
