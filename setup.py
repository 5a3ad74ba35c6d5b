"""Packs the distribution, and compiles the hot loops where a C compiler is at hand; elsewhere they run as Python."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext  # Cython's own where Cython is installed
from setuptools.command.build_py import build_py

# Files of hot loops: see whatif/runtime/loops.py.
LOOPS = sorted(path.as_posix() for path in Path("whatif").rglob("_[a-z]*.py"))
# No flag names an instruction set: a wheel runs on every machine. Without contraction the answers of both forms have
# the same bits.
FLAGS = ["-O3", "-g0", "-ffp-contract=off"]


class BuildLoops(build_ext):
    """Builds what can be built: ``optional=True`` alone lets the FileNotFoundError of a missing compiler through."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            self.warn(f"{ext.name} stays plain Python: {error}")


class BuildPython(build_py):
    """Packs recordings without the scripts that made them."""

    def find_package_modules(self, package, package_dir):
        return [] if package.startswith("whatif.traces") else super().find_package_modules(package, package_dir)


def extension(path):
    return Extension(
        path.removesuffix(".py").replace("/", ".") + "_aot", [path], extra_compile_args=FLAGS, optional=True
    )


setup(
    ext_modules=[extension(path) for path in LOOPS],
    cmdclass={"build_ext": BuildLoops, "build_py": BuildPython},
    options={"build_ext": {"parallel": 2, "cython_c_in_temp": 1}},
)
