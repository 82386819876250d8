"""What pyproject.toml cannot say: kernels/ and configs/ lie at the top level, and inside the package once installed."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """Copies them to `hydrainfer/_data`, where `hydrainfer.config.shipped` looks first. An editable installation uses
    those of the source tree."""

    def _shipped(self) -> dict[str, str]:
        """What is written → from where."""
        files = [path for top in ("kernels", "configs") for path in sorted(Path(top).rglob("*")) if path.is_file()]
        return {str(Path(self.build_lib, "hydrainfer", "_data", path)): str(path) for path in files}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, source in self._shipped().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return list(dict.fromkeys((*super().get_outputs(include_bytecode), *self._shipped())))

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() | self._shipped()


setup(cmdclass={"build_py": BuildWithData})
