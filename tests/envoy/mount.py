"""A ConfigMap or a Secret as Kubernetes mounts it."""
import os
import shutil


class Mount:
    """A directory whose files are links into `..data`, a link that is swapped when they change."""

    def __init__(self, path, files):
        self.path, self.version = path, 0
        path.mkdir()
        self.swap(files)
        for name in files:
            (path / name).symlink_to(f"..data/{name}")

    def swap(self, files):
        """Changes all files at once: contents by name."""
        old = self.path / f"..{self.version}"
        self.version += 1
        new = self.path / f"..{self.version}"
        new.mkdir()
        for name, content in files.items():
            (new / name).write_text(content)
        (self.path / "..data_tmp").symlink_to(new.name)
        os.replace(self.path / "..data_tmp", self.path / "..data")
        shutil.rmtree(old, ignore_errors=True)  # there is none before the first
